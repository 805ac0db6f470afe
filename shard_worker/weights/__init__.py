"""Checkpoints on disk (their configuration, their tensors in mapped files, their fingerprint), and matrices in memory.

It reads and never writes or unpickles. It must not know model families or layers.
"""
