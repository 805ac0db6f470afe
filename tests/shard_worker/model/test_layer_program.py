"""Rows through all layers by one call, to the bit as they come out of one layer after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.bench.shapes import TARGETS
from services.errors import ResourceExhausted
from services.layers import LayerRange
from services.model.config import LayerKind
from services.model.quantization import Quantization, QuantizedTo
from services.model.random_weights import KEY, PACKING
from shard_worker.cache.attention_cache import AttentionCache
from shard_worker.cpu_kernels import native
from shard_worker.device.devices import parse_devices
from shard_worker.model.features import Features
from shard_worker.model.layer_program import LayerProgram
from shard_worker.stage.loader import CaptureRequest, StageLoader
from shard_worker.stage.stage import Stage
from shard_worker.weights.opening import open_checkpoint
from tests.shard_worker.tiny import ids

pytestmark = pytest.mark.skipif(not native.is_available(), reason="llvmlite is not installed, or torch has no OpenMP")

LAYERS = 4
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 12, "layer_types": ["full_attention", "sliding_attention"] * 2}
QWEN3, LLAMA = TARGETS["qwen3-0.6b"] | SIZES, TARGETS["llama-3.1-8b"] | SIZES
HYBRID = TARGETS["qwen3.5-9b"] | SIZES | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
GEMMA3 = {
    **SIZES,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    # Of every second layer the values are in other codes than the queries and the keys.
    "unlike codes": QWEN3 | {PACKING: "q4_k_m"},
    "window": QWEN3 | SLIDING | {PACKING: "q4_k"},
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "8 bits": LLAMA | {PACKING: "q8_0"},
    # Some of these layers go on as they do without programs: mixtures, recurrent and gated mixers, and other gates.
    "experts": TARGETS["qwen3-30b-a3b"] | SIZES | EXPERTS | {PACKING: "q4_k"},
    "dense beside experts": TARGETS["qwen3-30b-a3b"] | SIZES | EXPERTS | {"mlp_only_layers": [1, 2]},
    "recurrent": HYBRID | {PACKING: "q4_k"},
    "output norms": GEMMA3,
}
QUANTIZED = {name: Quantization(QuantizedTo.INT4) for name in ("biases", "dense beside experts", "output norms")}

COUNTS = [(1,), (9,), (1, 1, 1), (4, 1, 9)]
"""Rows of each session."""


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads for any matrix, and a CPU on which codes stay codes."""
    if not native.multiplies_pairs():
        monkeypatch.setattr(native, "multiplies", lambda dtype: False)
    monkeypatch.setattr(native, "_LEAST_SHARE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def stage_of(folder: Path, name: str, captured: tuple[int, ...] = ()) -> Stage:
    """Return the whole model as one stage."""
    (folder / "config.json").write_text(json.dumps({**MODELS[name], KEY: True}))
    checkpoint = open_checkpoint(folder, quantization=QUANTIZED.get(name))
    loader = StageLoader(checkpoint, LayerRange(0, LAYERS), "bfloat16")
    request = CaptureRequest(captured, None) if captured else None
    return loader.load(parse_devices("cpu"), request, lambda done, total: None)


def run(stage: Stage, counts: Sequence[int], bases: Sequence[int]) -> tuple[list[torch.Tensor], Features]:
    """Return what two steps of several sessions make, and all that these remember; and what the draft is given.

    bases: how many tokens each session has before the steps.
    """
    states = [stage.allocate(64, 16, 16) for _ in counts]
    for number, (state, base) in enumerate(zip(states, bases, strict=True)):
        prompt = ids(base, seed=number)
        stage.run(state, stage.embed(prompt), None, uncommitted=False, token_ids=prompt)
    made, features = [], Features()
    for step in range(2):
        tokens = ids(sum(counts), seed=50 + step)
        features = Features()
        uncommitted = [count > 1 for count in counts]
        hidden = stage.embed(tokens)
        made.append(stage.run_together(states, counts, hidden, features, uncommitted=uncommitted, token_ids=tokens))
        for state, count in zip(states, counts, strict=True):
            if count > 1:
                stage.commit(state, state.length + count - 1)
    for state in states:
        for segment, caches in zip(stage.segments, state.caches, strict=True):
            for offset, slot in enumerate(segment.slots):
                if segment.weights[offset].kind is LayerKind.LINEAR:
                    assert caches.recurrent is not None
                    made += [caches.recurrent.state[slot].clone(), caches.recurrent.conv[slot, :3].clone()]
                    continue
                shape = stage.config.attention(segment.layers.first + offset)
                made += [one.clone() for one in caches.attention_of(shape).span(slot, 0, state.length)]
    return made, features


def without_program(stage: Stage) -> None:
    """Have rows go through one layer after the other from now on."""
    for segment in stage.segments:
        segment.__dict__["program"] = None


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_one_layer_after_the_other(
    name: str, counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of all sizes, biases, windows; one row, blocks, several sessions; with what they leave in the caches and
    what a draft is given, and from the first position on that has enough before it."""
    stage, taken = stage_of(tmp_path, name, (0, 2)), []
    whole = LayerProgram.run
    monkeypatch.setattr(LayerProgram, "run", lambda self, *rows: taken.append(rows) or whole(self, *rows))
    bases = [7, 30, 11][: len(counts)]
    made, features = run(stage, counts, bases)
    assert len(taken) == 2
    without_program(stage)
    expected, of_expected = run(stage, counts, bases)
    assert len(taken) == 2
    assert len(made) == len(expected)
    assert all(map(torch.equal, made, expected))
    assert sorted(features.slices) == [0, 1]
    assert all(torch.equal(features.slices[index], of_expected.slices[index]) for index in (0, 1))


def test_a_row_is_the_same_whatever_is_beside_it(tmp_path: Path) -> None:
    """Alone, and in a step of many sessions after steps of others."""
    stage = stage_of(tmp_path, "window")
    [alone, _, *_], _ = run(stage, (1,), (40,))
    for counts in COUNTS[2:]:
        run(stage, counts, [9, 8, 7])
    [again, _, *_], _ = run(stage, (1,), (40,))
    assert torch.equal(again, alone)


def test_rows_that_it_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as see few positions, and those of prompts, go through one layer after the other."""
    stage, taken = stage_of(tmp_path, "window"), []
    whole = LayerProgram.run
    monkeypatch.setattr(LayerProgram, "run", lambda self, *rows: taken.append(rows) or whole(self, *rows))
    run(stage, (1,), (4,))
    assert taken == []
    run(stage, (1,), (6,))
    assert len(taken) == 1


def test_a_step_without_memory_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of its kind fails in the third layer, and the next one is whole."""
    stage = stage_of(tmp_path, "experts")
    places, asked = AttentionCache.places, []

    def without_memory(self: AttentionCache, layer: int, first: int, count: int) -> Any:
        if count == 1:
            asked.append(layer)
            if layer == 2:
                raise ResourceExhausted("no memory")
        return places(self, layer, first, count)

    with monkeypatch.context() as patched:
        patched.setattr(AttentionCache, "places", without_memory)
        with pytest.raises(ResourceExhausted):
            run(stage, (1,), (30,))
    assert asked == [0, 1, 2]
    made, _ = run(stage, (1,), (30,))
    without_program(stage)
    expected, _ = run(stage, (1,), (30,))
    assert all(map(torch.equal, made, expected))


def test_which_layers_have_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None where no matrix is in codes, or a layer is taken in no part: windows that are too short beside a mixture, or
    a CPU that multiplies 16-bit floats and no pairs of whole numbers."""
    for name in MODELS:
        assert stage_of(tmp_path, name).segments[0].program is not None
    for base, change in (("window", {PACKING: None}), ("experts", SLIDING | {"sliding_window": 7})):
        monkeypatch.setitem(MODELS, "changed", {key: value for key, value in (MODELS[base] | change).items() if value})
        assert stage_of(tmp_path, "changed").segments[0].program is None
    monkeypatch.setattr(native, "multiplies", lambda dtype: True)
    monkeypatch.setattr(native, "multiplies_pairs", lambda: False)
    assert stage_of(tmp_path, "experts").segments[0].program is None
