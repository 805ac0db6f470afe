"""Text and tokens of one checkpoint: tokenizer, chat template, stop strings, and what a model's text means.

It owns the text-side files of a checkpoint. It must not know workers, requests or protocols.
"""
