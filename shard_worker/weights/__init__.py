"""Checkpoints on disk: their configuration, their tensors in mapped files, their fingerprint.

It reads and never writes or unpickles. It must not know model families.
"""
