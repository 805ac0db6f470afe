"""Long-lived streams of frames between two processes, through gRPC or past it.

It owns the life of a stream: its frames in their order, and why it ended. It must not know what a session computes.
"""
