"""A stage: one contiguous run of layers, loaded onto its devices, and the running of steps through it.

It owns weights and captured graphs. It must not know processes, streams or sampling.
"""
