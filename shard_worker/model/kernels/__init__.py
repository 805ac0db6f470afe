"""Triton kernels for steps of few rows on a GPU, CUDA or ROCm: each does what functions of `layers` and `ops` do.

Nothing here is imported where Triton is missing; `shard_worker.stage.step_runner` decides.
"""
