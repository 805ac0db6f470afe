"""Masks by brute force, attention by one head and one query at a time."""

from __future__ import annotations

import math

import pytest
import torch

from shard_worker.ops.attention import Causal, attend, grouped_mask, visibility


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_visibility_is_the_rule_for_every_pair(causal: bool, window: int | None) -> None:
    """A key is seen when it is held, not in the future of a causal query, and nearer than the window."""
    queries, keys = range(5, 12), [*range(12), -1, -7]

    own = visibility(torch.tensor(list(queries)), torch.tensor(keys), causal=causal, window=window)

    expected = [
        [key >= 0 and not (causal and key > query) and (window is None or abs(query - key) < window) for key in keys]
        for query in queries
    ]
    assert own.tolist() == expected


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("masked", [True, False])
def test_attend_is_softmax_attention_of_every_head(heads: int, kv_heads: int, masked: bool) -> None:
    """Consecutive query heads share a key head; masked keys have no weight; the scale is 1/sqrt(head_dim)."""
    generator = torch.Generator().manual_seed(0)
    rows, span, dim = 3, 7, 8
    queries = torch.randn(rows, heads, dim, generator=generator)
    # A cache holds more positions than are attended over.
    keys, values = (torch.randn(kv_heads, 10, dim, generator=generator)[:, :span] for _ in range(2))
    seen = visibility(torch.arange(4, 7), torch.arange(span), causal=True, window=3)
    mask = grouped_mask(seen, heads // kv_heads, torch.float32) if masked else None

    own = attend(queries, keys, values, mask)

    for row in range(rows):
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = [
                float(queries[row, head].double() @ keys[group, key].double()) / math.sqrt(dim)
                if seen[row, key] or not masked
                else -math.inf
                for key in range(span)
            ]
            weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
            expected = weights @ values[group].double()
            torch.testing.assert_close(own[row, head * dim : (head + 1) * dim].double(), expected, rtol=0, atol=1e-6)


def test_causal_is_the_mask_of_the_last_positions() -> None:
    """Without a mask in memory, the same as with one."""
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(3, 6, 8, generator=generator)
    keys, values = (torch.randn(2, 10, 8, generator=generator)[:, :7] for _ in range(2))
    seen = visibility(torch.arange(4, 7), torch.arange(7), causal=True, window=None)

    own = attend(queries, keys, values, Causal())

    torch.testing.assert_close(own, attend(queries, keys, values, grouped_mask(seen, 3, torch.float32)))
