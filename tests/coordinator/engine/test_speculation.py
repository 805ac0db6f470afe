"""The choice of block length: goes on while it pays, shortens or stops when it doesn't, comes back when it might."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from coordinator.engine.batch_costs import BatchCosts, lengths_of
from coordinator.engine.speculation import LONGEST_REST_STEPS, SHORTEST_REST_STEPS, Speculation

STEP_MS = {0: 7.0, 1: 12.3, 3: 12.7, 7: 14.7, 15: 17.4}
"""What steps of the demo pair take with so many draft tokens, on one thread of a CPU in float32."""


def drive(speculation: Speculation, steps: int, accept: float, plain_s: float, verify_s: float) -> list[int]:
    """Feed steps as a model would give them: `accept` of each block's draft tokens, time growing with the block."""
    lengths = []
    for _ in range(steps):
        draft_tokens = speculation.draft_tokens()
        lengths.append(draft_tokens)
        seconds = plain_s + (verify_s - plain_s) * draft_tokens / 15
        speculation.observe(draft_tokens, min(draft_tokens, round(15 * accept)), seconds)
    return lengths


def test_good_draft_keeps_whole_blocks() -> None:
    """With most draft tokens accepted every step offers the whole block and nothing is probed."""
    speculation = Speculation(16)

    assert drive(speculation, 50, accept=0.6, plain_s=1.0, verify_s=2.0) == [15] * 50
    assert speculation.acceptance_length == 10
    assert speculation.notes == []


def test_useless_draft_is_rested_and_tried_again() -> None:
    """A draft that is never right costs a few steps, then plain decode goes on but for a block now and then."""
    speculation = Speculation(16)

    lengths = drive(speculation, 400, accept=0.0, plain_s=1.0, verify_s=2.0)

    assert sum(1 for length in lengths if length) < 40
    assert any(lengths[60:])
    assert "plain decode" in speculation.notes[0]
    assert speculation.acceptance_length == 1


def test_as_many_steps_are_steady_as_are_alike() -> None:
    """Steps that workers take by themselves end where a measurement or a pause does."""
    speculation = Speculation(16)
    drive(speculation, 60, accept=0.0, plain_s=1.0, verify_s=2.0)
    lengths, promised = [], []
    for _ in range(300):
        promised.append(speculation.steady_steps)
        lengths += drive(speculation, 1, accept=0.0, plain_s=1.0, verify_s=2.0)

    for step, (length, count) in enumerate(zip(lengths, promised, strict=True)):
        assert count is not None
        assert count >= 1
        assert {*lengths[step : step + count]} == {length}


def test_half_good_draft_gets_shorter_blocks() -> None:
    """Where only the first draft tokens come true and rows are dear, the block shrinks but doesn't vanish."""
    speculation = Speculation(16)

    lengths = drive(speculation, 100, accept=0.14, plain_s=1.0, verify_s=6.0)

    assert 0 < lengths[-1] < 15
    assert any("shorter blocks" in note for note in speculation.notes)


def test_text_that_becomes_easy_is_speculated_on_again() -> None:
    """After a hard stretch ends, whole blocks come back."""
    speculation = Speculation(16)
    drive(speculation, 60, accept=0.0, plain_s=1.0, verify_s=2.0)

    lengths = drive(speculation, 300, accept=1.0, plain_s=1.0, verify_s=2.0)

    assert lengths[-20:] == [15] * 20


def test_statistics_count_what_was_offered() -> None:
    """An always right draft gives acceptance_length = block size, an always wrong one 1 [17]."""
    right, wrong = Speculation(8), Speculation(8)
    right.observe(7, 7, 1.0)
    wrong.observe(7, 0, 1.0)

    assert (right.acceptance_length, right.offered) == (8, 7)
    assert (wrong.acceptance_length, wrong.offered) == (1, 7)


@pytest.mark.parametrize("steps", [0, 5, 30])
def test_switching_off_is_final(steps: int) -> None:
    """Once the draft is lost no draft tokens are asked for any more, whatever state the choice was in."""
    speculation = Speculation(16)
    drive(speculation, steps, accept=0.0, plain_s=1.0, verify_s=2.0)
    speculation.switch_off("gone")

    assert drive(speculation, 300, accept=0.0, plain_s=1.0, verify_s=2.0) == [0] * 300
    assert speculation.notes[-1] == "gone"


def test_without_a_draft_every_step_is_plain() -> None:
    """Block size 1 never draft tokens."""
    assert drive(Speculation(1), 20, accept=0.0, plain_s=1.0, verify_s=1.0) == [0] * 20


@pytest.mark.parametrize("accept", [0.0, 1.0])
def test_a_fixed_length_is_kept(accept: float) -> None:
    """Whatever it brings, alone and among others, and any number of steps may follow one another."""
    costs = BatchCosts()
    costs.join("another")
    for fixed in (1, 5, 15):
        speculation = Speculation(16, costs, fixed)
        assert drive(speculation, 60, accept, plain_s=1.0, verify_s=2.0) == [fixed] * 60
        assert speculation.steady_steps is None
        assert not speculation.notes


def decode(speculation: Speculation, tokens: int, chance: float, seed: int) -> tuple[list[int], float]:
    """Take steps until there are so many tokens, of which a draft token is right by chance behind those before it.

    Returns how many draft tokens each step verified, and the milliseconds of so many tokens.
    """
    numbers, lengths, produced, elapsed = random.Random(seed), list[int](), 0, 0.0
    while produced < tokens:
        length, accepted = speculation.draft_tokens(), 0
        while accepted < length and numbers.random() < chance:
            accepted += 1
        speculation.observe(length, accepted, STEP_MS[length] / 1e3)
        lengths.append(length)
        produced, elapsed = produced + accepted + 1, elapsed + STEP_MS[length]
    speculation.leave()
    return lengths, elapsed * tokens / produced


def best_fixed_ms(tokens: int, chance: float) -> float:
    """The least time in which one length for all steps comes to so many tokens, on average."""
    return min(
        tokens * STEP_MS[length] / sum(chance**place for place in range(length + 1)) for length in lengths_of(16)
    )


@pytest.mark.parametrize("tokens", [200, 400, 600, 1200])
@pytest.mark.parametrize("shared", [False, True])
def test_a_draft_that_is_never_right_costs_little(tokens: int, shared: bool) -> None:
    """From 200 tokens on at most 3 of 100, whether other answers came before or not, of which no answer takes more than
    its first blocks and a share of its tokens."""
    costs = BatchCosts()
    for answer in range(6):
        speculation = Speculation(16, costs if shared else BatchCosts())
        lengths, elapsed = decode(speculation, tokens, 0.0, answer)
        assert tokens * STEP_MS[0] / elapsed > 0.97
        assert any(lengths)


def test_a_draft_that_was_never_right_before_costs_still_less() -> None:
    """Answers that come one after another know how the drafts of those before them began: at 200 tokens at most 1.5 of
    100 are lost. A good draft is not held back by that."""
    for chance, least in ((0.0, 0.985), (0.9, 0.97)):
        costs = BatchCosts()
        elapsed = [decode(Speculation(16, costs), 200, chance, seed)[1] for seed in range(30)][10:]
        assert len(elapsed) * best_fixed_ms(200, chance) / sum(elapsed) > least


def test_hard_texts_among_easy_ones_are_told_by_their_first_blocks() -> None:
    """Every fourth text is one whose draft tokens are hardly ever right. What is known of the others says little of it,
    at places that its blocks never reach as well."""
    costs, elapsed = BatchCosts(), []
    for seed in range(60):
        milliseconds = decode(Speculation(16, costs), 200, 0.25 if seed % 4 == 3 else 0.95, seed)[1]
        if seed > 20 and seed % 4 == 3:
            elapsed.append(milliseconds)
    assert len(elapsed) * best_fixed_ms(200, 0.25) / sum(elapsed) > 0.97


def test_a_block_of_no_use_is_hardly_followed_by_another() -> None:
    """However well the drafts of most answers begin: no second block follows before the first one is judged, and an
    answer of whose draft nothing is right verifies two or three within 60 tokens."""
    costs, blocks = BatchCosts(), []
    for seed in range(60):
        is_poor = seed % 4 == 3
        speculation = Speculation(16, costs)
        speculation.draft_tokens()
        assert speculation.steady_steps == 1
        lengths, _ = decode(speculation, 60, 0.0 if is_poor else 0.95, seed)
        if seed > 20 and is_poor:
            blocks.append(sum(length > 0 for length in lengths))
    assert sum(blocks) / len(blocks) < 3


@pytest.mark.parametrize(
    ("chance", "least"),
    [(0.1, 0.97), (0.3, 0.97), (0.5, 0.95), (0.6, 0.9), (0.7, 0.93), (0.8, 0.92), (0.9, 0.9), (0.95, 0.92)],
)
def test_little_is_lost_to_the_best_length(chance: float, least: float) -> None:
    """Over answers that know nothing of each other, beside what one length would do that is known to be the best."""
    elapsed = sum(decode(Speculation(16), 600, chance, seed)[1] for seed in range(30))
    assert 30 * best_fixed_ms(600, chance) / elapsed > least


def test_the_same_measurements_give_the_same_choices() -> None:
    """Nothing is drawn by chance."""
    assert decode(Speculation(16), 600, 0.6, 1) == decode(Speculation(16), 600, 0.6, 1)


def test_what_was_proposed_is_left_out_where_it_is_not_worth_its_cost() -> None:
    """A block that was asked for with the last step is not verified once the choice is to rest, and a block that is
    tried asks for no other before it is judged."""
    speculation = Speculation(16)
    drive(speculation, 2, accept=0.0, plain_s=7.0, verify_s=17.4)
    assert speculation.rests

    while speculation.rests:
        drive(speculation, 1, accept=0.0, plain_s=7.0, verify_s=17.4)
    assert speculation.is_trying
    assert (speculation.draft_tokens(), speculation.draft_tokens(verifying=True)) == (3, 0)


def test_a_draft_that_is_no_good_for_such_prompts_is_not_asked_at_first() -> None:
    """Long prompts for which nothing of it is ever right, among short ones for which all is. Reading one takes the
    draft model longer than may be lost by a block that tries it, so that answers of some steps never ask it."""
    costs, asked = BatchCosts(), Counter[int]()
    for answer in range(40):
        is_long = answer % 2 > 0
        speculation = Speculation(16, costs, prompt_tokens=2000 if is_long else 40)
        speculation.unread = speculation.prompt_tokens
        for step in range(25):
            length = speculation.draft_tokens()
            if length and speculation.unread:
                speculation.observe_first_block(15, 0.004 + speculation.unread * 5e-6)
                asked[is_long] += answer >= 12
                assert is_long or step == 0
            # The draft is good enough for some plain steps to be measured.
            accepted = 0 if is_long else min(length, 6)
            share = 4.0 / STEP_MS[length] if length else 0.0
            speculation.observe(
                length, accepted, STEP_MS[length] / 1e3, block_share=share, block_rows=16 if length else 0
            )
        speculation.leave()
    assert asked == Counter({False: 14})


@pytest.mark.parametrize("seed", range(8))
def test_it_is_foreseen_behind_which_blocks_others_are_verified(seed: int) -> None:
    """Whatever came before, in this answer and in others: where as many draft tokens are accepted as was said, or more,
    a block follows, and otherwise none does. What steps take changes little of that. Nothing is changed by asking."""
    costs, numbers, wrong, asked = BatchCosts(), random.Random(seed), 0, 0
    for _ in range(6):
        speculation, chance, produced = Speculation(16, costs), numbers.random(), 0
        while produced < 150:
            length, accepted = speculation.draft_tokens(), 0
            while accepted < length and numbers.random() < chance:
                accepted += 1
            asks = length > 0 and not speculation.is_trying
            least = speculation.least_accepted(length) if asks else 0
            assert 0 <= least <= length + 1
            assert not asks or speculation.least_accepted(length) == least
            speculation.observe(length, accepted, STEP_MS[length] / 1e3)
            produced += accepted + 1
            if asks:
                asked += 1
                wrong += (speculation.draft_tokens() > 0) != (accepted >= least)
        speculation.leave()
    assert asked > 20
    assert wrong <= asked / 20


def test_plain_steps_that_took_long_by_chance_are_measured_again() -> None:
    """Where something else was computed in the first plain steps, a draft that is never right seems to cost nothing;
    it rests all the same, and then shows what it costs."""
    speculation, plain, lengths = Speculation(16), 0, []
    for _ in range(400):
        length = speculation.draft_tokens()
        plain += not length
        slow = 3.0 if not length and plain <= 2 else 1.0
        speculation.observe(length, 0, STEP_MS[length] * slow / 1e3)
        lengths.append(length)
    assert sum(length > 0 for length in lengths) < 20


def test_a_block_that_seems_to_take_for_ever() -> None:
    """Where clocks tell of plain steps that took nothing, the pause behind a block has an end all the same."""
    speculation = Speculation(16)
    for length, seconds in ((15, 9.0), (15, 9.0), (0, 0.0), (0, 0.0)):
        speculation.observe(length, 0, seconds, block_share=1.0 if length else 0.0, block_rows=16 if length else 0)
    rests = 0
    while speculation.draft_tokens() == 0 and rests <= LONGEST_REST_STEPS:
        speculation.observe(0, 0, 1e-9)
        rests += 1
    assert SHORTEST_REST_STEPS <= rests <= LONGEST_REST_STEPS
