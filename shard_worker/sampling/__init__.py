"""From logits to tokens on the last stage: grammar masks, sampling, which draft tokens count, log-probabilities.

It owns a session's sampling state. It must not know the chain or how answers travel.
"""
