"""Packed checkpoints that are damaged or of a kind that is not served: each is refused with file, tensor and remedy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.planning.model_size import read_model_size
from services.errors import DataLoss, FlashsplitError, InvalidArgument, Unimplemented
from tests.reference import storage
from tests.shard_worker.packed import Packed
from tests.shard_worker.tiny import load_stage

Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.1.mlp.down_proj."
HEAD = "lm_head."


@pytest.fixture
def copied(packed: Packed, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a packed checkpoint, free to damage."""
    return lambda name: Path(shutil.copytree(packed(name)[0], tmp_path / "copy"))


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def spoilt(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """The same with one other number in it."""
    changed = tensor.float().flatten()
    changed[len(changed) // 2] = value
    return changed.view(tensor.shape).to(tensor.dtype)


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("checkpoint", "damage", "name", "words"),
    [
        ("fp8", drop(DOWN + "weight_scale_inv"), DOWN + "weight_scale_inv", "is missing in"),
        ("fp8", drop(DOWN + "weight"), DOWN + "weight", "is missing in"),
        ("awq", drop(DOWN + "qzeros"), DOWN + "qzeros", "is missing in"),
        ("gptq", drop(DOWN + "scales"), DOWN + "scales", "is missing in"),
        ("gptq-act", drop(DOWN + "g_idx"), DOWN + "g_idx", "is missing in"),
        ("ct-nvfp4", drop(DOWN + "weight_global_scale"), DOWN + "weight_global_scale", "is missing in"),
        ("fp8", put(DOWN + "weight_scale_inv", lambda t: t[:, :0]), DOWN + "weight_scale_inv", r"must be \[1, 1\]"),
        ("awq", put(DOWN + "scales", lambda t: t[1:]), DOWN + "scales", r"has shape \[3, 64\]; it must be \[4, 64\]"),
        ("fp8", put(DOWN + "weight_scale_inv", lambda t: t.int()), DOWN + "weight_scale_inv", "stored as I32; it must"),
        ("ct-nvfp4", put(DOWN + "weight_scale", lambda t: t.float()), DOWN + "weight_scale", "must be F8_E4M3"),
        ("fp8", put(DOWN + "weight", lambda t: t[None]), DOWN + "weight", "must be a matrix"),
        ("gptq", lambda t: t.update({DOWN + "weight": torch.ones(64, 128)}), DOWN + "weight", "twice, packed and as"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    copied: Callable[[str], Path], checkpoint: str, damage: Callable[[Tensors], Any], name: str, words: str
) -> None:
    """By the planner as by a worker, before anything is loaded: where, which tensor and what it must be."""
    path = copied(checkpoint)
    storage.edit_tensors(path, damage)
    for read in (load_stage, lambda path: read_model_size(path, None)):
        with pytest.raises(InvalidArgument, match=f"{re.escape(name)}.*{words}") as caught:
            read(path)
        assert str(path) in caught.value.message
        assert name in caught.value.where["field"]


@pytest.mark.parametrize(
    ("checkpoint", "name", "change", "words"),
    [
        ("fp8", DOWN + "weight_scale_inv", lambda t: spoilt(t, torch.nan), "holds NaN or infinity"),
        ("ct-float", DOWN + "weight_scale", lambda t: spoilt(t, torch.inf), "holds NaN or infinity"),
        ("ct-4-group", DOWN + "weight_scale", lambda t: spoilt(t, -torch.inf), "holds NaN or infinity"),
        ("ct-int", DOWN + "weight_scale", lambda t: spoilt(t, torch.nan), "holds NaN or infinity"),
        ("awq", DOWN + "scales", lambda t: spoilt(t, torch.nan), "holds NaN or infinity"),
        ("gptq", DOWN + "scales", lambda t: spoilt(t, torch.inf), "holds NaN or infinity"),
        ("ct-nvfp4", DOWN + "weight_scale", lambda t: spoilt(t, torch.nan), "holds NaN or infinity"),
        ("ct-nvfp4", DOWN + "weight_global_scale", torch.zeros_like, "is 0; scales are divided by it"),
        ("modelopt-nvfp4", DOWN + "weight_scale_2", lambda t: t * torch.nan, "holds NaN or infinity"),
        ("ct-mxfp4", DOWN + "weight_scale", lambda t: spoilt(t, 255), "holds 255, .*; exponents must be 0 to 144"),
        ("ct-mxfp4", DOWN + "weight_scale", lambda t: spoilt(t, 145), "holds 145, which is more than 2\\*\\*17"),
        ("ct-4-group", DOWN + "weight_shape", lambda t: t.flip(0), r"is \[128, 64\]; it must be \[64, 128\]"),
        ("gptq-act", DOWN + "g_idx", lambda t: spoilt(t, 4), "names group 4; groups are 0 to 3"),
        ("gptq-act", DOWN + "g_idx", lambda t: spoilt(t, -1), "names group -1; groups are 0 to 3"),
        ("gptq-act", DOWN + "g_idx", torch.zeros_like, "has groups of unlike sizes; each must have 32 columns"),
        ("gptq-symmetric", DOWN + "qzeros", lambda t: t + 1, "makes 9 the code of 0, .* it must be 8 in all groups"),
        ("awq-symmetric", DOWN + "qzeros", lambda t: t - 1, "makes 7 the code of 0, .* it must be 8 in all groups"),
    ],
)
def test_contents_that_a_format_cannot_have_are_named(
    copied: Callable[[str], Path],
    checkpoint: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: str,
) -> None:
    """While they are loaded: the file, the tensor, what it holds and what it must hold."""
    path = copied(checkpoint)
    storage.edit_tensors(path, put(name, change))
    with pytest.raises(DataLoss, match=f"tensor {re.escape(name)} in .*model.safetensors {words}") as caught:
        load_stage(path, (1, 2))
    assert caught.value.where["field"] == name


ROTATIONS = {
    "R2": {"type": "hadamard", "apply": [{"targets": ["v_proj"], "location": "weight_output"}]},
    "R4": {"type": "hadamard", "apply": [{"targets": ["down_proj"], "location": "input"}]},
}
"""One that is part of the weights already, and one that each product would begin with."""


def groups(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


@pytest.mark.parametrize(
    ("checkpoint", "changes", "kind", "words"),
    [
        (
            "fp8",
            {"quant_method": "hqq"},
            Unimplemented,
            "quant_method 'hqq' .*awq, compressed-tensors, fp8, gptq",
        ),
        ("fp8", {"fmt": "e5m2"}, Unimplemented, "fmt 'e5m2' .*convert the checkpoint to e4m3"),
        ("fp8", {"expert_dtype": "fp4"}, Unimplemented, "expert_dtype 'fp4'"),
        ("fp8", {"weight_block_size": [32, 32]}, InvalidArgument, r"weight_scale_inv .* must be \[\d, \d\]"),
        ("fp8", {"weight_block_size": [128]}, InvalidArgument, r"\[128\]; it must be two whole numbers above 0"),
        ("fp8", {"modules_to_not_convert": ["mlp"]}, InvalidArgument, r"mlp\..*modules_to_not_convert"),
        ("fp8", {"ignored_layers": ["model.layers.0"]}, InvalidArgument, r"layers\.0\..*ignored_layers"),
        ("fp8", {"modules_to_not_convert": "mlp"}, InvalidArgument, "'mlp'; it must be a list"),
        ("awq", {"version": "gemv"}, Unimplemented, "version 'gemv' .*'gemm' with AutoAWQ"),
        ("awq", {"version": "gemv_fast"}, Unimplemented, "version 'gemv_fast'"),
        ("awq", {"backend": "llm-awq"}, Unimplemented, "backend 'llm-awq'"),
        ("awq", {"bits": 3}, Unimplemented, "bits 3 .*convert the checkpoint to 4 bits"),
        ("awq", {"group_size": 64}, InvalidArgument, r"qzeros .* must be"),
        ("awq", {"group_size": 0}, InvalidArgument, "group_size is 0; it must be a whole number above 0, or -1"),
        ("awq", {"modules_to_not_convert": ["mlp.down_proj"]}, InvalidArgument, r"down_proj\.weight is packed, but"),
        ("gptq", {"bits": 2}, Unimplemented, "bits 2 .*convert the checkpoint to 4 or 8 bits"),
        ("gptq", {"bits": 3}, Unimplemented, "bits 3"),
        ("gptq", {"checkpoint_format": "marlin"}, Unimplemented, "checkpoint_format 'marlin' .*GPTQModel"),
        ("gptq", {"pack_dtype": "int16"}, Unimplemented, "pack_dtype 'int16'"),
        ("gptq", {"meta": {"eora": {"rank": 64}}}, Unimplemented, "eora .*without an adapter"),
        ("gptq", {"dynamic": {r"-:.*\.mlp\..*": {}}}, InvalidArgument, r"mlp\..* is packed, .*dynamic"),
        ("gptq", {"dynamic": {r"+:.*down_proj": {"bits": 3}}}, Unimplemented, "bits 3"),
        ("gptq-head", {"lm_head": False}, InvalidArgument, r"lm_head\.weight is packed, .*lm_head"),
        ("ct-int", {"format": "marlin-24"}, Unimplemented, "format 'marlin-24' .*int-quantized"),
        ("ct-int", {"config_groups": {}}, InvalidArgument, "is packed, but no group"),
        ("ct-int", {"config_groups": None}, InvalidArgument, "config_groups is None; it must be an object of groups"),
        ("ct-int", {"ignore": ["lm_head", "re:.*v_proj"]}, InvalidArgument, r"v_proj\.weight is packed, .*ignore"),
        ("ct-int", {"ignore": ["re:("]}, InvalidArgument, r"'re:\(' .*is no regular expression"),
        ("ct-int", {"sparsity_config": "x"}, InvalidArgument, "sparsity_config .* must be an object"),
        ("ct-int", {"ignore": []}, InvalidArgument, r"lm_head\.weight is not packed, but .*config_groups"),
        ("ct-int", {"sparsity_config": {"format": "sparse-24-bitmask"}}, Unimplemented, "format 'sparse-24-bitmask'"),
        ("ct-int", {"transform_config": {"config_groups": ROTATIONS}}, Unimplemented, "transform_config 'input'"),
        ("ct-4-group", {"config_groups": groups(num_bits=3, group_size=32)}, Unimplemented, "num_bits 3 .*4 or 8"),
        (
            "ct-4-group",
            {"config_groups": groups(num_bits=4, group_size=64)},
            InvalidArgument,
            "weight_scale .* must",
        ),
        ("modelopt-nvfp4", {"quant_algo": "W4A8_AWQ"}, Unimplemented, "quant_algo 'W4A8_AWQ' .*NVFP4 or FP8"),
        (
            "modelopt-nvfp4",
            {"exclude_modules": ["*self_attn*"], "ignore": None},
            InvalidArgument,
            "self_attn.*exclude",
        ),
    ],
)
def test_settings_that_are_not_served_or_contradict_the_tensors(
    copied: Callable[[str], Path], checkpoint: str, changes: dict[str, Any], kind: type[FlashsplitError], words: str
) -> None:
    """Each with its key and value, and with what would be accepted or what to convert to."""
    path = copied(checkpoint)
    storage.edit_config(path, lambda config: config["quantization_config"].update(changes))
    for read in (load_stage, lambda path: read_model_size(path, None)):
        with pytest.raises(kind, match=words):
            read(path)


def test_a_tensor_in_two_files_is_named(copied: Callable[[str], Path]) -> None:
    """Neither is taken."""
    path = copied("fp8")
    (path / "second").mkdir()
    shutil.copy(path / "model.safetensors", path / "other.safetensors")
    names = storage.load_tensors(path)
    files = ["model.safetensors", "other.safetensors"]
    index = {"weight_map": dict(zip(names, files * len(names), strict=False))}
    (path / storage.INDEX).write_text(json.dumps(index))
    for read in (load_stage, lambda path: read_model_size(path, None)):
        with pytest.raises(InvalidArgument, match=r"is in .*model\.safetensors and in .*other\.safetensors: .* once"):
            read(path)


def test_modelopts_own_file_counts(packed: Packed, tmp_path: Path) -> None:
    """Older versions write hf_quant_config.json instead of quantization_config."""
    path = Path(shutil.copytree(packed("modelopt-nvfp4")[0], tmp_path / "copy"))
    settings = storage.read_config(path)["quantization_config"]
    storage.edit_config(path, lambda config: config.pop("quantization_config"))
    own = {"quant_algo": settings["quant_algo"], "exclude_modules": settings["ignore"], "group_size": 16}
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    assert load_stage(path).weight_bytes == load_stage(packed("modelopt-nvfp4")[0]).weight_bytes
