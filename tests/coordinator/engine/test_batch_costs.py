"""Blocks of answers that are decoded together: how long they become follows from what rows cost all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from coordinator.engine.acceptance import Acceptance
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


def test_plain_decode_of_many_is_measured_for_a_few_steps() -> None:
    """So many steps follow by themselves, and no more: what comes behind them is decided anew."""
    costs = BatchCosts()
    answers = [Speculation(BLOCK, costs) for _ in range(8)]
    assert [answer.draft_tokens() for answer in answers] == [0] * 8
    assert {answer.steady_steps for answer in answers} == {4}
    decode(answers, costs, 4, 4, 0.02)
    assert max(answer.draft_tokens() for answer in answers) > 0


def test_answers_that_come_at_once_begin_as_many() -> None:
    """The first of them knows of the others too before it asks for draft tokens."""
    costs = BatchCosts()
    before = [Speculation(BLOCK, costs) for _ in range(8)]
    decode(before, costs, 100, 0, 0.5)
    for answer in before:
        answer.leave()
    answers = [Speculation(BLOCK, costs) for _ in range(8)]
    assert [answer.draft_tokens() for answer in answers] == [0] * 8


def test_a_new_answer_is_judged_by_how_others_began() -> None:
    """One whose text became easy drafts most of all steps; that promises nothing to those that begin."""
    costs = BatchCosts()
    answers = [Speculation(BLOCK, costs) for _ in range(8)]
    decode(answers, costs, 20, 0, 0.1)
    # One that goes on.
    for _ in range(200):
        answers[0].observe(7, 7, 2.0, BatchTaken(8, 7, 2.0))
    assert (answers[0].acceptance_length or 0) > 7
    assert Speculation(BLOCK, costs).draft_tokens() == 0


def test_a_prior_gives_way_to_the_first_steps() -> None:
    """Where the drafts of others are right from the beginning and those of a new answer are not, it stops at once; its
    steps do not follow by themselves before that is known."""
    costs = BatchCosts()
    decode([Speculation(BLOCK, costs) for _ in range(8)], costs, 50, 4, 0.05)
    unlike = Speculation(BLOCK, costs)
    lengths = []
    while unlike.draft_tokens():
        assert unlike.steady_steps == 1
        lengths += [unlike.draft_tokens()]
        seconds = 1.0 + 0.05 * (8 * 3 + lengths[-1])
        unlike.observe(lengths[-1], 0, seconds, BatchTaken(9, 8 * 3 + lengths[-1], seconds))
    assert 1 <= len(lengths) <= 3


def test_lengths_of_blocks() -> None:
    assert lengths_of(16) == (0, 1, 3, 7, 15)
    assert lengths_of(4) == (0, 1, 3)
    assert lengths_of(1) == (0,)


def test_what_is_looked_up_is_not_charged_with_the_draft_model() -> None:
    """Of the same number of draft tokens, those that were looked up cost what their rows do, without the draft model's
    next block; and a block that will hardly be used is not worth asking for."""
    costs = BatchCosts()
    costs.join("answer")
    for length, seconds, block_seconds in ((0, 7.0, 0.0), (15, 12.0, 5.0), (15, 12.0, 0.0)) * 20:
        asks = int(block_seconds > 0)
        costs.observe("answer", length, BatchTaken(1, length, seconds, asks, block_seconds, asks * BLOCK))

    assert costs.values([4.0], [15]) == pytest.approx([4 / 17], rel=0.01)
    assert costs.values([4.0], [15], looked_up=True) == pytest.approx([4 / 12], rel=0.01)
    assert [costs.pays_to_propose(chance, 5.0, 15) for chance in (0.0, 0.2, 0.9)] == [True, True, False]
    # Behind a step without draft tokens a block that wins nothing is not worth it either.
    assert not costs.pays_to_propose(0.2, 1.0, 15)


def test_a_block_is_taken_to_cost_half_a_step_until_that_is_known() -> None:
    """Where an answer is looked up from its beginning on, no plain step tells for hundreds of tokens what blocks cost.
    They are asked for beside what is looked up where they are likely to win more, and not in any case."""
    costs = BatchCosts()
    costs.join("answer")
    costs.observe("answer", 15, BatchTaken(1, 15, 12.0, 1, 5.0, BLOCK))
    assert [costs.pays_to_propose(chance, 5.0, 15) for chance in (0.0, 0.4, 0.9)] == [True, True, False]
    assert not costs.pays_to_propose(0.4, 2.0, 15)


@pytest.mark.parametrize(("chances", "least", "most"), [((0.8,), 0.0, 0.4), ((0.1, 0.95), 1.0, 9.0)])
def test_how_much_texts_differ_is_seen_by_their_first_blocks(
    chances: tuple[float, ...], least: float, most: float
) -> None:
    """Answers whose draft tokens are right by the same chance differ by luck alone; easy and hard ones by more."""
    costs, numbers = BatchCosts(), random.Random(1)
    for answer in range(80):
        chance = chances[answer % len(chances)]
        acceptance = Acceptance(15, costs.beginnings.shares)
        for number in range(4):
            accepted = next((place for place in range(15) if numbers.random() >= chance), 15)
            costs.beginnings.observe(9, number, 15, accepted)
            acceptance.observe(15, accepted, begins=True)
        costs.observe_ease(acceptance.surplus, acceptance.information)
    assert least <= costs.ease_variance <= most


def test_what_reading_a_prompt_takes_is_told_from_what_a_block_does() -> None:
    """Nothing is known before both were measured; then it grows with the prompt, in plain steps."""
    costs = BatchCosts()
    costs.join("answer")
    assert costs.observe_context(1000, BLOCK, 0.015) == 0.0
    costs.observe("answer", 0, BatchTaken(1, 0, 0.01))
    costs.observe("answer", 15, BatchTaken(1, 15, 0.02, 1, 0.005, BLOCK))
    assert costs.context_tokens(1000) == 0.0
    assert costs.observe_context(1000, BLOCK, 0.015) == pytest.approx(0.01)
    assert costs.context_tokens(1000) == pytest.approx(1.0)
    assert costs.context_tokens(3000) == pytest.approx(3.0)
    # A short one that took less than a block by chance.
    assert costs.observe_context(10, BLOCK, 0.004) == 0.0
    assert 0.8 < costs.context_tokens(1000) < 1.0
    costs.join("another")
    assert costs.context_tokens(1000) == 0.0


def simulated_ms(chances: Sequence[float], first_blocks: Sequence[int], *, drafts: bool, clients: int = 16) -> float:
    """Return the milliseconds of so many clients' answers of 200 tokens on two stages, by the law that was measured of
    the demo pair on two cores: a step takes 3 ms, 0.35 for each session, 0.12 for each draft token and 0.4 for a
    further kind of rows; a draft's call 1.6 ms and 1.1 for each session that asks. Half of the sessions are in each
    batch, and the last stage, which has the draft, decides.

    chances: of each draft token being right behind those before it, in turn by answer. first_blocks: how many are right
    at least in an answer's first blocks.
    """
    costs, numbers, elapsed = BatchCosts(), random.Random(1), 0.0
    texts = [chances[number % len(chances)] for number in range(4 * clients)]
    running: list[tuple[Speculation, float]] = []
    produced: dict[int, int] = {}
    batches = 0
    while texts or running:
        while texts and len(running) < clients:
            answer = Speculation(BLOCK if drafts else 1, costs), texts.pop(0)
            running.append(answer)
            produced[id(answer[0])] = 0
        batch = running[batches % 2 :: 2] if len(running) > 1 else running
        batches += 1
        lengths = [answer.draft_tokens() for answer, _ in batch]
        proposing = sum(length > 0 for length in lengths)
        kinds = len({length > 0 for length in lengths})
        milliseconds = 3 + 0.35 * len(batch) + 0.12 * sum(lengths) + 0.4 * (kinds - 1)
        drafting = 1.6 + 1.1 * proposing if proposing else 0.0
        elapsed += milliseconds + drafting
        for (answer, chance), length in zip(batch, lengths, strict=True):
            blocks = answer.verify_steps
            accepted = min(length, first_blocks[blocks]) if blocks < len(first_blocks) else 0
            while accepted < length and numbers.random() < chance:
                accepted += 1
            told = drafting / 1e3 if length or not proposing else None
            taken = BatchTaken(
                len(batch), sum(lengths), milliseconds / 1e3, proposing, told, length + 1 if proposing else 0
            )
            answer.observe(
                length,
                accepted,
                (milliseconds + drafting) / 1e3,
                taken if costs.shared else None,
                block_share=drafting / (milliseconds + drafting),
                block_rows=length + 1 if length else 0,
            )
            produced[id(answer)] += accepted + 1
        for done in [one for one in running if produced[id(one[0])] >= 200]:
            running.remove(done)
            done[0].leave()
    return elapsed


@pytest.mark.parametrize(
    ("chances", "first_blocks", "most"),
    [
        # Nothing of a block is right: a few blocks show it.
        ((0.0,), (), 1.03),
        # What a mean chat is: its beginning is known by heart.
        ((0.35,), (14, 10, 7, 4), 1.0),
        # One in four is easy, and pays for what it takes of the others.
        ((0.2, 0.2, 0.2, 0.95), (), 1.03),
        # All are: then nearly all of them draft.
        ((0.95,), (), 0.9),
    ],
)
def test_drafts_among_many_take_no_longer_than_plain_decode(
    chances: Sequence[float], first_blocks: Sequence[int], most: float
) -> None:
    """By the same steps' costs, from an engine's first answer on."""
    plain = simulated_ms(chances, first_blocks, drafts=False)
    assert simulated_ms(chances, first_blocks, drafts=True) <= most * plain
