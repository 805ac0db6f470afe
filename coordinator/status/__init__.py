"""The state of a running server: the engine's figures, the workers' descriptions, and both as one report.

It owns counts and connections for asking. It must not know APIs, nor delay a request.
"""
