"""The kernel of attention against softmax in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from shard_worker.cpu_kernels import attention, native
from shard_worker.cpu_kernels.attention import attend
from tests.combinations import covering

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")


@pytest.fixture(autouse=True, params=[8, 16])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many float32 a vector has: wider ones than the CPU's are made of two."""
    monkeypatch.setattr(attention, "lanes", lambda: request.param)
    attention._kernel.cache_clear()
    yield request.param
    attention._kernel.cache_clear()


SHAPES = [
    (4, 2, 64, 8),
    (4, 2, 64, 301),
    (14, 2, 32, 77),
    (8, 1, 128, 130),
    (3, 3, 48, 64),
    (4, 2, 80, 200),
    (5, 1, 256, 40),
]
"""How many heads queries and keys have, numbers each, and how many keys there are."""


@pytest.mark.parametrize(
    ("shape", "dtype", "threads", "lanes"),
    covering(product(SHAPES, (torch.bfloat16, torch.float16), (1, 3), (8, 16))),
    indirect=["lanes"],
)
def test_results_are_those_of_softmax(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups of all sizes, and keys that fill no vector."""
    heads, kv_heads, head_dim, span = shape
    torch.manual_seed(span)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    queries = (3 * torch.randn(1, heads, head_dim)).to(dtype)
    # As in a cache: longer than what is seen, keys beside values.
    cached = torch.randn(2, kv_heads, span + 9, head_dim).to(dtype)
    keys, values = cached[:, :, 2 : 2 + span].unbind()

    assert attention.takes(keys)
    scores = queries.view(kv_heads, -1, head_dim).double() @ keys.double().transpose(1, 2) / head_dim**0.5
    expected = (scores.softmax(-1) @ values.double()).view(1, heads, head_dim)
    for _ in range(2):
        made = attend(queries, keys, values)
        assert (made.shape, made.dtype) == (expected.shape, dtype)
        assert (made.double() - expected).norm() <= expected.norm() * 4e-3


@pytest.mark.parametrize("window", [None, 8, 29])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_those_alone(window: int | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a block's rows sees what is before it, as far as the window reaches, and has the bits it has alone."""
    torch.manual_seed(threads)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows, span = 13, 41
    queries = torch.randn(rows, 6, 32).bfloat16()
    keys, values = torch.randn(2, 2, span, 32).bfloat16().unbind()
    assert attention.takes(keys, rows)
    made = attend(queries, keys, values, window)
    for row, query in enumerate(queries):
        end = span - rows + row + 1
        seen = slice(0 if window is None else max(0, end - window), end)
        assert torch.equal(attend(query[None], keys[:, seen], values[:, seen]), made[row : row + 1])


def test_scores_of_all_sizes() -> None:
    """Very unlike ones leave weights of 0, and equal ones equal weights; nothing overflows."""
    keys = torch.zeros(1, 40, 32, dtype=torch.bfloat16)
    keys[0, 7] = 30000
    values = torch.arange(40.0)[None, :, None].expand(1, 40, 32).bfloat16()
    queries = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    for sign, expected in ((1, 7.0), (-1, (sum(range(40)) - 7) / 39)):
        made = attend(sign * queries, keys, values)
        torch.testing.assert_close(made.float(), torch.full((1, 1, 32), expected), rtol=4e-3, atol=0)


def test_what_it_does_not_take() -> None:
    """Few keys, also of the first of many rows, heads that fill no vector, float32, elements that lie apart."""
    assert attention.takes(torch.zeros(2, 8, 32, dtype=torch.bfloat16))
    assert attention.takes(torch.zeros(2, 12, 32, dtype=torch.bfloat16), 5)
    assert not attention.takes(torch.zeros(2, 12, 32, dtype=torch.bfloat16), 6)
    for keys in (
        torch.zeros(2, 7, 32, dtype=torch.bfloat16),
        torch.zeros(2, 8, 20, dtype=torch.bfloat16),
        torch.zeros(2, 8, 32),
        torch.zeros(2, 32, 16, dtype=torch.bfloat16).transpose(1, 2),
    ):
        assert not attention.takes(keys)
