"""One module for each gRPC service, with its port (a Protocol), its servicer and its remote client.

A user of these modules cannot tell a remote worker from one in the same process. It must not know torch, models or
requests of clients beyond their messages.
"""
