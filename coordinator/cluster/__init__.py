"""The workers of one model: placing parts on them, starting or connecting them, loading, and restoring lost ones.

It owns the child processes and the connections. It must not know requests of clients or text.
"""
