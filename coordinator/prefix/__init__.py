"""Kept prefixes: which states of prompts and answers are kept, and how a prompt finds the longest one again.

It owns the index of what the workers keep in memory, and the entries of a store on disk. It must not know text, or how
a worker computes a state.
"""
