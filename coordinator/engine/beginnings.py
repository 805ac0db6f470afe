"""How the drafts of answers began, which tells how another answer's will: of all answers, of those to prompts of about
the same length, and block by block.

Answers that go on to draft are the ones whose draft tokens are accepted, so that all steps together would promise too
much of an answer that begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

SLOW_SMOOTHING = 0.02
"""Weight of the newest block in the moving averages of what is known of all answers together."""

BEGINNING_BLOCKS = 4
"""Verify steps of an answer that tell how answers begin."""

KNOWN_STEPS = 8
"""Of how many such steps it is known how often draft tokens of a new answer will be accepted, in all likelihood."""

FIRST_BLOCKS, KNOWN_ANSWERS = 8, 3
"""Blocks of an answer that are told apart by how many came before them, and answers that tell enough of one, or of
prompts of about one length: texts of one kind often begin alike, and then less and less of a block is accepted."""


class Survival:
    """How often each draft token of blocks of several answers was accepted behind those before it.

    shares: by place, moving averages; of those that were never reached there are none.
    """

    def __init__(self) -> None:
        self.shares: list[float] = []
        self._reached: list[int] = []

    def observe(self, draft_tokens: int, accepted: int) -> None:
        """Record a block of so many draft tokens, the first `accepted` of which were accepted."""
        for place in range(min(draft_tokens, accepted + 1)):
            if place == len(self.shares):
                # Until more is known, as good as the place before it.
                self.shares.append(self.shares[-1] if self.shares else 0.5)
                self._reached.append(1)
            self._reached[place] += 1
            weight = max(SLOW_SMOOTHING, 1 / self._reached[place])
            self.shares[place] += weight * ((place < accepted) - self.shares[place])


class Beginnings:
    """What answers before have shown. Who sends long prompts mostly wants something else done than who sends short
    ones, so that those of about one length tell most of each other."""

    def __init__(self) -> None:
        self._steps = 0
        self._all = Survival()
        self._by_length: dict[int, Survival] = {}
        self._answers: Counter[int] = Counter()
        """How many answers to prompts of each class of lengths there were."""
        self._blocks: list[Survival] = []
        self._block_counts: list[int] = []
        """How often draft tokens were accepted in the first block of each answer, in the second and so on, and how many
        answers had one."""

    @staticmethod
    def _class_of(prompt_tokens: int) -> int:
        """Return which lengths are about the same: each class goes up to four times the one before. 0 for lengths that
        tell nothing."""
        return prompt_tokens.bit_length() // 2

    @property
    def is_known(self) -> bool:
        """Whether enough answers were decoded to tell how another one's draft tokens will be accepted."""
        return self._steps >= KNOWN_STEPS

    def observe(self, prompt_tokens: int, number: int, draft_tokens: int, accepted: int) -> None:
        """Record how many draft tokens were accepted in a block of an answer to a prompt of so many tokens. number: how
        many blocks the answer had before."""
        if number < FIRST_BLOCKS:
            self._blocks += [Survival() for _ in range(number + 1 - len(self._blocks))]
            self._block_counts += [0] * (number + 1 - len(self._block_counts))
            self._block_counts[number] += 1
            self._blocks[number].observe(draft_tokens, accepted)
        if number < BEGINNING_BLOCKS:
            of = self._class_of(prompt_tokens)
            self._steps += 1
            self._answers[of] += number == 0
            for survival in (self._all, self._by_length.setdefault(of, Survival())):
                survival.observe(draft_tokens, accepted)

    @property
    def shares(self) -> Sequence[float]:
        """How often each draft token of the first blocks is accepted behind those before it."""
        return self._all.shares

    def shares_of(self, prompt_tokens: int) -> Sequence[float]:
        """Return the same for answers to such prompts; none where too few of them were decoded."""
        of = self._class_of(prompt_tokens)
        return self._by_length[of].shares if of and self._answers[of] >= KNOWN_ANSWERS else ()

    def shares_of_block(self, number: int) -> Sequence[float]:
        """Return the same for the block of an answer that has so many before it; none where too few answers had one, or
        it is none of the first ones."""
        known = number < len(self._blocks) and self._block_counts[number] >= KNOWN_ANSWERS
        return self._blocks[number].shares if known else ()
