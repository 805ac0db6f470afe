"""The workers of one model: who holds what, starting or calling them, loading, and bringing lost ones back.

It owns the child processes and the connections. It must not know requests of clients or text.
"""
