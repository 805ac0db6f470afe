"""The contract between the processes, made callable. The only package that imports grpc or the stubs."""

import os

# gRPC's own lines on stderr say in its words what is raised or logged here in ours. Read once, when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Its handlers for forks start its threads anew in every child, and crash there now and then before the worker's program
# has taken the child's place: uvloop starts programs by a fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
