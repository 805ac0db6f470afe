"""Models out of GGUF files against checkpoints whose dense tensors are the numbers that the packed ones stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.planning.model_size import read_model_size
from services.errors import DataLoss, InvalidArgument
from services.layers import LayerRange
from services.model.gguf.container import read_gguf
from shard_worker.device.devices import parse_devices
from shard_worker.model.kernels.codes import form_of
from shard_worker.stage.loader import StageLoader
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.packed import PackedWeight
from shard_worker.weights.tiled import TiledWeight, tiling_of
from shard_worker.weights.unread import in_memory
from tests.reference import checkpoints, storage, target
from tests.reference.gguf_files import ChooseType, all_of, mxfp4_experts, q4_k_m, write_gguf
from tests.shard_worker.tiny import LLAMA3, Run, ids, ignore_progress, load_split, load_stage


@dataclass(frozen=True)
class Model:
    """A GGUF file, and the checkpoint of the same numbers."""

    path: Path
    dense: Path


def hybrid(path: Path) -> Path:
    """Three value heads a key head, so that heads in a wrong order are other heads; unlike numbers of key and value
    heads in attention."""
    return checkpoints.write_qwen3_5(
        path, layers=4, hidden=256, mlp=256, linear_value_heads=6, linear_head_dim=64, heads=6, nested=True, extras=True
    )


def wide_heads(path: Path) -> Path:
    """Value heads whose columns fill whole groups but no super-block, which is cut in two."""
    return checkpoints.write_qwen3_5(
        path, layers=4, hidden=256, mlp=256, linear_value_heads=4, linear_head_dim=128, tied=True
    )


def dense_family(path: Path) -> Path:
    return checkpoints.write_qwen3(path, layers=3, hidden=256, mlp=512, heads=8, kv_heads=2, head_dim=32)


def llama(path: Path) -> Path:
    """Scaled RoPE, and rows of unlike numbers of queries and keys."""
    return checkpoints.write_llama(path, hidden=256, heads=8, head_dim=32, attention_bias=True, rope_scaling=LLAMA3)


def experts(path: Path) -> Path:
    return checkpoints.write_qwen3_moe(path, layers=2, experts=5, hidden=256, size=256)


def hybrid_experts(path: Path) -> Path:
    """Three value heads a key head; a shared expert."""
    return checkpoints.write_qwen3_5_moe(path, value_heads=6, hidden=256, size=256)


def next_experts(path: Path) -> Path:
    return checkpoints.write_qwen3_next(path, value_heads=6, hidden=256, size=256)


def gpt_oss(path: Path) -> Path:
    """Gates that are cut off where published models' are, and scaled RoPE that blends between no whole pairs."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False}
    return checkpoints.write_gpt_oss(path, limit=7.0, rope_scaling=yarn)


def gemma3(path: Path) -> Path:
    """A full layer behind five with windows."""
    return checkpoints.write_gemma3(path, layers=7, pattern=6, scalar=16, stretched=True, cap=8.0)


def gemma4(path: Path) -> Path:
    return checkpoints.write_gemma4(path, older=True)


def gemma4_experts(path: Path) -> Path:
    return checkpoints.write_gemma4(path, older=True, experts=8, keys_as_values=False)


def gemma4_sharing(path: Path) -> Path:
    """Layers that share keys and values, with dense parts twice as wide, and per-layer embeddings."""
    return checkpoints.write_gemma4(path, older=True, layers=6, sharing=2, wide_mlp=True, per_layer=32)


@dataclass(frozen=True)
class Case:
    """A checkpoint and how it is packed. split: tensors of a file, 0 for one file. joined: as of `write_gguf`."""

    write: Callable[[Path], Path]
    choose: ChooseType
    split: int = 0
    joined: bool = False


CASES = {
    "qwen3 Q4_K_M": Case(dense_family, q4_k_m),
    "qwen3 Q5_K in several files": Case(dense_family, all_of("Q5_K"), split=7),
    "qwen3 F16": Case(dense_family, all_of("F16")),
    "llama Q4_K": Case(llama, all_of("Q4_K")),
    "llama F32": Case(llama, all_of("F32")),
    "qwen3_5 Q4_K_M": Case(hybrid, q4_k_m),
    "qwen3_5 Q4_0": Case(hybrid, all_of("Q4_0")),
    "qwen3_5 Q4_K wide heads": Case(wide_heads, all_of("Q4_K")),
    "qwen3_5 F32": Case(hybrid, all_of("F32")),
    "qwen3 NVFP4": Case(dense_family, all_of("NVFP4")),
    "qwen3_5 NVFP4": Case(hybrid, all_of("NVFP4")),
    "qwen3_moe NVFP4": Case(experts, all_of("NVFP4")),
    "qwen3_moe Q4_K_M": Case(experts, q4_k_m),
    "qwen3_5_moe Q4_K_M": Case(hybrid_experts, q4_k_m, split=9),
    "qwen3_next Q4_K_M": Case(next_experts, q4_k_m),
    "qwen3_next Q8_0 joined": Case(checkpoints.write_qwen3_next, all_of("Q8_0"), joined=True),
    "qwen3_5_moe F16 joined": Case(checkpoints.write_qwen3_5_moe, all_of("F16"), joined=True),
    "gpt_oss F16": Case(gpt_oss, all_of("F16")),
    "gpt_oss MXFP4": Case(gpt_oss, mxfp4_experts),
    "gemma3 F32": Case(gemma3, all_of("F32")),
    "gemma3 Q8_0": Case(gemma3, all_of("Q8_0")),
    "gemma4 F32": Case(gemma4, all_of("F32")),
    "gemma4 Q8_0": Case(gemma4, all_of("Q8_0")),
    "gemma4 experts Q8_0 joined": Case(gemma4_experts, all_of("Q8_0"), joined=True),
    "gemma4 sharing Q8_0": Case(gemma4_sharing, all_of("Q8_0")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A model by its case, written on first use."""
    root = tmp_path_factory.mktemp("gguf")
    made: dict[str, Model] = {}

    def model(case: str) -> Model:
        if case not in made:
            chosen = CASES[case]
            folder = root / str(len(made))
            folder.mkdir()
            source, path, dense = chosen.write(folder / "checkpoint"), folder / "model.gguf", folder / "dense"
            write_gguf(source, path, chosen.choose, dense, chosen.split, chosen.joined)
            made[case] = Model(next(iter(sorted(folder.glob("model*.gguf")))) if chosen.split else path, dense)
        return made[case]

    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_unpacked_checkpoint(models: Callable[[str], Model], case: str) -> None:
    """As transformers computes them, for a stage and for two; and the planner counts what is loaded."""
    model = models(case)
    prompt = ids(24)
    expected = target.logits(target.load(model.dense), prompt)
    whole = load_stage(model.path, dtype="float32")
    torch.testing.assert_close(Run([whole])(prompt), expected, atol=2e-4, rtol=1e-4)
    assert whole.weight_bytes == read_model_size(model.path, "float32").weight_bytes
    halves = load_split(model.path, [1], dtype="float32")
    torch.testing.assert_close(Run(halves)(prompt), expected, atol=2e-4, rtol=1e-4)


def test_matrices_stay_packed(models: Callable[[str], Model]) -> None:
    case = "qwen3_5 Q4_K_M"
    path = models(case).path
    checkpoint = open_checkpoint(path)
    for name, kind in (("lm_head.weight", "Q6_K"), ("model.layers.0.linear_attn.out_proj.weight", "Q8_0")):
        assert checkpoint.headers[name].code == kind
        unread = checkpoint.weight(name, torch.device("cpu"), torch.bfloat16)
        weight = in_memory(unread)
        assert isinstance(weight, PackedWeight)
        assert weight.dtype == torch.bfloat16
        assert weight.nbytes == unread.nbytes
    stage = load_stage(path)
    assert stage.dtype == torch.bfloat16
    assert stage.weight_bytes < sum(tensor.numel() for tensor in storage.load_tensors(models(case).dense).values())


def test_rows_are_looked_up_without_the_rest(models: Callable[[str], Model]) -> None:
    model, name = models("qwen3 Q4_K_M"), "model.embed_tokens.weight"
    rows = open_checkpoint(model.path).rows(name, [7, 0, 255])
    assert torch.equal(rows, storage.load_tensors(model.dense)[name][[7, 0, 255]])


def test_a_stage_reads_its_own_layers_alone(models: Callable[[str], Model], tmp_path: Path) -> None:
    """Scales that are no numbers matter to the stage that has them, and are named."""
    path = tmp_path / "model.gguf"
    content = bytearray(models("qwen3 Q4_K_M").path.read_bytes())
    broken = read_gguf(models("qwen3 Q4_K_M").path).tensors["blk.2.ffn_gate.weight"]
    content[broken.begin : broken.begin + 2] = np.array([np.inf], dtype=np.float16).tobytes()
    path.write_bytes(content)
    loader = StageLoader(open_checkpoint(path), LayerRange(0, 2), None)
    loader.load(parse_devices("cpu"), None, ignore_progress)
    with pytest.raises(DataLoss, match=r"tensor blk.2.ffn_gate.weight in .*model.gguf has scales that are NaN or inf"):
        load_stage(path, (2, 3))


def test_powers_of_two_that_kernels_do_not_know_are_refused(models: Callable[[str], Model], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = bytearray(models("gpt_oss MXFP4").path.read_bytes())
    spoilt = read_gguf(models("gpt_oss MXFP4").path).tensors["blk.0.ffn_down_exps.weight"]
    content[spoilt.begin] = 145
    path.write_bytes(content)
    with pytest.raises(DataLoss, match=r"tensor blk.0.ffn_down_exps.weight in .*model.gguf has scales above 2\*\*17"):
        load_stage(path, (0, 1))


def test_scales_of_whole_matrices_are_checked(models: Callable[[str], Model], tmp_path: Path) -> None:
    """They are finite, and one for each of many experts; rows that are looked up are multiplied by them, and kernels
    know them, with columns in another order too."""
    path, source = tmp_path / "model.gguf", models("qwen3_moe NVFP4").path
    scales = read_gguf(source).tensors["blk.0.ffn_up_exps.scale"]
    content = bytearray(source.read_bytes())
    content[scales.begin + 4 : scales.begin + 8] = np.array([np.nan], dtype=np.float32).tobytes()
    path.write_bytes(content)
    with pytest.raises(DataLoss, match=r"tensor blk.0.ffn_up_exps.weight in .*model.gguf has scales that are NaN"):
        load_stage(path, (0, 1))
    # The table says how many there are: 5 become 4.
    content = source.read_bytes()
    entry = content.index(b"blk.0.ffn_up_exps.scale") + len("blk.0.ffn_up_exps.scale") + 4
    assert content[entry] == 5
    path.write_bytes(content[:entry] + bytes([4]) + content[entry + 1 :])
    with pytest.raises(
        InvalidArgument, match=r"tensor blk.0.ffn_up_exps.scale in .* is F32 \[4\]; it must be F32 \[5\]"
    ):
        load_stage(path, (0, 1))

    model, rows = models("qwen3_5 NVFP4"), "model.embed_tokens.weight"
    hybrid, expected = open_checkpoint(model.path), storage.load_tensors(model.dense)[rows][[7, 0, 255]]
    torch.testing.assert_close(hybrid.rows(rows, [7, 0, 255]), expected, rtol=1e-6, atol=0)
    for name in ("linear_attn.out_proj.weight", "mlp.up_proj.weight"):
        matrix = in_memory(hybrid.weight(f"model.layers.0.{name}", torch.device("cpu"), torch.bfloat16))
        assert isinstance(matrix, PackedWeight)
        assert form_of(TiledWeight(matrix, tiling_of(matrix, lane_columns=2))).lane_columns


def test_decays_that_no_checkpoint_has_are_named(models: Callable[[str], Model], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = bytearray(models("qwen3_5 Q4_0").path.read_bytes())
    decays = read_gguf(models("qwen3_5 Q4_0").path).tensors["blk.0.ssm_a"]
    content[decays.begin : decays.begin + 4] = np.array([0.5], dtype=np.float32).tobytes()
    path.write_bytes(content)
    with pytest.raises(DataLoss, match=r"tensor blk.0.ssm_a in .*model.gguf holds numbers that are not below 0"):
        load_stage(path, (0, 1))


def test_a_fingerprint_is_that_of_the_numbers(models: Callable[[str], Model], tmp_path: Path) -> None:
    """Not of the path and of what the file says of text; other packings of one model are other models."""
    path = models("qwen3 Q4_K_M").path
    found = open_checkpoint(path).fingerprint
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(path.read_bytes().replace(b"Tiny", b"Tony"))
    assert open_checkpoint(renamed).fingerprint == found
    others = {open_checkpoint(models(case).path).fingerprint for case in CASES if case.startswith("qwen3 ")}
    assert len(others) == sum(case.startswith("qwen3 ") for case in CASES)
    content = bytearray(renamed.read_bytes())
    content[min(tensor.begin for tensor in read_gguf(path).tensors.values())] ^= 1
    renamed.write_bytes(content)
    assert open_checkpoint(renamed).fingerprint != found
