"""State of prefixes that outlives a session: kept in host memory under a budget, and moved between workers.

It owns the kept copies. It must not know which prefixes are worth keeping; the coordinator decides that.
"""
