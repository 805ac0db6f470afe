"""The verbs of `flashsplit`, one file each."""
