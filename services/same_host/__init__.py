"""Processes of one host: large payloads through memory that both map, small frames through Unix sockets.

It owns the memory and the sockets. It must not know gRPC services or what the bytes mean.
"""
