"""The figures of ways to draft: medians of repeats, and ratios to plain decode and to the fastest fixed way."""

from __future__ import annotations

import pytest

from coordinator.answer import Answer, Stats
from coordinator.bench.drafts import CHOICE, PLAIN, Answers, Way, figures_of, in_all_ways

WAYS = Way(PLAIN, 0), Way("15 a step", 15), Way(CHOICE, None)


def took(milliseconds: float) -> Answer:
    """Return an answer of 101 tokens, the first of which came before."""
    stats = Stats(
        prompt_tokens=1,
        cached_tokens=0,
        cache_source=None,
        restore_ms=0.0,
        completion_tokens=101,
        prefill_ms=1.0,
        decode_ms=milliseconds,
        decode_tokens_per_s=0.0,
        steps=25,
        draft_tokens=0,
        accepted_tokens=0,
        acceptance_length=None,
        draft_ms=50.0,
        stages=(),
    )
    return Answer((7,), "a", "stop", stats)


def test_a_prompt_that_was_disturbed_once_does_not_count() -> None:
    """Its median is that of the other repeats; which repeat was disturbed shows in the least."""
    answers = Answers({0: [took(1000), took(9000), took(1000)], 1: [took(3000), took(3000), took(3000)]})

    assert answers.rate() == pytest.approx(50)
    assert answers.rates == pytest.approx([50, 200 / 12, 50])


def test_the_choice_is_compared_with_the_fastest_fixed_way() -> None:
    """Also where the choice is faster than all of them, and repeat by repeat."""
    times = {WAYS[0]: [2000, 2000], WAYS[1]: [1000, 1000], WAYS[2]: [800, 1600]}
    answered = {way: Answers({0: [*map(took, milliseconds)]}) for way, milliseconds in times.items()}

    rows = {row.way: row for row in figures_of("draft", "DFlash", "chat", answered)}

    assert [row.of_plain for row in rows.values()] == pytest.approx([1, 2, 2 / 1.2])
    assert [row.of_best for row in rows.values()] == pytest.approx([0.5, 1, 1 / 1.2])
    choice = rows[CHOICE]
    assert (choice.least_of_best, choice.most_of_best) == pytest.approx((1000 / 1600, 1000 / 800))
    assert (choice.tokens_a_step, choice.draft_ms, choice.identical) == pytest.approx((4, 2, 2))


def test_what_was_interrupted_counts_as_far_as_all_ways_came() -> None:
    """Prompts that were answered in one way alone do not, nor repeats of some prompts alone."""
    plain, fixed, choice = WAYS
    answered = {
        plain: Answers({0: [took(1), took(2)], 1: [took(3), took(4)], 2: [took(5)]}),
        fixed: Answers({0: [took(6), took(7)], 1: [took(8)]}),
        choice: Answers({0: [took(9), took(10)], 1: [took(11)]}),
    }

    found = in_all_ways(answered)

    times = {way: [[one.stats.decode_ms for one in of] for of in found[way].by_prompt.values()] for way in found}
    assert times == {plain: [[1], [3]], fixed: [[6], [8]], choice: [[9], [11]]}
    assert in_all_ways({plain: answered[plain], fixed: Answers()}) == {}
