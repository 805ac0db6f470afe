"""Loading a stage: its own layers, all of them, and nothing that doesn't fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.errors import DataLoss, FlashsplitError, InvalidArgument, Unimplemented
from services.layers import LayerRange
from shard_worker.device.devices import parse_devices
from shard_worker.stage.loader import StageLoader
from shard_worker.weights.opening import open_checkpoint
from tests.reference import storage, target
from tests.shard_worker.model.layers.family_runner import TOLERANCE
from tests.shard_worker.packed import Packed
from tests.shard_worker.tiny import AS_GPU, Run, Tiny, ids, load_stage, unsplit

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def copied(tiny: Tiny, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a checkpoint, free to damage."""
    return lambda name: Path(shutil.copytree(tiny.path(name), tmp_path / name))


def stored_bytes(path: Path, *prefixes: str) -> int:
    tensors = storage.load_tensors(path)
    return sum(t.numel() * t.element_size() for name, t in tensors.items() if name.startswith(prefixes))


@pytest.mark.parametrize(
    ("name", "layers", "prefixes"),
    [
        ("qwen3", (0, 2), ("model.layers.0.", "model.layers.1.", "model.embed_tokens")),
        ("qwen3", (1, 3), ("model.layers.1.", "model.layers.2.")),
        ("qwen3", (3, 4), ("model.layers.3.", "model.norm", "lm_head")),
        ("qwen3", (0, 4), ("model.", "lm_head")),
        ("qwen3-tied", (0, 1), ("model.layers.0.", "model.embed_tokens")),
        ("qwen3-tied", (3, 4), ("model.layers.3.", "model.norm", "model.embed_tokens")),
        ("qwen3-tied", (0, 4), ("model.",)),
        ("qwen3_5-nested", (1, 2), ("model.language_model.layers.1.",)),
        ("qwen3_5-nested", (0, 4), ("model.language_model.", "lm_head")),
    ],
)
def test_a_stage_reads_its_own_layers_alone(
    tiny: Tiny, name: str, layers: tuple[int, int], prefixes: tuple[str, ...]
) -> None:
    """Only its layers, the embedding where it is first and norm and head where it is last; a tied matrix once."""
    expected = stored_bytes(tiny.path(name), *prefixes)
    seen: list[tuple[int, int]] = []
    loader = StageLoader(open_checkpoint(tiny.path(name)), LayerRange(*layers), None)

    stage = loader.load(parse_devices("cpu"), None, lambda *progress: seen.append(progress))

    assert stage.weight_bytes == loader.total_bytes == expected
    assert [total for _, total in seen] == [expected] * len(seen)
    assert [loaded for loaded, _ in seen] == sorted(loaded for loaded, _ in seen)
    assert seen[-1] == (expected, expected)
    assert (stage.embedding is None) == (layers[0] > 0)
    assert (stage.head is None) == (layers[1] < 4)


def test_layers_that_share_keys_are_not_cut_apart(tiny: Tiny) -> None:
    """No stage begins behind the first layer whose keys others share, and no device of a worker does."""
    path = tiny.path("gemma4-sharing")
    with pytest.raises(InvalidArgument, match="read keys and values of layers before them: begin them with layer 2"):
        load_stage(path, (3, 6))
    spread = load_stage(path, devices=[AS_GPU, AS_GPU])
    assert [segment.layers for segment in spread.segments] == [LayerRange(0, 2), LayerRange(2, 6)]
    with pytest.raises(
        InvalidArgument, match="4 layers, of which those from 2 on share keys and values, cannot be spr"
    ):
        load_stage(path, (2, 6), devices=[AS_GPU, AS_GPU])


def test_several_threads_load_what_one_does(
    tiny: Tiny, packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers in order, progress that grows, the error of the layer that has one; and torch has its threads back."""
    path, threads, seen = tiny.path("qwen3_moe"), torch.get_num_threads(), list[int]()
    expected = unsplit(path)(ids(12))
    damaged = Path(shutil.copytree(packed("fp8")[0], tmp_path / "damaged"))
    scales = "model.layers.2.mlp.down_proj.weight_scale_inv"
    storage.edit_tensors(damaged, lambda tensors: tensors[scales].fill_(torch.nan))
    monkeypatch.setattr("shard_worker.stage.loader._RETURNED_EVERY", 1 << 14)
    torch.set_num_threads(3)
    try:
        loader = StageLoader(open_checkpoint(path), LayerRange(0, 4), None)
        stage = loader.load(parse_devices("cpu"), None, lambda loaded, _: seen.append(loaded))
        assert seen[-1] == loader.total_bytes
        with pytest.raises(DataLoss, match=r"layers.2.mlp.down_proj.weight_scale_inv in .* holds NaN"):
            load_stage(damaged, (0, 4))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert seen == sorted(seen)
    torch.testing.assert_close(Run([stage])(ids(12)), expected)


def test_a_damaged_layer_of_another_stage_does_not_matter(copied: Callable[[str], Path]) -> None:
    """What a stage doesn't load it doesn't ask for."""
    path = copied("qwen3")
    storage.edit_tensors(path, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))

    assert load_stage(path, (0, 3)).layers == LayerRange(0, 3)
    with pytest.raises(InvalidArgument, match=r"model\.layers\.3\.mlp\.up_proj\.weight is missing"):
        load_stage(path, (3, 4))


@pytest.mark.parametrize("prefix", ["", "model.language_model."])
def test_other_prefixes_are_found(tiny: Tiny, copied: Callable[[str], Path], prefix: str) -> None:
    """Bare and multimodal names load as the usual ones do."""
    path = copied("qwen3")

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", prefix, 1)] = tensors.pop(name)

    storage.edit_tensors(path, rename)

    assert torch.equal(unsplit(path)(ids(9)), unsplit(tiny.path("qwen3"))(ids(9)))


def test_other_parts_of_a_published_file_are_left_alone(copied: Callable[[str], Path]) -> None:
    """Rotary buffers, MTP layers and a vision tower are neither needed nor in the way."""
    path = copied("qwen3")

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.ones(2, 2)
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(2, 2)
        tensors["vision_tower.layers.0.norm.weight"] = torch.ones(2)

    before = load_stage(path).weight_bytes
    storage.edit_tensors(path, add)

    assert load_stage(path).weight_bytes == before


@pytest.mark.parametrize(
    ("name", "change", "field", "words"),
    [
        ("qwen3", lambda t: t.pop("model.layers.2.self_attn.k_norm.weight"), "2.self_attn.k_norm", "is missing"),
        ("qwen3_5", lambda t: t.pop("model.layers.1.linear_attn.A_log"), "1.linear_attn.A_log", "is missing"),
        ("qwen3", lambda t: t.pop("model.norm.weight"), "model.norm.weight", "is missing"),
        ("qwen3", lambda t: t.pop("lm_head.weight"), "lm_head.weight", "is missing"),
        ("qwen3", lambda t: t.pop("model.embed_tokens.weight"), "model.embed_tokens.weight", "is missing"),
        (
            "qwen3",
            lambda t: t.update({"model.layers.1.mlp.down_proj.weight": torch.zeros(64, 64)}),
            "model.layers.1.mlp.down_proj.weight",
            r"has shape \[64, 64\], config\.json asks for \[64, 128\]",
        ),
        (
            "qwen3",
            lambda t: t.update({"lm_head.weight": torch.zeros(255, 64)}),
            "lm_head.weight",
            r"has shape \[255, 64\]",
        ),
        (
            "qwen3_5",
            lambda t: t.update({"model.layers.0.mlp.gate_proj.weight_scale_inv": torch.ones(1)}),
            "model.layers.0.mlp.gate_proj.weight_scale_inv",
            "is not one that family qwen3_5 has",
        ),
        (
            "qwen3",
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            "model.layers.0.self_attn.q_proj.bias",
            "is not one that family qwen3 has",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    copied: Callable[[str], Path], name: str, change: Callable[[Tensors], Any], field: str, words: str
) -> None:
    """Missing, mis-shaped and unknown tensors are refused by name, the ends' too."""
    path = copied(name)
    storage.edit_tensors(path, change)

    with pytest.raises(InvalidArgument, match=words) as caught:
        load_stage(path)

    assert field in caught.value.where["field"]
    assert field in caught.value.message


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused(copied: Callable[[str], Path], dtype: torch.dtype) -> None:
    """A tensor of a type that isn't served is refused wherever it stands, not cast."""
    path, name = copied("qwen3"), "model.layers.2.self_attn.o_proj.weight"
    storage.edit_tensors(path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))

    with pytest.raises(Unimplemented, match=name.replace(".", r"\.")):
        load_stage(path)


def test_a_checkpoint_without_layers_is_refused(copied: Callable[[str], Path]) -> None:
    """Files with other names altogether are no checkpoint of a known layout."""
    path = copied("qwen3")
    storage.edit_tensors(
        path, lambda tensors: [tensors.update({name[6:].upper(): tensors.pop(name)}) for name in list(tensors)]
    )

    with pytest.raises(InvalidArgument, match=r"no tensor named model\.layers"):
        load_stage(path)


def test_layers_that_the_model_lacks_are_refused(tiny: Tiny) -> None:
    """A range beyond the last layer is refused with the model's size."""
    with pytest.raises(InvalidArgument, match=r"\[2, 5\) do not exist: the model has 4 layers"):
        load_stage(tiny.path("qwen3"), (2, 5))


def test_more_devices_than_layers_are_refused(tiny: Tiny) -> None:
    """Every device of a stage gets at least one layer."""
    with pytest.raises(InvalidArgument, match="2 layers cannot be spread over 3 devices"):
        load_stage(tiny.path("qwen3"), (1, 3), devices="cpu+cpu+cpu")


@pytest.mark.parametrize(("devices", "sizes"), [("cpu+cpu", [4, 4]), ("cpu+cpu+cpu", [2, 3, 3])])
def test_layers_are_spread_evenly_and_in_order(tiny: Tiny, devices: str, sizes: list[int]) -> None:
    """Devices hold contiguous runs that differ by at most one layer."""
    segments = load_stage(tiny.path("qwen3_5"), devices=devices).segments

    assert [len(segment.layers) for segment in segments] == sizes
    assert [layer for segment in segments for layer in range(segment.layers.first, segment.layers.last)] == [*range(8)]


@pytest.mark.parametrize("name", ["qwen3-bias", "qwen3_5-bias"])
def test_a_bfloat16_checkpoint_runs_in_float32_on_demand(tiny: Tiny, copied: Callable[[str], Path], name: str) -> None:
    """With dtype float32 all weights, biases too, are widened, and the logits are transformers' over them."""
    path = copied(name)
    storage.edit_tensors(path, lambda tensors: tensors.update({key: t.bfloat16() for key, t in tensors.items()}))
    expected = target.logits(target.load(path), ids(30))

    run = Run([load_stage(path, dtype="float32")])

    torch.testing.assert_close(run(ids(30)), expected, **TOLERANCE)
    assert load_stage(path).dtype == torch.bfloat16
    assert Run([load_stage(path)])(ids(30)).dtype == torch.bfloat16


def test_an_unknown_dtype_is_refused(tiny: Tiny) -> None:
    """Only the three float types can be asked for."""
    with pytest.raises(InvalidArgument, match="'int32' is not one of float32, bfloat16, float16"):
        load_stage(tiny.path("qwen3"), dtype="int32")


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"model_type": "gpt_neox"}, Unimplemented, "model_type"),
        ({"model_type": None}, InvalidArgument, "model_type"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, Unimplemented, "quantization_config"),
        ({"hidden_act": "gelu"}, Unimplemented, "hidden_act"),
    ],
)
def test_what_a_config_says_is_heeded(
    copied: Callable[[str], Path], changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """An unknown family and a config that asks for other math stop the load before any tensor is read."""
    path = copied("qwen3")
    storage.edit_config(path, lambda config: config.update(changes))

    with pytest.raises(kind) as caught:
        load_stage(path)

    assert caught.value.where["field"] == field
