"""Where state is kept: the points of a prompt, the steps of prefill between them, and long answers."""

from __future__ import annotations

import random

import pytest

from coordinator.prefix.policy import KeepPolicy, chunks, generation_checkpoint_due, save_points

POLICY = KeepPolicy(min_tokens=32, checkpoint_tokens=100)


@pytest.mark.parametrize(
    ("length", "boundaries", "expected"),
    [
        (90, (), (90,)),
        (31, (10, 20), ()),
        (32, (), (32,)),
        (90, (40, 60, 70, 80), (40, 70, 80, 90)),
        (90, (40,), (40, 90)),
        (90, (40, 90), (40, 90)),
        (90, (10, 50, 80), (50, 80, 90)),  # the system part is too short; it isn't replaced by another boundary
        (90, (10, 40, 50, 80), (50, 80, 90)),
        (90, (40, 80, 120), (40, 80, 90)),
        (0, (), ()),
        (350, (), (100, 200, 300, 350)),
        (330, (), (100, 200, 330)),  # 300 is hardly worth having beside 330 itself
        (332, (), (100, 200, 300, 332)),
        (400, (180, 390), (100, 180, 300, 390, 400)),  # 200 follows 180 too closely
        (300, (100, 200), (100, 200, 300)),
    ],
)
def test_save_points(length: int, boundaries: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """System part, last two boundaries, checkpoints in long stretches and the end; none below the minimum."""
    assert save_points(length, boundaries, POLICY) == expected


def test_points_of_random_prompts() -> None:
    """Ascending, in range, with everything that was asked for, and never much further apart than a checkpoint."""
    rng = random.Random(5)
    for _ in range(3000):
        policy = KeepPolicy(min_tokens=rng.choice([1, 8, 32]), checkpoint_tokens=rng.choice([64, 100, 2048]))
        length = rng.randint(1, 9000)
        boundaries = sorted(rng.sample(range(1, length + 1), min(length, rng.randint(0, 6))))
        points = save_points(length, boundaries, policy)

        assert list(points) == sorted(set(points))
        assert all(policy.min_tokens <= point <= length for point in points)
        asked = {*boundaries[:1], *boundaries[-2:], length}
        assert {point for point in asked if point >= policy.min_tokens} <= {*points}
        assert all(point % policy.checkpoint_tokens == 0 for point in points if point not in asked)
        gaps = [after - before for before, after in zip((0, *points), (*points, length), strict=True)]
        assert max(gaps) <= policy.checkpoint_tokens + 2 * policy.min_tokens


def test_common_document_shares_its_checkpoints() -> None:
    """Prompts that part after a long document stop at the same places within it."""
    for asked in (5, 300, 900):
        points = save_points(10_000 + asked, (400, 10_000 + asked - 4), KeepPolicy())
        assert points[:5] == (400, 2048, 4096, 6144, 8192)


@pytest.mark.parametrize(
    ("length", "points", "size", "start", "expected"),
    [
        (10, (), 4, 0, [(0, 4), (4, 8), (8, 10)]),
        (10, (3, 10), 4, 0, [(0, 3), (3, 7), (7, 10)]),
        (10, (3, 10), 4, 3, [(3, 7), (7, 10)]),
        (10, (3, 8), 4, 5, [(5, 8), (8, 10)]),
        (10, (3, 8), 100, 0, [(0, 3), (3, 8), (8, 10)]),
        (10, (10,), 4, 10, []),
        (10, (4, 12), 5, 0, [(0, 4), (4, 9), (9, 10)]),
        (0, (), 4, 0, []),
    ],
)
def test_chunks(length: int, points: tuple[int, ...], size: int, start: int, expected: list[tuple[int, int]]) -> None:
    """Steps of at most the size that begin anew at each point after the start."""
    assert chunks(length, points, size, start) == expected


def test_restored_run_computes_the_rest_of_the_cold_run() -> None:
    """From every save point the steps are the cold run's from there; from a cut they agree after the next point."""
    rng = random.Random(11)
    for _ in range(200):
        length = rng.randint(1, 6000)
        boundaries = sorted(rng.sample(range(1, length + 1), min(length, 3)))
        points = save_points(length, boundaries, KeepPolicy(min_tokens=8, checkpoint_tokens=rng.choice([64, 1000])))
        size = rng.choice([1, 16, 100, 512, 8192])
        cold = chunks(length, points, size)

        assert [row for begin, end in cold for row in range(begin, end)] == list(range(length))
        assert all(0 < end - begin <= size for begin, end in cold)
        assert {*points} <= {end for _, end in cold}
        for point in points:
            assert chunks(length, points, size, point) == [step for step in cold if step[0] >= point]
        cut = rng.randint(0, length)
        warm = chunks(length, points, size, cut)
        assert [row for begin, end in warm for row in range(begin, end)] == list(range(cut, length))
        after = min((point for point in points if point >= cut), default=length)
        assert [step for step in warm if step[0] >= after] == [step for step in cold if step[0] >= after]


def test_long_answers_are_kept_on_the_way() -> None:
    """Once as many tokens came as a checkpoint is apart, however many a step brings, and not below the minimum."""
    assert not generation_checkpoint_due(50, 149, POLICY)
    assert generation_checkpoint_due(50, 150, POLICY)
    assert generation_checkpoint_due(50, 163, POLICY)
    assert not generation_checkpoint_due(163, 200, POLICY)
    assert not generation_checkpoint_due(0, 20, KeepPolicy(min_tokens=32, checkpoint_tokens=10))
