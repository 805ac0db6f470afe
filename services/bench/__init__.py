"""Programs that exist to be measured: a worker that computes nothing, so that a step's way can be timed alone.

Nothing that serves requests may import it.
"""
