"""Checks of the references themselves, so that a disagreement points at the project.

Checkpoints are compared with what transformers expects to load, recurrent states with the
plain recurrence, and the sampling distribution with the logits processors of transformers.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers.generation as hf

from tests.combinations import others_slow
from tests.reference import checkpoints, distribution, storage, target

PROMPT = checkpoints.random_prompts(256, 1, seed=3, lengths=[12])[0]
WRITERS: list[Any] = [checkpoints.write_qwen3, checkpoints.write_qwen3_5]
VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (checkpoints.write_qwen3, {}),
    (checkpoints.write_qwen3, {"tied": True, "dtype": "bfloat16"}),
    (checkpoints.write_qwen3, {"sliding": 6}),
    (checkpoints.write_qwen3, {"vocab": 5, "layers": 2, "legacy_rope": True}),
    (checkpoints.write_qwen3_5, {"tied": True, "dtype": "bfloat16"}),
    (checkpoints.write_qwen3_5, {"linear_value_heads": 2, "extras": True}),
    (checkpoints.write_qwen3_5, {"linear_value_heads": 6, "layers": 4}),
    (checkpoints.write_qwen3_5, {"nested": True, "extras": True}),
    (checkpoints.write_qwen3_5, {"nested": True, "tied": True, "max_shard_size": "40KB"}),
]


@pytest.mark.parametrize(("write", "options"), VARIANTS)
def test_checkpoints_load_completely(write: Callable[..., Path], options: dict[str, Any], tmp_path: Path) -> None:
    model = target.load(write(tmp_path / "m", **options))
    rows = target.logits(model, [i % model.config.vocab_size for i in PROMPT])
    assert torch.isfinite(rows).all()
    assert rows.dtype == torch.float32
    assert 1.0 < float(rows.std()) < 8.0


@pytest.mark.parametrize(
    ("tied", "write"), others_slow(product([False, True], WRITERS), [(False, checkpoints.write_qwen3)])
)
def test_greedy_is_varied_with_clear_margins(write: Callable[..., Path], tied: bool, tmp_path: Path) -> None:
    model = target.load(write(tmp_path / "m", tied=tied))
    prompt, tokens = target.clear_prompt(model, 12, 80)
    assert len(tokens) == 80
    assert len(set(tokens)) > 30
    assert tokens == target.greedy(model, prompt, 80)
    rows = target.logits(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert rows.argmax(-1).tolist() == tokens
    assert float(target.margins(rows).min()) > 2e-3


def test_sliding_layers_are_sliding_and_legacy_rope_is_read(tmp_path: Path) -> None:
    wide = target.load(checkpoints.write_qwen3(tmp_path / "w", rope_theta=5_000.0))
    old = checkpoints.write_qwen3(tmp_path / "o", rope_theta=5_000.0, legacy_rope=True)
    narrow = target.load(checkpoints.write_qwen3(tmp_path / "n", rope_theta=5_000.0, sliding=6))
    assert "rope_parameters" not in storage.read_config(old)
    assert narrow.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    base = target.logits(wide, PROMPT)
    torch.testing.assert_close(target.logits(target.load(old), PROMPT), base)
    torch.testing.assert_close(target.logits(narrow, PROMPT)[:6], base[:6])
    assert not torch.allclose(target.logits(narrow, PROMPT)[6:], base[6:])


def test_layouts_of_one_seed_are_one_model(tmp_path: Path) -> None:
    flat = checkpoints.write_qwen3_5(tmp_path / "flat", layers=4)
    nested = checkpoints.write_qwen3_5(tmp_path / "nested", layers=4, nested=True, extras=True, max_shard_size="40KB")
    assert storage.read_config(nested)["model_type"] == "qwen3_5"
    assert storage.read_config(nested)["text_config"]["model_type"] == "qwen3_5_text"
    assert len(list(nested.glob("*.safetensors"))) > 3
    names = set(storage.load_tensors(nested))
    assert "model.language_model.layers.0.linear_attn.A_log" in names
    assert any(name.startswith("mtp.") for name in names)
    models = [target.load(path) for path in (flat, nested)]
    torch.testing.assert_close(*[target.logits(m, PROMPT) for m in models], rtol=0, atol=0)
    storage.edit_tensors(flat, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ValueError, match=r"missing_keys.*model\.norm\.weight"):
        target.load(flat)


def test_captures_are_taken_before_the_final_norm(tmp_path: Path) -> None:
    model = target.load(checkpoints.write_qwen3_5(tmp_path / "m", layers=4))
    last, first = target.block_outputs(model, PROMPT, [3, 0])
    with torch.no_grad():
        rows = model.lm_head(model.model.norm(last))
        states = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(rows, target.logits(model, PROMPT))
    torch.testing.assert_close(first, states[1][0])
    assert not torch.allclose(last, states[4][0])


@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_recurrent_states_follow_the_recurrence(length: int, tmp_path: Path) -> None:
    model = target.load(checkpoints.write_qwen3_5(tmp_path / "m", layers=4))
    ids = PROMPT[:length]
    states = target.recurrent_states(model, ids)
    assert sorted(states) == [0, 1, 2]
    conv, state = states[0]
    block = target.blocks(model)[0]
    mixer = block.linear_attn
    with torch.no_grad():
        x = block.input_layernorm(target.embedding(model)[ids])
        mix = torch.cat([torch.zeros(3, 128), mixer.in_proj_qkv(x)])
        taps = mixer.conv1d.weight[:, 0].flip(-1)
        mixed = torch.stack([sum(taps[:, lag] * mix[t + 3 - lag] for lag in range(4)) for t in range(length)])
        _, k, v = torch.nn.functional.silu(mixed).split([32, 32, 64], dim=-1)
        beta = torch.sigmoid(mixer.in_proj_b(x))
        rate = torch.nn.functional.softplus(mixer.in_proj_a(x) + mixer.dt_bias)
        decay = torch.exp(-mixer.A_log.exp() * rate)
    for head in range(4):
        own = torch.zeros(16, 16)
        for t in range(length):
            key = k[t].view(2, 16)[head // 2]
            key = key / torch.sqrt((key * key).sum() + 1e-6)
            own = own * decay[t, head]
            own = own + torch.outer(key, beta[t, head] * (v[t].view(4, 16)[head] - own.T @ key))
        torch.testing.assert_close(state[head], own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(conv, mix[-3:].T)
    assert float(decay.min()) > 0.05
    assert float(decay.max()) < 0.9999


def test_distribution_equals_transformers_processors() -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    ids = torch.tensor([[1, 2, 2]])
    steps = [
        (hf.RepetitionPenaltyLogitsProcessor(1.4), {"repetition_penalty": 1.4}),
        (hf.TemperatureLogitsWarper(0.7), {"temperature": 0.7}),
        (hf.TopKLogitsWarper(6), {"top_k": 6}),
        (hf.TopPLogitsWarper(0.9), {"top_p": 0.9}),
        (hf.MinPLogitsWarper(0.1), {"min_p": 0.1}),
    ]
    scores = logits[None]
    settings: dict[str, Any] = {}
    for processor, setting in steps:
        scores = processor(ids, scores)
        settings |= setting
        own = distribution.next_token(logits, [1], [2, 2], distribution.Settings(**settings))
        np.testing.assert_allclose(own, scores.softmax(-1)[0].numpy(), atol=1e-12)


def test_distribution_penalties_and_limits_by_hand() -> None:
    settings = distribution.Settings(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={3: 2.0})
    own = distribution.next_token([0.0] * 4, [0, 1], [1, 2, 2], settings)
    np.testing.assert_allclose(own, distribution.softmax(np.array([0.0, -0.75, -1.0, 2.0])))
    for one_token in (distribution.Settings(temperature=0), distribution.Settings(top_p=0.0)):
        assert distribution.next_token([0.0, 3.0, 1.0], [], [], one_token).tolist() == [0, 1, 0]


def test_joint_distribution_sums_to_one_and_bounds_honest_samples(tmp_path: Path) -> None:
    path = checkpoints.write_qwen3(tmp_path / "m", vocab=5, layers=2, logit_scale=1.5)
    model = target.load(path)
    settings = distribution.Settings(temperature=0.9, top_k=4, frequency_penalty=0.5)
    joint = distribution.joint(lambda ids: target.logits(model, ids)[-1], [1, 2, 3], 3, settings)
    assert joint.shape == (125,)
    assert abs(joint.sum() - 1) < 1e-12
    first = joint.reshape(5, 25).sum(1)
    direct = distribution.next_token(target.logits(model, [1, 2, 3])[-1], [1, 2, 3], [], settings)
    np.testing.assert_allclose(first, direct, atol=1e-12)
    draws = 20_000
    cells = np.random.default_rng(1).choice(125, size=draws, p=joint)
    samples = np.stack(np.unravel_index(cells, (5, 5, 5)), axis=1).tolist()
    distance = distribution.total_variation(distribution.empirical(samples, 5, 3), joint)
    bound = distribution.sampling_bound(125, draws)
    assert distance < bound < 0.06
    assert distribution.total_variation(np.full(125, 1 / 125), joint) > bound
