"""Drafts: the small models that propose a block of tokens to the target, and what carries features to them.

It owns the drafts' weights and state. It must not know how the target decides which draft tokens count.
"""
