"""Shapes with random weights that are packed: what workers make of them, and what planners count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from coordinator.cluster.placement import make_plan
from coordinator.planning.memory import Models
from coordinator.planning.model_size import read_model_size
from coordinator.planning.report import make_report
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.model.random_weights import PACKINGS, random_headers
from services.model.target_tensors import cpu_bytes
from shard_worker.device.devices import parse_devices
from shard_worker.stage.loader import StageLoader
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.weight import rows_at_a_time


def shape(directory: Path, packing: str) -> Path:
    """Write a small configuration that asks for random packed weights, of rows that are whole blocks."""
    directory.mkdir(exist_ok=True)
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "random_weights": True,
        "random_packing": packing,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.usefixtures("largest_cpu_form")
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_matrices_take_the_bytes_that_are_counted(packing: str, tmp_path: Path) -> None:
    """Each matrix is of its type, and takes what its header says, which the planner adds up."""
    checkpoint = open_checkpoint(shape(tmp_path, packing))
    packed = {name: header.packed for name, header in checkpoint.headers.items() if header.packed is not None}
    assert len(packed) == 2 * 7 + 2
    for name, how in packed.items():
        weight = checkpoint.weight(name, torch.device("cpu"), torch.bfloat16)
        assert weight.nbytes == how.loaded_bytes, name
        assert weight.prepared().nbytes == cpu_bytes(name, checkpoint.headers[name], "bfloat16"), name
    counted = read_model_size(tmp_path, None)
    held = sum(checkpoint.weight(n, torch.device("cpu"), torch.bfloat16).nbytes for n in packed if ".layers." in n)
    assert sum(layer.read_bytes for layer in counted.layers) == held


def test_the_mix_is_that_of_files_of_its_name(tmp_path: Path) -> None:
    """Q6_K for the head and half of the layers' values and down projections."""
    headers = random_headers(json.loads((shape(tmp_path, "q4_k_m") / "config.json").read_text()))
    wide = {name for name, header in headers.items() if header.code == "Q6_K"}
    assert wide == {"lm_head.weight", *(f"model.layers.1.{n}.weight" for n in ("self_attn.v_proj", "mlp.down_proj"))}
    assert {header.code for name, header in headers.items() if name not in wide} == {"Q4_K", "BF16"}


def test_plans_say_what_cpus_unpack(tmp_path: Path) -> None:
    """Q6_K has groups of 16 columns, which CPUs have no product for; Q8_0 is held as twice 4 bits."""
    for packing, bytes_of_weight, says in (("q6_k", 2.0, "unpacked to bfloat16"), ("q8_0", 1.25, "4 and 8 bits")):
        models = Models(read_model_size(shape(tmp_path, packing), None), None)
        plan = make_plan(target_devices="cpu", layer_split=None, draft_device=None, num_layers=2, has_draft=False)
        report = make_report(models, plan, lengths=[128], sessions=1)
        (load,) = report.devices
        matrices = 2 * (256 * 64 * (4 + 2 * 2 + 4) + 3 * 256 * 512) + 320 * 256
        rest = models.target.embedding_bytes + 2 * (2 * (2 * 256 + 2 * 64)) + 2 * 256
        assert load.weight_bytes == matrices * bytes_of_weight + rest
        assert says in report.notes[0]


def test_a_packed_shape_computes(tmp_path: Path) -> None:
    """A stage of it is loaded and gives numbers."""
    assert_computes(shape(tmp_path, "q4_k_m"))


def assert_computes(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    with torch.inference_mode():
        stage = StageLoader(checkpoint, LayerRange(0, 2), None).load(parse_devices("cpu"), None, lambda *_: None)
        state = stage.allocate(16, 4)
        hidden = stage.run(state, stage.embed((1, 2, 3)), None, uncommitted=False)
        assert stage.head is not None
        assert stage.head.logits(hidden).isfinite().all()


def test_experts_alone_are_packed_as_gpt_oss_is_published(tmp_path: Path) -> None:
    """In MXFP4, which a stage computes with; attention, router and ends are dense."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = json.loads((shape(tmp_path, "mxfp4_experts") / "config.json").read_text())
    config |= {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "sliding_window": 8, **experts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    headers = random_headers(config)
    assert {header.code for name, header in headers.items() if header.packed is not None} == {"MXFP4"}
    packed = {name for name, header in headers.items() if header.packed is not None}
    assert packed == {name for name in headers if ".experts." in name and name.endswith("weight")}
    assert_computes(tmp_path)


def test_an_unknown_packing_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"random_packing 'q3_m' is unknown: it must be one of q4_k_m, "):
        open_checkpoint(shape(tmp_path, "q3_m"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_has_the_same_numbers_each_time(dtype: torch.dtype, tmp_path: Path) -> None:
    """In any order, whole and in parts, with rows of another tensor between: so another worker has the same model."""
    path, cpu = shape(tmp_path, "q8_0"), torch.device("cpu")
    config = json.loads((path / "config.json").read_text())
    del config["random_packing"]
    # More than are made at a time.
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": rows_at_a_time(256, cpu) + 33}))
    first, second = open_checkpoint(path), open_checkpoint(path)
    names = sorted(first.headers)
    tensors = {name: first.place(name, cpu, dtype) for name in names}
    for name in reversed(names):
        assert torch.equal(second.place(name, cpu, dtype), tensors[name]), name
    name = "model.embed_tokens.weight"
    assert torch.equal(torch.cat([*second.parts(name, cpu, dtype)]), tensors[name])
    assert torch.equal(second.rows(name, [5, 3]).to(dtype), tensors[name][[5, 3]])
    assert not torch.equal(tensors[name], tensors["lm_head.weight"])
    assert len({tensor.flatten()[0].item() for tensor in tensors.values() if tensor.dim() == 2}) > len(names) / 4
