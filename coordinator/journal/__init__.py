"""Running answers on disk: what one record is, the file of one answer, and the directory that holds them.

It knows requests and answers as plain data, and nothing of who computes them or of the protocol by which they are told.
"""
