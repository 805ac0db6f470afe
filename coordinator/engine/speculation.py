"""Chooses, for each step of a request, what its draft tokens are and how many it verifies: the draft model's, what is
looked up in the text, or none.

The choices are the arms of a bandit whose rewards are tokens a second. How likely each place of a block is accepted is
measured for the request (`acceptance`), and for matches of each length (`prompt_lookup`); what rows cost is measured
over all requests (`batch_costs`). The arm that promises most is taken. What is looked up is compared with every token
that comes, so that only the draft model must be tried to be known. It is tried as a conservative bandit tries (Wu,
Shariff, Lattimore and Szepesvari, "Conservative Bandits", 2016): plain decode is the arm that may always be taken, and
while it promises most, another one is tried when the tokens that all of them have lost so far, and one more may lose,
are few, and a small share of those that plain decode would have brought. So an answer never loses more by its draft
than these, however poor it is; what a draft wins pays for what it loses, so that bad luck does not end a good one.

Nothing is drawn by chance: the same measurements give the same choices. They never change which tokens come out, only
when they do.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.engine.acceptance import FORGETTING, Acceptance
from coordinator.engine.batch_costs import (
    PROBE_STEPS,
    ROW_COST,
    BatchCosts,
    BatchTaken,
    expected_by_length,
    expected_tokens,
    lengths_of,
)
from coordinator.engine.beginnings import BEGINNING_BLOCKS

WARM_UP_STEPS = 2
"""Verify steps before the first choice."""

PRIOR_BLOCKS = 2.0
"""As how many of its own blocks how others began counts for an answer that is decoded alone: where drafts are good for
most, two bad blocks are no reason to rest."""

SURE_TOKENS_PER_STEP = 4.0
"""With so many tokens a verify step, speculation pays in any case: a verify never costs that many plain steps."""

LOOKUP_GAIN = 1.1
"""How many times as many tokens must be expected of draft tokens that were looked up as of the draft model's."""

TRIED_TOKENS_PER_STEP = 2.0
"""So many tokens a verify step are worth a try, as long as it is not known what they cost."""

PLAIN_PROBES, VERIFY_PROBES = 2, 4
"""How many steps measure plain decode, and how many blocks a try has before it is chosen anew."""

TRIED_SHARE = 0.01
"""How many tokens for each step of an answer may be lost by drafting while plain decode promises more. Not for each
token: a step that verifies what was looked up takes little longer than a plain one, however many it brings."""

TRIED_TOKENS, CREDIT_TOKENS = 3.0, 9.0
"""How many tokens more than that share may be lost, and how many of those that drafting won count for later losses: a
few bad blocks are no reason to rest behind many good ones."""

LEAST_COST = 0.5
"""As how many plain steps a block counts at least beside the one that it takes the place of. Where the few plain steps
of the beginning took long for another reason, blocks that bring nothing would seem to cost nothing, and no plain step
would follow that tells better."""

ELSEWHERE = 0.5
"""How much an answer's first blocks count for the next one, among others, where those of others tell what that is
like."""

TRIED_TOKENS_OF_KNOWN, TRIED_TOKENS_OF_POOR = 2.0, 1.0
"""The same number of tokens where it is known how the answers before began, so that less is left to find out; and where
they began so badly that plain decode promised more from the start."""

SHORTEST_REST_STEPS, LONGEST_REST_STEPS = 16, 100_000
"""Plain steps between two tries, however much was won before, and however dear a try seems."""

MOST_BLOCK_SHARE = 0.9
"""The step itself takes a part of the time, whatever clocks say."""

RESTS_AMONG_OTHERS = 4
"""How many times smaller that share is while other answers are decoded."""

PLANNED_AHEAD = 64
"""How far what is planned is told: no more steps follow by themselves."""

HYSTERESIS = 1.05
"""How much faster another length must be to be chosen."""

DRAFT_GAIN = 1.25
"""How many times as fast as plain decode drafting must promise to be, to be chosen without counting what it loses.
The arm that promises most is mostly promised too much, and text that is not looked up is harder to draft as well. A
draft that wins less goes on all the same, by what it has won."""


@dataclass(slots=True)
class Speculation:
    """The measurements and the choice for one request.

    block_size: rows of the draft model's block, one known token and the draft tokens; 1 switches it off. costs: what
    draft tokens cost, measured with the other requests. fixed: how many of the draft model's tokens each step verifies
    whatever is measured, None to choose. prompt_tokens: of the request. unread: those of the prompt that the draft
    model reads before it makes the first block. offered: draft tokens that were verified; looked_up: those of them that
    were looked up in the text. produced_by_verify: tokens that verify steps produced. draft_lost: whether the draft was
    lost, before the answer began or on its way. notes: what the request's figures say about it. draft_steps,
    lookup_steps: how many steps verified so many of the draft model's tokens, and so many that were looked up.
    """

    block_size: int
    costs: BatchCosts = field(default_factory=BatchCosts)
    fixed: int | None = None
    prompt_tokens: int = 0
    unread: int = 0
    steps: int = 0
    offered: int = 0
    looked_up: int = 0
    verify_steps: int = 0
    produced_by_verify: int = 0
    draft_lost: bool = False
    notes: list[str] = field(default_factory=list)
    draft_steps: Counter[int] = field(default_factory=Counter)
    lookup_steps: Counter[int] = field(default_factory=Counter)
    _drafted_steps: int = 0
    """Verify steps with the draft model's tokens."""
    _acceptance: Acceptance = field(default_factory=lambda: Acceptance(0))
    _current: int = 0
    _lost: float = 0.0
    """How many more of them plain steps would have come to in the time of those that verified the draft model's
    tokens."""
    _tried_tokens: float = TRIED_TOKENS
    """How many tokens more than their share may be lost."""
    _begins_poorly: bool = False
    """Whether plain decode promised more from the start, by how drafts behind prompts like this one began."""
    _tries: int = 0
    """Blocks of the try that goes on."""
    _lookups_missed: float = 1.0
    _looked_up_again: float = 0.0
    """How many steps verified tokens that were looked up, of which some were wrong, and behind how many of these steps
    others were looked up; older ones count less. One behind which none were is taken to have been seen before."""
    _lookup_missed: bool = False
    """Whether the last step was one of them."""
    _rests_among: int = 0
    """Of how many answers it was one when its last pause began."""
    _planned: deque[int] = field(default_factory=deque)
    """Lengths of the next steps that are decided already: measurements, what is left of a pause, and the try that ends
    it with the plain step in which it is judged."""

    def __post_init__(self) -> None:
        self._current = self.block_size - 1 if self.fixed is None else self.fixed
        self._acceptance = Acceptance(self.block_size - 1)
        self.costs.join(id(self))

    @property
    def acceptance_length(self) -> float | None:
        """The mean number of tokens that a verify step produced, None without such a step."""
        return self.produced_by_verify / self.verify_steps if self.verify_steps else None

    @property
    def steady_steps(self) -> int | None:
        """How many of the next steps will be as long as the next one, since no measurement is planned or due before;
        None for any number."""
        if not self._is_settled and self.costs.limit == 0:
            # Plain decode of so many answers is measured, and then they draft.
            return PROBE_STEPS
        if not self._planned:
            if self._is_settled or self._drafted_steps >= WARM_UP_STEPS:
                return None
            # Each of them is judged before the next one follows, however well drafts of others began: a block that
            # is of no use costs more than a step that is sent.
            return 1
        return self.planned_steps

    @property
    def planned_steps(self) -> int | None:
        """How many of the next steps, of PLANNED_AHEAD at most, are as long as the next one because that was decided
        before; None where each is decided when it comes."""
        if not self._planned:
            return None
        # A rest may have thousands.
        [first, *others] = itertools.islice(self._planned, PLANNED_AHEAD)
        return next((count for count, length in enumerate(others, 1) if length != first), 1 + len(others))

    @property
    def expected_tokens(self) -> float:
        """How many tokens the next step produces on average with the draft model's tokens, or without any."""
        return self._expected(self.draft_tokens())

    @property
    def rests(self) -> bool:
        """Whether the next step is to be plain, whatever the draft model proposed for it."""
        return bool(self._planned) and not self._planned[0]

    def draft_tokens(self, *, verifying: bool = False) -> int:
        """Return how many draft tokens the next step should verify. verifying: the one after it is meant, which the
        draft is asked for with a step that verifies some."""
        if not self.steps:
            self._take_prior()
        place = int(verifying and self.is_trying)
        count = self._planned[place] if len(self._planned) > place else self._current
        limit = self.costs.limit if self.fixed is None else None
        return count if limit is None else min(count, limit)

    @property
    def is_trying(self) -> bool:
        """Whether the next step is one that tries the draft at the end of a pause."""
        return bool(self._planned) and self._planned[0] > 0

    def least_accepted(self, draft_tokens: int) -> int:
        """Return how many of the next step's draft tokens, which are the draft model's, must be accepted for another
        block to be verified behind it, as far as that can be foreseen; 0 where one is in any case, or others are
        decoded too, whose steps change what blocks cost."""
        # Where drafts are good one is verified behind none that is accepted, which is told first: the workers wait.
        if self._is_settled or self.costs.shared or self._drafts_behind(draft_tokens, 0):
            return 0
        return bisect.bisect_left(
            range(draft_tokens + 1), True, 1, key=lambda accepted: self._drafts_behind(draft_tokens, accepted)
        )

    def _drafts_behind(self, draft_tokens: int, accepted: int) -> bool:
        """Return whether a block would be verified behind a step of which so many draft tokens are accepted."""
        behind = copy.copy(self)
        behind._acceptance, behind._planned = self._acceptance.copied(), self._planned.copy()
        behind.notes = []
        behind.steps += 1
        behind._drafted_steps += 1
        behind._take_in(draft_tokens, accepted)
        behind._choose()
        return behind.draft_tokens() > 0

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
        expected = expected_by_length(survival, lengths_of(len(survival) + 1))
        longer = [length for length, tokens in expected.items() if length and tokens > least]
        values = self.costs.values([expected[length] for length in longer], longer, looked_up=True)
        values_own = self.costs.values([self._expected(own)], [own])
        if values is None or values_own is None:
            return max((length for length in longer if expected[length] > TRIED_TOKENS_PER_STEP), default=0)
        worth = dict(zip(longer, values, strict=True))
        best = max(worth, key=worth.__getitem__, default=0)
        return best if best and worth[best] > values_own[0] else 0

    def asks_beside(self, survival: Sequence[float]) -> bool:
        """Return whether to ask the draft model for its next block with a step that verifies tokens which were looked
        up. survival: how likely each of them is right where those before it are."""
        own, right = self.draft_tokens(), math.prod(survival)
        again = right + (1 - right) * self._looked_up_again / self._lookups_missed
        return bool(own) and self.costs.pays_to_propose(again, self._expected(own), own)

    def observe_first_block(self, draft_tokens: int, seconds: float) -> float:
        """Record how long the draft model took to read what it had not read of the prompt, and to make its first block.
        Return how much of that was reading; 0 where it is not known, or others' steps may have come between.
        """
        rows, self.unread = self.unread, 0
        if self.costs.shared:
            return 0.0
        reading = self.costs.observe_context(rows, draft_tokens + 1, seconds)
        self._lost += self.costs.context_tokens(rows)
        return reading

    def leave(self) -> None:
        """Say that the request is not decoded any more."""
        self.costs.observe_ease(self._acceptance.surplus, self._acceptance.information)
        self.costs.leave(id(self))

    def lose_draft(self, why: str) -> None:
        """Go on without a draft, because it was lost."""
        self.draft_lost = True
        self.switch_off(f"plain decode: the draft was lost ({why})")

    def switch_off(self, note: str) -> None:
        """Go on without a draft. note: why, for the request's figures."""
        self._current, self.block_size = 0, 1
        self.costs.give_up(id(self))
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
        block_share: float = 0.0,
        block_rows: int = 0,
    ) -> None:
        """Record a step that verified `draft_tokens`, of which `accepted` were taken.

        seconds: how long the step took, with the proposal for the next one. batch: what it was computed in, None
        where that is not known. looked_up: whether they were looked up in the text, and are not the draft model's.
        block_share: which share of the seconds the draft model took for its next block of `block_rows` rows; 0 where it
        was asked for none.
        """
        self.steps += 1
        if draft_tokens:
            self.verify_steps += 1
            self.offered += draft_tokens
            self.produced_by_verify += accepted + 1
            (self.lookup_steps if looked_up else self.draft_steps)[draft_tokens] += 1
        if batch is None and not self.costs.shared:
            block_seconds, asks = seconds * min(MOST_BLOCK_SHARE, block_share), int(block_rows > 0)
            batch = BatchTaken(1, draft_tokens, seconds - block_seconds, asks, block_seconds, block_rows)
        if self._lookup_missed:
            self._lookups_missed = FORGETTING * self._lookups_missed + 1
            self._looked_up_again = FORGETTING * self._looked_up_again + looked_up
        self._lookup_missed = looked_up and accepted < draft_tokens
        if looked_up:
            # They say nothing of the draft model's next ones.
            self.looked_up += draft_tokens
            self.costs.observe(id(self), draft_tokens, batch)
            return
        self.costs.observe(id(self), draft_tokens, batch)
        if draft_tokens:
            self.costs.beginnings.observe(self.prompt_tokens, self._drafted_steps, draft_tokens, accepted)
            self._drafted_steps += 1
        self._take_in(draft_tokens, accepted)
        self._hope()
        self._choose()

    def _take_in(self, draft_tokens: int, accepted: int) -> None:
        """Take a step with so many of the draft model's tokens, of which so many were accepted, into what is known of
        this answer, and off the steps that are planned."""
        if draft_tokens:
            self._acceptance.observe(draft_tokens, accepted, begins=self._begins)
            self._count_loss(draft_tokens, accepted + 1)
            others = self.costs.beginnings.shares_of_block(self._drafted_steps) if self.costs.shared else ()
            if others:
                self._acceptance.go_on(others, ELSEWHERE)
        if self.rests and self._pays_again:
            self._planned.clear()
        # Proposals are asked for one step ahead, so a step that was decided before the plan does not count for it.
        if self._planned and bool(self._planned[0]) == bool(draft_tokens):
            self._planned.popleft()
            if draft_tokens:
                self._judge_try(draft_tokens)

    def _count_loss(self, draft_tokens: int, produced: int) -> None:
        """Count what a step with the draft model's tokens lost, or how much of that it won back."""
        least = self.costs.least_tokens(draft_tokens, self._lengths)
        if least is None:
            least = 1 + draft_tokens * ROW_COST
        if not self.costs.shared:
            least = max(least, 1 + LEAST_COST)
        credit = 0.0 if self.costs.shared else CREDIT_TOKENS
        self._lost = max(-credit, self._lost + least - produced)

    @property
    def _left_to_lose(self) -> float:
        """How many tokens may be lost by drafting from now on, though plain decode promises more."""
        if self.costs.shared:
            return TRIED_SHARE / RESTS_AMONG_OTHERS * self.steps - self._lost
        return self._tried_tokens + TRIED_SHARE * self.steps - self._lost

    def _risk(self, draft_tokens: int) -> float:
        """Return how many tokens a step with so many draft tokens loses at most."""
        least = self.costs.least_tokens(draft_tokens, self._lengths)
        lost = draft_tokens if least is None else max(0.0, least - 1)
        return lost + self.costs.context_tokens(self.unread)

    def _judge_try(self, draft_tokens: int) -> None:
        """Go on to try the draft while there is something left to lose by it, and rest again where there is not."""
        if self._risk(draft_tokens) > self._left_to_lose:
            self._rest()
            return
        self._tries += 1
        self._planned.clear()
        if self._tries < VERIFY_PROBES:
            self._planned.extend([draft_tokens, 0])

    def _take_prior(self) -> None:
        """Take how the drafts of others began for what this one's does: of all others, or of those to prompts of about
        the same length, where drafting did not pay for these. Then, or where others are decoded too, choose before the
        first step: a block is known to be of no use, or one that is too long is everybody's."""
        costs = self.costs
        if self._is_settled or not costs.beginnings.is_known:
            return
        begun = functools.partial(Acceptance, self.block_size - 1, ease_variance=costs.ease_variance)
        if costs.shared:
            first = costs.beginnings.shares_of_block(0) or costs.beginnings.shares
            self._acceptance = begun(first, costs.likeness, lasting=costs.likeness)
        else:
            self._acceptance = begun(costs.beginnings.shares, PRIOR_BLOCKS)
            alike = costs.beginnings.shares_of(self.prompt_tokens)
            if alike and not self._promises(begun(alike, PRIOR_BLOCKS)):
                self._acceptance, self._begins_poorly = begun(alike, PRIOR_BLOCKS), True
        promises = self._promises(self._acceptance)
        self._tried_tokens = TRIED_TOKENS_OF_KNOWN if promises else TRIED_TOKENS_OF_POOR
        self._hope()
        self._choose()

    def _promises(self, acceptance: Acceptance) -> bool:
        """Return whether blocks of which so many tokens are accepted promise more than plain decode, as far as it is
        known what they cost."""
        expected = expected_by_length(acceptance.shares, self._lengths)
        values = self.costs.values([*expected.values()], self._lengths)
        return values is None or max(values) > values[0] * DRAFT_GAIN

    def _hope(self) -> None:
        """Tell what this answer expects of the draft model, wherever it is about to choose."""
        if self._is_choosing:
            self.costs.hope(id(self), self._expected_by_length)

    def _choose(self) -> None:
        if not self._is_choosing:
            return
        longest = self.block_size - 1
        lengths = self._lengths
        expected = self._expected_by_length
        values = self.costs.values([*expected.values()], lengths)
        if values is None:
            tokens = max(self._expected(longest), self.acceptance_length or 0.0)
            if tokens < SURE_TOKENS_PER_STEP and not self.costs.shared:
                self._planned.extend([0] * PLAIN_PROBES)
            return
        worth = dict(zip(lengths, values, strict=True))
        allotted = self.costs.allotted(id(self), expected)
        best = max(lengths, key=worth.__getitem__) if allotted is None else allotted
        if not self.costs.shared and worth[best] <= worth[self._current] * HYSTERESIS:
            best = self._current
        if not self.costs.shared and worth[best] <= worth[0] * DRAFT_GAIN:
            best = 0
        if best == 0:
            best = max((length for length in lengths if length), key=worth.__getitem__)
            if self.costs.shared or self._risk(best) > self._left_to_lose:
                self._rest()
                return
        if best < self._current:
            self._note(f"shorter blocks: {best + 1} rows instead of {self._current + 1}")
        self._current = best

    @property
    def _pays_again(self) -> bool:
        """Whether a pause is over because drafting takes less of others than when it began: fewer are decoded, or more
        of them draft."""
        if 2 * self.costs.count <= self._rests_among:
            return True
        return self.costs.shared and self.costs.pays_surely(id(self), self._expected_by_length)

    def _rest(self) -> None:
        """Decode plainly until the draft may be tried again: the text may become easier to predict."""
        probe = self._lengths[len(self._lengths) // 2]
        share = TRIED_SHARE / (RESTS_AMONG_OTHERS if self.costs.shared else 1)
        wanted = math.ceil((self._risk(probe) - self._left_to_lose) / share)
        steps = min(max(SHORTEST_REST_STEPS, wanted), LONGEST_REST_STEPS)
        self._tries, self._rests_among = 0, self.costs.count
        self._planned.clear()
        self._planned.extend([*[0] * steps, probe, 0])
        self._note("plain decode, but for a block now and then: drafting cost more than it won")

    @property
    def _begins(self) -> bool:
        """Whether the last verify step was one of those that tell how answers begin."""
        return self._drafted_steps <= BEGINNING_BLOCKS

    @property
    def _is_choosing(self) -> bool:
        """Whether it is to be chosen now how many draft tokens the next step verifies."""
        return not self._is_settled and not self._planned and self._is_warm

    @property
    def _is_settled(self) -> bool:
        """Whether nothing is left to choose of the draft model's blocks."""
        return self.block_size == 1 or self.fixed is not None

    @property
    def _is_warm(self) -> bool:
        """Whether it is known how often draft tokens are accepted."""
        is_told = self.costs.shared or self._begins_poorly or self._drafted_steps > 0
        known = self.costs.beginnings.is_known and is_told
        return known or self._drafted_steps >= WARM_UP_STEPS

    @property
    def _lengths(self) -> Sequence[int]:
        """How many draft tokens a step may verify."""
        return lengths_of(self.block_size)

    @property
    def _expected_by_length(self) -> dict[int, float]:
        return expected_by_length(self._acceptance.shares, self._lengths)

    def _expected(self, draft_tokens: int) -> float:
        """Return how many tokens a step with so many draft tokens produces on average."""
        return expected_tokens(self._acceptance.shares, draft_tokens)

    def _note(self, note: str) -> None:
        if not self.notes or self.notes[-1] != note:
            self.notes.append(note)
