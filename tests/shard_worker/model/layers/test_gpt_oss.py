"""gpt-oss against transformers: sinks, windows, biases and clamped gates, experts dense and in MXFP4."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.errors import InvalidArgument
from services.model.checkpoint_files import read_headers
from shard_worker.weights.opening import open_checkpoint
from tests.reference import storage, target
from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import GPT_OSS, Tiny, ids, load_stage, unsplit

STEPS = [(family_runner.check_steps, name) for name in GPT_OSS]
OTHERS = [(family_runner.check_commits, "gpt_oss")]


@pytest.mark.parametrize(("check", "name"), [*STEPS, *OTHERS])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Tied and untied heads, attention with biases and without, scaled RoPE by its old name and its new one, windows
    shorter than a block, all experts chosen, and packed matrices of whole blocks and others."""
    check(tiny, name)


@pytest.mark.parametrize("size", [60.0, -60.0])
def test_sinks_may_take_everything_or_nothing(tiny: Tiny, tmp_path: Path, size: float) -> None:
    """A sink far above all scores leaves nothing of attention's output but its bias; one far below changes nothing."""
    path = Path(shutil.copytree(tiny.path("gpt_oss"), tmp_path / "sinks"))

    def even(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("sinks")]:
            tensors[name].fill_(size)

    storage.edit_tensors(path, even)
    tokens = ids(20)
    expected = target.logits(target.load(path), tokens)

    torch.testing.assert_close(unsplit(path)(tokens), expected, **family_runner.TOLERANCE)
    assert (expected - target.logits(tiny.model("gpt_oss"), tokens)).abs().max() > 0.1


def test_long_rows_are_attended_to_in_parts(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of so many rows and positions that not all of them are in memory at a time."""
    tokens = ids(40)
    expected = unsplit(tiny.path("gpt_oss"))(tokens)
    monkeypatch.setattr("shard_worker.ops.attention._SCORES", 4 * 40 * 7)

    torch.testing.assert_close(unsplit(tiny.path("gpt_oss"))(tokens), expected, **family_runner.TOLERANCE)


def test_the_router_stays_in_float32(tiny: Tiny) -> None:
    """In a model of 16 bits too, its biases with it."""
    [layer] = load_stage(tiny.path("gpt_oss"), (0, 1), dtype="bfloat16").segments[0].weights
    assert layer.mlp.router.dtype is layer.mlp.router_bias.dtype is torch.float32
    assert layer.mlp.experts[0].gate_up_bias.dtype is torch.bfloat16


def test_headers_of_packed_experts_tell_what_is_loaded(tiny: Tiny) -> None:
    """Experts one by one, packed, with biases of their own: what a file has of them, and what it takes in memory."""
    path = tiny.path("gpt_oss-mxfp4")
    checkpoint = open_checkpoint(path)
    stored = storage.load_tensors(path)
    start = "model.layers.1.mlp.experts"
    packed = checkpoint.headers[f"{start}.3.up_proj.weight"].packed

    assert dict(checkpoint.headers) == read_headers(path, checkpoint.config, "--model")
    assert packed is not None
    assert (packed.format, packed.group, packed.stored_bytes) == ("mxfp4", 32, 64 * 32 + 64 * 2)
    assert sum(checkpoint.size_bytes(name) for name in checkpoint.headers) == sum(t.nbytes for t in stored.values())
    weight = checkpoint.weight(f"{start}.3.up_proj.weight", torch.device("cpu"), torch.bfloat16)
    assert weight.nbytes == packed.loaded_bytes
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    pairs = stored[f"{start}.gate_up_proj_blocks"][3, 1::2].int()
    numbers = torch.stack((table[pairs & 15], table[pairs >> 4]), -1).flatten(-2)
    scales = 2.0 ** (stored[f"{start}.gate_up_proj_scales"][3, 1::2].float() - 127)
    assert torch.equal(weight.lookup(torch.arange(64)).float(), (numbers * scales[..., None]).flatten(1))
    biases = checkpoint.tensor(f"{start}.3.gate_proj.bias")
    assert torch.equal(biases, stored[f"{start}.gate_up_proj_bias"][3, ::2])


def test_a_list_that_contradicts_packed_experts_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """modules_to_not_convert names modules whose experts are packed."""
    path = Path(shutil.copytree(tiny.path("gpt_oss-mxfp4"), tmp_path / "listed"))
    storage.edit_config(path, lambda config: config["quantization_config"].update(modules_to_not_convert=["mlp"]))

    with pytest.raises(InvalidArgument, match=r"mlp.experts.0.*modules_to_not_convert"):
        open_checkpoint(path)


def test_kernels_take_dense_experts_with_all_biases(tiny: Tiny) -> None:
    """Those of each expert, in the order of their numbers, as where no blocks of a CPU hold the matrices."""
    [layer] = load_stage(tiny.path("gpt_oss"), (0, 1), dtype="float16").segments[0].weights
    together, stored = layer.mlp.together, storage.load_tensors(tiny.path("gpt_oss"))
    start = "model.layers.0.mlp.experts"

    gates_first = stored[f"{start}.gate_up_proj_bias"].half()
    gates_first = torch.cat([gates_first[:, ::2], gates_first[:, 1::2]], 1)
    assert torch.equal(together.gate_up_bias, gates_first.flatten())
    assert torch.equal(together.down_bias, stored[f"{start}.down_proj_bias"].half().flatten())
    assert torch.equal(together.down.tensor.view(8, 64, 64), stored[f"{start}.down_proj"].half().transpose(1, 2))
