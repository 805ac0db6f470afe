"""The verbs of `flashsplit`, one file each, found by name.

A command puts option groups and rooms together and must not know how either does its work.
"""
