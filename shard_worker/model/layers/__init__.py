"""The math of a decoder's sublayers, one file each, and of a whole decoder layer made of them.

A mixer or feed-forward part is found by the name of its module, which a ModelConfig holds; the module of the same name
in `services.model.layers` says which tensors it has and what it caches. Nothing here imports kernels.
"""
