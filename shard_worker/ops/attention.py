"""Grouped-query attention of a few rows over a preallocated cache, without expanding keys or values.

The queries of a group become rows of their key/value head, so that one product serves them all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias


def visibility(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Which keys each query sees, bool [n, keys]. A negative key position marks an empty slot.

    causal: no key after the query. window W: only keys with |distance| < W.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    seen = (key_positions >= 0)[None, :].expand_as(distance)
    if causal:
        seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window)
        if not causal:
            seen = seen & (distance > -window)
    return seen


def grouped_mask(seen: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The additive mask that `attend` takes, [group * n, keys], from `visibility`."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf")).repeat(group, 1)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim) + mask) v.

    queries: [n, heads, head_dim]; keys, values: [kv_heads, span, head_dim]; mask: from `grouped_mask`, or None when
    every query sees every key, or a CausalBias, with which a GPU needs no mask in memory. Returns
    [n, heads * head_dim].
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if isinstance(mask, CausalBias):
        rows_last = queries.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(rows_last, keys[None], values[None], attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(rows, heads * head_dim)
    grouped = queries.transpose(0, 1).reshape(1, kv_heads, group * rows, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask)
    # Some kernels return it with the two middle axes swapped in memory.
    return out.reshape(heads, rows, head_dim).transpose(0, 1).reshape(rows, heads * head_dim)
