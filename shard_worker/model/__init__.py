"""A model's math: its layers, the kernels that compute the same on GPUs, the rows of a step, features and head.

Plain functions of weights, hidden rows, positions and caches. It must not know sessions, streams or sampling.
"""
