"""Where two token sequences first differ."""

from __future__ import annotations

from coordinator.text.common_prefix import common_prefix_length


def test_common_prefix_length() -> None:
    """Every place at which two sequences can part, and none."""
    for size in (0, 1, 2, 3, 7, 8, 33):
        a = tuple(range(size))
        for parted in range(size):
            assert common_prefix_length(a, (*a[:parted], -1, *a[parted + 1 :])) == parted
            assert common_prefix_length(a, a[:parted]) == parted
        assert common_prefix_length(a, a) == size
