"""What draft tokens cost where several answers are decoded at once, measured over all answers of an engine.

Steps of all sessions are computed together, so a row more in one of them takes time of all. It owns what was measured,
and knows of each answer how many draft tokens its steps verify and how many tokens they produce.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

SMOOTHING = 0.2
"""Weight of the newest step in the moving averages of times."""

SLOW_SMOOTHING = 0.02
"""The same for what is known of all answers together."""

EASE_SMOOTHING = 0.05
"""Weight of the newest answer in what is known of how much texts differ."""

FIRST_EASE_VARIANCE, FIRST_ANSWERS = 1.0, 4
"""How much texts are taken to differ before there were answers, and as how many answers that counts."""

EASE_ATTENUATION = 4.0
"""By how much texts differ more than the moments tell: where nearly all or nearly no draft tokens are accepted, their
number hardly says how easy a text is. Measured on chats, code and random tokens in turn."""

KNOWN_STEPS = 8
"""First verify steps of answers behind which it is known how often draft tokens of a new one will be accepted, in all
likelihood."""

PROBE_STEPS = 4
"""Steps of all sessions in which plain decode of about so many is measured."""

FAR = 4.0
"""How much less a measurement weighs with twice or half as many sessions, or twice or half as many rows of each."""


def lengths_of(block_size: int) -> list[int]:
    """Return how many draft tokens a step may verify, rising from none to all of a block."""
    longest = block_size - 1
    return sorted({0, *(max(1, longest // divisor) for divisor in (1, 2, 4, 8))}) if longest else [0]


def expected_tokens(survival: Sequence[float], draft_tokens: int) -> float:
    """Return how many tokens a step with so many draft tokens produces on average.

    survival: how often each draft token is accepted behind those before it.
    """
    expected = reached = 1.0
    for share in survival[:draft_tokens]:
        reached *= share
        expected += reached
    return expected


def observe_accepted(survival: list[float], draft_tokens: int, accepted: int, weight: float) -> None:
    """Record in moving averages how many of a step's draft tokens were accepted.

    survival: how often each draft token is accepted behind those before it. weight: of this step.
    """
    survival += [1.0] * (draft_tokens - len(survival))
    for index in range(min(draft_tokens, accepted + 1)):
        hit = 1.0 if index < accepted else 0.0
        survival[index] += weight * (hit - survival[index])


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """What a step of an answer was computed in: of how many sessions, how many draft tokens of all of them were
    verified, how long it took with the draft model's next blocks, and whether it was asked for some."""

    sessions: int
    draft_tokens: int
    seconds: float
    proposed: bool = False


@dataclass(frozen=True, slots=True)
class _Prices:
    """What draft tokens cost, by how many of them each step of an answer verifies.

    seconds: of a batch in which all verify so many of the draft model's. looked_up: the same of tokens that were looked
    up, while no draft model is asked for any. rate: the most tokens that a batch gets in a second. more: seconds that
    one answer's draft tokens take of all.
    """

    seconds: dict[int, float]
    looked_up: dict[int, float]
    rate: float
    more: dict[int, float]


@dataclass(slots=True)
class _Measured:
    """The moving averages of batches of about one size. proposed: whether the draft model was asked for blocks with
    them. steps: how many answers' steps were in them."""

    sessions: float
    draft_tokens: float
    seconds: float
    proposed: bool
    steps: int = 0

    def add(self, batch: BatchTaken) -> None:
        # All sessions of a batch tell of it.
        self.steps += 1
        weight = max(SMOOTHING / batch.sessions, 1 / self.steps)
        self.sessions += weight * (batch.sessions - self.sessions)
        self.draft_tokens += weight * (batch.draft_tokens - self.draft_tokens)
        self.seconds += weight * (batch.seconds - self.seconds)


class BatchCosts:
    """The measurements of one engine.

    survival: how often each draft token is accepted behind those before it, over all answers. beginning: the same for
    the first verify steps of answers. Those that go on to draft are the ones whose draft tokens are accepted, so that
    all steps together would promise too much of an answer that begins.
    """

    def __init__(self) -> None:
        self._now: dict[Hashable, int] = {}
        """How many draft tokens the last step of each answer that has begun verified."""
        self._measured: dict[tuple[int, int, bool], _Measured] = {}
        """By powers of two of sessions and of the mean number of their draft tokens, without any as -1; and by whether
        the draft model was asked for blocks with them."""
        self._batched_share = 1.0
        """The moving average of which share of the answers a batch has steps of."""
        self._prices: _Prices | None = None
        """For about so many sessions as there are now; None where they are to be looked for again."""
        self._looked_at = self._observed = self._verifies = self._beginnings = 0
        self.survival: list[float] = []
        self.beginning: list[float] = []
        self._eases = FIRST_ANSWERS
        self._ease_excess, self._ease_information = FIRST_EASE_VARIANCE / EASE_ATTENUATION, 1.0
        """Moving averages, over answers, of the square of how many draft tokens more or fewer were accepted than in
        others, less its variance if no text were easier than another; and of the square of that variance."""

    @property
    def shared(self) -> bool:
        """Whether several answers are decoded now, or will be soon."""
        return len(self._now) > 1

    @property
    def knows_survival(self) -> bool:
        """Whether enough answers were decoded to tell how another one's draft tokens will be accepted."""
        return self._beginnings >= KNOWN_STEPS

    @property
    def _batched(self) -> float:
        """How many sessions a batch has, about."""
        return max(1.0, self._batched_share * len(self._now))

    @property
    def limit(self) -> int | None:
        """How many draft tokens a step verifies at most for now, None for any number: none while plain decode is to be
        measured."""
        if not self.shared:
            return None
        plain = self._measured.get(_place(self._batched, 0))
        return 0 if plain is None or plain.steps < PROBE_STEPS * self._batched else None

    def join(self, answer: Hashable) -> None:
        """Count an answer that begins."""
        self._now[answer] = 0
        if len(self._now) == 2:
            # What one answer's draft tokens take of all was not asked before.
            self._prices = None

    def leave(self, answer: Hashable) -> None:
        """Forget an answer that is not decoded any more."""
        self._now.pop(answer, None)

    def observe(
        self,
        answer: Hashable,
        draft_tokens: int,
        seconds: float,
        batch: BatchTaken | None = None,
        *,
        proposed: bool = False,
    ) -> None:
        """Record a step of an answer.

        draft_tokens: how many it verified. seconds: how long it took, from one to the next. batch: what it was computed
        in, None where that is not known, so that among others nothing can be learnt from it. proposed: whether the
        draft model was asked for its next block with it.
        """
        self._now[answer] = draft_tokens
        if batch is None:
            if self.shared:
                return
            batch = BatchTaken(1, draft_tokens, seconds, proposed)
        self._observed += 1
        share = min(1.0, batch.sessions / len(self._now))
        self._batched_share += SMOOTHING / len(self._now) * (share - self._batched_share)
        place = _place(batch.sessions, batch.draft_tokens, proposed=batch.proposed)
        if place not in self._measured:
            self._measured[place] = _Measured(batch.sessions, batch.draft_tokens, batch.seconds, batch.proposed)
            self._prices = None
        self._measured[place].add(batch)

    def observe_acceptance(self, draft_tokens: int, accepted: int, *, begins: bool) -> None:
        """Record how many of a step's draft tokens were accepted. begins: it is one of its answer's first ones."""
        self._verifies += 1
        observe_accepted(self.survival, draft_tokens, accepted, max(SLOW_SMOOTHING, 1 / self._verifies))
        if begins:
            self._beginnings += 1
            observe_accepted(self.beginning, draft_tokens, accepted, max(SLOW_SMOOTHING, 1 / self._beginnings))

    @property
    def ease_variance(self) -> float:
        """How much texts differ in how easy they are for the draft, as of `Acceptance`, by the method of moments."""
        return EASE_ATTENUATION * max(0.0, self._ease_excess / self._ease_information)

    def observe_ease(self, surplus: float, information: float) -> None:
        """Record, of a whole answer, how many more draft tokens were accepted than in the answers of others, and the
        variance of that if no text were easier than another."""
        if not information:
            return
        self._eases += 1
        weight = max(EASE_SMOOTHING, 1 / self._eases)
        self._ease_excess += weight * (surplus**2 - information - self._ease_excess)
        self._ease_information += weight * (information**2 - self._ease_information)

    def values(
        self, expected: Sequence[float], lengths: Sequence[int], *, looked_up: bool = False
    ) -> list[float] | None:
        """Return what steps of an answer are worth by how many draft tokens they verify, None where nothing tells what
        they cost.

        expected: how many tokens a step with each of `lengths`, which come in any order, produces on average.
        looked_up: whether its draft tokens are looked up, and the draft model may be left alone meanwhile. The worth is
        that in tokens a second where it is decoded alone. Among others it is the tokens less those that all could have
        had in the time that its draft tokens take.
        """
        prices = self._prices_of(lengths)
        if prices is None:
            return None
        if not self.shared:
            seconds = prices.looked_up if looked_up else prices.seconds
            return [tokens / seconds[length] for tokens, length in zip(expected, lengths, strict=True)]
        return [tokens - prices.rate * prices.more[length] for tokens, length in zip(expected, lengths, strict=True)]

    def least_tokens(self, draft_tokens: int, plan: Sequence[int]) -> float | None:
        """Return how many tokens a step with so many draft tokens must produce to be worth as much as a plain one, None
        where nothing tells what they cost. plan: all numbers of draft tokens that an answer's steps may have."""
        prices = self._prices_of({*plan, draft_tokens})
        if prices is None:
            return None
        if not self.shared:
            return prices.seconds[draft_tokens] / prices.seconds[0]
        return 1 + prices.rate * prices.more[draft_tokens]

    def pays_to_propose(self, chance: float, expected: float, draft_tokens: int) -> bool:
        """Return whether the draft model should be asked for its next block with a step of an answer that verifies
        tokens which were looked up.

        chance: that all of them are right, so that the next step verifies such tokens as well, and the block is of no
        use. Where one is wrong and there is no block, a plain step comes before it. expected: how many tokens a step
        with the block's `draft_tokens` produces on average.
        """
        prices = self._prices_of([draft_tokens])
        if prices is None or self.shared:
            return True
        seconds = prices.seconds[draft_tokens]
        proposing = seconds - prices.looked_up[draft_tokens]
        return (1 - chance) * (prices.seconds[0] - seconds / expected) > chance * proposing

    def _prices_of(self, lengths: Collection[int]) -> _Prices | None:
        """Return what draft tokens cost now; None where it was not measured yet with draft tokens and without."""
        known = {place[1] < 0 for place in self._measured}
        if len(known) < 2:
            return None
        stale = self._observed - self._looked_at >= max(len(self._now), 8)
        prices = self._prices
        if prices is None or stale or any(length not in prices.seconds for length in lengths):
            # Those that were asked for before will be again.
            asked = {*lengths, *(() if prices is None else prices.seconds)}
            self._looked_at, self._prices = self._observed, self._looked_for(asked)
        return self._prices

    def _looked_for(self, lengths: Iterable[int]) -> _Prices:
        lengths = sorted({0, *lengths})
        sessions = self._batched
        tokens = {length: sessions * length for length in lengths}
        seconds = self._rising(sessions, tokens)
        # Where the two were not told apart, what is looked up costs no more than the draft model's.
        looked_up = {
            length: min(seconds[length], one) for length, one in self._rising(sessions, tokens, proposed=False).items()
        }
        rates = {length: sessions * expected_tokens(self.survival, length) / seconds[length] for length in lengths}
        best = max(rates, key=rates.__getitem__)
        if best or not self.shared:
            # All of them draft: each pays its share.
            more = {length: (seconds[length] - seconds[0]) / sessions for length in lengths}
        else:
            # Most of them don't: who does pays all that a step takes longer by it.
            others = sum(self._now.values()) * sessions / max(1, len(self._now))
            beside = self._rising(sessions, {length: others + length for length in lengths})
            more = {length: beside[length] - beside[0] for length in lengths}
        return _Prices(seconds, looked_up, rates[best], more)

    def _rising(self, sessions: float, draft_tokens: dict[int, float], *, proposed: bool = True) -> dict[int, float]:
        """Return the seconds of batches of so many sessions by the number of draft tokens of all of them: more never
        take less time, whatever was measured while something else was computed too. proposed: whether the draft model
        is asked for blocks where there are any."""
        rising, seconds = 0.0, {}
        for length, tokens in draft_tokens.items():
            asked = proposed and tokens > 0
            rising = max(rising, _predicted(self._measured.values(), sessions, tokens, proposed=asked))
            seconds[length] = rising
        return seconds


def _place(sessions: float, draft_tokens: float, *, proposed: bool = False) -> tuple[int, int, bool]:
    """Return what is equal for batches of about one size."""
    mean = draft_tokens / sessions
    size = -1 if not draft_tokens else max(0, math.ceil(math.log2(max(mean, 1 / 16)) + 4))
    return round(math.log2(sessions)), size, proposed


_CHOSEN = (
    (0, 1, 2, 3, 4),
    (0, 2, 3, 4),
    (0, 1, 2, 4),
    (0, 1, 2, 3),
    (0, 2, 4),
    (0, 2, 3),
    (0, 1, 2),
    (0, 2),
    (0, 1),
    (0,),
)
"""Which of a batch's parts its seconds are fitted to, as many as what was measured tells apart."""


def _predicted(measured: Iterable[_Measured], sessions: float, draft_tokens: float, *, proposed: bool) -> float:
    """Return the seconds of a batch: a constant, something for each session, something for each draft token, something
    for any, and something where the draft model is asked for blocks: as it fits what was measured best, the more the
    nearer that is. None of them is negative; where too little was measured to tell them apart some are left out."""
    samples = []
    rows = draft_tokens / sessions + 1
    for one in measured:
        wider = (one.draft_tokens / one.sessions + 1) / rows
        far = abs(math.log2(one.sessions / sessions)) + abs(math.log2(wider))
        # By what share of it a time is missed counts, not by how much.
        parts = _parts(one.sessions, one.draft_tokens, proposed=one.proposed)
        samples.append((parts, one.seconds, 1 / (one.seconds**2 * (1 + FAR * far**2))))
    at = _parts(sessions, draft_tokens, proposed=proposed)
    # Of all parts once: which of them are chosen only leaves out some of these sums.
    sums = [
        [sum(w * x[i] * x[j] for x, _, w in samples) for j in range(len(at))]
        + [sum(w * x[i] * y for x, y, w in samples)]
        for i in range(len(at))
    ]
    for chosen in _CHOSEN:
        fitted = _fitted(sums, chosen)
        if fitted is not None and all(one >= 0 for one in fitted):
            return sum(share * at[part] for share, part in zip(fitted, chosen, strict=True))
    return min(seconds for _, seconds, _ in samples)


def _parts(sessions: float, draft_tokens: float, *, proposed: bool) -> tuple[float, ...]:
    return 1.0, sessions, draft_tokens, float(draft_tokens > 0), float(proposed)


def _fitted(sums: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[float] | None:
    """Return the factors with which the chosen parts of x come nearest to y by least squares, None where nothing tells
    them apart.

    sums: over all measurements, of the product of each part with each one and with y at the end, times their weights.
    """
    size = len(chosen)
    rows = [[*(sums[i][j] for j in chosen), sums[i][-1]] for i in chosen]
    scales = [rows[i][i] for i in range(size)]
    for i in range(size):
        if rows[i][i] <= 1e-6 * scales[i]:
            return None
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in itertools.zip_longest(rows[j], rows[i])]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
