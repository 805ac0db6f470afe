"""Draft tokens looked up in the text: the longest earlier run is followed, and nothing else is ever proposed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest

from coordinator.engine.prompt_lookup import BLOCK_ROWS, LONGEST_MATCH, SHORTEST_MATCH, PromptLookup
from coordinator.engine.speculation import Speculation
from tests.e2e.conftest import ROOT


def longest_match(tokens: Sequence[int]) -> tuple[int, set[int]]:
    """Return how many of the last tokens stood together before, and what followed them wherever they did."""
    for matched in range(min(len(tokens) - 1, LONGEST_MATCH), SHORTEST_MATCH - 1, -1):
        last = tokens[len(tokens) - matched :]
        ends = [end for end in range(matched, len(tokens)) if tokens[end - matched : end] == last]
        if ends:
            return matched, {tokens[end] for end in ends}
    return 0, set()


def test_what_followed_the_longest_match_comes_next() -> None:
    """As by looking through the whole text, whatever was in the prompt and came one by one or together; a match that
    goes on is kept, as nothing longer can have begun since."""
    for seed in range(200):
        numbers = random.Random(seed)
        prompt, answer = ([numbers.randrange(3) for _ in range(numbers.randrange(most))] for most in (40, 8))
        lookup = PromptLookup()
        lookup.read(prompt[:5])
        lookup.read(prompt[5:])
        lookup.follow(answer[:1])
        lookup.follow(answer[1:])
        tokens = [*prompt, *answer]
        matched, followers = longest_match(tokens)

        found = lookup.draft_tokens(3)

        assert len(lookup) == len(tokens)
        assert bool(found) == bool(matched)
        assert len(lookup.survival(3)) == len(found)
        assert not found or found[0] in followers


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    """Also beyond its last known token, with as many tokens as are asked for."""
    lookup = PromptLookup()
    lookup.read([1, 2, 3, 4, 1, 2, 3])
    assert lookup.draft_tokens(9) == (4, 1, 2, 3, 4, 1, 2, 3, 4)


def test_it_learns_how_often_it_is_right() -> None:
    """From every token that comes, verified or not: what it proposes behind short matches loses its worth where they
    mean nothing, and long ones keep theirs."""
    lookup = PromptLookup()
    lookup.read([*(number for first in range(100) for number in (1, 2, 3, 10 + first)), 1, 2, 3])
    before = lookup.survival(1)
    for first in range(200, 300):
        lookup.follow([first, 1, 2, 3])
    assert lookup.survival(1)[0] < 0.2 < before[0]
    assert lookup.survival(40)[-1] > 0.9


@pytest.mark.parametrize(
    ("came", "goes_on"),
    [
        # A token, then two, in place of one.
        ([900], [21, 22, 23]),
        ([900, 901], [21, 22, 23]),
        # Lines put in before it: what follows is known once the token before it came again.
        ([900, 901, 902, 19], [20, 21, 22]),
        # Five tokens left out.
        ([25], [26, 27, 28]),
    ],
)
def test_behind_a_change_the_old_text_goes_on(came: list[int], goes_on: list[int]) -> None:
    """A long match that ends is followed from around its end, though none of the last three tokens stood there."""
    lookup = PromptLookup()
    lookup.read([*range(100)])
    lookup.follow([*range(20)])

    lookup.follow(came)

    assert lookup.draft_tokens(3) == tuple(goes_on)
    assert 0 < lookup.survival(1)[0] < lookup.survival(3)[2]


def test_a_text_that_was_left_for_good_is_forgotten() -> None:
    """Nothing is proposed behind many tokens of another text, nor is it learnt from short matches that end."""
    lookup = PromptLookup()
    lookup.read([*range(100)])
    lookup.follow([*range(20), *range(900, 940)])
    assert lookup.draft_tokens(3) == ()
    lookup.follow([40, 41, 42, 43, 950])
    assert lookup.draft_tokens(3) == ()


def steps_for(prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return how many steps an answer takes whose draft tokens are looked up, where each step costs the same."""
    lookup, speculation, steps, done = PromptLookup(), Speculation(1), 0, 0
    lookup.read(prompt)
    while done < len(answer):
        count = speculation.looked_up_tokens(lookup.survival(min(BLOCK_ROWS, len(answer) - done) - 1))
        draft_tokens = lookup.draft_tokens(count) if count else ()
        accepted = 0
        while accepted < len(draft_tokens) and draft_tokens[accepted] == answer[done + accepted]:
            accepted += 1
        speculation.observe(len(draft_tokens), accepted, 1.0, looked_up=bool(draft_tokens))
        new = answer[done : done + accepted + 1]
        lookup.follow(new)
        done, steps = done + len(new), steps + 1
    return steps


def test_an_edited_file_takes_few_steps() -> None:
    """A file that is given back with a word changed in ten of its lines comes at more than 14 tokens a step, which may
    have 16."""
    words: dict[str, int] = {}

    def tokens(text: str) -> list[int]:
        return [words.setdefault(word, len(words)) for word in re.findall(r"\w+|\W", text)]

    lines = (ROOT / "LICENSE").read_text().splitlines(keepends=True)
    prompt = tokens("".join(lines))
    for line in range(5, len(lines), len(lines) // 10):
        lines[line] = re.sub(r"\w+", "changed", lines[line], count=1)
    answer = tokens("".join(lines))

    assert len(answer) / steps_for(prompt, answer) > 14
    # And nothing is lost where nothing comes again.
    assert steps_for(prompt, range(10_000, 10_200)) <= 200


def test_the_better_block_is_taken() -> None:
    """Tokens that were looked up stand in for the draft model's where they promise more, and not for as good ones;
    they say nothing of how good the draft model's next ones are."""
    speculation = Speculation(16)
    for _ in range(20):
        speculation.observe(15, 2, 2.0)
    sure, unsure = [0.99] * 15, [0.3] * 15

    assert speculation.looked_up_tokens(sure) == 15
    assert speculation.looked_up_tokens(unsure) == 0
    assert speculation.looked_up_tokens([]) == 0
    speculation.observe(15, 15, 2.0, looked_up=True)
    assert (speculation.offered, speculation.looked_up, speculation.expected_tokens < 5) == (315, 15, True)

    good = Speculation(16)
    for _ in range(20):
        good.observe(15, 14, 2.0)
    assert good.looked_up_tokens(sure) == 0


@pytest.mark.parametrize("again", [True, False])
def test_no_block_is_asked_for_beside_what_is_looked_up_again_and_again(again: bool) -> None:
    """Where other tokens are looked up behind those that were wrong, the draft model's block is of no use either, as
    little as it is behind those that were right."""
    speculation = Speculation(16)
    for draft_tokens, seconds, block_share in ((0, 7.0, 0.0), (15, 17.0, 0.3)) * 10:
        asks = bool(draft_tokens)
        speculation.observe(draft_tokens, 6 * asks, seconds, block_share=block_share, block_rows=16 * asks)
    unsure = [0.5] * 15
    assert speculation.asks_beside(unsure)
    for _ in range(10):
        speculation.observe(15, 1, 12.0, looked_up=True)
        if not again:
            speculation.observe(15, 6, 17.0, block_share=0.3, block_rows=16)
    assert speculation.asks_beside(unsure) is not again
