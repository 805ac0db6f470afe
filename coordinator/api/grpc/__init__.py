"""The gRPC API for clients: the inference service over the engine, and the server that it listens on.

It must not know HTTP.
"""
