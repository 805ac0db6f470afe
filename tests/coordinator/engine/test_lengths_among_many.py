"""How many draft tokens many answers verify on a GPU, where steps of 129 rows take as long as those of 256: little less
comes of it than of the one length that is known to be the best."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from coordinator.engine.batch_costs import BatchCosts, BatchTaken, expected_tokens, lengths_of
from coordinator.engine.speculation import Speculation

BLOCK, TOKENS = 16, 128
ROW_COUNTS = (16, 64, 128, 256, 512)
STEP_MS = dict(zip(ROW_COUNTS, (5.3, 6.1, 7.2, 10.0, 17.0), strict=True))
BLOCKS_MS = dict(zip(ROW_COUNTS, (1.0, 1.3, 1.8, 2.6, 4.6), strict=True))
"""What a step of an 8B shape takes on one H200, and the blocks of its draft."""


def seconds_of(rows: int, milliseconds: dict[int, float]) -> float:
    most = ROW_COUNTS[-1]
    steps, left = divmod(rows, most)
    last = next(milliseconds[count] for count in ROW_COUNTS if left <= count) if left else 0.0
    return (steps * milliseconds[most] + last) / 1e3


def tokens_per_s(
    clients: int, chances: Sequence[float], fixed: int | None, costs: BatchCosts, seed: int, rounds: int = 6
) -> float:
    """Return how many tokens a second so many clients get, each of whom asks for `rounds` answers.

    chances: of a draft token being right behind those before it, in turn by answer. fixed: how many draft tokens each
    step verifies, None to choose.
    """
    numbers, seconds, produced = random.Random(seed), 0.0, 0
    costs.compute_with(ROW_COUNTS)
    left = clients * rounds
    running: list[tuple[Speculation, float]] = []
    blocks: dict[int, int] = {}
    made: dict[int, int] = {}
    while left or running:
        while left and len(running) < clients:
            speculation = Speculation(BLOCK, costs, fixed)
            running.append((speculation, chances[left % len(chances)]))
            blocks[id(speculation)], made[id(speculation)] = 0, numbers.randint(0, TOKENS // 2) if left > clients else 0
            left -= 1
        verified = [blocks[id(one)] for one, _ in running]
        asked = [one.draft_tokens(verifying=block > 0) for (one, _), block in zip(running, verified, strict=True)]
        proposing, rows = sum(length > 0 for length in asked), len(running) + sum(verified)
        step_s = seconds_of(rows, STEP_MS)
        block_s = seconds_of(sum(asked) + proposing, BLOCKS_MS) if proposing else 0.0
        seconds += step_s + block_s
        for (one, chance), block, length in zip(running, verified, asked, strict=True):
            accepted = 0
            while accepted < block and numbers.random() < chance:
                accepted += 1
            told = block_s if length or not proposing else None
            taken = BatchTaken(len(running), sum(verified), step_s, proposing, told, length + 1 if proposing else 0)
            own = block_s if length else 0.0
            one.observe(
                block,
                accepted,
                step_s + own,
                taken if costs.shared else None,
                block_share=own / (step_s + own),
                block_rows=length + 1 if length else 0,
            )
            blocks[id(one)] = 0 if one.rests else length
            made[id(one)] += accepted + 1
            produced += accepted + 1
        for done in [one for one in running if made[id(one[0])] >= TOKENS]:
            running.remove(done)
            done[0].leave()
    return produced / seconds


@pytest.mark.parametrize(
    ("clients", "chances", "least"),
    [
        (4, (0.83,), 0.9),
        (16, (0.83,), 0.88),
        pytest.param(64, (0.83,), 0.88, marks=pytest.mark.slow),
        pytest.param(16, (0.6,), 0.88, marks=pytest.mark.slow),
        pytest.param(16, (0.95,), 0.9, marks=pytest.mark.slow),
        (16, (0.2, 0.95), 1.0),
        (16, (0.0,), 0.98),
        pytest.param(64, (0.0,), 0.98, marks=pytest.mark.slow),
    ],
)
def test_little_is_lost_to_the_best_common_length(clients: int, chances: Sequence[float], least: float) -> None:
    """Of answers that are alike; where they are not, more comes of what each of them chooses."""
    fixed = [tokens_per_s(clients, chances, length, BatchCosts(), 1) for length in lengths_of(BLOCK)]
    chosen = [tokens_per_s(clients, chances, None, BatchCosts(), seed) for seed in (1, 2)]
    assert sum(chosen) / len(chosen) >= least * max(fixed)


def test_draft_tokens_fill_the_rows_that_steps_are_computed_with() -> None:
    """Steps of 16 answers get all of 128 rows and not one more, the easy texts most of them; a later answer gets what
    one has left that is gone, and those that do not come true are left out."""
    costs, answers = BatchCosts(), [f"answer {number}" for number in range(16)]
    costs.compute_with(ROW_COUNTS)
    for answer in answers:
        costs.join(answer)
    for rows in (16, *ROW_COUNTS) * 8:
        block_s = BLOCKS_MS[rows] / 1e3 if rows > 16 else 0.0
        for answer in answers:
            taken = BatchTaken(16, rows - 16, STEP_MS[rows] / 1e3, 16 if block_s else 0, block_s, rows // 16)
            costs.observe(answer, 7 if block_s else 0, taken)
    chances = {answer: 0.95 if number < 4 else 0.7 for number, answer in enumerate(answers)}
    hopes = {
        answer: {length: expected_tokens([chance] * 15, length) for length in lengths_of(BLOCK)}
        for answer, chance in chances.items()
    }
    for answer, hope in hopes.items():
        costs.hope(answer, hope)
    given = {answer: costs.allotted(answer, hope) for answer, hope in hopes.items()}
    lengths = [given[answer] or 0 for answer in answers]
    assert lengths[:4] == [15] * 4
    assert max(lengths[4:]) <= 7
    assert 120 < 16 + sum(lengths) <= 128
    costs.leave("answer 0")
    costs.join("later")
    assert costs.allotted("later", hopes["answer 1"]) == 15
    assert costs.allotted("answer 1", dict.fromkeys(lengths_of(BLOCK), 1.0)) == 0
