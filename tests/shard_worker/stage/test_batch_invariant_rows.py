"""Batch-invariant rows: one comes out bit for bit the same, whatever step it is part of, and so does its cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from shard_worker.device.devices import best_devices
from shard_worker.model.features import Features
from shard_worker.stage.loader import CaptureRequest
from shard_worker.weights.weight import DenseWeight
from tests.combinations import covering, others_slow
from tests.shard_worker.tiny import QWEN3, QWEN3_5, Run, Tiny, ids, load_split, load_stage

ROWS = 16
BLOCKS = [(16, 3), (1, 1), (9, 9), (16, 16), (5, 1), (2, 2), (16, 7)]
"""Verifies: rows, and how many of them count."""
TOKENS = ids(30 + sum(kept for _, kept in BLOCKS))


def state(run: Run) -> list[torch.Tensor]:
    """All that is remembered of the committed tokens, in order of the layers."""
    held = []
    for stage, memory in zip(run.stages, run.states, strict=True):
        for segment, caches in zip(stage.segments, memory.caches, strict=True):
            for offset, slot in enumerate(segment.slots):
                layer = segment.layers.first + offset
                if stage.config.layer_kinds[layer] == "linear_attention":
                    assert caches.recurrent is not None
                    before = caches.recurrent.taps - 1
                    held += [caches.recurrent.state[slot], caches.recurrent.conv[slot, :before]]
                else:
                    held += caches.attention_of(stage.config.attention(layer)).span(slot, 0, run.length)
    return [one.clone() for one in held]


def plain(run: Run, features: list[Features] | None = None) -> torch.Tensor:
    """Logits of the tokens behind a prompt of 30, one a step."""
    run(TOKENS[:30])
    logits = []
    for token in TOKENS[30:]:
        step = None
        if features is not None:
            features.append(step := Features())
        logits.append(run([token], step))
    return torch.cat(logits)


def speculated(run: Run, features: list[Features] | None = None) -> torch.Tensor:
    """The same by verifies, whose draft tokens behind what counts are other tokens."""
    run(TOKENS[:30])
    logits, done = [], 30
    for rows, kept in BLOCKS:
        step = None
        block = [*TOKENS[done : done + kept], *ids(rows - kept, seed=done)]
        if features is not None:
            step = Features()
        logits.append(run.verify(block, step)[:kept])
        if features is not None and step is not None:
            features.append(step.rows(kept))
        run.commit(kept)
        done += kept
    return torch.cat(logits)


def equal(own: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(own) == len(other) and all(map(torch.equal, own, other))


NAMES = [*QWEN3, *QWEN3_5]
TYPES = list(product(["bfloat16", "float16", "float32"], [None, "float8_e4m3fn"]))


# By default each model with two pairs of types, each pair with several models of both families.
@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    others_slow(
        [(name, *types) for name in NAMES for types in TYPES],
        [(name, *TYPES[(number + more) % len(TYPES)]) for number, name in enumerate(NAMES) for more in (0, 3)],
    ),
)
def test_verifies_are_plain_steps_to_the_bit(tiny: Tiny, name: str, dtype: str, kv_dtype: str | None) -> None:
    """Logits of all rows that count, and the state behind them, of every family in every element type."""
    stage = load_stage(tiny.path(name), dtype=dtype, kv_dtype=kv_dtype)
    one, other = (Run([stage], batch_invariant_rows=ROWS) for _ in range(2))

    assert torch.equal(plain(one), speculated(other))

    assert one.length == other.length == len(TOKENS)
    assert equal(state(one), state(other))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen3-sliding", "qwen3-bias", "qwen3_5"])
def test_so_they_are_with_matrices_as_they_are(
    tiny: Tiny, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without oneDNN's blocks, where already products of this size round one row otherwise than sixteen."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    stage = load_stage(tiny.path(name), dtype=dtype)
    assert stage.head is not None
    assert isinstance(stage.head.weight, DenseWeight)
    runs = [Run([stage], batch_invariant_rows=ROWS) for _ in range(2)]

    assert torch.equal(plain(runs[0]), speculated(runs[1]))
    assert equal(*map(state, runs))


@pytest.mark.parametrize(
    ("name", "cuts", "summed"),
    covering(
        (
            (name, cuts, summed)
            for name, cuts in (
                ("qwen3-sliding", (1, 3)),
                ("qwen3_5", (3,)),
                ("qwen3_5", (1, 4, 6)),
                ("qwen3_moe", (2,)),
            )
            for summed in (True, False)
        ),
        1,
    ),
)
def test_so_they_are_over_several_stages_with_captures(
    tiny: Tiny, name: str, cuts: tuple[int, ...], summed: bool
) -> None:
    """In bfloat16, split: logits and state as unsplit, and captured slices, or their sum, that are the same too."""
    fc = torch.randn(64, 128, generator=torch.Generator().manual_seed(7)) / 16
    capture = CaptureRequest((3, 1), fc if summed else None)
    stages = load_split(tiny.path(name), cuts, dtype="bfloat16", capture=capture)
    unsplit = Run([load_stage(tiny.path(name), dtype="bfloat16")], batch_invariant_rows=ROWS)
    runs = [Run(stages, batch_invariant_rows=ROWS) for _ in range(2)]
    captured: list[list[Features]] = [[], []]

    expected = plain(unsplit)
    assert torch.equal(plain(runs[0], captured[0]), expected)
    assert torch.equal(speculated(runs[1], captured[1]), expected)

    assert equal(state(runs[0]), state(unsplit))
    assert equal(state(runs[1]), state(unsplit))
    rows = [[torch.cat(tensors) for tensors in zip(*(one.tensors for one in run), strict=True)] for run in captured]
    assert equal(*rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["qwen3-sliding", "qwen3_5"])
def test_so_they_are_on_a_gpu_without_kernels(tiny: Tiny, name: str, dtype: str) -> None:
    """Logits and state, where plain torch computes the steps there."""
    stage = load_stage(tiny.path(name), devices=best_devices()[0], dtype=dtype).without_kernels()
    runs = [Run([stage], batch_invariant_rows=ROWS) for _ in range(2)]

    assert torch.equal(plain(runs[0]), speculated(runs[1]))

    assert equal(*map(state, runs))


def test_without_it_they_differ(tiny: Tiny) -> None:
    """What the option is for: in bfloat16 the same steps round differently, and in float32 a little."""
    for dtype, least in (("bfloat16", 1e-3), ("float32", 1e-9)):
        stage = load_stage(tiny.path("qwen3_5"), dtype=dtype)
        difference = plain(Run([stage])) - speculated(Run([stage]))
        assert difference.abs().max() > least, dtype


def test_batch_invariant_steps_compute_what_others_do(tiny: Tiny) -> None:
    """In float32 they differ from fast ones by rounding alone."""
    for name in ("qwen3-sliding", "qwen3_5"):
        stage = load_stage(tiny.path(name))
        invariant, fast = speculated(Run([stage], batch_invariant_rows=ROWS)), speculated(Run([stage]))
        torch.testing.assert_close(invariant, fast, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(96, 64), (33, 97), (1152, 384), (256, 3072)])
def test_a_product_of_fixed_rows_rounds_every_row_alike(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Wherever a row stands, and whatever stands beside it: what batch-invariant steps rest on, on this machine."""
    generator = torch.Generator().manual_seed(1)
    dense = DenseWeight((torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(dtype))
    x = torch.randn(ROWS, shape[1], generator=generator).to(dtype)
    for weight in (dense, dense.prepared()):
        whole = weight.matmul(x)
        for first, last in itertools.combinations(range(ROWS + 1), 2):
            assert torch.equal(weight.matmul(x[first:last], None, ROWS), whole[first:last])
