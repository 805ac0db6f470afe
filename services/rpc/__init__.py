"""One module for each gRPC service, with its port (a Protocol), its servicer and its remote client.

Who uses a port cannot tell a worker in another process from one in its own. This room must not know torch, models or
requests of clients beyond their messages.
"""
