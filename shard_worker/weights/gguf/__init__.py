"""Weights out of GGUF files.

Blocks of codes are brought to the form that packed matrices have here, with the same numbers to the bit. What a file
says of a model is read without torch, in `services.model.gguf`.
"""
