"""Copying a prefix's state out of a session's memory and into another's: rows, windows, state, chains and cuts.

The yardstick is the whole history of every row, which no session keeps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from shard_worker.cache.attention_cache import AttentionCache, AttentionView
from shard_worker.cache.prefix_state import (
    GroupKind,
    StateView,
    TensorGroup,
    WholeView,
    copy_in,
    copy_out,
    rows_of,
    tensors_of,
    trimmable,
)

TOTAL = 40
ROWS = TensorGroup(GroupKind.ROWS, ("layers.0.k", "layers.3.k"), (2, 3), torch.float32)
WINDOW = TensorGroup(GroupKind.ROWS, ("draft.layers.0.k",), (2, 3), torch.bfloat16, window=7)
STATE = TensorGroup(GroupKind.STATE, ("layers.1.recurrent", "layers.2.recurrent"), (2, 4, 4), torch.float32)
LOGITS = TensorGroup(GroupKind.LOGITS, ("logits",), (11,), torch.float32)
GROUPS = (ROWS, WINDOW, STATE, LOGITS)
TRIMMABLE = (ROWS, LOGITS)
Chain = list[tuple[int, int, tuple[torch.Tensor, ...]]]


def history(group: TensorGroup) -> torch.Tensor:
    """What a group holds for, or behind, each of TOTAL tokens: rows [names, heads, TOTAL, dim], others [TOTAL, …]."""
    generator = torch.Generator().manual_seed(len(group.names) + len(group.extents))
    if group.kind is GroupKind.ROWS:
        heads, dim = group.extents
        return torch.randn(len(group.names), heads, TOTAL, dim, generator=generator).to(group.dtype)
    return torch.randn(TOTAL, len(group.names), *group.extents, generator=generator)


HISTORY = {group: history(group) for group in GROUPS}


def rows_view(group: TensorGroup) -> AttentionView:
    """Keys of as many layers as the group has names, all NaN."""
    heads, dim = group.extents
    like = torch.empty(0, dtype=group.dtype)
    cache = AttentionCache(len(group.names), heads, TOTAL, dim, like, window=group.window)
    cache.pages[0].fill_(torch.nan)
    return AttentionView(cache, slice(None), 0)


def memory_of(view: AttentionView) -> torch.Tensor:
    """All positions in their order: [names, heads, TOTAL, dim]."""
    return view.cache.pages[0][:, 0]


class Memory:
    """A session's memory that has seen some tokens, in the views of all groups; what it has not seen is NaN."""

    def __init__(self, seen: int = 0, *, groups: Sequence[TensorGroup] = GROUPS) -> None:
        self.views: list[StateView] = []
        for group in groups:
            history = HISTORY[group]
            if group.kind is GroupKind.ROWS:
                rows, first = rows_view(group), group.first_row(0, seen)
                memory_of(rows)[:, :, first:seen] = history[:, :, first:seen]
                self.views.append(rows)
            else:
                self.views.append(
                    WholeView(history[seen - 1].clone() if seen else torch.full_like(history[0], torch.nan))
                )

    def clear(self) -> None:
        """Forget all, in place."""
        for view in self.views:
            (memory_of(view) if isinstance(view, AttentionView) else view.tensor).zero_()

    def holds(self, length: int, groups: Sequence[TensorGroup] = GROUPS) -> bool:
        """Whether all that steps behind `length` tokens look at is as it would be after seeing them."""
        whole = True
        for group, view in zip(groups, self.views, strict=True):
            history = HISTORY[group]
            if group.kind is not GroupKind.ROWS:
                whole &= torch.equal(view.read(0, length), history[length - 1])
                continue
            first = group.first_row(0, length)
            assert isinstance(view, AttentionView)
            whole &= torch.equal(memory_of(view)[:, :, first:length], history[:, :, first:length])
        return whole


def saved(lengths: Sequence[int], groups: Sequence[TensorGroup] = GROUPS) -> Chain:
    """A chain of snapshots, each taken by a session at its length."""
    return [
        (first, last, copy_out(groups, Memory(last, groups=groups).views, first, last))
        for first, last in pairwise([0, *lengths])
    ]


# --- what a group takes


def test_shapes_and_sizes() -> None:
    """Rows have as many as there are tokens, or as many as are looked at; state and logits have one shape always."""
    assert ROWS.shape(0, 5) == (2, 5, 3)
    assert ROWS.shape(4, 5) == (2, 1, 3)
    assert ROWS.size_bytes(4, 9) == 2 * 2 * 5 * 3 * 4
    assert [WINDOW.shape(0, length)[1] for length in (1, 6, 7, 8, 40)] == [1, 6, 7, 7, 7]
    assert [WINDOW.shape(first, 20)[1] for first in (0, 12, 13, 14, 19)] == [7, 7, 7, 6, 1]
    assert WINDOW.size_bytes(18, 20) == 2 * 2 * 3 * 2
    assert STATE.shape(0, 5) == STATE.shape(4, 40) == (2, 4, 4)
    assert LOGITS.size_bytes(0, 40) == 44


def test_announced_tensors_are_those_that_are_copied() -> None:
    """Names, types and sizes of a header, in order, are those of the copies."""
    announced = tensors_of(GROUPS, 3, 15)
    copies = copy_out(GROUPS, Memory(15).views, 3, 15)

    assert [tensor.name for tensor in announced] == [name for group in GROUPS for name in group.names]
    flat = [tensor for group_tensor in copies for tensor in group_tensor]
    assert [(tensor.dtype, tensor.shape) for tensor in announced] == [
        (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in flat
    ]
    assert sum(tensor.size_bytes for tensor in announced) == sum(group.size_bytes(3, 15) for group in GROUPS)
    assert sum(tensor.size_bytes for tensor in announced) == sum(tensor.nbytes for tensor in copies)


def test_only_rows_that_all_stay_can_be_trimmed() -> None:
    """State and windows bind a snapshot to its length; rows and logits don't."""
    assert trimmable(TRIMMABLE)
    assert trimmable(())
    assert not trimmable((ROWS, STATE))
    assert not trimmable((ROWS, WINDOW))


# --- views


def test_rows_are_written_where_they_belong_and_nowhere_else() -> None:
    """Putting rows back touches no other row of the session."""
    history = HISTORY[ROWS]
    view = rows_view(ROWS)

    view.write(Memory(TOTAL, groups=(ROWS,)).views[0].read(3, 9), 3, 9)

    target = memory_of(view)
    assert torch.equal(target[:, :, 3:9], history[:, :, 3:9])
    assert target[:, :, :3].isnan().all()
    assert target[:, :, 9:].isnan().all()


# --- out and in


def test_one_snapshot_brings_everything_back() -> None:
    """A session of any length restored from one snapshot is where the saving one was."""
    for length in range(1, TOTAL):
        memory = Memory()
        copy_in(GROUPS, memory.views, saved([length]), length)
        assert memory.holds(length)
        assert not memory.holds(length - 1) or length == 1


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_brings_everything_back(seed: int) -> None:
    """Snapshots that build on each other at any lengths give the state behind the last one, the window included."""
    rng = random.Random(seed)
    lengths = sorted(rng.sample(range(1, TOTAL), rng.randrange(2, 9)))
    chain = saved(lengths)
    for count in range(1, len(lengths) + 1):
        memory = Memory()
        copy_in(GROUPS, memory.views, chain[:count], lengths[count - 1])
        assert memory.holds(lengths[count - 1])


def test_a_trimmed_snapshot_brings_back_the_shorter_prefix() -> None:
    """Where there are only rows, a chain serves every length below its own; the logits of its end stay out."""
    chain = saved([5, 6, 17, 30], TRIMMABLE)
    for length in range(1, 30):
        memory = Memory(groups=TRIMMABLE)
        copy_in(TRIMMABLE, memory.views, chain, length)
        rows, logits = memory.views
        assert torch.equal(rows.read(0, length), HISTORY[ROWS][:, :, :length])
        assert rows.read(length, TOTAL).isnan().all()
        assert logits.read(0, length).isnan().all()


def test_copies_are_copies() -> None:
    """What a session does behind a save doesn't reach what was kept, nor what a restored one does."""
    memory, untouched = Memory(20), Memory(20)
    copies = copy_out(GROUPS, memory.views, 0, 20)
    memory.clear()
    for _ in range(2):
        restored = Memory()
        copy_in(GROUPS, restored.views, [(0, 20, copies)], 20)
        assert restored.holds(20)
        restored.clear()
    assert untouched.holds(20)
    assert all(tensor.is_contiguous() for tensor in copies)


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_of_any_part_are_found(seed: int) -> None:
    """For tokens [first, length) of a chain the pieces follow each other without gap, up to the last row."""
    rng = random.Random(seed)
    lengths = sorted(rng.sample(range(1, TOTAL), rng.randrange(1, 7)))
    chain, last = saved(lengths), lengths[-1]
    for index, group in enumerate((ROWS, WINDOW)):
        for first in range(last):
            pieces = rows_of(group, index, chain, first, last)
            begin = max(first, last - 7) if group is WINDOW else first
            assert [piece[0] for piece in pieces] == [begin, *(piece[1] for piece in pieces[:-1])]
            assert pieces[-1][1] == last
            joined = torch.cat([rows for _, _, rows in pieces], -2)
            assert torch.equal(joined, HISTORY[group][:, :, begin:last])
