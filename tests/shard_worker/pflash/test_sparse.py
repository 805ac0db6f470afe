"""Attention to chosen blocks against dense attention with the same choice written out as a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shard_worker.pflash.drafter import attend_causally
from shard_worker.pflash.sparse import (
    BLOCK,
    FULL_QUERY_BLOCKS,
    RECENT_BLOCKS,
    SINK_BLOCKS,
    attend_sparsely,
    choose_blocks,
)


def rows(length: int, heads: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(length, heads, 16, generator=torch.Generator().manual_seed(seed)) * scale


def masked(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Dense attention of [n, heads, dim] under a mask, in float64. seen: [heads, n, n]."""
    group = queries.shape[1] // keys.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (queries, keys, values))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    weights = (q @ k.transpose(1, 2) / 4).masked_fill(~seen, float("-inf")).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1).float()


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 7 * BLOCK, 9 * BLOCK + 5])
def test_everything_chosen_is_dense(length: int) -> None:
    """With every block chosen, the result is that of dense causal attention."""
    q, k, v = rows(length, 4, 1), rows(length, 2, 2), rows(length, 2, 3)
    dense = attend_causally(q, k, v, sparse_from=10**9)
    torch.testing.assert_close(attend_sparsely(q, k, v, alpha=0.0), dense, rtol=1e-4, atol=1e-5)
    seen = torch.ones(4, length, length).tril().bool()
    torch.testing.assert_close(dense, masked(q, k, v, seen), rtol=1e-4, atol=1e-5)


def test_chosen_blocks_are_a_mask() -> None:
    """Sharp queries leave most blocks out; what is left equals dense attention under that mask."""
    length = 12 * BLOCK + 40
    q, k, v = rows(length, 4, 1, 3.0), rows(length, 2, 2), rows(length, 2, 3)
    drift = torch.randn(13, 1, 1, 16, generator=torch.Generator().manual_seed(4)).repeat_interleave(BLOCK, 1)
    k = k + 2 * drift.flatten(0, 1)[:length]
    q = q + 3 * drift.flip(0).flatten(0, 1)[:length]
    padded = [F.pad(x, (0, 0, 0, 0, 0, -length % BLOCK)) for x in (q, k)]
    chosen = choose_blocks(*padded, alpha=0.12)
    assert chosen.sum() < 0.9 * 2 * 13 * 14 / 2
    seen = chosen.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :length, :length]
    seen = seen.repeat_interleave(2, 0) & torch.ones(length, length).tril().bool()
    torch.testing.assert_close(attend_sparsely(q, k, v, 0.12), masked(q, k, v, seen), rtol=1e-4, atol=1e-5)


def test_what_is_always_chosen() -> None:
    """Every block of queries sees the first blocks and the latest ones; the last blocks of queries see everything."""
    chosen = choose_blocks(rows(20 * BLOCK, 4, 1, 50.0), rows(20 * BLOCK, 2, 2), alpha=1.0)
    for query in range(20):
        assert chosen[:, query, : min(SINK_BLOCKS, query + 1)].all()
        assert chosen[:, query, max(0, query - RECENT_BLOCKS + 1) : query + 1].all()
        assert not chosen[:, query, query + 1 :].any()
    assert chosen[:, -FULL_QUERY_BLOCKS:].sum() == 2 * (19 + 20)


def test_the_best_block_is_chosen() -> None:
    """A block of keys that answers a block of queries is seen by it, however far back."""
    length = 20 * BLOCK
    q, k = rows(length, 2, 1, 0.1), rows(length, 1, 2, 0.1)
    direction = torch.zeros(16)
    direction[3] = 5.0
    k[7 * BLOCK : 8 * BLOCK] += direction
    q[15 * BLOCK : 16 * BLOCK] += direction
    assert choose_blocks(q, k, alpha=0.5)[0, 15].nonzero().flatten().tolist() == [0, 1, 7, 12, 13, 14, 15]
