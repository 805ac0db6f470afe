"""Qwen3.5: the math of its layers against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.reference import checkpoints, storage, target
from tests.shard_worker.model.layers import family_runner
from tests.shard_worker.tiny import QWEN3_5, Tiny, ids, unsplit


@pytest.mark.parametrize("name", QWEN3_5)
@pytest.mark.parametrize("check", [family_runner.check_steps, family_runner.check_commits, family_runner.check_chunks])
def test_logits_are_those_of_transformers(tiny: Tiny, name: str, check: Callable[[Tiny, str], None]) -> None:
    """Key:value head ratios 1 to 3, nested and biased checkpoints give transformers' logits by every way."""
    check(tiny, name)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_short_prompts_fill_the_convolution(tiny: Tiny, length: int) -> None:
    """After a prompt as short as the convolution, state, inputs and the next tokens' logits are transformers'."""
    name, tokens = "qwen3_5-ratio-3", ids(length + 6)
    model = tiny.model(name)
    run = unsplit(tiny.path(name))
    run(tokens[:length])

    for layer, (conv, state) in target.recurrent_states(model, tokens[:length]).items():
        own_conv, own_state = run.recurrent(layer)
        torch.testing.assert_close(own_conv, conv, rtol=0, atol=2e-5)
        torch.testing.assert_close(own_state, state, rtol=0, atol=2e-5)
    rows = torch.cat([run([token]) for token in tokens[length:]])
    torch.testing.assert_close(rows, target.logits(model, tokens)[length:], **family_runner.TOLERANCE)


def test_extreme_weights_stay_exact(tmp_path: Path) -> None:
    """Keys next to zero, states that vanish at once and states that never decay are as in transformers."""
    path = checkpoints.write_qwen3_5(tmp_path / "m", layers=4)

    def push(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.linear_attn.in_proj_qkv.weight"][:64] *= 1e-4
        tensors["model.layers.1.linear_attn.A_log"].fill_(10.0)
        tensors["model.layers.2.linear_attn.A_log"].fill_(-30.0)

    storage.edit_tensors(path, push)
    tokens = ids(90)
    expected = target.logits(target.load(path), tokens)
    run = unsplit(path)

    rows = torch.cat((run(tokens[:70]), run(tokens[70:71]), run.verify(tokens[71:87])))

    torch.testing.assert_close(rows, expected[:87], **family_runner.TOLERANCE)
