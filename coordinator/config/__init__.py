"""Files that a person writes: YAML with a command's flags, and a cluster's workers drawn as a list.

It reads, checks and refuses by field. It must not know commands or what starts workers.
"""
