"""Acceptance against its definition, case by case."""

from __future__ import annotations

import pytest

from shard_worker.sampling.acceptance import accept

STOP, MASK = 99, 98
NO_STOP: frozenset[int] = frozenset()


def test_an_always_right_draft_gives_the_whole_block_and_one_more() -> None:
    """All draft tokens count, and the target's token after the last of them."""
    assert accept([1, 2, 3], [1, 2, 3, 4], NO_STOP) == [1, 2, 3, 4]


def test_an_always_wrong_draft_gives_the_targets_own_token() -> None:
    """Nothing is accepted; the step still produces one token, as a plain one does."""
    assert accept([7, 8, 9], [1, 2, 3, 4], NO_STOP) == [1]


@pytest.mark.parametrize("wrong", range(7))
def test_right_then_wrong_ends_with_the_targets_token_there(wrong: int) -> None:
    """A draft that is right up to any index yields exactly that many draft tokens, and the target's token in the next
    place."""
    chosen = [10, 11, 12, 13, 14, 15, 16, 17]
    draft_tokens = chosen[:7]
    draft_tokens[wrong] = 50

    assert accept(draft_tokens, chosen, NO_STOP) == chosen[: wrong + 1]


def test_a_draft_token_that_is_right_again_later_does_not_count() -> None:
    """What the target chose after a wrong draft token belongs to another text."""
    assert accept([1, 7, 3], [1, 2, 3, 4], NO_STOP) == [1, 2]


def test_without_draft_tokens_there_is_one_token() -> None:
    """A verify of the known row alone is a plain step."""
    assert accept([], [5], NO_STOP) == [5]


@pytest.mark.parametrize(
    ("draft_tokens", "chosen", "produced"),
    [
        pytest.param([1, STOP, 3], [1, STOP, 3, 4], [1, STOP], id="accepted draft token"),
        pytest.param([1, 2], [1, 2, STOP], [1, 2, STOP], id="bonus"),
        pytest.param([1, 2], [1, STOP, 5], [1, STOP], id="correction"),
        pytest.param([STOP, 2], [STOP, 2, 3], [STOP], id="first token"),
        pytest.param([1, STOP, STOP], [1, STOP, STOP, 4], [1, STOP], id="two stops"),
        pytest.param([STOP, 2, 3], [1, 2, 3, 4], [1], id="proposed but not chosen"),
        pytest.param([], [STOP], [STOP], id="no draft tokens"),
    ],
)
def test_nothing_follows_a_stop_token(draft_tokens: list[int], chosen: list[int], produced: list[int]) -> None:
    """The first stop token that the target chooses ends the step, wherever it stands; one that is only proposed does
    not."""
    assert accept(draft_tokens, chosen, frozenset({STOP})) == produced


def test_any_stop_token_of_several_counts() -> None:
    """Requests may have several stop tokens, and the mask token may be one of them or an ordinary token."""
    draft_tokens, chosen = [1, MASK, 3], [1, MASK, 3, 4]

    assert accept(draft_tokens, chosen, frozenset({STOP, MASK})) == [1, MASK]
    assert accept(draft_tokens, chosen, frozenset({STOP})) == [1, MASK, 3, 4]


def test_so_many_rows_count_as_tokens_are_produced() -> None:
    """The known row and every accepted draft token but the last token, whose row is the next step's first."""
    for right in range(5):
        draft_tokens = [0, 1, 2, 3][:right] + [77] * (4 - right)
        assert len(accept(draft_tokens, [0, 1, 2, 3, 4], NO_STOP)) == right + 1
