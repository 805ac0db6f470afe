"""Packed checkpoints of every format: what a model computes with them is what it computes with what they stand for."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from coordinator.planning.model_size import read_model_size
from services.layers import LayerRange
from services.model.checkpoint_files import read_headers
from services.model.target_tensors import cpu_bytes
from shard_worker.model.kernels.codes import form_of
from shard_worker.model.layer_weights import AttentionWeights, DecoderWeights, ExpertsWeights, matrices_of
from shard_worker.stage.loader import StageLoader
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.tiled import TiledWeight, tiling_of
from shard_worker.weights.unread import UnreadWeight, in_memory
from shard_worker.weights.weight import DenseWeight, ReorderedWeight
from tests.combinations import others_slow
from tests.reference import checkpoints, packed_checkpoints, storage
from tests.shard_worker.packed import CASES, Packed
from tests.shard_worker.tiny import Run, Tiny, ids, load_split, load_stage, unsplit

CPU = torch.device("cpu")


MODELS = ("qwen3", "qwen3_5-ratio-2")


# Each form by default in one of the models, in turn.
@pytest.mark.parametrize(
    ("name", "model"),
    others_slow(product(CASES, MODELS), ((name, MODELS[number % 2]) for number, name in enumerate(CASES))),
)
def test_logits_are_those_of_the_matrices_that_are_stood_for(
    packed: Packed, name: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one stage and in two, all of a prompt and then one token; and no matrix of layers is loaded as a dense one."""
    path, dense = packed(name, model)
    for run in (unsplit(path), Run(load_split(path, [1]))):
        expected = unsplit(dense)
        torch.testing.assert_close(run(ids(20)), expected(ids(20)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(run([7]), expected([7]), rtol=1e-4, atol=1e-4)
    # CPUs have no fast product for packed matrices in float32 and unpack them at the end.
    monkeypatch.setattr(PackedWeight, "prepared", lambda self, **_: self)
    monkeypatch.setattr(UnreadWeight, "prepared", lambda self, **_: in_memory(self))
    mlp = load_stage(path).segments[0].weights[0].mlp
    for weight in (mlp.gate_up, mlp.down):
        assert isinstance(weight.weight if isinstance(weight, ReorderedWeight) else weight, PackedWeight)


@pytest.mark.parametrize("name", ["fp8", "ct-4-zeros-32", "awq", "gptq-act"])
def test_experts_stay_packed(packed: Packed, name: str) -> None:
    """In memory, where nothing multiplies by them as well: those that rows are sent to are unpacked for it."""
    path, dense = packed(name, "qwen3_moe")
    expected, halves = unsplit(dense)(ids(20)), load_split(path, [2])
    for run in (unsplit(path), Run(halves)):
        torch.testing.assert_close(run(ids(20)), expected, rtol=1e-4, atol=1e-4)
    [segment] = halves[0].segments
    for layer in segment.weights:
        if isinstance(layer.mlp, ExpertsWeights):
            held = [one.down.weight if isinstance(one.down, ReorderedWeight) else one.down for one in layer.mlp.experts]
            assert all(isinstance(matrix, PackedWeight) for matrix in held)


@pytest.mark.usefixtures("largest_cpu_form")
@pytest.mark.parametrize("name", ["fp8", "ct-4-zeros-32"])
def test_the_planner_counts_experts_that_stay_packed(packed: Packed, name: str) -> None:
    """What a CPU holds of layers that multiply by dense matrices, and of such that multiply by packed ones."""
    path, _ = packed(name, "qwen3_moe")
    for dtype in ("float32", "bfloat16"):
        size, [segment] = read_model_size(path, dtype), load_stage(path, dtype=dtype).segments
        for layer, counted in zip(segment.weights, size.layers, strict=True):
            held = sum(matrix.nbytes for matrix in matrices_of(layer))
            assert counted.cpu_bytes - held == sum(norm.nbytes for norm in norms_of(layer))


def norms_of(layer: DecoderWeights) -> list[torch.Tensor]:
    assert isinstance(layer.mixer, AttentionWeights)
    assert layer.mixer.qk_norm is not None
    heads = torch.empty(2, layer.mixer.qk_norm.shape[1])
    return [layer.input_norm, layer.post_norm, heads]


@pytest.mark.usefixtures("largest_cpu_form")
@pytest.mark.parametrize("name", CASES)
def test_the_matrix_is_the_one_stood_for(packed: Packed, name: str) -> None:
    """Element by element, all of it and a few rows; and headers give the planner what a worker takes."""
    path, dense = packed(name)
    checkpoint, expected = open_checkpoint(path), storage.load_tensors(dense)
    assert dict(checkpoint.headers) == read_headers(path, checkpoint.config, "--model")
    assert {name: header.shape for name, header in checkpoint.headers.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    for name, header in checkpoint.headers.items():
        if header.packed is not None:
            weight = in_memory(checkpoint.weight(name, CPU, torch.float32))
            whole = weight.lookup(torch.arange(weight.rows))
            torch.testing.assert_close(whole, expected[name], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(
                checkpoint.rows(name, (5, 0, 5)), expected[name][[5, 0, 5]], rtol=1e-6, atol=1e-7
            )
            assert torch.equal(checkpoint.dense(name), whole)
            assert weight.nbytes == header.packed.loaded_bytes
            on_cpu = checkpoint.weight(name, CPU, torch.bfloat16).prepared()
            held = on_cpu.weight if isinstance(on_cpu, ReorderedWeight) else on_cpu
            assert held.nbytes == cpu_bytes(name, header, "bfloat16"), name


@pytest.mark.parametrize("name", CASES)
def test_the_planner_counts_what_a_worker_takes(packed: Packed, name: str) -> None:
    """All weights in memory, and what is read of the files, which progress counts."""
    path, _ = packed(name, "qwen3_5-ratio-2")
    size = read_model_size(path, None)
    loader = StageLoader(open_checkpoint(path), LayerRange(0, 4), None)
    tensors = storage.load_tensors(path)
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if not name.endswith("input_scale"))

    head = in_memory(open_checkpoint(path).weight("lm_head.weight", CPU, torch.float32))
    assert load_stage(path).weight_bytes == size.weight_bytes
    assert size.head_bytes == size.draft_head_bytes(4) == head.nbytes
    assert size.draft_head_bytes(2) == (head.nbytes // 2 if isinstance(head, DenseWeight) else head.nbytes)
    assert loader.total_bytes == stored


def test_packings_have_fingerprints_of_their_own(packed: Packed, tiny: Tiny) -> None:
    """So that no two of one model share a prefix."""
    fingerprints = {open_checkpoint(packed(other)[0]).fingerprint for other in CASES}
    assert len(fingerprints) == len(CASES)
    assert open_checkpoint(tiny.path("qwen3")).fingerprint not in fingerprints


@pytest.mark.parametrize("name", ["ct-4-zeros-32", "ct-nvfp4", "ct-mxfp4", "awq", "gptq-act"])
def test_columns_that_are_no_whole_blocks_are_held_in_bytes(tmp_path: Path, name: str) -> None:
    """Codes of 4 bits lie in blocks of 64 columns; of others each has a byte, and is the same number."""
    source, case = checkpoints.write_qwen3(tmp_path / "source", layers=1, mlp=96), CASES[name]
    path, dense = packed_checkpoints.write_packed(source, tmp_path, case.settings, case.pack, case.which)

    torch.testing.assert_close(unsplit(path)(ids(20)), unsplit(dense)(ids(20)), rtol=1e-4, atol=1e-4)
    assert load_stage(path).weight_bytes == read_model_size(path, None).weight_bytes


@pytest.mark.parametrize("name", ["gptq", "gptq-8", "gptq-v2", "awq"])
def test_zero_may_be_the_smallest_code(tmp_path: Path, name: str) -> None:
    """As in groups without a negative number; GPTQ's first version then stores the largest code, as 0 less one."""
    source, case = checkpoints.write_qwen3(tmp_path / "source", layers=1), CASES[name]
    matrix = "model.layers.0.mlp.down_proj.weight"
    storage.edit_tensors(source, lambda tensors: tensors.update({matrix: tensors[matrix].abs()}))
    path, dense = packed_checkpoints.write_packed(source, tmp_path, case.settings, case.pack, case.which)
    torch.testing.assert_close(
        open_checkpoint(path).dense(matrix), storage.load_tensors(dense)[matrix], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "fp8-f32-edges"])
def test_kernels_know_every_format(packed: Packed, name: str) -> None:
    """In groups of usual sizes each is brought to a form that they multiply by."""
    checkpoint = open_checkpoint(packed(name)[0])
    weight = in_memory(checkpoint.weight("model.layers.0.mlp.down_proj.weight", CPU, torch.bfloat16))
    held = weight.weight if isinstance(weight, ReorderedWeight) else weight
    assert isinstance(held, PackedWeight)
    assert form_of(TiledWeight(held, tiling_of(held, lane_columns=2))).lane_columns
