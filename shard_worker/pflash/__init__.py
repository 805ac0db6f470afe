"""Prompt compression: a small model reads a long prompt and says which parts of it the end of it looks at.

`drafter` is its forward pass, `sparse` the attention of that over long prompts, `scoring` gives every token a weight,
and `selection` keeps chunks by it. Sources: speculative prefill (arXiv 2502.02789) and lucebox's PFlash.
It owns the small model. It must not know sessions, streams or how text becomes tokens.
"""
