"""Connections over a network: channels, servers, certificates, the cluster's token, health.

It owns listening sockets and credentials. It must not know which services run behind them.
"""
