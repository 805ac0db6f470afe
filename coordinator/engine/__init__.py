"""The way of one request through the cluster: admission, prefill, steps, speculation, figures.

It owns what runs and waits. It must not know protocols of clients or how text is shown.
"""
