"""Files that a person writes: YAML with a command's flags, and a cluster's workers drawn as a list.

This room reads and checks them; a refusal names the field. It must not know commands, nor what starts workers.
"""
