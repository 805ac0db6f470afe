"""Blocks of answers that are decoded together: how long they become follows from what rows cost all of them."""

from __future__ import annotations

import pytest

from coordinator.engine.batch_costs import BatchCosts, BatchTaken, lengths_of
from coordinator.engine.speculation import Speculation

BLOCK = 16


def decode(answers: list[Speculation], costs: BatchCosts, rounds: int, accepted: int, row_s: float) -> list[int]:
    """Take steps of all answers together, each row of which takes so long, and `accepted` draft tokens are right.

    Returns the draft tokens of the last half of the steps.
    """
    taken: list[int] = []
    for _ in range(rounds):
        lengths = [answer.draft_tokens() for answer in answers]
        seconds = 1.0 + row_s * sum(lengths)
        for answer, length in zip(answers, lengths, strict=True):
            answer.observe(length, min(accepted, length), seconds, BatchTaken(len(answers), sum(lengths), seconds))
        taken += lengths
    return taken[len(taken) // 2 :]


@pytest.mark.parametrize(
    ("count", "row_s", "least", "most"),
    [(1, 0.02, 15, 15), (2, 0.02, 3, 15), (16, 0.02, 3, 3), (16, 0.5, 0, 0), (16, 0.0, 3, 15)],
)
def test_blocks_get_shorter_where_rows_are_dear_to_all(count: int, row_s: float, least: int, most: int) -> None:
    """Four draft tokens of a block are right: alone all of it is verified, of many answers the rows that pay."""
    costs = BatchCosts()
    answers = [Speculation(BLOCK, costs) for _ in range(count)]
    lengths = decode(answers, costs, 200, 4, row_s)
    # Those that pause try again now and then.
    assert least <= sorted(lengths)[len(lengths) // 2] <= most


def test_a_new_answer_begins_as_the_others_go_on() -> None:
    """Among others it does not try whole blocks first; alone it begins anew."""
    costs = BatchCosts()
    answers = [Speculation(BLOCK, costs) for _ in range(8)]
    decode(answers, costs, 100, 0, 0.5)
    assert Speculation(BLOCK, costs).draft_tokens() == 0
    for answer in answers:
        answer.leave()
    assert not costs.shared
    assert Speculation(BLOCK, costs).draft_tokens() == BLOCK - 1


def test_lengths_of_blocks() -> None:
    assert lengths_of(16) == [0, 1, 3, 7, 15]
    assert lengths_of(4) == [0, 1, 3]
    assert lengths_of(1) == [0]
