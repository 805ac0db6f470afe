"""The APIs that clients speak, over one engine: HTTP and gRPC, and what both share about requests.

It translates and refuses; it must not know workers, placement or caches.
"""
