"""The command line: its commands, the options that they share, and what people see in a terminal.

It puts the other rooms together. No other room but `bench` may import it.
"""
