"""Scales and codes that are chosen while a checkpoint is loaded, against a search in float64, and what is made of
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coordinator.bench.shapes import write_shape
from coordinator.planning.model_size import read_model_size
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.model.quantization import Quantization, QuantizedTo
from shard_worker.device.devices import parse_devices
from shard_worker.stage.loader import StageLoader
from shard_worker.stage.stage import Stage
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.quantize import quantize
from tests.reference import packed_checkpoints as packing
from tests.shard_worker.tiny import Run, Tiny, ids, ignore_progress, load_split, load_stage

CPU = torch.device("cpu")
GROUP = 128


def rounded(group: list[float], scale: float, to: QuantizedTo) -> list[float]:
    """The nearest multiples of a scale that there are codes for."""
    low, high = (-8, 7) if to is QuantizedTo.INT4 else (-127, 127)
    return [scale * min(max(round(number / scale), low), high) for number in group]


def least_error(group: list[float], to: QuantizedTo) -> float:
    """The squared error with the best of many scales, searched one by one."""
    largest = max(group, key=abs) / (-8 if to is QuantizedTo.INT4 else 127)
    scales = [largest * (0.5 + step / 400) for step in range(260)]
    return min(
        sum((one - other) ** 2 for one, other in zip(group, rounded(group, scale, to), strict=True)) for scale in scales
    )


@pytest.mark.parametrize("to", [QuantizedTo.INT4, QuantizedTo.INT8])
def test_errors_are_nearly_the_least(to: QuantizedTo) -> None:
    """On the whole within 7 % of what a long search finds in float64; elements are the scale's multiples."""
    matrix = torch.randn(8, 4 * GROUP, generator=torch.Generator().manual_seed(0))
    packed = quantize([matrix], to, (8, 4 * GROUP), GROUP, torch.float32)
    exact = matrix.double().view(-1, GROUP)
    found = packed.unpacked().double().view(-1, GROUP)
    scales = packed.scales.values.double().flatten().tolist()
    for group, elements, scale in zip(exact.tolist(), found.tolist(), scales, strict=True):
        assert elements == pytest.approx(rounded(group, scale, to), abs=1e-6)
    least = sum(least_error(group, to) for group in exact.tolist())
    assert (found - exact).norm().item() <= 1.07 * least**0.5


def test_floats_are_the_nearest() -> None:
    """Of the scale that clips nothing."""
    matrix = torch.randn(8, 4 * GROUP, generator=torch.Generator().manual_seed(0))
    packed = quantize([matrix], QuantizedTo.FP8, (8, 4 * GROUP), GROUP, torch.float32)
    scales = packed.scales.values.double().repeat_interleave(GROUP, 1)
    assert torch.equal(packed.scales.values, (matrix.view(8, 4, GROUP).abs().amax(2) / 448).bfloat16())
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[every.isfinite()]
    nearest = (every[None, None] * scales[..., None] - matrix.double()[..., None]).abs().amin(2)
    assert torch.allclose((packed.unpacked().double() - matrix).abs(), nearest, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("to", QuantizedTo)
def test_rows_are_packed_by_themselves(to: QuantizedTo) -> None:
    """Whatever rows are read at a time; zeros stay zeros; elements of 16 bits are taken as they are."""
    matrix = torch.randn(10, 2 * GROUP, generator=torch.Generator().manual_seed(1)).bfloat16()
    matrix[4:6] = 0
    matrix[7, :GROUP] = 0
    whole, parts = (
        quantize(rows, to, (10, 2 * GROUP), GROUP, torch.bfloat16) for rows in ([matrix.float()], matrix.split(3))
    )
    assert torch.equal(whole.codes.view(torch.uint8), parts.codes.view(torch.uint8))
    assert torch.equal(whole.scales.values, parts.scales.values)
    elements = whole.unpacked()
    assert not elements[4:6].any()
    assert not elements[7, :GROUP].any()
    assert elements.isfinite().all()
    assert (elements - matrix.float()).norm() < (0.12 if to is QuantizedTo.INT4 else 0.03) * matrix.float().norm()


PACKINGS = [Quantization(QuantizedTo.INT8), Quantization(QuantizedTo.INT4, ends=True), Quantization(QuantizedTo.FP8)]


@pytest.mark.parametrize("quantization", PACKINGS, ids=str)
@pytest.mark.parametrize("model", ["qwen3-tied", "qwen3_5-ratio-2", "qwen3_moe", "gpt_oss"])
def test_a_stage_computes_with_the_packed_matrices(tiny: Tiny, model: str, quantization: Quantization) -> None:
    """The same logits as a checkpoint of those very elements, in one stage and in two; the planner counts its bytes,
    and progress those of the file."""
    path = tiny.path(model)
    checkpoint = open_checkpoint(path, quantization=quantization)
    loader = StageLoader(checkpoint, LayerRange(0, 4), None)
    dense = StageLoader(open_checkpoint(path), LayerRange(0, 4), None)
    stage = load_stage(path, (0, 4), quantization=quantization)
    assert loader.total_bytes == dense.total_bytes
    assert stage.weight_bytes == read_model_size(path, None, quantization=quantization).weight_bytes

    reference = Run([reference_stage(path, quantization)])
    expected = [reference(ids(20)), reference([7])]
    for run in (Run([stage]), Run(load_split(path, [1], quantization=quantization))):
        torch.testing.assert_close(run(ids(20)), expected[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(run([7]), expected[1], rtol=1e-4, atol=1e-4)


def reference_stage(path: Path, quantization: Quantization) -> Stage:
    """A stage of a checkpoint whose matrices are the unpacked elements, loaded as any dense one is."""
    packed, dense = open_checkpoint(path, quantization=quantization), open_checkpoint(path)
    elements = {}
    for name, header in packed.headers.items():
        if header.packed is not None:
            weight = packed.weight(name, CPU, torch.float32)
            assert isinstance(weight, PackedWeight)
            assert weight.nbytes == header.packed.loaded_bytes
            elements[name] = weight.unpacked()
    plain: Callable[[str], torch.Tensor] = dense.tensor
    dense.tensor = lambda name: elements[name] if name in elements else plain(name)
    return StageLoader(dense, LayerRange(0, 4), None).load(parse_devices("cpu"), None, ignore_progress)


def test_packings_have_fingerprints_of_their_own(tiny: Tiny) -> None:
    """So that no two share a prefix; a packed checkpoint is refused by name."""
    path = tiny.path("qwen3")
    found = {open_checkpoint(path, quantization=one).fingerprint for one in (None, *PACKINGS)}
    assert len(found) == len(PACKINGS) + 1
    draft = tiny.draft("qwen3")
    assert open_checkpoint(draft, "--draft", PACKINGS[0]).fingerprint != open_checkpoint(draft, "--draft").fingerprint


def test_random_checkpoints_are_packed_too(tmp_path: Path) -> None:
    """As benches load them: the same way, of numbers that are drawn when they are read."""
    target, _ = write_shape("qwen3-0.6b", tmp_path)
    checkpoint = open_checkpoint(target, quantization=Quantization(QuantizedTo.INT4))
    name = "model.layers.0.self_attn.k_proj.weight"
    weight = checkpoint.weight(name, CPU, torch.bfloat16)
    header = checkpoint.headers[name]
    assert header.packed is not None
    assert weight.nbytes == header.packed.loaded_bytes
    assert isinstance(weight, PackedWeight)
    assert 0.015 < weight.unpacked().std().item() < 0.025
    assert checkpoint.rows("model.embed_tokens.weight", (1, 2)).shape == (2, header.shape[1])


def test_a_packed_checkpoint_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """By the name of the option and of a matrix in it."""
    packed, _ = packing.write_packed(
        tiny.path("qwen3"),
        tmp_path / "fp8",
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        packing.float8_blocks(32, 32, torch.float32),
    )
    with pytest.raises(InvalidArgument, match="--quantize int8 packs .*_proj.weight in .* is packed already, as"):
        open_checkpoint(packed, quantization=PACKINGS[0])
