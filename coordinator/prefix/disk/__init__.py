"""Snapshots of prefixes in a store: their files, their index, making room, and writing and reading them.

It owns the entries of one store. It must not know workers' memory or requests.
"""
