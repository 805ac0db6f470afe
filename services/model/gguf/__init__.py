"""Models in GGUF, llama.cpp's file format: the container, its block types, and what a file says of a model.

It reads and never writes. Nothing here reads the contents of a tensor.
"""
