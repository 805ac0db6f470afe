"""Features: sums and slices of what was captured."""

from __future__ import annotations

import torch

from shard_worker.model.features import Capture, Features, fc_columns, joined
from shard_worker.weights.weight import DenseWeight


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_each_capture_meets_its_own_columns() -> None:
    """Segments that hold captures 2, and 0 and 1, add up to fc over all three in the list's order."""
    fc, captured = random(4, 12), [random(5, 4, seed=seed) for seed in (1, 2, 3)]
    features = Features()

    # Layer 1 is the list's last capture, layers 5 and 6 are its first two.
    for indices, pieces in (({1: 2}, captured[2:]), ({5: 0, 6: 1}, captured[:2])):
        Capture(indices, DenseWeight(fc_columns(fc, indices, 4))).collect(pieces, features)

    assert features.total is not None
    torch.testing.assert_close(features.total, torch.cat(captured, -1) @ fc.T, rtol=0, atol=1e-5)


def test_the_sum_is_kept_in_float32() -> None:
    """bfloat16 parts are added up in float32."""
    features = Features()
    for part in (torch.full((1, 1), 256.0).bfloat16(), torch.full((1, 1), 1.0).bfloat16()):
        features.add(part)

    assert features.total is not None
    assert features.total.dtype == torch.float32
    assert features.total.item() == 257.0


def test_the_first_rows_of_sums_and_slices() -> None:
    """`rows` keeps the committed rows of whatever is there."""
    total, piece = random(5, 4), random(5, 4, seed=1)

    kept = Features(total, {2: piece}).rows(3)

    assert kept.total is not None
    assert torch.equal(kept.total, total[:3])
    assert torch.equal(kept.slices[2], piece[:3])
    assert Features().rows(3) == Features()


def test_rows_that_wait_are_multiplied_once_for_all_of_them() -> None:
    """Those of steps whose first rows count come to what each step's product is, and go on waiting until they are asked
    for; what was multiplied elsewhere is in the sum."""
    fc, totals, expected = DenseWeight(random(4, 6)), random(6, 4, seed=9), []
    capture, steps = Capture({0: 0, 1: 1}, fc), []
    for seed in range(3):
        features = Features(totals[2 * seed : 2 * seed + 2], waits=True)
        captured = [random(2, 3, seed=seed), random(2, 3, seed=seed + 5)]
        capture.collect(captured, features)
        expected.append((totals[2 * seed : 2 * seed + 2] + fc.matmul(torch.cat(captured, -1)))[: seed + 1][:2])
        steps.append(features.rows(min(2, seed + 1)).own())

    together = joined(steps)

    assert together.waits is False
    assert (together.count, len(together.unmultiplied)) == (5, 1)
    assert torch.equal(together.total, torch.cat([totals[:1], totals[2:]]))
    together.settle()
    assert not together.unmultiplied
    torch.testing.assert_close(together.total, torch.cat(expected), rtol=0, atol=1e-5)


def test_rows_of_which_one_is_the_same_in_any_number_are_not_multiplied_with_others() -> None:
    """Batch-invariant products of steps beside those of a prompt: each is what it is alone."""
    fc, steps = DenseWeight(random(4, 3)), []
    for seed, invariant_rows in enumerate((None, 2)):
        features = Features(waits=True)
        Capture({0: 0}, fc).collect([random(2, 3, seed=seed)], features, invariant_rows)
        steps.append(features)

    together = joined(steps)

    assert not together.unmultiplied
    for seed, invariant_rows in enumerate((None, 2)):
        own = fc.matmul(random(2, 3, seed=seed), None, invariant_rows)
        assert torch.equal(together.total[2 * seed : 2 * seed + 2], own)
