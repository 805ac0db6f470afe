"""One request's session on one stage: its steps in order, what is passed on, what comes back.

It owns positions and step numbers and refuses what does not follow from them. It must not know how layers compute.
"""
