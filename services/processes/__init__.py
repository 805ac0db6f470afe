"""Worker processes on this host: launching, watching and ending them, and their logs.

It owns the child processes and their scratch directories. It must not know models or requests.
"""
