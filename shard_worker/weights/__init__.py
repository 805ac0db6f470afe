"""Checkpoints on disk (their configuration, their tensors in mapped files, their fingerprint), and matrices in memory.

It reads and never writes or unpickles. It must not know layers, nor model families but to make up random tensors.
"""
