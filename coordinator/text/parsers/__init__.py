"""From the text that a model writes to what a client gets: reasoning, content and tool calls, as the text comes.

Parsers are pure: text goes in, events come out. How the text was cut into pieces never changes what the events add up
to, no text makes a parser raise, and what isn't part of a call comes out as it went in.
"""
