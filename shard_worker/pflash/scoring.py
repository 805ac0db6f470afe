"""How much the last tokens of a prompt look at each of its tokens, from queries and keys before RoPE.

Without positions a match counts the same wherever it stands, so that what is far back is not forgotten.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TAIL_QUERIES = 8
"""Last tokens of a prompt whose queries are looked at."""

SMOOTHING = 13
"""Tokens over which scores are averaged: a match is seldom one token wide."""


class TokenScores:
    """The running maximum of attention weights over layers and heads, float32 [tail, n]."""

    def __init__(self) -> None:
        self._best: torch.Tensor | None = None

    def add(self, queries: torch.Tensor, keys: torch.Tensor) -> None:
        """Take one layer's weights into account.

        queries: [tail, heads, head_dim], of the last `tail` tokens. keys: [n, kv_heads, head_dim]. Both are normed and
        not rotated.
        """
        weights = attention_weights(queries, keys)
        self._best = weights if self._best is None else torch.maximum(self._best, weights)

    def tokens(self) -> torch.Tensor:
        """Return a weight for every token, float32 [n]: the mean over the tail's queries, smoothed."""
        assert self._best is not None
        return smoothed(self._best.mean(0))


def attention_weights(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the maximum over heads of softmax(q kᵀ / sqrt(head_dim)), float32 [tail, n].

    Each query sees the keys up to its own. queries, keys: as in `TokenScores.add`.
    """
    tail, heads, head_dim = queries.shape
    length, kv_heads, _ = keys.shape
    grouped = queries.float().transpose(0, 1).reshape(kv_heads, heads // kv_heads * tail, head_dim)
    scores = torch.bmm(grouped, keys.float().permute(1, 2, 0)).mul_(head_dim**-0.5).view(heads, tail, length)
    positions = torch.arange(length - tail, length, device=keys.device)
    behind = torch.arange(length, device=keys.device)[None, :] > positions[:, None]
    return scores.masked_fill_(behind, float("-inf")).softmax(-1).amax(0)


def smoothed(scores: torch.Tensor, width: int = SMOOTHING) -> torch.Tensor:
    """Return the centred moving average of scores [n]; at the ends it is over fewer of them."""
    return F.avg_pool1d(scores[None, None], width, 1, width // 2, count_include_pad=False)[0, 0]


def chunk_means(scores: torch.Tensor, size: int) -> list[float]:
    """Return the mean of each run of `size` scores; the last run may be shorter."""
    return [float(chunk.mean()) for chunk in torch.split(scores, size)]
