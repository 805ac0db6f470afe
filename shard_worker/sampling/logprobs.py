"""Log-probabilities of chosen tokens, and of the most probable ones at their places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from services.errors import InvalidArgument
from services.messages.steps import TokenLogprobs


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], alternatives: int) -> tuple[TokenLogprobs, ...]:
    """Return the model's own log-probabilities at the places of the chosen tokens.

    logits: [n, vocab] as the head gives them: before bias, penalties, grammar, temperature, top-k, top-p and min-p, so
    that none of these is counted in. token_ids: the n tokens chosen after these rows. alternatives: how many of the
    most probable tokens to return for each place. The softmax is float32. Raises InvalidArgument when the logits are
    not finite.
    """
    rows = logits.float().log_softmax(-1)
    chosen = torch.tensor(token_ids, device=rows.device)[:, None]
    best = rows.topk(min(alternatives, rows.shape[-1]), dim=-1)
    # One transfer of numbers and one of ids, however many rows there are.
    numbers = torch.cat([rows.gather(-1, chosen), best.values], dim=-1).tolist()
    if any(math.isnan(number[0]) for number in numbers):
        raise InvalidArgument("the logits are not finite: there are no log-probabilities", reason="NOT_FINITE")
    return tuple(
        TokenLogprobs(own, tuple(ids), tuple(others))
        for (own, *others), ids in zip(numbers, best.indices.tolist(), strict=True)
    )
