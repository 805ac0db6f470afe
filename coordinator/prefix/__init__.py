"""Prefixes that are kept: in the workers' memory and in a store on disk; which ones, and finding them again."""
