"""How many tokens to guess in the next step: as many as pay, or none.

Measures, for one request, how often each guess of a block is accepted and how long steps of each length take, and picks
the length with the most tokens a second. Never changes which tokens come out, only when.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SMOOTHING = 0.2
WARM_UP_STEPS = 4
SURE_TOKENS_PER_STEP = 4.0
"""With so many tokens a verify step, speculation pays without asking: a verify never costs that many plain steps."""
PLAIN_PROBES, VERIFY_PROBES = 2, 4
FIRST_REST_STEPS, LONGEST_REST_STEPS = 16, 256
HYSTERESIS = 1.05


@dataclass(slots=True)
class Speculation:
    """The choice for one request. block_size: rows of the draft's block; 1 switches speculation off."""

    block_size: int
    steps: int = 0
    offered: int = 0
    accepted: int = 0
    verify_steps: int = 0
    produced_by_verify: int = 0
    notes: list[str] = field(default_factory=list)
    _survival: list[float] = field(default_factory=list)
    _seconds: dict[int, float] = field(default_factory=dict)
    _current: int = 0
    _next_rest: int = FIRST_REST_STEPS
    _ahead: deque[int] = field(default_factory=deque)
    """Lengths decided already: probes, and the rest of a pause."""

    def __post_init__(self) -> None:
        self._current = self.block_size - 1
        self._survival = [1.0] * self._current

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a verify step produced; None without one."""
        return self.produced_by_verify / self.verify_steps if self.verify_steps else None

    @property
    def steady(self) -> bool:
        """Whether the next steps will be like the last one: nothing is being tried out or about to be."""
        return not self._ahead and (self.block_size == 1 or self.verify_steps >= WARM_UP_STEPS)

    def draft_tokens(self) -> int:
        """Guesses wanted for the next step."""
        return self._ahead[0] if self._ahead else self._current

    def switch_off(self, note: str) -> None:
        """Go on without a draft."""
        self._current, self.block_size = 0, 1
        self._ahead.clear()
        self.notes.append(note)

    def observe(self, draft_tokens: int, accepted: int, seconds: float) -> None:
        """A step that offered `guesses`, of which `accepted` were taken, and took so long with its next proposal."""
        self.steps += 1
        known = self._seconds.get(draft_tokens)
        self._seconds[draft_tokens] = seconds if known is None else known + SMOOTHING * (seconds - known)
        if draft_tokens:
            self.verify_steps += 1
            self.offered += draft_tokens
            self.accepted += accepted
            self.produced_by_verify += accepted + 1
            for index in range(min(draft_tokens, accepted + 1)):
                hit = 1.0 if index < accepted else 0.0
                self._survival[index] += SMOOTHING * (hit - self._survival[index])
        # Guesses are asked for one step ahead: a step that was decided before the plan doesn't use it up.
        if self._ahead and bool(self._ahead[0]) == bool(draft_tokens):
            self._ahead.popleft()
        self._choose()

    def _choose(self) -> None:
        if self.block_size == 1 or self._ahead or self.verify_steps < WARM_UP_STEPS:
            return
        longest = self.block_size - 1
        if 0 not in self._seconds:
            if self._expected(longest) < SURE_TOKENS_PER_STEP:
                self._ahead.extend([0] * PLAIN_PROBES)
            return
        lengths = sorted({0, *(max(1, longest // divisor) for divisor in (1, 2, 4))})
        best = max(lengths, key=self._rate)
        if self._rate(best) <= self._rate(self._current) * HYSTERESIS:
            best = self._current
        if best == 0:
            # The text may become easier to guess: try again after a rest, later each time.
            self._ahead.extend([0] * self._next_rest + [longest] * VERIFY_PROBES)
            self._note(f"plain decode for {self._next_rest} steps: guessing cost more than it won")
            self._next_rest = min(2 * self._next_rest, LONGEST_REST_STEPS)
            return
        if best < self._current:
            self._note(f"shorter blocks: {best + 1} rows instead of {self._current + 1}")
        self._current = best

    def _rate(self, draft_tokens: int) -> float:
        return self._expected(draft_tokens) / self._time(draft_tokens)

    def _expected(self, draft_tokens: int) -> float:
        """Tokens that a step with so many guesses produces on average."""
        expected, reached = 1.0, 1.0
        for survival in self._survival[:draft_tokens]:
            reached *= survival
            expected += reached
        return expected

    def _time(self, draft_tokens: int) -> float:
        """Measured, or on the line between plain steps and the longest block tried."""
        if draft_tokens in self._seconds:
            return self._seconds[draft_tokens]
        longest = max(self._seconds)
        plain = self._seconds[0]
        return plain + (self._seconds[longest] - plain) * draft_tokens / max(longest, 1)

    def _note(self, note: str) -> None:
        if not self.notes or self.notes[-1] != note:
            self.notes.append(note)
