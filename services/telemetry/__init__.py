"""Log lines, traces and the identifiers that tie them to one request.

It owns the set-up of both. It must not know what is logged.
"""
