"""Long prompts made shorter before the target reads them (PFlash): when, how much, and from text to text.

A worker with the role `compress` says what to keep; here is everything around that question.
"""
