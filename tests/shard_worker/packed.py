"""Helpers of tests: packed tiny checkpoints of every format beside the dense ones that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.reference import packed_checkpoints as packing
from tests.shard_worker.tiny import Tiny


@dataclass(frozen=True)
class Case:
    """One way of packing. settings: its quantization_config. which: says which matrices are packed."""

    settings: dict[str, Any]
    pack: packing.Packer
    which: Callable[[str], bool] = field(default=packing.is_projection)


def fp8(**settings: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"} | settings


CASES = {
    "fp8": Case(fp8(weight_block_size=[128, 128]), packing.float8_blocks(128, 128, torch.bfloat16)),
    # Blocks that are partial at both edges of the tiny matrices.
    "fp8-f32-edges": Case(fp8(weight_block_size=[48, 40]), packing.float8_blocks(48, 40, torch.float32)),
    "fp8-ue8m0": Case(
        fp8(weight_block_size=[32, 32], scale_fmt="ue8m0", modules_to_not_convert=["lm_head", "model.embed_tokens"]),
        packing.float8_blocks(32, 32, torch.float8_e8m0fnu),
    ),
    "fp8-whole": Case(fp8(weight_block_size=None), packing.float8_whole),
    "fp8-ends": Case(
        fp8(weight_block_size=[32, 64]),
        packing.float8_blocks(32, 64, torch.float32),
        lambda name: name in ("lm_head.weight", "model.embed_tokens.weight") or packing.is_projection(name),
    ),
}


def ct(name: str, **weights: Any) -> Case:
    group = {"targets": ["Linear"], "weights": weights}
    settings = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*in_proj_[ab]$"],
    }
    return Case(settings, packing.compressed(name, **weights))


def gptq(bits: int, group: int, *, symmetric: bool, version: int = 1, shuffled: bool = False, **more: Any) -> Case:
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": shuffled,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "lm_head": "which" in more,
    }
    pack = packing.gptq(bits, group, symmetric=symmetric, version=version, shuffled=shuffled)
    return Case(settings, pack, **more)


def awq(group: int, *, symmetric: bool = False) -> Case:
    settings = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group,
        "zero_point": not symmetric,
        "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b"],
    }
    return Case(settings, packing.awq(group, symmetric=symmetric))


CASES |= {
    "ct-4-group": ct("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32),
    "ct-4-zeros": ct("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=64),
    "ct-4-zeros-32": ct("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=32),
    "ct-4-channel": ct("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="channel"),
    "ct-8-group": ct("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="group", group_size=32),
    "ct-8-zeros": ct("pack-quantized", num_bits=8, type="int", symmetric=False, strategy="channel"),
    "ct-int": ct("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    "ct-int-zeros": ct("int-quantized", num_bits=8, type="int", symmetric=False, strategy="channel"),
    "ct-int-whole": ct("int-quantized", num_bits=8, type="int", symmetric=True, strategy="tensor"),
    "ct-float": ct("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"),
    "ct-float-whole": ct("naive-quantized", num_bits=8, type="float", symmetric=True, strategy="tensor"),
    "ct-float-block": ct(
        "float-quantized", num_bits=8, type="float", symmetric=True, strategy="block", block_structure=[32, 32]
    ),
    "ct-nvfp4": ct(
        "nvfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16
    ),
    "ct-mxfp4": ct("mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="group", group_size=32),
    "awq": awq(32),
    "awq-symmetric": awq(64, symmetric=True),
    "gptq": gptq(4, 32, symmetric=False),
    "gptq-symmetric": gptq(4, 64, symmetric=True),
    "gptq-v2": gptq(4, 32, symmetric=False, version=2),
    "gptq-8": gptq(8, 32, symmetric=False),
    "gptq-act": gptq(4, 32, symmetric=False, shuffled=True),
    "gptq-head": gptq(
        4, 32, symmetric=True, which=lambda name: name == "lm_head.weight" or packing.is_projection(name)
    ),
    "modelopt-nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*in_proj_[ab]"]},
        packing.modelopt_nvfp4,
    ),
    "modelopt-fp8": Case({"quant_method": "modelopt", "quant_algo": "FP8"}, packing.modelopt_fp8),
}


class Packed:
    """Packed checkpoints and those that they stand for, each written once."""

    def __init__(self, tiny: Tiny, root: Path) -> None:
        self._tiny, self._root = tiny, root
        self._written: dict[tuple[str, str], tuple[Path, Path]] = {}

    def __call__(self, name: str, model: str = "qwen3") -> tuple[Path, Path]:
        """Return the folders of the packed one and of the dense one."""
        if (name, model) not in self._written:
            case, folder = CASES[name], self._root / f"{name}-{model}"
            self._written[name, model] = packing.write_packed(
                self._tiny.path(model), folder, case.settings, case.pack, case.which
            )
        return self._written[name, model]
