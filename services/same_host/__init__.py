"""What two processes of one host share: memory for large payloads, and Unix sockets for small frames.

It owns the memory and the sockets. It must not know gRPC services or what the bytes mean.
"""
