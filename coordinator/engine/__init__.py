"""The way of one request through the cluster: queue, prefill, decode steps, speculation, figures.

It owns what runs and waits. It must not know the protocols of clients, nor how text is shown.
"""
