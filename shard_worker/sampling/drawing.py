"""Drawing tokens at a temperature: a race of all tokens, in which each has a random number of its own.

A token's number depends on the seed, the position and the token alone. It is an exponential variate; the token whose
variate, divided by the token's weight, is the least wins, and each wins with its share of the weights (the Gumbel-max
trick: it is also the argmax of logits / temperature plus Gumbel variates). So a seeded answer changes only where the
two first of a race are nearly level: logits that differ in their last bits, as those of another number of rows in a
step do, cannot bring up a token that is far behind. Drawing by the inverse of the cumulative distribution would let
every such difference move the shares of all tokens behind it.

All of it is elementwise or exact, or row by row, so that a row's token does not depend on the rows beside it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from shard_worker.device.devices import kernel_target

NOT_FINITE = -1
"""What stands for the token of a row whose logits are not finite."""

CPU_SLICE, GPU_SLICE = 1 << 20, 1 << 23
"""How many logits are worked on at once: what caches still help with, and what takes some 130 MB of a GPU's memory."""

TWO_STEPS = 1 << 14
"""From how many quotients on the least of them is found in two steps."""

_TEMPERATURES = 1e-20, 1e20
"""Those for which logits stay within float32; one beyond comes to the same as these."""

_ONE = float(1 << 52)
"""Probabilities are added up as integers, as so many parts of 1: no order of such sums makes a difference."""

# The constants of splitmix64 (Steele, Lea and Flood 2014), as int64 has them.
_INCREMENT, _FIRST, _SECOND = (
    constant - (1 << 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token behind one row of logits is drawn, at a temperature above 0. position: the token's own."""

    sampling: SamplingParams
    position: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that take part in the races behind some rows.

    weights: float32 [n, m], in proportion to their probabilities, 0 for those that cannot be drawn. places: int64
    [n, m], which tokens they are; None where they are all, in order.
    """

    weights: torch.Tensor
    places: torch.Tensor | None = None

    def above(self, least: torch.Tensor) -> Candidates:
        """Return those whose weights are at least so much, [n, 1], and above 0, the greatest first."""
        least = least.clamp(min=torch.finfo(torch.float32).tiny)
        most = max(1, int((self.weights >= least).sum(-1).max()))
        weights, places = self.weights.topk(most)
        if self.places is not None:
            places = self.places.gather(-1, places)
        return Candidates(weights * (weights >= least), places)


def draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw the token behind each row, on the device of the logits; NOT_FINITE for a row whose logits are not finite.

    logits: [n, vocab] after bias, penalties and masks. draws: of each row.
    """
    [tokens] = draw_together([(logits, draws)])
    return tokens


def draw_together(sessions: Sequence[tuple[torch.Tensor, Sequence[Draw]]]) -> list[list[int]]:
    """Draw the tokens of several sessions: of the rows of each what `draw` returns. A GPU is waited for once."""
    if not sessions:
        return []
    tokens = iter(torch.cat([queue_draws(logits, draws) for logits, draws in _slices(sessions)]).tolist())
    return [[next(tokens) for _ in draws] for _, draws in sessions]


def queue_draws(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Draw as `draw` does, and return the tokens in a tensor on the device of the logits, int64 [n]. A GPU that kernels
    run on is not waited for."""
    vocabulary = logits.shape[-1]
    if runs_by_kernels(logits.device):
        tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        queue_draws_into(tokens, logits, draws, range(len(draws)))
        return tokens
    found = candidates(logits, [one.sampling for one in draws])
    return race(found, vocabulary, _race_keys(draws))


def queue_draws_into(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    draws: Sequence[Draw],
    rows: Sequence[int],
    made: torch.Tensor | None = None,
) -> None:
    """Draw by kernels behind some rows of logits [n, vocab], and store the tokens in the same places of `tokens`, int64
    [n or more], NOT_FINITE among them; and in `made`, where given, with 0 in place of that."""
    from shard_worker.model.kernels import draw as kernels

    vocabulary = logits.shape[-1]
    samplings = [one.sampling for one in draws]
    numbers = np.empty((len(draws), kernels.NUMBERS), np.int64)
    real = numbers.view(np.float64)
    # By columns: one by one they take as long as all else for many clients.
    numbers[:, kernels.ROW] = numbers[:, kernels.PLACE] = rows
    numbers[:, kernels.TOP_K] = [min(one.top_k or vocabulary, vocabulary) for one in samplings]
    numbers[:, kernels.FIRST : kernels.SECOND + 1] = _race_keys(draws)
    real[:, kernels.TEMPERATURE] = [_within(one.temperature or 0.0) for one in samplings]
    real[:, kernels.TOP_P] = [1.0 if one.top_p is None else one.top_p for one in samplings]
    real[:, kernels.MIN_P] = [one.min_p or 0.0 for one in samplings]
    sent = torch.from_numpy(numbers)
    if logits.device.type != "cpu":
        sent = sent.pin_memory().to(logits.device, non_blocking=True)
    kernels.draw(
        logits.contiguous(),
        sent,
        token_numbers(vocabulary, logits.device),
        tokens,
        made,
        by_k=_any_by_k(samplings, vocabulary),
        by_p=_any_by_p(samplings),
    )


@functools.cache
def runs_by_kernels(device: torch.device) -> bool:
    """Return whether kernels draw on a device: those of the steps, which need the same of it."""
    target = kernel_target(device)
    return target is not None and target.lack is None and importlib.util.find_spec("triton") is not None


def _slices(sessions: Sequence[tuple[torch.Tensor, Sequence[Draw]]]) -> Iterator[tuple[torch.Tensor, list[Draw]]]:
    """Return the same rows in the same order, cut and joined to as many as are worked on at once."""
    first_logits = sessions[0][0]
    most = max(1, (CPU_SLICE if first_logits.device.type == "cpu" else GPU_SLICE) // first_logits.shape[-1])
    parts, held = list[torch.Tensor](), list[Draw]()
    for logits, draws in sessions:
        for first in range(0, len(draws), most):
            some = draws[first : first + most]
            if len(held) + len(some) > most:
                yield _joined(parts), held
                parts, held = [], []
            parts.append(logits[first : first + most])
            held += some
    yield _joined(parts), held


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def finite(tokens: list[int]) -> list[int]:
    """Return drawn tokens as they are. Raises InvalidArgument where the logits of a row were not finite."""
    if NOT_FINITE in tokens:
        raise InvalidArgument(
            "the logits are not finite: the activation that came in, the checkpoint or its element type is at fault",
            reason="NOT_FINITE",
        )
    return tokens


def candidates(logits: torch.Tensor, samplings: Sequence[SamplingParams]) -> Candidates:
    """Return what may be drawn behind each row [n, vocab] after temperature, top-k, top-p and min-p, by each row's
    parameters. Tokens that are as probable as the last one that top-k or top-p leaves stay as well."""
    vocabulary = logits.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    temperatures = column([_within(one.temperature or 0.0) for one in samplings])
    found = Candidates((logits.float() / temperatures).softmax(-1))
    if _any_by_k(samplings, vocabulary):
        found = _first(found, [min(one.top_k or vocabulary, vocabulary) for one in samplings])
    if _any_by_p(samplings):
        found = _most_probable(found, [1.0 if one.top_p is None else one.top_p for one in samplings])
    if any(one.min_p is not None for one in samplings):
        least = column([one.min_p or 0.0 for one in samplings]) * found.weights.amax(-1, keepdim=True)
        found = Candidates(found.weights * (found.weights >= least), found.places)
    return found


def _within(temperature: float) -> float:
    coldest, hottest = _TEMPERATURES
    return min(max(temperature, coldest), hottest)


def _any_by_k(samplings: Sequence[SamplingParams], vocabulary: int) -> bool:
    """Return whether top-k leaves tokens out behind any row."""
    return any(one.top_k is not None and one.top_k < vocabulary for one in samplings)


def _any_by_p(samplings: Sequence[SamplingParams]) -> bool:
    """Return whether top-p may leave tokens out behind any row."""
    return any(one.top_p is not None and one.top_p < 1 for one in samplings)


def _first(found: Candidates, counts: list[int]) -> Candidates:
    """Return so many of each row's candidates, the most probable ones; all where the count is their number."""
    weights = found.weights
    most = max(count for count in counts if count < weights.shape[-1])
    last = torch.tensor([min(count, most) - 1 for count in counts], device=weights.device)[:, None]
    least = weights.topk(most).values.gather(-1, last)
    limited = torch.tensor([count <= most for count in counts], device=weights.device)[:, None]
    return found.above(least * limited)


def _most_probable(found: Candidates, shares: list[float]) -> Candidates:
    """Return those that make up these shares of each row's probability: as long as the mass before a token has not
    reached the share, it stays, so that the most probable one always does. A share of 1 leaves all."""
    weights = found.weights
    wanted = torch.tensor(shares, dtype=torch.float64, device=weights.device)[:, None]
    total = (weights * _ONE).long().sum(-1, keepdim=True)
    # All that weigh less than this are less than what may be left out, together: so few need to be put in order.
    found = found.above((weights.sum(-1, keepdim=True) * ((1 - wanted) / weights.shape[-1])).float())
    parts = (found.weights * _ONE).long()
    kept = (parts.cumsum(-1) - parts < wanted * total) | (wanted >= 1)
    least = found.weights.where(kept, torch.inf).amin(-1, keepdim=True)
    return Candidates(found.weights * (found.weights >= least), found.places)


def race(found: Candidates, vocabulary: int, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return which token wins behind each row, int64 [n]; NOT_FINITE where none can. keys: of each row's race."""
    numbers = token_numbers(vocabulary, found.weights.device)
    if found.places is not None:
        numbers = numbers[:, found.places]
    factors = torch.tensor(keys, dtype=torch.int32, device=numbers.device)[:, :, None]
    least, winner = _least(found.weights, negated_variates(numbers, factors))
    if found.places is not None:
        winner = found.places.gather(-1, winner)
    # The comparison is false for what is not a number, too.
    return winner.where(least < 0, NOT_FINITE).squeeze(-1)


def _least(weights: torch.Tensor, negated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least of each row's quotients, and where it is: both [n, 1].

    Where there are many, in two steps: on CPUs torch finds out what is least ten times as fast as where it is.
    """
    rows, columns = weights.shape
    if columns < TWO_STEPS:
        return (weights / negated).min(-1, keepdim=True)
    quotients = weights.new_zeros(rows, -(-columns // 64) * 64)
    torch.div(weights, negated, out=quotients[:, :columns])
    groups = quotients.view(rows, -1, 64)
    group = groups.amin(-1).argmin(-1, keepdim=True)
    least, inside = groups.take_along_dim(group[..., None], 1).squeeze(1).min(-1, keepdim=True)
    return least, group * 64 + inside


def _race_keys(draws: Sequence[Draw]) -> list[tuple[int, int]]:
    return [race_key(one.sampling.seed or 0, one.position) for one in draws]


def race_key(seed: int, position: int) -> tuple[int, int]:
    """Return the random numbers of one position's race: an odd and an arbitrary one of 32 bits, signed."""
    key = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    first, second = (int.from_bytes(half, "little", signed=True) for half in (digest[:4], digest[4:]))
    return first | 1, second


@functools.lru_cache(maxsize=8)
def token_numbers(vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return two random numbers of each token, an odd and an even one, int32 [2, vocab]: the halves of the numbers that
    splitmix64 makes from state 0."""
    bits = torch.arange(1, vocabulary + 1) * _INCREMENT
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        # torch shifts copies of the sign in.
        bits = (bits ^ (bits >> shift & (1 << (64 - shift)) - 1)) * factor
    halves = bits.view(torch.int32).view(-1, 2).T
    return torch.stack([halves[0] | 1, halves[1] & -2]).to(device)


def negated_variates(numbers: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return exponential variates with their sign changed, float32 [n, m].

    numbers: of the tokens, [2, m] or [2, n, m]. factors: the keys, [n, 2, 1], the first ones odd. All are int32, whose
    products overflow alike on every device. The sum of the two products is as random as the tokens' numbers are; that
    there are two of them leaves hardly any two tokens related. It is odd, and so never 0: one of 2^30 equally spaced
    numbers between 0 and 1, of which float32 has the least, where races are won, exactly. So a token comes as often as
    it should down to probabilities of about 1e-9.
    """
    uniform = (numbers[0] * factors[:, 0]).add_(numbers[1] * factors[:, 1]).float().abs_()
    # Less than 1 also where float32 rounds up.
    return uniform.mul_(-(2.0**-31) * (1 - 2.0**-24)).log1p_()
