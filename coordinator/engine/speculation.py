"""Decides how many draft tokens the next step verifies: as many as pay, or none.

Measures for one request how often each draft token of a block is accepted, and chooses the length with which all
requests together get the most tokens a second, as `batch_costs` has measured it. It never changes which tokens come
out, only when they do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from coordinator.engine.batch_costs import BatchCosts, BatchTaken, expected_tokens, lengths_of

SMOOTHING = 0.2
"""Weight of the newest step in how often draft tokens are accepted."""

WARM_UP_STEPS = 4
"""Verify steps before the first choice."""

SURE_TOKENS_PER_STEP = 4.0
"""With so many tokens a verify step, speculation pays in any case: a verify never costs that many plain steps."""

PLAIN_PROBES, VERIFY_PROBES = 2, 4
"""How many steps measure plain decode, and how many verify steps end a pause."""

FIRST_REST_STEPS, LONGEST_REST_STEPS = 16, 256
"""How many plain steps a pause of speculation has; each is twice as long as the one before."""

RESTS_AMONG_OTHERS = 4
"""How many times longer a pause is while other answers are decoded."""

HYSTERESIS = 1.05
"""How much faster another length must be to be chosen."""


@dataclass(slots=True)
class Speculation:
    """The measurements and the choice for one request.

    block_size: rows of the draft's block, one known token and the draft tokens; 1 switches speculation off. offered:
    draft tokens that were verified. produced_by_verify: tokens that verify steps produced. draft_lost: whether the
    draft was lost, before the answer began or on its way. notes: what the request's figures say about it. costs: what
    draft tokens cost, measured with the other requests.
    """

    block_size: int
    costs: BatchCosts = field(default_factory=BatchCosts)
    steps: int = 0
    offered: int = 0
    verify_steps: int = 0
    produced_by_verify: int = 0
    draft_lost: bool = False
    notes: list[str] = field(default_factory=list)
    _survival: list[float] = field(default_factory=list)
    _current: int = 0
    _next_rest: int = FIRST_REST_STEPS
    _planned: deque[int] = field(default_factory=deque)
    """Lengths of the next steps that are decided already: measurements, and what is left of a pause."""

    def __post_init__(self) -> None:
        self._current = self.block_size - 1
        self._survival = [1.0] * self._current
        self.costs.join(id(self))
        if self.costs.shared and self.costs.knows_survival and self.block_size > 1:
            # Among others a block that is too long is everybody's: how the others' drafts did is the best guess.
            self._survival = [*self.costs.survival, *self._survival][: self._current]
            self._choose()

    @property
    def acceptance_length(self) -> float | None:
        """The mean number of tokens that a verify step produced, None without such a step."""
        return self.produced_by_verify / self.verify_steps if self.verify_steps else None

    @property
    def steady_steps(self) -> int | None:
        """How many of the next steps will be as long as the next one, since no measurement is planned or due before;
        None for any number."""
        if not self._planned:
            return None if self.block_size == 1 or self._is_warm else 1
        first = self._planned[0]
        return next((count for count, length in enumerate(self._planned) if length != first), len(self._planned))

    def draft_tokens(self) -> int:
        """Return how many draft tokens the next step should verify."""
        count, limit = self._planned[0] if self._planned else self._current, self.costs.limit
        return count if limit is None else min(count, limit)

    def leave(self) -> None:
        """Say that the request is not decoded any more."""
        self.costs.leave(id(self))

    def lose_draft(self, why: str) -> None:
        """Go on without a draft, because it was lost."""
        self.draft_lost = True
        self.switch_off(f"plain decode: the draft was lost ({why})")

    def switch_off(self, note: str) -> None:
        """Go on without a draft. note: why, for the request's figures."""
        self._current, self.block_size = 0, 1
        self._planned.clear()
        self.notes.append(note)

    def observe(self, draft_tokens: int, accepted: int, seconds: float, batch: BatchTaken | None = None) -> None:
        """Record a step that verified `draft_tokens`, of which `accepted` were taken.

        seconds: how long the step took, with the proposal for the next one. batch: what it was computed in, None
        where that is not known.
        """
        self.steps += 1
        if draft_tokens:
            self.costs.observe_acceptance(draft_tokens, accepted)
            self.verify_steps += 1
            self.offered += draft_tokens
            self.produced_by_verify += accepted + 1
            for index in range(min(draft_tokens, accepted + 1)):
                hit = 1.0 if index < accepted else 0.0
                self._survival[index] += SMOOTHING * (hit - self._survival[index])
        self.costs.observe(id(self), draft_tokens, seconds, batch)
        # Proposals are asked for one step ahead, so a step that was decided before the plan does not count for it.
        if self._planned and bool(self._planned[0]) == bool(draft_tokens):
            self._planned.popleft()
        self._choose()

    def _choose(self) -> None:
        if self.block_size == 1 or self._planned or not self._is_warm:
            return
        longest = self.block_size - 1
        lengths = self._lengths
        values = self.costs.values([self._expected(length) for length in lengths], lengths)
        if values is None:
            if self._expected(longest) < SURE_TOKENS_PER_STEP and not self.costs.shared:
                self._planned.extend([0] * PLAIN_PROBES)
            return
        worth = dict(zip(lengths, values, strict=True))
        best = max(lengths, key=worth.__getitem__)
        if not self.costs.shared and worth[best] <= worth[self._current] * HYSTERESIS:
            best = self._current
        if best == 0:
            # The text may become easier to predict: try again after a pause, which is longer each time.
            # Among others a step of its own kind takes time of all: it is tried less often, and with few rows.
            rest = self._next_rest * (RESTS_AMONG_OTHERS if self.costs.shared else 1)
            probe = self._lengths[len(self._lengths) // 2] if self.costs.shared else longest
            self._planned.extend([0] * rest + [probe] * VERIFY_PROBES)
            self._note(f"plain decode for {self._next_rest} steps: drafting cost more than it won")
            self._next_rest = min(2 * self._next_rest, LONGEST_REST_STEPS)
            return
        if best < self._current:
            self._note(f"shorter blocks: {best + 1} rows instead of {self._current + 1}")
        self._current = best

    @property
    def _is_warm(self) -> bool:
        """Whether it is known how often draft tokens are accepted."""
        return self.verify_steps >= WARM_UP_STEPS or (self.costs.shared and self.costs.knows_survival)

    @property
    def _lengths(self) -> list[int]:
        """How many draft tokens a step may verify."""
        return lengths_of(self.block_size)

    def _expected(self, draft_tokens: int) -> float:
        """Return how many tokens a step with so many draft tokens produces on average."""
        return expected_tokens(self._survival, draft_tokens)

    def _note(self, note: str) -> None:
        if not self.notes or self.notes[-1] != note:
            self.notes.append(note)
