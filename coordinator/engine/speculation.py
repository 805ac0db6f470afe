"""Decides how many draft tokens the next step verifies, and whose: as many as pay, or none.

Measures for one request how often each draft token of a block is accepted, and chooses the length with which all
requests together get the most tokens a second, as `batch_costs` has measured it. Blocks are the draft model's or, where
they promise more, those of `prompt_lookup`. It never changes which tokens come out, only when they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.engine.batch_costs import BatchCosts, BatchTaken, expected_tokens, lengths_of, observe_accepted

SMOOTHING = 0.2
"""Weight of the newest step in how often draft tokens are accepted."""

WARM_UP_STEPS = 4
"""Verify steps before the first choice."""

SURE_TOKENS_PER_STEP = 4.0
"""With so many tokens a verify step, speculation pays in any case: a verify never costs that many plain steps."""

LOOKUP_GAIN = 1.25
"""How many times as many tokens must be expected of draft tokens that were looked up as of the draft model's."""

TRIED_TOKENS_PER_STEP = 2.0
"""So many tokens a verify step are worth a try, as long as it is not known what they cost."""

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

    block_size: rows of the draft model's block, one known token and the draft tokens; 1 switches it off. offered:
    draft tokens that were verified; looked_up: those of them that were looked up in the text. produced_by_verify:
    tokens that verify steps produced. draft_lost: whether the
    draft was lost, before the answer began or on its way. notes: what the request's figures say about it. costs: what
    draft tokens cost, measured with the other requests.
    """

    block_size: int
    costs: BatchCosts = field(default_factory=BatchCosts)
    steps: int = 0
    offered: int = 0
    looked_up: int = 0
    verify_steps: int = 0
    produced_by_verify: int = 0
    draft_lost: bool = False
    notes: list[str] = field(default_factory=list)
    _drafted_steps: int = 0
    """Verify steps with the draft model's tokens."""
    _survival: list[float] = field(default_factory=list)
    _is_guessed: bool = False
    """Whether that began as a guess by other answers, which the first own steps weigh more than."""
    _current: int = 0
    _next_rest: int = FIRST_REST_STEPS
    _planned: deque[int] = field(default_factory=deque)
    """Lengths of the next steps that are decided already: measurements, and what is left of a pause."""

    def __post_init__(self) -> None:
        self._current = self.block_size - 1
        self._survival = [1.0] * self._current
        self.costs.join(id(self))

    @property
    def acceptance_length(self) -> float | None:
        """The mean number of tokens that a verify step produced, None without such a step."""
        return self.produced_by_verify / self.verify_steps if self.verify_steps else None

    @property
    def steady_steps(self) -> int | None:
        """How many of the next steps will be as long as the next one, since no measurement is planned or due before;
        None for any number."""
        if not self._planned:
            return None if self.block_size == 1 or self._drafted_steps >= WARM_UP_STEPS else 1
        first = self._planned[0]
        return next((count for count, length in enumerate(self._planned) if length != first), len(self._planned))

    @property
    def expected_tokens(self) -> float:
        """How many tokens the next step produces on average with the draft model's tokens, or without any."""
        return self._expected(self.draft_tokens())

    def draft_tokens(self) -> int:
        """Return how many draft tokens the next step should verify."""
        if not self.steps:
            self._guess()
        count, limit = self._planned[0] if self._planned else self._current, self.costs.limit
        return count if limit is None else min(count, limit)

    def looked_up_tokens(self, survival: Sequence[float]) -> int:
        """Return how many draft tokens that were looked up the next step should verify in place of the draft model's; 0
        where those are worth more, or none are worth it.

        survival: how likely each of them is right where those before it are.
        """
        if not survival or self.costs.limit == 0:
            return 0
        # None where the draft model's promise about as much: only its blocks follow one another by themselves.
        own = self.draft_tokens()
        least = LOOKUP_GAIN * self._expected(own) if own else 1.0
        expected = {length: expected_tokens(survival, length) for length in lengths_of(len(survival) + 1)}
        longer = [length for length, tokens in expected.items() if length and tokens > least]
        values = self.costs.values([self._expected(own), *(expected[length] for length in longer)], [own, *longer])
        if values is None:
            return max((length for length in longer if expected[length] > TRIED_TOKENS_PER_STEP), default=0)
        worth = dict(zip(longer, values[1:], strict=True))
        best = max(worth, key=worth.__getitem__, default=0)
        return best if best and worth[best] > values[0] else 0

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

    def observe(
        self,
        draft_tokens: int,
        accepted: int,
        seconds: float,
        batch: BatchTaken | None = None,
        *,
        looked_up: bool = False,
    ) -> None:
        """Record a step that verified `draft_tokens`, of which `accepted` were taken.

        seconds: how long the step took, with the proposal for the next one. batch: what it was computed in, None
        where that is not known. looked_up: whether they were looked up in the text, and are not the draft model's.
        """
        self.steps += 1
        if draft_tokens:
            self.verify_steps += 1
            self.offered += draft_tokens
            self.produced_by_verify += accepted + 1
        if looked_up:
            # They say nothing of the draft model's next ones.
            self.looked_up += draft_tokens
            self.costs.observe(id(self), draft_tokens, seconds, batch)
            return
        if draft_tokens:
            self._drafted_steps += 1
            self.costs.observe_acceptance(draft_tokens, accepted, begins=self._drafted_steps <= WARM_UP_STEPS)
            weight = max(SMOOTHING, 1 / (self._drafted_steps + 1)) if self._is_guessed else SMOOTHING
            observe_accepted(self._survival, draft_tokens, accepted, weight)
        self.costs.observe(id(self), draft_tokens, seconds, batch)
        # Proposals are asked for one step ahead, so a step that was decided before the plan does not count for it.
        if self._planned and bool(self._planned[0]) == bool(draft_tokens):
            self._planned.popleft()
        self._choose()

    def _guess(self) -> None:
        """Choose before the first step, where others are decoded too: a block that is too long is everybody's then. How
        the drafts of others began is the best guess."""
        if self.costs.shared and self.costs.knows_survival and self.block_size > 1:
            self._is_guessed = True
            self._survival = [*self.costs.beginning, *self._survival[len(self.costs.beginning) :]]
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
        return self._drafted_steps >= WARM_UP_STEPS or (self.costs.shared and self.costs.knows_survival)

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
