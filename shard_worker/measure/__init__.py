"""How fast this worker's devices are, and checkpoints of random weights to measure shapes with.

It keeps nothing. Nothing that answers requests may depend on what it measures.
"""
