"""The math of a layer, as plain functions over tensors.

It keeps nothing. It must not know families, caches, sessions or processes.
"""
