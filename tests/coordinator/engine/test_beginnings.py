"""What answers before tell of another one: of all, by the length of the prompt, and by the number of the block."""

from __future__ import annotations

from coordinator.engine.beginnings import BEGINNING_BLOCKS, FIRST_BLOCKS, KNOWN_ANSWERS, Beginnings


def test_how_answers_begin_is_told_apart_by_how_long_their_prompts_are() -> None:
    """Once three answers to prompts of about a length are known; all of them tell of the others."""
    beginnings = Beginnings()
    for answer in range(KNOWN_ANSWERS):
        assert not beginnings.shares_of(1000)
        beginnings.observe(60, 0, 15, 15)
        beginnings.observe(900 + 100 * answer, 0, 15, 0)
        # Further blocks of an answer tell no more of others than its first one.
        beginnings.observe(30, 1, 15, 15)
    assert beginnings.is_known
    assert beginnings.shares_of(1000)[0] < 0.2
    assert beginnings.shares_of(50)[0] > 0.8
    assert not beginnings.shares_of(30)
    assert 0.4 < beginnings.shares[0] < 0.8


def test_how_answers_go_on_is_told_by_each_block() -> None:
    """Of the first ones, once three answers had one; blocks behind the beginning say nothing of it."""
    beginnings = Beginnings()
    for _ in range(KNOWN_ANSWERS):
        assert not beginnings.shares_of_block(0)
        for number in range(FIRST_BLOCKS + 1):
            beginnings.observe(60, number, 15, 15 if number < BEGINNING_BLOCKS else 0)
    assert beginnings.shares_of_block(0)[0] > 0.8
    assert beginnings.shares_of_block(BEGINNING_BLOCKS)[0] < 0.2
    assert not beginnings.shares_of_block(FIRST_BLOCKS)
    assert beginnings.shares[0] > 0.8


def test_a_length_that_is_not_known_tells_nothing() -> None:
    """It is 0."""
    beginnings = Beginnings()
    for _ in range(KNOWN_ANSWERS):
        beginnings.observe(0, 0, 15, 15)
    assert not beginnings.shares_of(0)
    assert beginnings.shares
