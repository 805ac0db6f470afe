"""A chat in the terminal: who answers, how answers look while they come, what a person can type."""
