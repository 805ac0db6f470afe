"""State of prefixes that outlives a session: kept in host memory under a budget, and moved between workers.

`store` owns the copies, `keeper` takes them from sessions and puts them back, `transfer` sends and receives them. The
room must not know which prefixes are worth keeping; the coordinator decides that.
"""
