"""What a placement takes and how fast it decodes, before anything is loaded: sizes, memory, edges, step time, split.

It reads checkpoints' headers and asks workers for measurements. It must not know requests or how a cluster is run.
"""
