"""What choosers that walk through blocks do between their products, for all sessions at once: a place of each block at
a time, from the known token on.

A slot is a block. Each place begins with the token of the one before it; what stands between two products is done
here, and at the end the largest of a row's logits is found, with what was added to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shard_worker.model.kernels.step_parameters import FIRST_ROW, ROWS, Places
from shard_worker.model.kernels.sums import row_sums

_COLUMNS = 1024
_LOGITS = 4096
"""How many logits of a row a program looks through."""


@triton.jit
def _order(lines, line, known, sessions, order, tokens, BLOCK: tl.constexpr):
    """BLOCK: a power of two, `sessions` or more."""
    ss = tl.arange(0, BLOCK)
    has = tl.load(lines + ss * line + ROWS, mask=ss < sessions, other=0) > 0
    slots = tl.cumsum(has.to(tl.int32), 0) - 1
    tl.store(order + slots, ss.to(tl.int64), mask=has)
    tl.store(tokens + slots, tl.load(known + ss, mask=has, other=0), mask=has)


@triton.jit
def _place(order, lines, line, place, FIRST: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the slot's session, its block's first row, its row at a place, and whether it has that. FIRST: the row of
    a block that chooses the first token."""
    session = tl.load(order + tl.program_id(0))
    own = lines + tl.maximum(session, 0) * line
    first = tl.load(own + FIRST_ROW) if TOGETHER else tl.load(own + ROWS) * 0
    inside = (session >= 0) & (place + FIRST < tl.load(own + ROWS))
    return first, first + place + FIRST, inside


@triton.jit(do_not_specialize=["place"])
def _see(
    order, lines, line, place, tokens, table, rank, hidden, width, state, states, out, columns,
    TABLE_AT: tl.constexpr, HIDDEN_AT: tl.constexpr, STATE_AT: tl.constexpr,
    FIRST: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each of what stands side by side has a place, or -1 where it is left out. rank, width, states: their columns."""
    slot = tl.program_id(0)
    _, row, inside = _place(order, lines, line, place, FIRST, TOGETHER)
    if inside:
        cs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        made = tl.zeros((BLOCK,), out.dtype.element_ty)
        if TABLE_AT >= 0:
            at = cs - TABLE_AT
            own = (at >= 0) & (at < rank)
            read = tl.load(table + tl.load(tokens + slot) * rank + at, mask=own, other=0.0)
            made = tl.where(own, read.to(made.dtype), made)
        if HIDDEN_AT >= 0:
            at = cs - HIDDEN_AT
            own = (at >= 0) & (at < width)
            read = tl.load(hidden + row * width + at, mask=own, other=0.0)
            made = tl.where(own, read.to(made.dtype), made)
        if STATE_AT >= 0:
            at = cs - STATE_AT
            own = (at >= 0) & (at < states)
            made = tl.where(own, tl.load(state + slot * states + at, mask=own, other=0.0), made)
        tl.store(out + slot * columns + cs, made, mask=cs < columns)


@triton.jit
def _sigmoid(x, like):
    """In float32, rounded as `like` is."""
    return (1.0 / (1.0 + tl.exp(-x))).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _tanh(x, like):
    return (1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _gate(gates, embedded, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    share = _sigmoid(tl.load(gates + at, mask=inside, other=0.0).to(tl.float32), out)
    kept = share * tl.load(embedded + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, kept.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _carry(joint, state, out, rank, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    joint += at // rank * 3 * rank + at % rank
    gate = tl.load(joint, mask=inside, other=0.0).to(tl.float32)
    candidate = tl.load(joint + rank, mask=inside, other=0.0).to(tl.float32)
    shown = tl.load(joint + 2 * rank, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    kept = _sigmoid(gate, state)
    carried = kept * before + (1.0 - kept) * _tanh(candidate, state)
    tl.store(state + at, carried.to(state.dtype.element_ty), mask=inside)
    tl.store(out + at, _tanh(shown, out).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _recur(of_token, of_state, state, size, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    of_token += at // size * 3 * size + at % size
    of_state += at // size * 3 * size + at % size
    reset = tl.load(of_token, mask=inside, other=0.0).to(tl.float32)
    reset = _sigmoid(reset + tl.load(of_state, mask=inside, other=0.0).to(tl.float32), state)
    update = tl.load(of_token + size, mask=inside, other=0.0).to(tl.float32)
    update = _sigmoid(update + tl.load(of_state + size, mask=inside, other=0.0).to(tl.float32), state)
    new = tl.load(of_token + 2 * size, mask=inside, other=0.0).to(tl.float32)
    new = _tanh(new + reset * tl.load(of_state + 2 * size, mask=inside, other=0.0).to(tl.float32), state)
    before = tl.load(state + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(state + at, ((1.0 - update) * new + update * before).to(state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["place"])
def _weigh(
    order, lines, line, place, tokens, table, rank, hidden, width, weight, bias, chances,
    WITH_TOKEN: tl.constexpr, FIRST: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    _, row, inside = _place(order, lines, line, place, FIRST, TOGETHER)
    if inside:
        total = tl.load(bias + tl.arange(0, 1))
        for start in range(0, width, BLOCK):
            cs = start + tl.arange(0, BLOCK)
            own = tl.load(hidden + row * width + cs, mask=cs < width, other=0.0).to(tl.float32)
            own *= tl.load(weight + cs, mask=cs < width, other=0.0)
            total += row_sums(tl.reshape(own, (1, BLOCK)), 1, BLOCK)
        if WITH_TOKEN:
            token = tl.load(tokens + slot)
            for start in range(0, rank, BLOCK):
                cs = start + tl.arange(0, BLOCK)
                own = tl.load(table + token * rank + cs, mask=cs < rank, other=0.0).to(tl.float32)
                own *= tl.load(weight + width + cs, mask=cs < rank, other=0.0)
                total += row_sums(tl.reshape(own, (1, BLOCK)), 1, BLOCK)
        before = tl.load(chances + slot + tl.arange(0, 1))
        tl.store(chances + slot + tl.arange(0, 1), before / (1.0 + tl.exp(-total)))


@triton.jit(do_not_specialize=["place"])
def _largest(
    order, lines, line, place, logits, added, vocab, values, indices, parts,
    ADDED: tl.constexpr, FIRST: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, row, inside = _place(order, lines, line, place, FIRST, TOGETHER)
    if inside:
        cs = part * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(logits + row * vocab + cs, mask=cs < vocab, other=float("-inf")).to(tl.float32)
        if ADDED:
            found += tl.load(added + slot * vocab + cs, mask=cs < vocab, other=0.0).to(tl.float32)
        tl.store(values + slot * parts + part, tl.max(found, 0))
        tl.store(indices + slot * parts + part, (part * BLOCK + tl.argmax(found, 0)).to(tl.int64))


@triton.jit(do_not_specialize=["place"])
def _take(
    order, lines, line, place, values, indices, parts, named, chances, least, tokens, chosen, ended,
    NAMED: tl.constexpr, CHANCES: tl.constexpr, FIRST: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK: a power of two, `parts` or more."""
    slot = tl.program_id(0)
    first, _, inside = _place(order, lines, line, place, FIRST, TOGETHER)
    if inside:
        ps = tl.arange(0, BLOCK)
        found = tl.load(values + slot * parts + ps, mask=ps < parts, other=float("-inf"))
        token = tl.load(indices + slot * parts + tl.argmax(found, 0))
        if NAMED:
            token = tl.load(named + token)
        tl.store(tokens + slot, token)
        if CHANCES:
            token = tl.where((place > 0) & (tl.load(chances + slot) < least), ended, token)
        tl.store(chosen + first + 1 + place, token)


@dataclass(frozen=True, slots=True)
class BlockWalk:
    """A walk through the blocks of a captured launch, all of which are at one place at a time.

    places: where the rows of blocks stand. order: int64 [slots], the session of each block, -1 where there is none.
    tokens: int64 [slots], that of each block's place before. hidden: [rows, hidden], normed. first: the row of a block
    that chooses its first token.
    """

    places: Places
    order: torch.Tensor
    tokens: torch.Tensor
    hidden: torch.Tensor
    first: int

    @classmethod
    def begin(cls, places: Places, known: torch.Tensor, hidden: torch.Tensor, *, from_anchor: bool) -> BlockWalk:
        """Find the blocks. known: int64 [sessions], the token before each session's block. from_anchor: whether a
        block's first row chooses a token too."""
        sessions = len(known)
        # Every block has a row at least.
        slots = min(sessions, len(hidden))
        order = torch.full((slots,), -1, dtype=torch.int64, device=known.device)
        tokens = torch.zeros_like(order)
        block = triton.next_power_of_2(sessions)
        _order[(1,)](places.lines, places.lines.stride(0), known, sessions, order, tokens, BLOCK=block, num_warps=4)
        return cls(places, order, tokens, hidden, int(not from_anchor))

    def side_by_side(
        self, place: int, table: torch.Tensor, parts: Sequence[str], state: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the rows of a place of all blocks, [slots, columns] in the table's element type.

        table: [vocab, rank], the numbers of each token. parts: what stands side by side: "token", the numbers of the
        token before; "hidden", the hidden row; "state", of `state` [slots, states].
        """
        rank, width = table.shape[1], self.hidden.shape[1]
        states = 0 if state is None else state.shape[1]
        sizes, at, columns = {"token": rank, "hidden": width, "state": states}, {}, 0
        for part in parts:
            at[part] = columns
            columns += sizes[part]
        out = torch.empty((len(self.order), columns), dtype=table.dtype, device=table.device)
        _see[(len(self.order), triton.cdiv(columns, _COLUMNS))](
            *self._at(place), self.tokens, table, rank, self.hidden, width, state, states, out, columns,
            TABLE_AT=at.get("token", -1), HIDDEN_AT=at.get("hidden", -1), STATE_AT=at.get("state", -1),
            **self._constants, BLOCK=_COLUMNS, num_warps=4,
        )  # fmt: skip
        return out

    def weigh(
        self,
        place: int,
        table: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        chances: torch.Tensor,
        *,
        with_token: bool,
    ) -> None:
        """Multiply chances, float32 [slots], by the sigmoid of what the hidden row of a place is weighed by, and with
        the token also its numbers in `table`. weight: float32 [hidden, or hidden + rank]; bias: float32 []."""
        _weigh[(len(self.order),)](
            *self._at(place), self.tokens, table, table.shape[1], self.hidden, self.hidden.shape[1], weight, bias,
            chances, WITH_TOKEN=with_token, **self._constants, BLOCK=_COLUMNS, num_warps=4,
        )  # fmt: skip

    def take(
        self,
        place: int,
        logits: torch.Tensor,
        added: torch.Tensor | None,
        chosen: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        chances: torch.Tensor | None = None,
        least: float = 0.0,
        ended: int = 0,
    ) -> None:
        """Choose the token of a place of all blocks, the first one with the largest logit.

        logits: [rows, tokens]. added: [slots, tokens], what is added to those of the place; None for nothing. chosen:
        int64 [rows + 1], gets the token behind where the block begins, and that of the known token. token_ids: int64
        [tokens], as of `DraftHead`. chances: where one is below `least`, the block gets `ended` instead, but for its
        first place.
        """
        slots, vocab = len(self.order), logits.shape[1]
        parts = triton.cdiv(vocab, _LOGITS)
        values = torch.empty((slots, parts), dtype=torch.float32, device=logits.device)
        indices = torch.empty((slots, parts), dtype=torch.int64, device=logits.device)
        _largest[(slots, parts)](
            *self._at(place), logits, added, vocab, values, indices, parts, ADDED=added is not None, **self._constants,
            BLOCK=_LOGITS, num_warps=4,
        )  # fmt: skip
        _take[(slots,)](
            *self._at(place), values, indices, parts, token_ids, chances, least, self.tokens, chosen, ended,
            NAMED=token_ids is not None, CHANCES=chances is not None, **self._constants,
            BLOCK=triton.next_power_of_2(parts), num_warps=1,
        )  # fmt: skip

    def _at(self, place: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        return self.order, self.places.lines, self.places.lines.stride(0), place

    @property
    def _constants(self) -> dict[str, int | bool]:
        return {"FIRST": self.first, "TOGETHER": self.places.sessions is not None}


def gate(gates: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """Return `sigmoid(gates) * embedded`, both [n, rank] and contiguous."""
    out = torch.empty_like(embedded)
    count = embedded.numel()
    _gate[(triton.cdiv(count, _COLUMNS),)](gates, embedded, out, count, BLOCK=_COLUMNS, num_warps=4)
    return out


def carry(joint: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return `tanh` of the last third of rows [n, 3 * rank], and let the state [n, rank] be carried on by the other
    two: by the sigmoid of the first third it is kept, the rest is the tanh of the second."""
    out = torch.empty_like(state)
    count, rank = state.numel(), state.shape[1]
    _carry[(triton.cdiv(count, _COLUMNS),)](joint, state, out, rank, count, BLOCK=_COLUMNS, num_warps=4)
    return out


def recur(of_token: torch.Tensor, of_state: torch.Tensor, state: torch.Tensor) -> None:
    """Let a GRU's state [n, size] go on. of_token, of_state: [n, 3 * size], the products of both with its matrices, of
    [reset | update | new]."""
    count, size = state.numel(), state.shape[1]
    _recur[(triton.cdiv(count, _COLUMNS),)](of_token, of_state, state, size, count, BLOCK=_COLUMNS, num_warps=4)
