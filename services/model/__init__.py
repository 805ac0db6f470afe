"""The description of a model, without torch: its configuration, its tensors and what its caches take.

A worker loads a checkpoint by it and the coordinator's planner counts by it, so that both always agree. It must
not know torch, devices, processes or messages.
"""
