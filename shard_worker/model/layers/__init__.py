"""Sublayers that several families share: their tensors' shapes, packing and running."""
