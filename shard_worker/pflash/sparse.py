"""Causal attention of a whole long prompt to chosen blocks of keys only.

A block of queries always sees the first blocks, the latest ones and itself; another block of keys is chosen where its
mean key gets at least a share of the weight that the best block's gets from the mean query. The last blocks of queries,
whose scores decide what is kept, see everything. Heads of one group share their choice, so that keys are gathered once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 128
SINK_BLOCKS = 2
RECENT_BLOCKS = 4
FULL_QUERY_BLOCKS = 2
ALPHA = 0.12


def attend_sparsely(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, alpha: float = ALPHA
) -> torch.Tensor:
    """queries: [n, heads, dim]; keys, values: [n, kv_heads, dim], all rotated; row i sees rows up to i. Returns
    [n, heads * dim]. alpha 0 is dense attention."""
    length, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    padding = -length % BLOCK
    # Padded keys lie behind every real query, so causality hides them.
    queries, keys, values = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (queries, keys, values))
    blocks = (length + padding) // BLOCK
    chosen = choose_blocks(queries, keys, alpha)
    grouped = queries.view(blocks, BLOCK, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    key_blocks = keys.view(blocks, BLOCK, kv_heads, dim).permute(2, 0, 1, 3)
    value_blocks = values.view(blocks, BLOCK, kv_heads, dim).permute(2, 0, 1, 3)
    offsets = torch.arange(BLOCK, device=queries.device)
    later = offsets[None, :] > offsets[:, None]
    head_index = torch.arange(kv_heads, device=queries.device)[:, None]
    out = torch.empty_like(grouped)
    for block in range(blocks):
        index, there = _gather_list(chosen[:, block])
        hidden = ~there[:, None, :, None].expand(-1, BLOCK, -1, BLOCK)
        hidden = hidden | ((index == block)[:, None, :, None] & later[None, :, None, :])
        mask = torch.zeros(hidden.shape, dtype=queries.dtype, device=queries.device).masked_fill_(hidden, float("-inf"))
        out[block] = F.scaled_dot_product_attention(
            grouped[block],
            key_blocks[head_index, index].flatten(1, 2)[:, None].expand(-1, group, -1, -1),
            value_blocks[head_index, index].flatten(1, 2)[:, None].expand(-1, group, -1, -1),
            attn_mask=mask.flatten(2)[:, None],
        )
    return out.permute(0, 3, 1, 2, 4).reshape(blocks * BLOCK, heads * dim)[:length]


def choose_blocks(queries: torch.Tensor, keys: torch.Tensor, alpha: float) -> torch.Tensor:
    """Which blocks of keys each block of queries sees, bool [kv_heads, blocks, blocks].

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


def _gather_list(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the chosen blocks of each head, and which of them are real: both [kv_heads, most of any head]."""
    counts = chosen.sum(-1)
    most = int(counts.max())
    # Stable: the chosen ones come first, in order.
    index = torch.argsort(chosen.logical_not().to(torch.uint8), dim=-1, stable=True)[:, :most]
    return index, torch.arange(most, device=chosen.device)[None, :] < counts[:, None]
