"""Scores against a restatement over transformers' own model, one query and one head at a time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from services.errors import InvalidArgument, Unimplemented
from shard_worker.device.devices import parse_devices
from shard_worker.pflash.drafter import Drafter, check_prompt, load_drafter
from shard_worker.pflash.scoring import chunk_means, smoothed
from shard_worker.weights.opening import open_checkpoint
from tests.reference import checkpoints
from tests.shard_worker.packed import Packed

TAIL, WIDTH, CHUNK = 8, 13, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_qwen3(tmp_path_factory.mktemp("drafter") / "qwen3", layers=3, tied=True)


@pytest.fixture(scope="module")
def drafter(folder: Path) -> Drafter:
    [device] = parse_devices("cpu")
    return load_drafter(open_checkpoint(str(folder)), device, "float32", lambda *_: None)


def test_a_packed_drafter_scores_as_what_it_stands_for(packed: Packed) -> None:
    """Its embedding may be packed too."""
    [device] = parse_devices("cpu")
    prompt = checkpoints.random_prompts(256, 1, 5, [200])[0]
    scores = [
        [*load_drafter(open_checkpoint(path), device, None, lambda *_: None).score(tuple(prompt))][-1]
        for path in packed("fp8-ends")
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)


def restated(folder: Path, token_ids: list[int]) -> list[float]:
    """The mean score of each chunk, in Python floats."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    queries: list[torch.Tensor] = []
    keys: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.q_norm.register_forward_hook(lambda _m, _i, out: queries.append(out[0]))
        layer.self_attn.k_norm.register_forward_hook(lambda _m, _i, out: keys.append(out[0]))
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    length = len(token_ids)
    tail = range(max(0, length - TAIL), length)
    best = [[0.0] * length for _ in tail]
    for q, k in zip(queries, keys, strict=True):
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
        for row, position in enumerate(tail):
            for head in range(heads):
                dots = (k[: position + 1, head * kv_heads // heads] @ q[position, head] / math.sqrt(dim)).double()
                weights = (dots - dots.max()).exp()
                for token, weight in enumerate((weights / weights.sum()).tolist()):
                    best[row][token] = max(best[row][token], weight)
    mean = [sum(column) / len(best) for column in zip(*best, strict=True)]
    half = WIDTH // 2
    smooth = [sum(mean[max(0, i - half) : i + half + 1]) / len(mean[max(0, i - half) : i + half + 1])
              for i in range(length)]  # fmt: skip
    return [sum(smooth[i : i + CHUNK]) / len(smooth[i : i + CHUNK]) for i in range(0, length, CHUNK)]


@pytest.mark.parametrize("length", [1, 5, 9, 32, 33, 150])
def test_scores_are_those_of_the_restatement(length: int, folder: Path, drafter: Drafter) -> None:
    """Each layer is reported, and the scores of all chunks are those computed one query and head at a time."""
    token_ids = checkpoints.random_prompts(256, 1, length, [length])[0]
    *layers, scores = drafter.score(tuple(token_ids))
    assert layers == [1, 2, 3]
    assert scores == pytest.approx(restated(folder, token_ids), rel=1e-4)


def test_smoothing_and_means_at_the_ends() -> None:
    """Near the ends the average is over the tokens that are there, and the last chunk may be shorter."""
    scores = torch.zeros(40)
    scores[0] = 7.0
    assert smoothed(scores)[:8].tolist() == pytest.approx([1, 7 / 8, 7 / 9, 7 / 10, 7 / 11, 7 / 12, 7 / 13, 0])
    assert chunk_means(torch.ones(33), CHUNK) == [1.0, 1.0]
    assert len(chunk_means(torch.ones(64), CHUNK)) == 2


def test_what_cannot_be_scored(drafter: Drafter) -> None:
    """An empty prompt and tokens outside the vocabulary are refused by name."""
    check_prompt(drafter, (0, drafter.config.vocab_size - 1))
    for token_ids, words in (((), "empty"), ((drafter.config.vocab_size,), "the drafter's tokens"), ((-1,), "-1")):
        with pytest.raises(InvalidArgument, match=words):
            check_prompt(drafter, token_ids)


def test_another_family_is_refused(tmp_path: Path) -> None:
    """A hybrid model cannot be the drafter; the refusal says what can."""
    folder = checkpoints.write_qwen3_5(tmp_path / "hybrid", layers=4)
    [device] = parse_devices("cpu")
    with pytest.raises(Unimplemented, match="Qwen3-0.6B"):
        load_drafter(open_checkpoint(str(folder)), device, None, lambda *_: None)
