"""What is kept: ordered, within its number, the ends and the anchors first."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from shard_worker.pflash.selection import (
    CHUNK_TOKENS,
    anchor_chunks,
    forced_chunks,
    keep_count,
    kept_ranges,
    normalised_ratio,
    select_chunks,
)


@pytest.mark.parametrize(
    ("ratio", "kept"),
    [(0.0, 1), (1e-9, 1), (0.05, 5), (0.5, 50), (1.0, 100), (1.5, 100), (-1.0, 1), (float("nan"), 100)],
)
def test_ratios_are_normalised_before_use(ratio: float, kept: int) -> None:
    """Ratios beyond 0 and 1 count as those, one that is not a number keeps everything, and one chunk always stays."""
    assert keep_count(100, ratio) == kept
    assert 0 <= normalised_ratio(ratio) <= 1


@pytest.mark.parametrize("seed", range(20))
def test_an_ordered_subset_of_the_right_size(seed: int) -> None:
    """Whatever the prompt and the ratio, chunks are in order, as many as asked for, and ranges do not touch."""
    rng = random.Random(seed)
    length = rng.randrange(1, 6000)
    token_ids = [rng.randrange(50) for _ in range(length)]
    chunks = -(-length // CHUNK_TOKENS)
    scores = [rng.random() for _ in range(chunks)]
    ratio = rng.choice([0.0, 0.01, 0.1, 0.5, 0.9, 1.0])
    chosen = select_chunks(scores, token_ids, ratio)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(chunks))
    assert len(chosen) == keep_count(chunks, ratio)
    ranges = kept_ranges(chosen, length)
    assert all(first < last <= length for first, last in ranges)
    assert all(left[1] < right[0] for left, right in pairwise(ranges))
    assert sum(last - first for first, last in ranges) <= len(chosen) * CHUNK_TOKENS


def test_ends_are_forced_and_scaled() -> None:
    """Head and tail are kept whole where there is room, else scaled down with the tail first."""
    assert forced_chunks(100, 50) == [*range(8), *range(76, 100)]
    assert forced_chunks(100, 32) == [*range(8), *range(76, 100)]
    assert forced_chunks(100, 4) == [0, 97, 98, 99]
    assert forced_chunks(100, 1) == [99]
    assert forced_chunks(3, 3) == [0, 1, 2]


def test_best_scores_fill_what_is_left() -> None:
    """Beside the ends the chunks with the highest scores are kept."""
    scores = [0.0] * 100
    scores[40], scores[60], scores[50] = 3.0, 1.0, 2.0
    assert select_chunks(scores, list(range(3200)), 0.34) == [*range(8), 40, 50, *range(76, 100)]


def test_words_of_the_end_are_anchors() -> None:
    """Four tokens of the end that stand once in the body keep what is around them, above all scores."""
    token_ids = list(range(3200))
    token_ids[50 * CHUNK_TOKENS : 50 * CHUNK_TOKENS + 4] = token_ids[-20:-16]
    assert anchor_chunks(token_ids) == [50, 49, 51, 48, 52]
    scores = [0.0] * 100
    scores[30] = 1.0
    assert select_chunks(scores, token_ids, 0.37) == [*range(8), 48, 49, 50, 51, 52, *range(76, 100)]


def test_common_words_are_no_anchors() -> None:
    """An n-gram that stands everywhere keeps nothing around it."""
    token_ids = [7, 8, 9, 10] * 800
    assert anchor_chunks(token_ids) == []
