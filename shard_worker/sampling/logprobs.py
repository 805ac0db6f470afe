"""Log-probabilities of tokens, produced or of the prompt, and of the most probable ones at their places."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from services.errors import InvalidArgument
from services.messages.steps import TokenLogprobs
from shard_worker.model.head import Head

MAX_SLICE_ROWS = 64
"""Rows of a prompt whose logits are there at once: enough for lm_head to be read seldom."""

SLICE_BYTES = 64 << 20
"""The most bytes of float32 logits that are there at once for a prompt; what is made of them takes twice as much."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], alternatives: int) -> tuple[TokenLogprobs, ...]:
    """Return the model's own log-probabilities at the places of the given tokens.

    logits: [n, vocab] as the head gives them: before bias, penalties, grammar, temperature, top-k, top-p and min-p, so
    that none of these is counted in. token_ids: the tokens behind the first of these rows, at most n. alternatives: how
    many of the most probable tokens to return for each place. The softmax is float32. Raises InvalidArgument when the
    logits are not finite.
    """
    rows = logits.float().log_softmax(-1)[: len(token_ids)]
    own = rows.gather(-1, torch.tensor(token_ids, device=rows.device)[:, None])
    best = rows.topk(min(alternatives, rows.shape[-1]), dim=-1)
    ranks = (rows >= own).sum(-1, keepdim=True)
    # One transfer of numbers and one of integers, however many rows there are.
    numbers = torch.cat([own, best.values], dim=-1).tolist()
    integers = torch.cat([ranks, best.indices], dim=-1).tolist()
    if any(math.isnan(number[0]) for number in numbers):
        raise InvalidArgument("the logits are not finite: there are no log-probabilities", reason="NOT_FINITE")
    return tuple(
        TokenLogprobs(logprob, tuple(ids), tuple(others), rank)
        for (logprob, *others), (rank, *ids) in zip(numbers, integers, strict=True)
    )


def prompt_logprobs(
    head: Head, hidden: torch.Tensor, token_ids: Sequence[int], alternatives: int
) -> tuple[TokenLogprobs, ...]:
    """Return what `token_logprobs` says of tokens that are known, without the logits of all rows at once.

    hidden: [n, hidden], the residual stream of the rows before each of the n tokens.

    Every slice has the same number of rows, the last one filled up with zeros, so that the numbers of a token are the
    same bits however its prompt was cut into steps.
    """
    size = min(MAX_SLICE_ROWS, max(1, SLICE_BYTES // (4 * head.weight.rows)))
    found: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), size):
        rows = hidden[first : first + size]
        logits = head.logits(F.pad(rows, (0, 0, 0, size - len(rows))))
        found += token_logprobs(logits, token_ids[first : first + size], alternatives)
    return tuple(found)
