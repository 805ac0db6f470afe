"""Shortens long prompts before the target reads them (PFlash): when, by how much, and from text to text.

It owns the worker with the role `compress`, which says which tokens to keep. It must not know how that worker chooses
them, or how a request goes on.
"""
