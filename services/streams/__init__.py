"""Long-lived streams of frames between two processes, through gRPC or past it.

It owns the life of a stream: its frames in order, and why it ended. It must not know what a session computes.
"""
