"""What draft tokens cost where several answers are decoded at once, measured over all answers of an engine.

Steps of all sessions are computed together, so a row more in one of them takes time of all. It owns what was measured,
and knows of each answer how many draft tokens its steps verify and how many tokens they produce.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from coordinator.engine.beginnings import Beginnings
from coordinator.engine.row_times import SMOOTHING, RowTimes

EASE_SMOOTHING = 0.05
"""Weight of the newest answer in what is known of how much texts differ."""

FIRST_EASE_VARIANCE, FIRST_ANSWERS = 1.0, 4
"""How much texts are taken to differ before there were answers, and as how many answers that counts."""

EASE_ATTENUATION = 4.0
"""By how much texts differ more than the moments tell: where nearly all or nearly no draft tokens are accepted, their
number hardly says how easy a text is. Measured on chats, code and random tokens in turn."""

ROW_COST, BLOCK_COST = 0.1, 0.5
"""As which part of a plain step a draft token is taken to cost until that is measured, and the draft model's block."""

CONTEXT_FORGETTING = 0.9
"""By how much what was seen before counts less with each context that a draft model has read."""

PROBE_STEPS = 4
"""Steps of all sessions in which plain decode of about so many is measured."""

PLAIN_EVERY = 400
"""Steps of each answer, on average, after which plain decode is measured anew where there was none."""

GROUP_HYSTERESIS = 1.05
"""How many times as many tokens a second must be expected of all answers for some of them to begin to draft."""

AGAIN_HYSTERESIS = 1.25
"""How many times as many tokens as drafting takes of others must be won by it for an answer to end its pause."""

LONGER_HYSTERESIS = 1.1
"""The same for one that drafts to verify more draft tokens."""

NEARLY_ALL = 0.75
"""Which share of the answers has steps in a batch where nearly all are meant to."""

PRICES = tuple(0.6 * 0.75**step for step in range(15))
"""How many tokens a further draft token has to win at least for one of several answers to verify it: the highest one
leaves the tokens that nearly always come true, the lowest one all of most blocks. The best one is looked for where each
number of rows takes its own time; where rows up to a number take as long as that, the lowest one holds, and the best
number is looked for."""

FULL = 0.7
"""With such a share of the rows that a step may have a batch is taken to be full."""

HOPE = 0.1
"""Which share of its time a batch may take less than predicted as long as none of its size was measured."""

MOST_LIKE, LIKE_VARIANCE = 16.0, 2.0
"""As how many of its own blocks an answer's beginning is known by those of others: so many at most, and otherwise this
over how much texts differ."""

STALE_STEPS, STALE_LEAST = 4, 32
"""Steps of each answer behind which prices are looked for again, and of all answers together at least: that takes
milliseconds, in which no answer goes on."""


@functools.cache
def lengths_of(block_size: int) -> tuple[int, ...]:
    """Return how many draft tokens a step may verify, rising from none to all of a block."""
    longest = block_size - 1
    return (0, *sorted({max(1, longest // divisor) for divisor in (1, 2, 4, 8)})) if longest else (0,)


def expected_tokens(survival: Sequence[float], draft_tokens: int) -> float:
    """Return how many tokens a step with so many draft tokens produces on average.

    survival: how often each draft token is accepted behind those before it.
    """
    return expected_by_length(survival, [draft_tokens])[draft_tokens]


def expected_by_length(survival: Sequence[float], lengths: Iterable[int]) -> dict[int, float]:
    """Return the same for each of these numbers of draft tokens."""
    reached = itertools.accumulate(survival, operator.mul)
    expected = [*itertools.accumulate(reached, initial=1.0)]
    return {length: expected[min(length, len(survival))] for length in lengths}


@dataclass(frozen=True, slots=True)
class BatchTaken:
    """What a step of an answer was computed in.

    sessions: of how many sessions. draft_tokens: rows beside the first one of each, which are draft tokens, but for
    those of prompts. seconds: how long it took, without the draft model's next blocks. proposing: how many of the
    sessions asked for such blocks. block_seconds: how much longer these took; None where that is not known. block_rows:
    how many rows each of them had, about.
    """

    sessions: int
    draft_tokens: int
    seconds: float
    proposing: int = 0
    block_seconds: float | None = 0.0
    block_rows: int = 0


@dataclass(frozen=True, slots=True)
class _Prices:
    """What draft tokens cost, by how many of them each step of an answer verifies.

    seconds: of a batch in which all verify so many of the draft model's. looked_up: the same of tokens that were looked
    up, while no draft model is asked for any. rate: the most tokens that a batch gets in a second. more: seconds that
    one answer's draft tokens take of all; looked_up_more: the same where they were looked up. allotment: None where no
    answer drafts.
    """

    seconds: dict[int, float]
    looked_up: dict[int, float]
    rate: float
    more: dict[int, float]
    looked_up_more: dict[int, float]
    allotment: _Allotment | None = None


@dataclass(frozen=True, slots=True)
class _Wish:
    """Draft tokens that an answer's steps would verify beyond others: `rows` more, `length` with those before them.

    tokens: how many they win on average. worth: how many each of them wins, less where it would be a change.
    """

    answer: Hashable
    length: int
    rows: int
    tokens: float
    worth: float


@dataclass(frozen=True, slots=True)
class _Allotment:
    """How draft tokens are dealt out among answers.

    draft_tokens: of each answer's steps. rows: how many all answers' steps may have together, their first ones and
    draft tokens. price: how many tokens one more would have to win to be worth it.
    """

    draft_tokens: dict[Hashable, int]
    rows: int
    price: float


def _dealt_out(wishes: Sequence[_Wish], limit: int) -> tuple[dict[Hashable, int], float, float]:
    """Return how many draft tokens the steps of whose wishes are met get where only so many are to be had, how many
    tokens these win, and how many one more would win at most.

    wishes: the most promising one first, and each answer's in their order.
    """
    lengths: dict[Hashable, int] = {}
    refused: set[Hashable] = set()
    left, won, price = limit, 0.0, 0.0
    for wish in wishes:
        if wish.answer in refused:
            continue
        if wish.rows > left:
            refused.add(wish.answer)
            price = max(price, wish.worth)
            continue
        left, won = left - wish.rows, won + wish.tokens
        lengths[wish.answer] = wish.length
    return lengths, won, price


@dataclass(slots=True)
class _Share:
    """The moving average of which share of the answers a batch has steps of. steps: how many told of it."""

    value: float = 1.0
    steps: int = 0

    def add(self, sessions: int, answers: int) -> None:
        self.steps += 1
        self.value += max(SMOOTHING / answers, 1 / self.steps) * (min(1.0, sessions / answers) - self.value)


class BatchCosts:
    """The measurements of one engine."""

    def __init__(self) -> None:
        self._now: dict[Hashable, int] = {}
        """How many draft tokens the last step of each answer that has begun verified."""
        self._hopes: dict[Hashable, dict[int, float]] = {}
        """How many tokens a step of each answer would produce on average, by how many draft tokens it verified."""
        self._steps, self._blocks_of_draft = RowTimes(), RowTimes()
        """Of batches without the draft model's next blocks, and of these blocks alone."""
        self._has_plain = self._has_drafted = False
        """Whether batches without draft tokens were measured, and such with some."""
        self._plain_share, self._drafting_share = _Share(), _Share()
        """While no answer verifies draft tokens, and where some do. Answers that take unlike times part into smaller
        batches."""
        self._drafts = False
        """Whether drafting pays for those together that are decoded now."""
        self._prices: _Prices | None = None
        """For about so many sessions as there are now; None where they are to be looked for again."""
        self._looked_at = self._observed = 0
        self._plain_steps = self._plain_seen = self._plain_answers = 0
        """How many steps told of batches without draft tokens since that was due last, when the last one did, as of
        `_observed`, and for how many answers that was due at first."""
        self.beginnings = Beginnings()
        self._context_s = self._context_rows = 0.0
        """How long draft models took to read contexts, and of how many rows, those before counting less and less."""
        self._eases = FIRST_ANSWERS
        self._ease_excess, self._ease_information = FIRST_EASE_VARIANCE / EASE_ATTENUATION, 1.0
        """Moving averages, over answers, of the square of how many draft tokens more or fewer were accepted than in
        others, less its variance if no text were easier than another; and of the square of that variance."""

    def compute_with(self, row_counts: Sequence[int]) -> None:
        """Say with which numbers of rows the stages compute steps, as of `RowTimes.row_counts`."""
        self._steps.row_counts = self._blocks_of_draft.row_counts = row_counts

    @property
    def shared(self) -> bool:
        """Whether several answers are decoded now, or will be soon."""
        return len(self._now) > 1

    @property
    def count(self) -> int:
        """How many answers are decoded now, or will be soon."""
        return len(self._now)

    @property
    def _plain_sessions(self) -> float:
        """How many sessions a batch has where none drafts, about."""
        return max(1.0, self._plain_share.value * len(self._now))

    @property
    def limit(self) -> int | None:
        """How many draft tokens a step verifies at most for now, None for any number: none while plain decode is to be
        measured."""
        if not self.shared:
            return None
        return 0 if self._plain_steps < PROBE_STEPS * len(self._now) else None

    def join(self, answer: Hashable) -> None:
        """Count an answer that begins."""
        self._now[answer] = 0
        if len(self._now) == 2:
            # What one answer's draft tokens take of all was not asked before.
            self._prices = None
        if len(self._now) >= 2 * self._plain_answers:
            # So many were not measured yet; a few more are not worth it.
            self._plain_steps, self._plain_answers = 0, len(self._now)

    def leave(self, answer: Hashable) -> None:
        """Forget an answer that is not decoded any more."""
        self._now.pop(answer, None)
        if not self.shared:
            self._prices = None
        self._hopes.pop(answer, None)

    def hope(self, answer: Hashable, expected: dict[int, float]) -> None:
        """Say how many tokens an answer's steps would produce on average, by how many draft tokens they verified, also
        where it rests for now: whether drafting pays depends on how many others would draft as well."""
        self._hopes[answer] = expected

    def give_up(self, answer: Hashable) -> None:
        """Say that an answer drafts no more, whatever others do."""
        self._hopes.pop(answer, None)

    def observe(self, answer: Hashable, draft_tokens: int, batch: BatchTaken | None) -> None:
        """Record a step of an answer.

        draft_tokens: how many it verified. batch: what it was computed in, None where that is not known, so that
        nothing can be learnt from it.
        """
        self._now[answer] = draft_tokens
        if batch is None:
            return
        self._observed += 1
        self._observe_share(batch)
        is_new = self._steps.add(batch.sessions, batch.sessions + batch.draft_tokens, batch.seconds, batch.sessions)
        if batch.proposing and batch.block_seconds:
            rows = batch.proposing * batch.block_rows
            is_new |= self._blocks_of_draft.add(batch.proposing, rows, batch.block_seconds, batch.proposing)
        if draft_tokens:
            is_new |= not self._has_drafted
            self._has_drafted = True
        if not any(self._now.values()):
            is_new |= not self._has_plain
            self._has_plain = True
            self._plain_steps, self._plain_seen = self._plain_steps + 1, self._observed
        elif self._observed - self._plain_seen > PLAIN_EVERY * len(self._now):
            self._plain_steps, self._plain_seen = 0, self._observed
        if is_new:
            self._prices = None

    def _observe_share(self, batch: BatchTaken) -> None:
        counts = self._steps.row_counts
        if not any(self._now.values()):
            self._plain_share.add(batch.sessions, len(self._now))
        elif batch.proposing and not (counts and batch.sessions + batch.draft_tokens > FULL * counts[-1]):
            # Of a full one others were left out for want of room.
            self._drafting_share.add(batch.sessions, len(self._now))

    def observe_context(self, rows: int, block_rows: int, seconds: float) -> float:
        """Record how long the draft model took to read so many rows that it had not read before, and to make a block of
        `block_rows` behind them. Return how much of that was reading, 0 where that is not known."""
        block_seconds = self._blocks_of_draft.predicted(1.0, float(block_rows))
        if not block_seconds:
            return 0.0
        # Of few rows it may seem to be less than nothing, which with others evens out.
        self._context_s = CONTEXT_FORGETTING * self._context_s + seconds - block_seconds
        self._context_rows = CONTEXT_FORGETTING * self._context_rows + rows
        return max(0.0, seconds - block_seconds)

    def context_tokens(self, rows: int) -> float:
        """Return how many plain steps of an answer that is decoded alone the draft model takes to read so many rows; 0
        where nothing tells that."""
        prices = self._prices_of([0])
        if prices is None or self.shared or not self._context_rows:
            return 0.0
        return max(0.0, self._context_s) / self._context_rows * rows / prices.seconds[0]

    @property
    def ease_variance(self) -> float:
        """How much texts differ in how easy they are for the draft, as of `Acceptance`, by the method of moments."""
        return EASE_ATTENUATION * max(0.0, self._ease_excess / self._ease_information)

    @property
    def likeness(self) -> float:
        """As how many of its own blocks an answer's are known by those of others."""
        return min(MOST_LIKE, max(1.0, LIKE_VARIANCE / max(self.ease_variance, 1e-9)))

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
        more = prices.looked_up_more if looked_up else prices.more
        return [tokens - prices.rate * more[length] for tokens, length in zip(expected, lengths, strict=True)]

    def allotted(self, answer: Hashable, expected: dict[int, float]) -> int | None:
        """Return how many draft tokens the steps of one of several answers should verify, so that all together get the
        most tokens a second; None where that is not known. expected: as of `hope`."""
        prices = self._prices_of(expected)
        allotment = None if prices is None else prices.allotment
        if allotment is None or not self.shared:
            return None
        given = allotment.draft_tokens
        room = given.get(answer)
        if room is None:
            # It came later: it has what is left, and what those have left who are gone.
            taken = sum(length for other, length in given.items() if other in self._now)
            room = max(0, allotment.rows - taken - len(self._now))
        # What it hoped for then may not have come true.
        given[answer] = max(
            (length for length in expected if length <= room),
            key=lambda length: expected[length] - allotment.price * length,
        )
        return given[answer]

    def least_tokens(self, draft_tokens: int, plan: Sequence[int]) -> float | None:
        """Return how many tokens a step with so many draft tokens must produce to be worth as much as a plain one, None
        where nothing tells what they cost. plan: all numbers of draft tokens that an answer's steps may have."""
        prices = self._prices_of({*plan, draft_tokens})
        if prices is None:
            return None
        if not self.shared:
            return prices.seconds[draft_tokens] / prices.seconds[0]
        return 1 + prices.rate * prices.more[draft_tokens]

    def pays_surely(self, answer: Hashable, expected: dict[int, float]) -> bool:
        """Return whether one of several answers that rests should draft again. expected: as of `hope`."""
        allotted = self.allotted(answer, expected)
        if allotted is not None:
            return allotted > 0
        prices = self._prices_of(expected)
        return prices is not None and any(
            tokens - 1 > AGAIN_HYSTERESIS * prices.rate * prices.more[length]
            for length, tokens in expected.items()
            if length
        )

    def pays_to_propose(self, chance: float, expected: float, draft_tokens: int) -> bool:
        """Return whether the draft model should be asked for its next block with a step of an answer that verifies
        tokens which were looked up.

        chance: that the next step verifies such tokens as well, so that the block is of no use. Where it does not, and
        there is no block, a plain step comes before one. expected: how many tokens a step with the block's
        `draft_tokens` produces on average.
        """
        if self.shared:
            return True
        prices = self._prices_of([draft_tokens])
        if prices is None:
            plain, proposing = 1.0, BLOCK_COST
            seconds = plain + draft_tokens * ROW_COST + proposing
        else:
            plain, seconds = prices.seconds[0], prices.seconds[draft_tokens]
            proposing = seconds - prices.looked_up[draft_tokens]
        return (1 - chance) * (plain - seconds / expected) > chance * proposing

    def _prices_of(self, lengths: Collection[int]) -> _Prices | None:
        """Return what draft tokens cost now; None where it was not measured yet with draft tokens and without."""
        if not (self._has_plain and self._has_drafted):
            return None
        stale = self._observed - self._looked_at >= max(STALE_STEPS * len(self._now), STALE_LEAST)
        prices = self._prices
        if prices is None or stale or any(length not in prices.seconds for length in lengths):
            # Those that were asked for before will be again.
            asked = {*lengths, *(() if prices is None else prices.seconds)}
            self._looked_at, self._prices = self._observed, self._looked_for(asked)
        return self._prices

    def _looked_for(self, lengths: Iterable[int]) -> _Prices:
        lengths = sorted({0, *lengths})
        sessions = max(1.0, self._drafting_share.value * len(self._now)) if self.shared else 1.0
        seconds = self._rising(sessions, {length: (length * sessions, sessions) for length in lengths})
        looked_up = self._rising(sessions, {length: (length * sessions, 0.0) for length in lengths})
        if not self.shared:
            return _Prices(seconds, looked_up, 1 / seconds[0], {}, {})
        plain, none = self._plain_sessions, seconds[0]
        plain_rate = plain / self._steps.predicted(plain, plain)
        rate, allotment = self._best_allotment(plain_rate, sessions, none)
        self._drafts = allotment is not None
        if allotment is not None:
            more = {length: allotment.price * length / rate for length in lengths}
        else:
            # What the first one takes that drafts, and each of all that do: all of them hear the same price.
            first = self._rising(sessions, {length: (length, 1.0) for length in lengths})
            more = {length: max(first[length] - none, (seconds[length] - none) / sessions) for length in lengths}
        alone = self._rising(sessions, {length: (length, 0.0) for length in lengths})
        looked_up_more = {length: min(more[length], alone[length] - none) for length in lengths}
        return _Prices(seconds, looked_up, rate, more, looked_up_more, allotment)

    def _best_allotment(self, plain_rate: float, sessions: float, none: float) -> tuple[float, _Allotment | None]:
        """Return how many tokens a second a batch gets at most, and how its rows are dealt out then; None where no
        answer drafts.

        Each number of rows is dealt out so that it brings the most tokens: to those draft tokens first that are
        accepted most often. Which number brings the most in a second depends on how long batches take, which grows by
        steps. plain_rate: where none drafts. sessions: of a batch where some do; none: the seconds of one of so many
        without draft tokens.
        """
        part = sessions / len(self._now)
        wishes = self._wishes()
        least, best, best_allotment = plain_rate * (1.0 if self._drafts else GROUP_HYSTERESIS), plain_rate, None
        for limit, least_price in self._limits(wishes, part):
            lengths, won, price = _dealt_out(wishes, limit)
            if not lengths:
                continue
            draft_tokens, drafting = part * sum(lengths.values()), part * len(lengths)
            seconds = max(none, self._predicted(sessions, draft_tokens, drafting, hope=HOPE))
            rate = (sessions + part * won) / seconds
            if rate > max(least, best):
                given = dict.fromkeys(self._hopes, 0) | lengths
                # What just got them is to keep them.
                price = max(price / LONGER_HYSTERESIS, least_price)
                best, best_allotment = rate, _Allotment(given, limit + len(self._now), price)
        return best, best_allotment

    def _wishes(self) -> list[_Wish]:
        """Return what each answer would verify beyond what it has, the most promising one first."""
        wishes = []
        for answer, hope in self._hopes.items():
            now, (before, least) = self._now.get(answer, 0), (0, 1.0)
            for length, tokens in sorted(hope.items()):
                if not length:
                    continue
                hurdle = 1.0 if length <= now else LONGER_HYSTERESIS if now else AGAIN_HYSTERESIS
                worth = (tokens - least) / (length - before) / hurdle
                if worth > PRICES[-1]:
                    wishes.append(_Wish(answer, length, length - before, tokens - least, worth))
                before, least = length, tokens
        # An answer's own ones stay in their order: the further a draft token lies, the less often it is accepted.
        return sorted(wishes, key=lambda wish: -wish.worth)

    def _limits(self, wishes: Sequence[_Wish], part: float) -> list[tuple[int, float]]:
        """Return how many draft tokens all answers' steps together may be given, to look for the best number, each with
        how many tokens one more must win at least.

        part: which share of the answers has steps in a batch.
        """
        counts, answers = self._steps.row_counts, len(self._now)
        if not counts:
            limits: dict[int, float] = {}
            for price in PRICES:
                limits.setdefault(sum(wish.rows for wish in wishes if wish.worth > price), price)
            return [*limits.items()]
        # Where a few are missing now and then, most batches have all.
        part = 1.0 if part > NEARLY_ALL else part
        wished, most = sum(wish.rows for wish in wishes), counts[-1]
        edges = [*counts, *range(2 * most, int(part * (answers + wished)) + most, most)]
        return [(int(edge / part) - answers, PRICES[-1]) for edge in edges if edge / part > answers]

    def _predicted(self, sessions: float, draft_tokens: float, drafting: float, *, hope: float = 0.0) -> float:
        """Return the seconds of a batch. draft_tokens: of all its sessions. drafting: how many of these have some of
        the draft model's, and ask it for as many again. hope: as of `RowTimes.predicted`."""
        seconds = self._steps.predicted(sessions, sessions + draft_tokens, hope=hope)
        if drafting:
            seconds += self._blocks_of_draft.predicted(max(1.0, drafting), draft_tokens + drafting, hope=hope)
        return seconds

    def _rising(self, sessions: float, drafting: dict[int, tuple[float, float]]) -> dict[int, float]:
        """Return the seconds of batches of so many sessions: more draft tokens never take less time, whatever was
        measured while something else was computed too.

        drafting: of all of a batch's sessions, how many draft tokens they have, rising from none, and how many of them
        ask the draft model for blocks where there are any.
        """
        rising, seconds = 0.0, {}
        for length, (tokens, proposing) in drafting.items():
            rising = max(rising, self._predicted(sessions, tokens, proposing if tokens else 0.0))
            seconds[length] = rising
        return seconds
