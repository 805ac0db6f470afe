"""A model's math: families, their layers, the kernels that compute the same on GPUs, embedding rows and head.

Plain functions of weights, hidden rows, positions and caches. It must not know sessions, streams or sampling.
"""
