"""The gated delta rule for a step's rows, session by session: convolution and norms, recurrence, gated norm, commit.

The state is read where it lies; a step whose rows may be rolled back leaves it as it was and records what advancing it
by any number of them needs. Of several sessions single rows may be recorded that the next step advances by, before its
own one, in the same pass over the state. Rows are taken one after the other, so that a row's result is the same in a
step of its own, in a block, and after a commit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.matmul import SQUARES_WIDTH, store_run_sums
from shard_worker.model.kernels.step_parameters import (
    CORRECTED,
    COUNTED,
    DECAYS,
    DEFERRED,
    FIRST_ROW,
    INPUTS,
    KEYS,
    ROOM,
    ROWS,
    STATE,
    Places,
)

_VALUES = 32
"""Columns of a head's state that one warp holds. 64 sessions' states are read and written in 110 us, and in 149 with 16
columns (48 heads of 128 x 128, H200: 96 at the rate of a copy); a session's block of 16 rows takes 12 us, not 10."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a recurrent layer. layers: how many of them a session's memory has."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layers: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        """Numbers in a row of the fused projection [q, k, v | z | b | a]."""
        return self.channels + self.value_heads * (self.value_dim + 2)


@triton.jit(do_not_specialize=["slot"])
def _mix(
    projected, taps, decay_rate, dt_bias, lines, sessions, indices, mixed, gates, slot,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr, LOGS: tl.constexpr,
):  # fmt: skip
    """Compute one row and head: convolution, SiLU, for queries and keys the L2 norm, for values also decay and beta.

    LOGS: store the decay's logarithm instead of the decay. LINE: of `Places`.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    index, counts, deferred = row, True, 0
    if LINE > 0:
        session = tl.load(sessions + row)
        index = tl.load(indices + row).to(tl.int32)
        counts = session >= 0
        lines += tl.maximum(session, 0) * LINE
        # The input of a row that was deferred lies behind those that have counted so far.
        deferred = (tl.load(lines + DEFERRED) > 0).to(tl.int32)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    kind = projected.dtype.element_ty
    is_value = head >= 2 * KEY_HEADS
    dim = tl.where(is_value, VALUE_DIM, KEY_DIM)
    first = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
    ds = tl.arange(0, BLOCK)
    inside = ds < dim
    cs = first + ds
    factors = tl.load(taps + cs, mask=inside, other=0.0)
    rows, room = tl.load(lines + ROWS), tl.load(lines + ROOM)
    memory = tl.load(lines + INPUTS).to(tl.pointer_type(kind)) + slot * (TAPS - 1 + room) * channels
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        if tap > 0:
            factors = tl.load(taps + tap * channels + cs, mask=inside, other=0.0)
        behind = index + tap - (TAPS - 1)
        kept_at = tl.multiple_of(memory + (index + tap + deferred) * channels + cs, 16)
        kept = tl.load(kept_at, mask=inside & counts & (behind < 0), other=0.0)
        new = tl.load(projected + (row + tap - (TAPS - 1)) * WIDTH + cs, mask=inside & (behind >= 0), other=0.0)
        total += tl.where(behind < 0, kept, new).to(tl.float32) * factors
    own = tl.load(projected + row * WIDTH + cs, mask=inside)
    # Of more rows than there is room for, which all count, the last ones are kept.
    place = index - tl.maximum(rows - room, 0)
    own_at = tl.multiple_of(memory + (TAPS - 1 + place + deferred) * channels + cs, 16)
    tl.store(own_at, own, mask=inside & counts & (index < rows) & (place >= 0))
    total = total / (1.0 + tl.exp(-total))
    if is_value:
        h = head - 2 * KEY_HEADS
        b = tl.load(projected + row * WIDTH + channels + VALUE_HEADS * VALUE_DIM + h).to(tl.float32)
        a = tl.load(projected + row * WIDTH + channels + VALUE_HEADS * (VALUE_DIM + 1) + h).to(tl.float32)
        a += tl.load(dt_bias + h)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        decay = tl.load(decay_rate + h) * softplus
        tl.store(gates + row * 2 * VALUE_HEADS + h, decay if LOGS else tl.exp(decay))
        tl.store(gates + row * 2 * VALUE_HEADS + VALUE_HEADS + h, 1.0 / (1.0 + tl.exp(-b)))
    else:
        total = total * tl.rsqrt(tl.sum(total * total, 0) + 1e-6)
        total = tl.where(head < KEY_HEADS, total * (KEY_DIM**-0.5), total)
    tl.store(mixed + row * channels + cs, total, mask=inside)


@triton.jit
def _advanced(state, keys, corrected, decays, row, ks, vs, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Return columns of a head's state advanced by a recorded row: to the last bit as when the row was computed."""
    decay = tl.load(decays + row)
    k, u = tl.load(keys + row * KEY_DIM + ks), tl.load(corrected + row * VALUE_DIM + vs)
    return tl.fma(tl.broadcast_to(k[:, None], state.shape), tl.broadcast_to(u[None, :], state.shape), state * decay)


@triton.jit(do_not_specialize=["slot"])
def _recur(
    mixed, gates, lines, out, slot,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    LINE: tl.constexpr, VALUES: tl.constexpr, UNCOMMITTED: tl.constexpr,
):  # fmt: skip
    """Take VALUES columns of a head's state through a session's rows; out: float32 [rows, VALUE_HEADS, VALUE_DIM].

    UNCOMMITTED: whether the rows of a session alone are; those of several ones say it by `COUNTED`.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    lines += tl.program_id(2).to(tl.int64) * LINE
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    ks, vs = tl.arange(0, KEY_DIM), part * VALUES + tl.arange(0, VALUES)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    rows, room = tl.load(lines + ROWS).to(tl.int32), tl.load(lines + ROOM)
    line = slot.to(tl.int64) * VALUE_HEADS + head
    states = tl.load(lines + STATE).to(tl.pointer_type(tl.float32)) + line * (KEY_DIM * VALUE_DIM)
    state_at = tl.multiple_of(states + ks[:, None] * VALUE_DIM + vs[None, :], (16, 16))
    # A session without rows among others has no memory either.
    if LINE > 0 and rows == 0:
        return
    recorded, deferred = UNCOMMITTED, 0
    if LINE > 0:
        recorded = tl.load(lines + COUNTED) == 0
        deferred = tl.load(lines + DEFERRED).to(tl.int32)
        first = tl.load(lines + FIRST_ROW).to(tl.int32)
        mixed += first * channels
        gates += first * 2 * VALUE_HEADS
        out += first * VALUE_HEADS * VALUE_DIM
    state = tl.load(state_at)
    keys = tl.load(lines + KEYS).to(tl.pointer_type(tl.float32)) + line * room * KEY_DIM
    corrected = tl.load(lines + CORRECTED).to(tl.pointer_type(tl.float32)) + line * room * VALUE_DIM
    decays = tl.load(lines + DECAYS).to(tl.pointer_type(tl.float32)) + line * room
    q_at = mixed + key_head * KEY_DIM + ks
    v_at = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + vs
    g_at = gates + head
    q, k, v = tl.load(q_at), tl.load(q_at + KEY_HEADS * KEY_DIM), tl.load(v_at)
    decay, beta = tl.load(g_at), tl.load(g_at + VALUE_HEADS)
    if LINE > 0:
        if deferred > 0:
            state = _advanced(state, keys, corrected, decays, deferred - 1, ks, vs, KEY_DIM, VALUE_DIM)
            if recorded:
                tl.store(state_at, state)
        if deferred == 1:
            # Others may still read the record there.
            keys += KEY_DIM
            corrected += VALUE_DIM
            decays += 1
    for row in range(rows):
        # The next row's numbers are on their way while this one's are used.
        more = row + 1 < rows
        q_at += channels
        v_at += channels
        g_at += 2 * VALUE_HEADS
        next_q = tl.load(q_at, mask=more & (ks >= 0), other=0.0)
        next_k = tl.load(q_at + KEY_HEADS * KEY_DIM, mask=more & (ks >= 0), other=0.0)
        next_v = tl.load(v_at, mask=more & (vs >= 0), other=0.0)
        next_decay = tl.load(g_at, mask=more, other=0.0)
        next_beta = tl.load(g_at + VALUE_HEADS, mask=more, other=0.0)
        # Both sums over the state as it was, so that neither waits for the other.
        u = beta * (v - decay * tl.sum(state * k[:, None], 0))
        o = decay * tl.sum(state * q[:, None], 0) + tl.sum(k * q, 0) * u
        state = tl.fma(
            tl.broadcast_to(k[:, None], state.shape), tl.broadcast_to(u[None, :], state.shape), state * decay
        )
        tl.store(out + (row * VALUE_HEADS + head) * VALUE_DIM + vs, o)
        if recorded:
            tl.store(corrected + row * VALUE_DIM + vs, u)
            if part == 0:
                tl.store(keys + row * KEY_DIM + ks, k)
                tl.store(decays + row, decay)
        q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta
    if not recorded:
        tl.store(state_at, state)


@triton.jit
def _gate(
    out, projected, norm, gated, column_sums, eps,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Compute one row and head: RMSNorm times SiLU of the gate.

    column_sums: float32, those of every SUMS columns of the result; None where nobody wants them.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    vs = tl.arange(0, VALUE_DIM)
    factors = tl.load(norm + vs)
    x = tl.load(out + (row * VALUE_HEADS + head) * VALUE_DIM + vs)
    z = tl.load(projected + row * WIDTH + CHANNELS + head * VALUE_DIM + vs).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / VALUE_DIM + eps) * factors
    x = x * (z / (1.0 + tl.exp(-z)))
    x = x.to(gated.dtype.element_ty)
    tl.store(gated + (row * VALUE_HEADS + head) * VALUE_DIM + vs, x)
    if column_sums is not None:
        store_run_sums(x, column_sums, row * VALUE_HEADS + head, VALUE_DIM, SUMS)


@triton.jit
def _commit_states(
    lines, counts, apart,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Advance LINES lines of one layer's head's state by as many recorded rows as counts says of the session, where its
    rows were recorded."""
    line, part, session = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lines += session * LINE
    ks, vs = part * LINES + tl.arange(0, LINES), tl.arange(0, VALUE_DIM)
    rows, room = tl.load(counts + session * apart).to(tl.int32), tl.load(lines + ROOM)
    if LINE > 0 and (rows == 0) | (tl.load(lines + COUNTED) > 0):
        return
    states = tl.load(lines + STATE).to(tl.pointer_type(tl.float32)) + line * (KEY_DIM * VALUE_DIM)
    state_at = tl.multiple_of(states + ks[:, None] * VALUE_DIM + vs[None, :], (16, 16))
    state = tl.load(state_at)
    keys = tl.load(lines + KEYS).to(tl.pointer_type(tl.float32)) + line * room * KEY_DIM
    corrected = tl.load(lines + CORRECTED).to(tl.pointer_type(tl.float32)) + line * room * VALUE_DIM
    decays = tl.load(lines + DECAYS).to(tl.pointer_type(tl.float32)) + line * room
    for row in range(rows):
        state = _advanced(state, keys, corrected, decays, row, ks, vs, KEY_DIM, VALUE_DIM)
    tl.store(state_at, state)


@triton.jit
def _commit_inputs(
    lines, counts, apart, kind_like,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr, RECORDED: tl.constexpr,
):  # fmt: skip
    """Make the last TAPS - 1 inputs of a session's rows that count those that its next convolution begins with.

    RECORDED: leave out, among several, sessions whose rows were not recorded. Otherwise a row that was deferred counts
    as well, and the input of one that is deferred by now moves up behind it.
    """
    layer, block, session = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lines += session * LINE
    kind = kind_like.dtype.element_ty
    cs = block * BLOCK + tl.arange(0, BLOCK)
    rows, room = tl.load(counts + session * apart), tl.load(lines + ROOM)
    defers = False
    if LINE > 0 and not RECORDED:
        deferred = (tl.load(lines + DEFERRED) > 0).to(rows.dtype)
        defers = (deferred > 0) & (rows == 0)
        rows += deferred
    inside = (cs < CHANNELS) & (rows > 0)
    if LINE > 0 and RECORDED:
        inside = inside & (tl.load(lines + COUNTED) == 0)
    rows = tl.minimum(rows, room)
    memory = tl.load(lines + INPUTS).to(tl.pointer_type(kind)) + layer * (TAPS - 1 + room) * CHANNELS
    # Row by row upwards: a column belongs to one thread, and what is written was read before.
    for row in tl.static_range(TAPS - 1):
        later = tl.load(tl.multiple_of(memory + (rows + row) * CHANNELS + cs, 16), mask=inside)
        tl.store(tl.multiple_of(memory + row * CHANNELS + cs, 16), later, mask=inside)
    if LINE > 0 and not RECORDED:
        last = tl.load(tl.multiple_of(memory + TAPS * CHANNELS + cs, 16), mask=inside & defers)
        tl.store(tl.multiple_of(memory + (TAPS - 1) * CHANNELS + cs, 16), last, mask=inside & defers)


def run(
    shape: Shape,
    projected: torch.Tensor,
    taps: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    norm: torch.Tensor,
    places: Places,
    slot: int,
    eps: float,
    *,
    uncommitted: bool,
    column_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [n, value_heads * value_dim], ready for the output projection, for rows of a fused one [n, shape.width].

    slot: the layer's index in a session's memory. uncommitted: the rows of a session alone are recorded and the state
    stays; else it advances by all of them. Of several sessions `places` says it of each.
    column_sums: memory for the result's sums, as of `Summed`; None where nobody wants them.
    """
    rows, device = len(projected), projected.device
    mixed, gates = mix(shape, projected, taps, decay_rate, dt_bias, places, slot)
    out = torch.empty((rows, shape.value_heads, shape.value_dim), dtype=torch.float32, device=device)
    heads = {"KEY_HEADS": shape.key_heads, "VALUE_HEADS": shape.value_heads}
    dims = {"KEY_DIM": shape.key_dim, "VALUE_DIM": shape.value_dim}
    values = min(_VALUES, shape.value_dim)
    _recur[(shape.value_heads, shape.value_dim // values, len(places.lines))](
        mixed, gates, places.lines, out, slot, **heads, **dims, LINE=places.line, VALUES=values,
        UNCOMMITTED=uncommitted, num_warps=1,
    )  # fmt: skip
    return gate(shape, out, projected, norm, eps, column_sums)


def mix(
    shape: Shape,
    projected: torch.Tensor,
    taps: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    places: Places,
    slot: int,
    *,
    logs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the recurrence takes.

    These are float32 [n, channels], queries, keys and values, and [n, 2, value_heads], decays (or their logarithms,
    where `logs`) and betas.
    """
    rows, device = len(projected), projected.device
    mixed = torch.empty((rows, shape.channels), dtype=torch.float32, device=device)
    gates = torch.empty((rows, 2, shape.value_heads), dtype=torch.float32, device=device)
    _mix[(rows, 2 * shape.key_heads + shape.value_heads)](
        projected, taps, decay_rate, dt_bias, places.lines, places.sessions, places.indices, mixed, gates, slot,
        KEY_HEADS=shape.key_heads, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim, VALUE_DIM=shape.value_dim,
        TAPS=shape.taps, WIDTH=shape.width, LINE=places.line, BLOCK=max(shape.key_dim, shape.value_dim), LOGS=logs,
        num_warps=1,
    )  # fmt: skip
    return mixed, gates


def gate(
    shape: Shape,
    out: torch.Tensor,
    projected: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    column_sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [n, value_heads * value_dim]: heads of out, float32 [n, value_heads, value_dim], normed, times SiLU(z).

    column_sums: as of `run`.
    """
    rows = len(out)
    gated = torch.empty((rows, shape.value_heads * shape.value_dim), dtype=projected.dtype, device=out.device)
    _gate[(rows, shape.value_heads)](
        out, projected, norm, gated, column_sums, eps, VALUE_HEADS=shape.value_heads, VALUE_DIM=shape.value_dim,
        CHANNELS=shape.channels, WIDTH=shape.width, SUMS=SQUARES_WIDTH, num_warps=1,
    )  # fmt: skip
    return gated


def commit(shape: Shape, places: Places, counts: torch.Tensor, like: torch.Tensor, *, states: bool = True) -> None:
    """Advance all layers of each session by the first rows of the step before, where these were recorded; without
    `states`, the inputs alone, of all sessions.

    counts: int64 [sessions or more], how many rows count, 0 for a session that is not in `places`. like: any tensor of
    the convolution inputs' type.
    """
    sessions, apart = len(places.lines), counts.stride(0)
    if states:
        lines = min(32, shape.key_dim)
        _commit_states[(shape.layers * shape.value_heads, shape.key_dim // lines, sessions)](
            places.lines, counts, apart, VALUE_HEADS=shape.value_heads, KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim, LINE=places.line, LINES=lines, num_warps=4,
        )  # fmt: skip
    _commit_inputs[(shape.layers, triton.cdiv(shape.channels, 1024), sessions)](
        places.lines, counts, apart, like, CHANNELS=shape.channels, TAPS=shape.taps, LINE=places.line, BLOCK=1024,
        RECORDED=states, num_warps=4,
    )  # fmt: skip
