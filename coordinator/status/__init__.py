"""How a running server does: figures as they come, what its workers say, and both as one report."""
