"""The math of a layer, as plain functions over tensors. Nothing here knows of families, sessions or processes."""
