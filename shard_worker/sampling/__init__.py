"""What the last stage makes of logits: grammar masks, chosen tokens, which draft tokens count, log-probabilities.

It owns a session's sampling state. It must not know the chain or how answers travel.
"""
