"""Devices: their names, their element types, and the one thread that computes on them.

It is the only room that asks which vendor a device is of. It must not know models or sessions.
"""
