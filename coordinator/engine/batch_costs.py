"""What draft tokens cost where several answers are decoded at once, measured over all answers of an engine.

Steps of all sessions are computed together, so a row more in one of them takes time of all. It owns what was measured,
and knows of each answer how many draft tokens its steps verify and how many tokens they produce.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

SMOOTHING = 0.2
"""Weight of the newest measurement in the moving averages of times."""

SLOW_SMOOTHING = 0.02
"""The same for what is known of all answers together."""

KNOWN_STEPS = 16
"""Verify steps behind which it is known how often draft tokens of a new answer will be accepted, in all likelihood."""

SAME_MEAN = 0.5
"""Draft tokens by which the mean over all answers may have changed from one step to the next one that is measured."""

LEARNING_ANSWERS = 16
"""Of so many answers that begin among others one has the draft although it does not pay."""

PROBE_STEPS = 8
"""Steps of each session in which plain decode of all of them is measured."""

PROBED_AGAIN_STEPS = 512
"""Steps of each session behind which it is measured again."""


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


@dataclass(slots=True)
class _Measured:
    """What was measured with so many sessions, up to the next power of two.

    seconds: of a step, by the mean number of draft tokens in the steps of all sessions. steps: how many there were.
    probed: how many draft tokens all sessions verify at most up to probed_until steps; None for any number.
    """

    seconds: dict[int, float] = field(default_factory=dict)
    steps: int = 0
    probed: int | None = None
    probed_until: int = 0


class BatchCosts:
    """The measurements of one engine.

    survival: how often each draft token is accepted behind those before it, over all answers.
    """

    def __init__(self) -> None:
        self._now: dict[Hashable, tuple[int, float]] = {}
        """Of each answer that is decoded how many draft tokens its last step verified, and how many tokens such steps
        produce on average."""
        self._before: dict[Hashable, tuple[int, int, float]] = {}
        """How many answers there were, how many draft tokens it verified and the mean of all, as each one's last step
        was recorded."""
        self._measured: dict[int, _Measured] = {}
        self._verifies = self._begun = 0
        self.survival: list[float] = []

    @property
    def shared(self) -> bool:
        """Whether several answers are decoded now."""
        return len(self._now) > 1

    @property
    def knows_survival(self) -> bool:
        """Whether enough answers were decoded to tell how another one's draft tokens will be accepted."""
        return self._verifies >= KNOWN_STEPS

    @property
    def limit(self) -> int | None:
        """How many draft tokens a step verifies at most for now, None for any number."""
        return self._here.probed if self.shared else None

    def drafts(self, block_size: int) -> bool:
        """Return whether a new answer should have the draft at all: where drafting costs more than it wins among the
        others, even its features do. One in LEARNING_ANSWERS has it, from which is learnt whether that stays so."""
        self._begun += 1
        if not (self.shared and self.knows_survival) or self._begun % LEARNING_ANSWERS == 0:
            return True
        lengths = lengths_of(block_size)
        rates = [self.rate(None, length, expected_tokens(self.survival, length)) for length in lengths]
        return rates[0] is None or max(rate or 0.0 for rate in rates[1:]) > rates[0]

    def leave(self, answer: Hashable) -> None:
        """Forget an answer that is not decoded any more."""
        self._now.pop(answer, None)
        self._before.pop(answer, None)

    def expect(self, answer: Hashable, draft_tokens: int) -> None:
        """Note that the next step of an answer will verify so many draft tokens, if it is decoded already."""
        if answer in self._now:
            self._now[answer] = draft_tokens, self._now[answer][1]

    def observe(
        self, answer: Hashable, draft_tokens: int, expected: float, seconds: float, lengths: Sequence[int]
    ) -> None:
        """Record a step of an answer.

        draft_tokens: how many it verified. expected: how many tokens such steps of the answer produce on average.
        seconds: how long it took, with the steps that were computed with it. lengths: those that blocks have, rising.
        """
        self._now[answer] = draft_tokens, expected
        here = self._here
        mean = sum(tokens for tokens, _ in self._now.values()) / len(self._now)
        length = min(lengths, key=lambda length: abs(length - mean))
        # The answers of one step come one by one: while some have other lengths already, it is not known whose it was.
        before, self._before[answer] = self._before.get(answer), (len(self._now), draft_tokens, mean)
        alike = before is not None and before[:2] == (len(self._now), draft_tokens)
        if not self.shared or (alike and before is not None and abs(mean - before[2]) < SAME_MEAN):
            known = here.seconds.get(length)
            here.seconds[length] = seconds if known is None else known + SMOOTHING * (seconds - known)
        here.steps += 1
        if self.shared and here.steps >= here.probed_until:
            self._probe(here, length)

    def observe_acceptance(self, draft_tokens: int, accepted: int) -> None:
        """Record how many of a step's draft tokens were accepted."""
        self._verifies += 1
        self.survival += [1.0] * (draft_tokens - len(self.survival))
        for index in range(min(draft_tokens, accepted + 1)):
            hit = 1.0 if index < accepted else 0.0
            self.survival[index] += max(SLOW_SMOOTHING, 1 / self._verifies) * (hit - self.survival[index])

    def rate(self, answer: Hashable, draft_tokens: int, expected: float) -> float | None:
        """Return how many tokens a second all answers would get together if the steps of one verified so many draft
        tokens; None where nothing tells what they cost. expected: as in `observe`."""
        others = [now for name, now in self._now.items() if name != answer]
        mean = (sum(tokens for tokens, _ in others) + draft_tokens) / (len(others) + 1)
        seconds = self._seconds(mean)
        return None if seconds is None else (sum(tokens for _, tokens in others) + expected) / seconds

    @property
    def _here(self) -> _Measured:
        return self._measured.setdefault(max(0, len(self._now) - 1).bit_length(), _Measured())

    def _seconds(self, mean: float) -> float | None:
        """Return the seconds of a step by the mean number of draft tokens: between two that were measured, or beyond
        them along the nearest two."""
        known = self._here.seconds
        lengths = sorted(known)
        if len(lengths) < 2:
            return None
        place = min(max(bisect.bisect(lengths, mean), 1), len(lengths) - 1)
        low, high = lengths[place - 1], lengths[place]
        # Fewer rows never take more time, whatever was measured while something else was computed too.
        before, behind = (min(known[one] for one in lengths[index:]) for index in (place - 1, place))
        return max(before + (behind - before) * (mean - low) / (high - low), before / 2)

    def _probe(self, here: _Measured, length: int) -> None:
        """End measuring plain steps of all sessions, or begin to."""
        here.probed = None
        again = here.probed_until + PROBED_AGAIN_STEPS * len(self._now)
        if not length or (here.probed_until and here.steps < again):
            return
        here.probed = 0
        here.probed_until = here.steps + PROBE_STEPS * len(self._now)
