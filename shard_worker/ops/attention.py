"""Grouped-query attention of a few rows over a preallocated cache, without expanding keys or values.

The queries of a group become rows of their key/value head, so that one product serves them all.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shard_worker.cpu_kernels import attention as cpu_attention
from shard_worker.cpu_kernels.kernel_writer import BLOCK

if torch.version.cuda or torch.version.hip:
    # What `Causal` needs brings a compiler along, which takes a second: not for a build that has no use for it, and
    # elsewhere not while the first prompt waits.
    import torch.nn.attention.bias

    # cuDNN's attention makes a plan for each number of rows, which takes 47 ms on an H200, and half a second for the
    # first: longer than most prompts take, and the others are as fast without it.
    torch.backends.cuda.enable_cudnn_sdp(False)

_SCORES = 1 << 24
"""The most scores that are in memory at a time."""


class Causal:
    """Stands for a mask: the queries are the last of the keys' positions, and each sees all up to its own.

    A GPU needs no mask in memory for that.
    """


def first_seen(base: int, window: int | None) -> int:
    """Return the first position that a row at position `base` sees. window: as in `visibility`."""
    return 0 if window is None else max(0, base + 1 - window)


def visibility(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Return which keys each query sees, bool [n, keys]. A negative key position marks an empty slot.

    causal: whether a query sees no key after itself. window: W where it sees only keys with |distance| < W.
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
    """Return the additive mask that `attend` takes, [group * n, keys]. seen: from `visibility`."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, float("-inf")).repeat(group, 1)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | Causal | None,
) -> torch.Tensor:
    """Return softmax(q kᵀ / sqrt(head_dim) + mask) v, [n, heads * head_dim].

    queries: [n, heads, head_dim]; keys, values: [kv_heads, span, head_dim]; mask: from `grouped_mask`, or None when
    every query sees every key, or `Causal`.
    """
    rows, heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    group = heads // kv_heads
    if isinstance(mask, Causal):
        from torch.nn.attention.bias import causal_lower_right

        rows_last, bias = queries.transpose(0, 1)[None], causal_lower_right(rows, keys.shape[1])
        out = F.scaled_dot_product_attention(rows_last, keys[None], values[None], attn_mask=bias, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(rows, heads * head_dim)
    if rows == 1 and mask is None and cpu_attention.takes(keys):
        return cpu_attention.attend(queries, keys, values).view(1, heads * head_dim)
    if rows == 1:
        # Heads are in order already: a step of one row takes no longer than it must.
        grouped = queries.reshape(1, kv_heads, group, head_dim)
        out = F.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask)
        return out.reshape(1, heads * head_dim)
    grouped = queries.transpose(0, 1).reshape(1, kv_heads, group * rows, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask)
    # Some kernels return it with the two middle axes swapped in memory.
    return out.reshape(heads, rows, head_dim).transpose(0, 1).reshape(rows, heads * head_dim)


def attend_each(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Do what `attend` does under a causal mask, one query at a time: each comes out bit for bit as it would alone.

    queries: of the last rows of the span. window: as in `visibility`. The rest is as in `attend`.
    """
    rows, span = len(queries), keys.shape[1]
    if (window is None or window >= BLOCK) and cpu_attention.takes(keys, rows):
        return cpu_attention.attend(queries, keys, values, window).view(rows, -1)
    mixed = []
    for behind, query in enumerate(queries.chunk(rows), span - rows + 1):
        seen = slice(first_seen(behind - 1, window), behind)
        mixed.append(attend(query, keys[:, seen], values[:, seen], None))
    return torch.cat(mixed)


def attend_with_sinks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor,
    window: int | None,
    *,
    alone: bool = False,
) -> torch.Tensor:
    """Return causal attention whose weights sum up to less than 1, [n, heads * head_dim]: a head's sink is one score
    more of its softmax, which no value belongs to.

    sinks: float32 [heads]. alone: whether each query is to come out bit for bit as it would alone. The rest is as in
    `attend_each`. Computed in float32.
    """
    rows, heads, head_dim = queries.shape
    kv_heads, span, _ = keys.shape
    # Rows of one window see no more than two windows together.
    most, reach = (rows, span) if window is None else (window, min(span, 2 * window))
    step, mixed = 1 if alone else max(1, min(most, _SCORES // (heads * reach))), []
    for first in range(0, rows, step):
        own = queries[first : first + step]
        base, end = span - rows + first, span - rows + first + len(own)
        begin = first_seen(base, window)
        positions = torch.arange(begin, end, device=queries.device)
        hidden = ~visibility(positions[base - begin :], positions, causal=True, window=window)
        # [kv_heads, queries of a group, positions]
        grouped = own.float().transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = torch.bmm(grouped, keys[:, begin:end].float().transpose(1, 2)).mul_(head_dim**-0.5)
        scores.view(heads, len(own), -1).masked_fill_(hidden, float("-inf"))
        sink = sinks.view(kv_heads, -1, 1, 1).expand(-1, -1, len(own), 1).reshape(kv_heads, -1, 1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True).add_((sink - top).exp_())
        out = torch.bmm(weights, values[:, begin:end].float()).div_(total)
        mixed.append(out.view(heads, len(own), head_dim).transpose(0, 1).reshape(len(own), -1).to(queries.dtype))
    return torch.cat(mixed)


def flash_with_sinks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Do what `attend_with_sinks` does by flash attention (arXiv 2307.08691), where a GPU has it for elements of 16
    bits. The log-sum-exp of a query's scores says which share of all weights they have beside the sink."""
    rows, heads, head_dim = queries.shape
    # [batch, rows, heads, head_dim]
    out, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        queries[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        None,
        None,
        rows,
        keys.shape[1],
        0.0,
        is_causal=True,
        return_debug_mask=False,
        scale=head_dim**-0.5,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    shares = torch.sigmoid(log_sums[0].T - sinks)
    return (out[0] * shares[:, :, None]).to(queries.dtype).flatten(1)
