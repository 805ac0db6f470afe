"""What a session remembers on one device: attention keys and values, recurrent state, and copies of both for a prefix.

It owns that memory. It must not know who computes with it, sessions or processes.
"""
