"""Triton kernels for steps of few rows on a GPU: each does what functions of `layers` and `ops` do.

Nothing here is imported where Triton is missing; `shard_worker.model.kernel_support` decides.
"""
