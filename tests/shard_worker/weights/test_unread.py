"""Packed matrices whose rows are read when they are needed, against the same ones in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shard_worker.weights import cpu_codes, cpu_int4, packed as packed_weights, tiled
from shard_worker.weights.cpu_codes import CpuCodesWeight
from shard_worker.weights.cpu_int4 import CpuInt4Weight
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.random_packed import random_packed
from shard_worker.weights.tiled import TiledWeight, tiling_of
from shard_worker.weights.unread import StoredRows, UnreadWeight, in_memory
from shard_worker.weights.weight import StackedWeight, Weight, concatenate

CPU = torch.device("cpu")
COLUMNS = 512


def unread(weight: PackedWeight, kind: str) -> UnreadWeight:
    """Return a matrix as one that is to be read."""
    sources = [StoredRows(weight.rows, weight.select_rows)]
    return UnreadWeight(sources, COLUMNS, kind, dtype=weight.dtype, device=CPU)


def same(one: Weight, other: Weight) -> bool:
    return torch.equal(one.lookup(torch.arange(one.rows)), other.lookup(torch.arange(other.rows)))


@pytest.fixture
def pair() -> tuple[PackedWeight, UnreadWeight]:
    """Rows of two matrices below each other, in memory and to be read."""
    parts = [random_packed("q4_k", rows, COLUMNS, torch.bfloat16, CPU) for rows in (80, 48)]
    whole, to_read = concatenate(parts), concatenate([unread(part, "Q4_K") for part in parts])
    assert isinstance(whole, PackedWeight)
    assert isinstance(to_read, UnreadWeight)
    assert (to_read.rows, to_read.nbytes) == (whole.rows, whole.nbytes)
    return whole, to_read


@pytest.mark.parametrize(
    "rows",
    [
        slice(None),
        slice(70, 90),
        slice(80, 128),
        slice(5, 5),
        torch.tensor([127, 0, 80, 3]),
        torch.tensor([], dtype=torch.int64),
    ],
    ids=str,
)
def test_rows_are_those_of_the_matrix(pair: tuple[PackedWeight, UnreadWeight], rows: slice | torch.Tensor) -> None:
    whole, to_read = pair
    if isinstance(rows, torch.Tensor) or rows != slice(5, 5):
        assert same(in_memory(to_read.select_rows(rows)), whole.select_rows(rows))
    else:
        assert to_read.select_rows(rows).rows == 0


def test_rows_of_rows_are_those_of_the_matrix(pair: tuple[PackedWeight, UnreadWeight]) -> None:
    whole = pair[0]
    order = torch.randperm(128)
    chosen = unread(whole, "Q4_K").select_rows(slice(10, 120)).select_rows(order[order < 110]).select_rows(slice(7, 90))
    assert same(in_memory(chosen), whole.select_rows(10 + order[order < 110][7:90]))


@pytest.mark.parametrize("lane_columns", [0, 2, 4])
def test_tiles_of_parts_are_those_of_the_whole(
    pair: tuple[PackedWeight, UnreadWeight], monkeypatch: pytest.MonkeyPatch, lane_columns: int
) -> None:
    """Parts end within one of both matrices, and the last one is smaller."""
    whole, to_read = pair
    expected = TiledWeight(whole, tiling_of(whole, lane_columns=lane_columns))
    monkeypatch.setattr(tiled, "_COPIED_BYTES", 3 * 16 * COLUMNS // 2)
    made = TiledWeight(to_read, tiling_of(to_read.form, lane_columns=lane_columns))
    assert made.nbytes == expected.nbytes
    assert torch.equal(made.unpacked(), expected.unpacked())
    assert same(made, whole)


@pytest.mark.parametrize("kind", ["q4_k", "q8_0", "iq4_xs", "q6_k", "fp8"])
def test_what_multiplies_on_a_cpu_is_that_of_the_whole(
    kind: str, cpu_form: type[Weight], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = random_packed(kind, 320, COLUMNS, torch.bfloat16, CPU)
    x = torch.randn(3, COLUMNS, dtype=torch.bfloat16)
    expected = whole.prepared()
    monkeypatch.setattr(cpu_int4, "_BROUGHT_AT_A_TIME", 3 * 64 * COLUMNS)
    for module in (packed_weights, cpu_codes):
        monkeypatch.setattr(module, "rows_at_a_time", lambda *_: 48)
    made = unread(whole, kind).prepared()
    assert type(made) is type(expected)
    assert torch.equal(made.matmul(x), expected.matmul(x))
    if isinstance(made, CpuInt4Weight | CpuCodesWeight):
        assert isinstance(expected, cpu_form)
        assert torch.equal(made._codes, expected._codes)
        assert torch.equal(made._numbers, expected._numbers)


def test_of_a_matrix_no_more_than_a_part_is_read_at_a_time(
    cpu_form: type[Weight], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, asked = random_packed("q8_0", 512, COLUMNS, torch.bfloat16, CPU), list[int]()

    def read(rows: slice | torch.Tensor) -> PackedWeight:
        part = whole.select_rows(rows)
        asked.append(part.rows)
        return part

    to_read = UnreadWeight([StoredRows(512, read)], COLUMNS, "Q8_0", dtype=torch.bfloat16, device=CPU)
    assert not asked
    monkeypatch.setattr(cpu_int4, "_BROUGHT_AT_A_TIME", 64 * COLUMNS)
    monkeypatch.setattr(cpu_codes, "rows_at_a_time", lambda *_: 64)
    assert isinstance(to_read.prepared(), cpu_form)
    assert max(asked) == 64
    assert sum(asked) == 512 + 1


def test_matrices_of_unlike_types_stay_beside_each_other(pair: tuple[PackedWeight, UnreadWeight]) -> None:
    _, to_read = pair
    other = random_packed("q6_k", 64, COLUMNS, torch.bfloat16, CPU)
    both = concatenate([to_read, unread(other, "Q6_K"), unread(other, "Q6_K")])
    assert isinstance(both, StackedWeight)
    assert [part.rows for part in both.parts] == [128, 128]


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.matmul(torch.zeros(1, COLUMNS)),
        lambda weight: weight.lookup(torch.tensor([0])),
        lambda weight: weight.tensor,
    ],
)
def test_what_is_not_read_yet_is_not_used(
    pair: tuple[PackedWeight, UnreadWeight], use: Callable[[Weight], object]
) -> None:
    with pytest.raises(TypeError):
        use(pair[1])
