"""Decides how many draft tokens the next step verifies: as many as pay, or none.

Measures for one request how often each draft token of a block is accepted and how long steps of each length take, and
chooses the length with the most tokens a second. It never changes which tokens come out, only when they do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SMOOTHING = 0.2
"""Weight of the newest measurement in the moving averages."""

WARM_UP_STEPS = 4
"""Verify steps before the first choice."""

SURE_TOKENS_PER_STEP = 4.0
"""With so many tokens a verify step, speculation pays in any case: a verify never costs that many plain steps."""

PLAIN_PROBES, VERIFY_PROBES = 2, 4
"""How many steps measure plain decode, and how many verify steps end a pause."""

FIRST_REST_STEPS, LONGEST_REST_STEPS = 16, 256
"""How many plain steps a pause of speculation has; each is twice as long as the one before."""

HYSTERESIS = 1.05
"""How much faster another length must be to be chosen."""


@dataclass(slots=True)
class Speculation:
    """The measurements and the choice for one request.

    block_size: rows of the draft's block, one known token and the draft tokens; 1 switches speculation off. offered:
    draft tokens that were verified. produced_by_verify: tokens that verify steps produced. draft_lost: whether the
    draft was lost, before the answer began or on its way. notes: what the request's figures say about it.
    """

    block_size: int
    steps: int = 0
    offered: int = 0
    verify_steps: int = 0
    produced_by_verify: int = 0
    draft_lost: bool = False
    notes: list[str] = field(default_factory=list)
    _survival: list[float] = field(default_factory=list)
    _seconds: dict[int, float] = field(default_factory=dict)
    _current: int = 0
    _next_rest: int = FIRST_REST_STEPS
    _planned: deque[int] = field(default_factory=deque)
    """Lengths of the next steps that are decided already: measurements, and what is left of a pause."""

    def __post_init__(self) -> None:
        self._current = self.block_size - 1
        self._survival = [1.0] * self._current

    @property
    def acceptance_length(self) -> float | None:
        """The mean number of tokens that a verify step produced, None without such a step."""
        return self.produced_by_verify / self.verify_steps if self.verify_steps else None

    @property
    def steady(self) -> bool:
        """Whether the next steps will be as long as the last one, because no measurement is planned or due."""
        return not self._planned and (self.block_size == 1 or self.verify_steps >= WARM_UP_STEPS)

    def draft_tokens(self) -> int:
        """Return how many draft tokens the next step should verify."""
        return self._planned[0] if self._planned else self._current

    def lose_draft(self, why: str) -> None:
        """Go on without a draft, because it was lost."""
        self.draft_lost = True
        self.switch_off(f"plain decode: the draft was lost ({why})")

    def switch_off(self, note: str) -> None:
        """Go on without a draft. note: why, for the request's figures."""
        self._current, self.block_size = 0, 1
        self._planned.clear()
        self.notes.append(note)

    def observe(self, draft_tokens: int, accepted: int, seconds: float) -> None:
        """Record a step that verified `draft_tokens`, of which `accepted` were taken.

        seconds: how long the step took, with the proposal for the next one.
        """
        self.steps += 1
        known = self._seconds.get(draft_tokens)
        self._seconds[draft_tokens] = seconds if known is None else known + SMOOTHING * (seconds - known)
        if draft_tokens:
            self.verify_steps += 1
            self.offered += draft_tokens
            self.produced_by_verify += accepted + 1
            for index in range(min(draft_tokens, accepted + 1)):
                hit = 1.0 if index < accepted else 0.0
                self._survival[index] += SMOOTHING * (hit - self._survival[index])
        # Proposals are asked for one step ahead, so a step that was decided before the plan does not count for it.
        if self._planned and bool(self._planned[0]) == bool(draft_tokens):
            self._planned.popleft()
        self._choose()

    def _choose(self) -> None:
        if self.block_size == 1 or self._planned or self.verify_steps < WARM_UP_STEPS:
            return
        longest = self.block_size - 1
        if 0 not in self._seconds:
            if self._expected(longest) < SURE_TOKENS_PER_STEP:
                self._planned.extend([0] * PLAIN_PROBES)
            return
        lengths = sorted({0, *(max(1, longest // divisor) for divisor in (1, 2, 4))})
        best = max(lengths, key=self._rate)
        if self._rate(best) <= self._rate(self._current) * HYSTERESIS:
            best = self._current
        if best == 0:
            # The text may become easier to predict: try again after a pause, which is longer each time.
            self._planned.extend([0] * self._next_rest + [longest] * VERIFY_PROBES)
            self._note(f"plain decode for {self._next_rest} steps: drafting cost more than it won")
            self._next_rest = min(2 * self._next_rest, LONGEST_REST_STEPS)
            return
        if best < self._current:
            self._note(f"shorter blocks: {best + 1} rows instead of {self._current + 1}")
        self._current = best

    def _rate(self, draft_tokens: int) -> float:
        return self._expected(draft_tokens) / self._time(draft_tokens)

    def _expected(self, draft_tokens: int) -> float:
        """Return how many tokens a step with so many draft tokens produces on average."""
        expected, reached = 1.0, 1.0
        for survival in self._survival[:draft_tokens]:
            reached *= survival
            expected += reached
        return expected

    def _time(self, draft_tokens: int) -> float:
        """Return the seconds of a step: measured, or interpolated between plain steps and the longest block tried."""
        if draft_tokens in self._seconds:
            return self._seconds[draft_tokens]
        longest = max(self._seconds)
        plain = self._seconds[0]
        return plain + (self._seconds[longest] - plain) * draft_tokens / max(longest, 1)

    def _note(self, note: str) -> None:
        if not self.notes or self.notes[-1] != note:
            self.notes.append(note)
