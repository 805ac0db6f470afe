"""The gated delta rule for many rows that all count, in chunks: `ops.deltanet.prefill` with kernels.

Within a chunk everything but the state is computed for all chunks at once; then the state walks through them. In
float32, products by three passes of the matrix units where they have no float32 of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from services.model.config import LinearAttentionConfig
from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.device import devices
from shard_worker.device.devices import KernelTarget, product_precision
from shard_worker.model.kernels.deltanet import Shape, gate, mix
from shard_worker.model.kernels.step_parameters import STATE, Places
from shard_worker.model.layer_weights import LinearAttentionWeights

CHUNK = 64

_VALUES = 32
"""The columns of a head's state that one program holds."""

_TWO_STAGES_BYTES = 208 << 10
"""Shared memory that a program takes whose next chunk is on its way while it works on one."""


class Cut(NamedTuple):
    """How programs work. warps: of one that computes a chunk; stages: chunks that a walk has in shared memory."""

    warps: int
    stages: int


def choose(target: KernelTarget | None) -> Cut | None:
    """Return how programs work on a GPU; None where its registers cannot hold a chunk.

    Hopper's matrix units read a chunk from shared memory. Where they read registers, a thread needs those that CDNA
    has: with 256 it would keep more than a thousand of them in memory.
    """
    if target is None or target.shared_bytes >= _TWO_STAGES_BYTES:
        return Cut(warps=8, stages=2)
    return Cut(warps=4, stages=1) if target.lane_registers >= 512 else None


@triton.jit
def _chunks(
    mixed, gates, corrected, projected_keys, scores, running, rows, padded,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHUNK: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one chunk of one head: its rows' corrections but for the state, and how rows see each other.

    With A the strictly lower part of beta K Kᵀ ⊙ decay and T the inverse of 1 + A: corrected = T beta V,
    projected_keys = T beta e^G K; scores = Q Kᵀ ⊙ decay; running = G, the running sum of log decays.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    cs, ks, vs = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    rs = chunk * CHUNK + cs
    inside = rs < rows
    lines = mixed + rs.to(tl.int64)[:, None] * channels
    keys = tl.load(lines + (KEY_HEADS + key_head) * KEY_DIM + ks[None, :], mask=inside[:, None], other=0.0)
    # Rows that are not there decay nothing and correct nothing.
    total = tl.cumsum(tl.load(gates + rs * 2 * VALUE_HEADS + head, mask=inside, other=0.0), 0)
    beta = tl.load(gates + rs * 2 * VALUE_HEADS + VALUE_HEADS + head, mask=inside, other=0.0)
    between = total[:, None] - total[None, :]
    decay = tl.exp(tl.where(cs[:, None] >= cs[None, :], between, float("-inf")))
    coupling = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decay * beta[:, None]
    # The inverse of blocks of SIDE rows along the diagonal by forward substitution, a row of every block at a time.
    near = cs[:, None] // SIDE == cs[None, :] // SIDE
    below = cs[:, None] > cs[None, :]
    inverse = tl.where(near & below, -coupling, 0.0)
    for row in range(1, SIDE):
        here = (cs % SIDE == row)[:, None]
        line = tl.sum(tl.where(here, inverse, 0.0), 0)
        line += tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(here & near, line[None, :], inverse)
    same = (cs[:, None] == cs[None, :]).to(tl.float32)
    inverse += same
    # With N what lies between the blocks times that, and four of them: (1 + N)⁻¹ = (1 - N)(1 + N²), as N⁴ is nothing.
    rest = tl.dot(inverse, tl.where(near, 0.0, tl.where(below, coupling, 0.0)), input_precision=PRECISION)
    square = tl.dot(rest, rest, input_precision=PRECISION)
    between_blocks = tl.dot(same - rest, same + square, input_precision=PRECISION)
    inverse = tl.dot(between_blocks, inverse, input_precision=PRECISION)
    at = (head.to(tl.int64) * padded + rs)[:, None]
    values = tl.load(lines + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + vs[None, :], mask=inside[:, None], other=0.0)
    tl.store(
        corrected + at * VALUE_DIM + vs[None, :], tl.dot(inverse, values * beta[:, None], input_precision=PRECISION)
    )
    weighted = keys * (beta * tl.exp(total))[:, None]
    tl.store(projected_keys + at * KEY_DIM + ks[None, :], tl.dot(inverse, weighted, input_precision=PRECISION))
    queries = tl.load(lines + key_head * KEY_DIM + ks[None, :], mask=inside[:, None], other=0.0)
    seen = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay
    tl.store(scores + at * CHUNK + cs[None, :], seen)
    tl.store(running + head.to(tl.int64) * padded + rs, total)


@triton.jit(do_not_specialize=["slot"])
def _walk(
    mixed, corrected, projected_keys, scores, running, parameters, out, slot, rows, padded,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take VALUES columns of one head's state through all chunks; out: float32 [rows, VALUE_HEADS, VALUE_DIM]."""
    head, part = tl.program_id(0), tl.program_id(1)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    cs, ks, vs = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM), part * VALUES + tl.arange(0, VALUES)
    line = slot.to(tl.int64) * VALUE_HEADS + head
    states = tl.load(parameters + STATE).to(tl.pointer_type(tl.float32)) + line * (KEY_DIM * VALUE_DIM)
    state_at = tl.multiple_of(states + ks[:, None] * VALUE_DIM + vs[None, :], (16, 16))
    state = tl.load(state_at)
    first = head.to(tl.int64) * padded
    for start in range(0, rows, CHUNK):
        rs = start + cs
        inside = rs < rows
        lines = mixed + rs.to(tl.int64)[:, None] * channels + key_head * KEY_DIM + ks[None, :]
        total = tl.load(running + first + rs)
        end = tl.load(running + first + start + CHUNK - 1)
        at = (first + rs)[:, None]
        before = tl.load(projected_keys + at * KEY_DIM + ks[None, :])
        values = tl.load(corrected + at * VALUE_DIM + vs[None, :])
        values -= tl.dot(before, state, input_precision=PRECISION)
        queries = tl.load(lines, mask=inside[:, None], other=0.0) * tl.exp(total)[:, None]
        result = tl.dot(queries, state, input_precision=PRECISION)
        result += tl.dot(tl.load(scores + at * CHUNK + cs[None, :]), values, input_precision=PRECISION)
        out_at = out + (rs.to(tl.int64)[:, None] * VALUE_HEADS + head) * VALUE_DIM + vs[None, :]
        tl.store(out_at, result, mask=inside[:, None])
        keys = tl.load(lines + KEY_HEADS * KEY_DIM, mask=inside[:, None], other=0.0) * tl.exp(end - total)[:, None]
        state = state * tl.exp(end) + tl.dot(tl.trans(keys), values, input_precision=PRECISION)
    tl.store(state_at, state)


def run_layer(
    config: LinearAttentionConfig,
    weights: LinearAttentionWeights,
    projected: torch.Tensor,
    cache: RecurrentCache,
    slot: int,
    eps: float,
) -> torch.Tensor:
    """Take rows of a fused projection, all of which count, to [n, value_heads * value_dim] for the output projection.

    The state advances; the convolution's inputs are left to the caller.
    """
    shape = Shape(
        config.key_heads,
        config.value_heads,
        config.key_head_dim,
        config.value_head_dim,
        config.conv_taps,
        len(cache.state),
    )
    rows, device = len(projected), projected.device
    # The cache's own parameters say that there are no rows, so that none are recorded.
    places = Places(cache.step_parameters)
    mixed, gates = mix(shape, projected, weights.taps, weights.decay_rate, weights.dt_bias, places, slot, logs=True)
    chunks = triton.cdiv(rows, CHUNK)
    padded, heads = chunks * CHUNK, shape.value_heads

    def made(*extents: int) -> torch.Tensor:
        return torch.empty(extents, dtype=torch.float32, device=device)

    corrected, keys = made(heads, padded, shape.value_dim), made(heads, padded, shape.key_dim)
    scores, running = made(heads, padded, CHUNK), made(heads, padded)
    out = made(rows, heads, shape.value_dim)
    cut = choose(devices.kernel_target(device))
    assert cut is not None
    common = {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "CHUNK": CHUNK,
        "PRECISION": product_precision(mixed),
    }
    _chunks[(chunks, heads)](
        mixed, gates, corrected, keys, scores, running, rows, padded, **common, SIDE=CHUNK // 4, num_warps=cut.warps
    )  # fmt: skip
    values = min(_VALUES, shape.value_dim)
    _walk[(heads, shape.value_dim // values)](
        mixed, corrected, keys, scores, running, cache.step_parameters, out, slot, rows, padded, **common,
        VALUES=values, num_warps=4, num_stages=cut.stages,
    )  # fmt: skip
    return gate(shape, out, projected, weights.norm, eps)
