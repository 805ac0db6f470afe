"""A chat in the terminal: who answers, how answers look while they stream, what a person can type.

It owns the conversation and its history file. It must not know whether a server or workers of its own answer.
"""
