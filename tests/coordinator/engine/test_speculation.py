"""The choice of block length: goes on while it pays, shortens or stops when it doesn't, comes back when it might."""

from __future__ import annotations

import pytest

from coordinator.engine.speculation import Speculation


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
    """A draft that is never right costs a few steps, then plain decode goes on with longer and longer rests."""
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
