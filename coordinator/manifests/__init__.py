"""A cluster file as Kubernetes objects: an overlay over deploy/kubernetes/base, for Kustomize.

What is the same for every cluster stands there as YAML; this room writes only what the file decides. It knows neither
workers nor engine: nothing is started, no cluster is called.
"""
