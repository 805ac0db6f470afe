"""Drawing tokens at a temperature on a GPU, as `sampling.drawing` says it, without waiting for the host.

What top-k and top-p leave out is found by the order of the logits: bits of the least one that stays, some at a time
from the highest on, by what is at or above each candidate for it, in tokens or in probability. Sums are of whole
numbers, so that no order of them makes a difference. A row's token depends on its own logits alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUMBERS = 8
"""What a draw has, int64 each, floating-point numbers as the bits of float64: the row of its logits, the temperature,
top-k, top-p, min-p, both random numbers of its race, and where its token is stored."""

ROW, TEMPERATURE, TOP_K, TOP_P, MIN_P, FIRST, SECOND, PLACE = range(NUMBERS)

_ROW, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _FIRST, _SECOND, _PLACE = (
    tl.constexpr(number) for number in range(NUMBERS)
)

_BITS_AT_ONCE = 4
"""Bits that a launch finds out. More are fewer launches, of which each takes the host 10 to 15 microseconds."""

_WORDS = 22
"""What a draw has in memory while it is decided: a sum for each candidate, how many programs have added to them, the
highest key, whether a logit is not finite, the least key that top-k and that top-p leaves, and the mass of all that
top-k leaves."""

_SUMS, _ARRIVED, _HIGHEST, _BROKEN, _LEAST_BY_K, _LEAST_BY_P, _TOTAL = (
    tl.constexpr(word) for word in (0, 16, 17, 18, 19, 20, 21)
)

_BLOCK = 4096
"""Logits of a program."""

_NOT_FINITE = tl.constexpr(-1)
"""As `drawing.NOT_FINITE`."""


@triton.jit
def _float_of(word):
    return word.to(tl.float64, bitcast=True)


@triton.jit
def _key(x, BITS: tl.constexpr):
    """Return whole numbers from 0 on, of BITS bits, which are ordered as the float32 numbers x are."""
    # Both zeros are one number.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) + (1 << 31)) >> (32 - BITS)


@triton.jit
def _number(key, BITS: tl.constexpr):
    """Return the float32 number that has a key."""
    ordered = ((key << (32 - BITS)) - (1 << 31)).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return (bits >> (32 - BITS) << (32 - BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _block(logits, numbers, vocabulary, BLOCK: tl.constexpr):
    """Return a program's tokens [BLOCK], which of them there are, and their logits in float32."""
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = tokens < vocabulary
    at = logits + tl.load(numbers + _ROW) * vocabulary + tokens
    return tokens, there, tl.load(at, mask=there, other=-float("inf")).to(tl.float32)


@triton.jit
def _weights(x, numbers, state, BITS: tl.constexpr):
    """Return the probabilities of tokens, times what makes the most probable one's 1."""
    return tl.exp(
        (x - _number(tl.load(state + _HIGHEST), BITS)) / _float_of(tl.load(numbers + _TEMPERATURE)).to(tl.float32)
    )


@triton.jit
def _find_highest(
    logits, all_numbers, states, vocabulary, NUMBERS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    numbers, state = all_numbers + tl.program_id(0) * NUMBERS, states + tl.program_id(0) * WORDS
    _, _, x = _block(logits, numbers, vocabulary, BLOCK)
    tl.atomic_max(state + _HIGHEST, tl.max(_key(x, BITS), 0))
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int64), 0)
    tl.atomic_max(state + _BROKEN, broken)


@triton.jit(do_not_specialize=["shift"])
def _narrow(
    logits, all_numbers, states, vocabulary, shift, NUMBERS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, MASS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Find out some bits of the least key that stays: by top-p where MASS is set, else by top-k, which comes before.
    shift: how many bits are behind these."""
    numbers, state = all_numbers + tl.program_id(0) * NUMBERS, states + tl.program_id(0) * WORDS
    _, there, x = _block(logits, numbers, vocabulary, BLOCK)
    key = _key(x, BITS)
    found = _LEAST_BY_P if MASS else _LEAST_BY_K
    least = tl.load(state + found)
    if MASS:
        # As many parts of the most probable one's.
        parts = (_weights(x, numbers, state, BITS) * (1 << 40)).to(tl.int64)
        there = there & (key >= tl.load(state + _LEAST_BY_K))
    else:
        parts = tl.full((BLOCK,), 1, tl.int64)
    parts = tl.where(there, parts, 0)
    for candidate in tl.static_range(0, CANDIDATES):
        above = ((key - least) >> shift) >= candidate
        tl.atomic_add(state + _SUMS + candidate, tl.sum(tl.where(above, parts, 0), 0))
    tl.debug_barrier()
    if tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        if MASS:
            total = tl.load(state + _TOTAL)
            total = tl.where(total == 0, tl.load(state + _SUMS, cache_modifier=".cg"), total)
            tl.store(state + _TOTAL, total)
            share = _float_of(tl.load(numbers + _TOP_P))
            # All stay where the share is 1: also those whose mass is nothing.
            wanted = tl.where(share < 1.0, share * total.to(tl.float64), float("inf"))
        else:
            wanted = tl.load(numbers + _TOP_K).to(tl.float64)
        chosen = tl.full((), 0, tl.int64)
        for candidate in tl.static_range(1, CANDIDATES):
            enough = tl.load(state + _SUMS + candidate, cache_modifier=".cg").to(tl.float64) >= wanted
            chosen += enough.to(tl.int64)
        tl.store(state + found, least + (chosen << shift))
        for candidate in tl.static_range(0, CANDIDATES):
            tl.store(state + _SUMS + candidate, 0)
        tl.store(state + _ARRIVED, 0)


@triton.jit
def _race(
    logits, all_numbers, states, token_numbers, scores, winners, tokens, made, vocabulary, NUMBERS: tl.constexpr,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Find the winner among a block's tokens; the last of a row's programs finds it among all of these.

    token_numbers: of `drawing.token_numbers`. scores, winners: float32 and int32 [draws, programs], of each program.
    tokens: int64, where each draw's token is stored. made: the same, with a token of the vocabulary in any case; None
    where nobody reads it.
    """
    draw, programs = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    numbers, state = all_numbers + draw * NUMBERS, states + draw * WORDS
    at, there, x = _block(logits, numbers, vocabulary, BLOCK)
    key, weights = _key(x, BITS), _weights(x, numbers, state, BITS)
    stays = there & (weights >= _float_of(tl.load(numbers + _MIN_P)).to(tl.float32)) & (weights > 0)
    # Nothing is below them where neither leaves any out.
    stays = stays & (key >= tl.maximum(tl.load(state + _LEAST_BY_K), tl.load(state + _LEAST_BY_P)))
    first = tl.load(token_numbers + at, mask=there, other=1) * tl.load(numbers + _FIRST).to(tl.int32)
    second = tl.load(token_numbers + vocabulary + at, mask=there, other=0) * tl.load(numbers + _SECOND).to(tl.int32)
    uniform = tl.abs((first + second).to(tl.float32)) * (2.0**-31 * (1.0 - 2.0**-24))
    # The logarithm of 1 - uniform to the last bits (Kahan): what rounding took from the difference is made up for.
    rest = 1.0 - uniform
    variates = tl.where(rest == 1.0, uniform, tl.log(rest) * (uniform / (rest - 1.0)))
    score = tl.where(stays, weights / variates, -1.0)
    best = tl.max(score, 0)
    tl.store(scores + draw * programs + tl.program_id(1), best)
    tl.store(winners + draw * programs + tl.program_id(1), tl.min(tl.where(score == best, at, 2**31 - 1), 0))
    tl.debug_barrier()
    if tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel") == programs - 1:
        ps = tl.arange(0, PROGRAMS)
        every = tl.load(scores + draw * programs + ps, mask=ps < programs, other=-1.0, cache_modifier=".cg")
        winner = tl.load(winners + draw * programs + ps, mask=ps < programs, other=2**31 - 1, cache_modifier=".cg")
        best = tl.max(every, 0)
        token = tl.min(tl.where(every == best, winner, 2**31 - 1), 0).to(tl.int64)
        decided = (tl.load(state + _BROKEN) == 0) & (best > 0)
        place = tl.load(numbers + _PLACE)
        tl.store(tokens + place, tl.where(decided, token, _NOT_FINITE))
        if made is not None:
            tl.store(made + place, tl.where(decided, token, 0))


def draw(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    token_numbers: torch.Tensor,
    tokens: torch.Tensor,
    made: torch.Tensor | None = None,
    *,
    by_k: bool,
    by_p: bool,
) -> None:
    """Draw tokens behind rows of logits [n, vocab].

    numbers: int64 [draws, NUMBERS], on the device. token_numbers: of `drawing.token_numbers`. tokens: int64, in whose
    places the drawn ones are stored, `drawing.NOT_FINITE` where the logits of a row are not finite. made: the same, 0
    in place of that; None where nobody wants them. by_k, by_p: whether top-k or top-p leaves tokens out in any row.
    """
    count, vocabulary = len(numbers), logits.shape[-1]
    programs = triton.cdiv(vocabulary, _BLOCK)
    bits = 16 if logits.dtype is torch.bfloat16 else 32
    states = torch.zeros((count, _WORDS), dtype=torch.int64, device=logits.device)
    common = {"NUMBERS": NUMBERS, "WORDS": _WORDS, "BLOCK": _BLOCK, "BITS": bits, "num_warps": 8}
    grid = (count, programs)
    _find_highest[grid](logits, numbers, states, vocabulary, **common)
    for mass in [False] * by_k + [True] * by_p:
        for shift in range(bits - _BITS_AT_ONCE, -1, -_BITS_AT_ONCE):
            _narrow[grid](
                logits, numbers, states, vocabulary, shift, **common, MASS=mass, CANDIDATES=1 << _BITS_AT_ONCE
            )
    scores = torch.empty(grid, dtype=torch.float32, device=logits.device)
    winners = torch.empty(grid, dtype=torch.int32, device=logits.device)
    _race[grid](
        logits, numbers, states, token_numbers, scores, winners, tokens, made, vocabulary, **common,
        PROGRAMS=triton.next_power_of_2(programs),
    )  # fmt: skip


def launch_all(logits: torch.Tensor, tokens: torch.Tensor, made: torch.Tensor) -> None:
    """Launch every kernel of `draw`, for what nobody has asked for: the first row's token. Arguments as there."""
    numbers = torch.zeros((1, NUMBERS), dtype=torch.int64, device=logits.device)
    token_numbers = torch.zeros((2, logits.shape[-1]), dtype=torch.int32, device=logits.device)
    for one in (made, None):
        draw(logits, numbers, token_numbers, tokens, one, by_k=True, by_p=True)
