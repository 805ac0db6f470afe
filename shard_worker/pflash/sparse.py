"""Causal attention of a whole long prompt, to chosen blocks of keys only.

A block of queries always sees the first blocks, the latest ones and itself. Another block of keys is chosen where its
mean key gets, from the mean query, at least a share of the weight that the best block's mean key gets. The last blocks
of queries, whose scores decide what is kept, see everything. Heads of one group share their choice, so that keys are
gathered once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 128
"""Tokens of a block of queries or keys."""

SINK_BLOCKS, RECENT_BLOCKS = 2, 4
"""The first blocks of keys, and the latest ones with the queries' own, which are always seen."""

FULL_QUERY_BLOCKS = 2
"""The last blocks of queries, which see everything."""

ALPHA = 0.12
"""The share of the best block's weight from which a block is chosen."""


def attend_sparsely(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, alpha: float = ALPHA
) -> torch.Tensor:
    """Return causal attention to chosen blocks, [n, heads * dim]. Row i sees rows up to i.

    queries: [n, heads, dim]. keys, values: [n, kv_heads, dim]. Queries and keys are rotated already. alpha: as ALPHA; 0
    is dense attention.
    """
    length, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    padding = -length % BLOCK
    # Padded keys lie behind every real query, so causality hides them.
    queries, keys, values = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (queries, keys, values))
    blocks = (length + padding) // BLOCK
    chosen = choose_blocks(queries, keys, alpha).cpu()
    # The queries of a group become rows of their key/value head, so that one product serves them all.
    grouped = queries.view(blocks, BLOCK, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(blocks, kv_heads, group * BLOCK, dim)
    # Its own block comes last for every block of queries, and is the only one that is seen in part.
    mask = torch.zeros((BLOCK, blocks * BLOCK), dtype=queries.dtype, device=queries.device)
    mask[:, -BLOCK:].fill_(float("-inf")).triu_(1)
    mask = mask.repeat(group, 1)
    out = torch.empty_like(grouped)
    for block in range(blocks):
        for head in range(kv_heads):
            index = chosen[head, block].nonzero()[:, 0]
            k, v = (_blocks_of(x[:, head], index, block)[None, None] for x in (keys, values))
            shown = mask[:, -len(index) * BLOCK :]
            rows = grouped[block, head][None, None]
            out[block, head] = F.scaled_dot_product_attention(rows, k, v, attn_mask=shown)[0, 0]
    out = out.view(blocks, kv_heads, group, BLOCK, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(blocks * BLOCK, heads * dim)[:length]


def _blocks_of(rows: torch.Tensor, index: torch.Tensor, last: int) -> torch.Tensor:
    """Return the blocks `index` of rows [n, dim], up to block `last`: a view where none is left out."""
    if len(index) == last + 1:
        return rows[: len(index) * BLOCK]
    return rows.view(-1, BLOCK, rows.shape[1])[index.to(rows.device)].flatten(0, 1)


def choose_blocks(queries: torch.Tensor, keys: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return which blocks of keys each block of queries sees, bool [kv_heads, blocks, blocks].

    queries: [n, heads, dim], keys: [n, kv_heads, dim], n a multiple of BLOCK.
    """
    heads, dim = queries.shape[1:]
    kv_heads = keys.shape[1]
    mean_queries = queries.view(-1, BLOCK, heads, dim).float().mean(1).transpose(0, 1)
    mean_keys = keys.view(-1, BLOCK, kv_heads, dim).float().mean(1).transpose(0, 1)
    blocks = mean_keys.shape[1]
    grouped = mean_queries.reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped, mean_keys.transpose(1, 2)).mul_(dim**-0.5).view(kv_heads, -1, blocks, blocks)
    number = torch.arange(blocks, device=keys.device)
    causal = number[None, :] <= number[:, None]
    weights = scores.masked_fill_(~causal, float("-inf")).softmax(-1)
    best = weights.amax(-1, keepdim=True)
    chosen = (weights >= alpha * best).any(1)
    chosen |= (number < SINK_BLOCKS)[None, :]
    chosen |= number[None, :] > number[:, None] - RECENT_BLOCKS
    chosen[:, -FULL_QUERY_BLOCKS:] = True
    return chosen & causal
