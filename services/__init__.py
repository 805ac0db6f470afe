"""The contract between the processes, made callable. The only package that imports grpc or the stubs."""

import os

# gRPC's own lines on stderr say in its words what is raised or logged here in ours. Read once, when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
