"""The contract between the processes, made callable. The only package that imports grpc or the stubs."""
