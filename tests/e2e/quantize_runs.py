"""How much answers differ with matrices packed by `--quantize`, and how many are still right: the demo pair, and its
held-out chats.

`python -m tests.e2e.quantize_runs` prints what docs/figures.md says of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate
from coordinator.planning.model_size import read_model_size
from coordinator.text.model_files import ModelFiles, read_model_files
from coordinator.text.prompt import chat_prompt
from services.messages.sampling import SamplingParams
from services.model.quantization import Quantization, QuantizedTo
from services.processes.launch import Launch
from services.telemetry.logs import configure_logs
from shard_worker.stage.stage import Stage
from tests.e2e.exact_runs import DEMO
from tests.shard_worker.tiny import Run, load_stage

CHOICES: tuple[tuple[Quantization | None, Quantization | None], ...] = (
    (None, None),
    (Quantization(QuantizedTo.INT8), None),
    (Quantization(QuantizedTo.FP8), None),
    (Quantization(QuantizedTo.INT4), None),
    (Quantization(QuantizedTo.INT8, ends=True), None),
    (Quantization(QuantizedTo.INT4, ends=True), None),
    (None, Quantization(QuantizedTo.INT8)),
    (None, Quantization(QuantizedTo.INT4)),
)
"""How target and draft are packed."""


async def answers(
    prompts: Sequence[tuple[int, ...]],
    stop: frozenset[int],
    devices: str,
    *,
    quantization: Quantization | None,
    draft_quantization: Quantization | None = None,
    dtype: str = "float32",
    tokens: int = 256,
    speculate: bool = True,
    exact: bool = False,
) -> list[Answer]:
    """To all prompts, one after the other, on workers of one thread each."""
    plan = make_plan(target_devices=devices, layer_split=None, draft_device=None, num_layers=12, has_draft=True)
    pair = Checkpoints(
        DEMO / "target",
        DEMO / "draft",
        dtype,
        quantization=quantization,
        draft_quantization=draft_quantization,
    )
    found = []
    async with Cluster(plan, pair, launch=Launch(threads=1), exact=exact) as cluster:
        for number, prompt in enumerate(prompts):
            request = Request(f"r{number}", prompt, tokens, SamplingParams(), stop, speculate=speculate)
            found.append(await generate(cluster, request, None))
    return found


@torch.no_grad()
def divergence(one: Stage, other: Stage, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    """Return the mean Kullback-Leibler divergence in nats over the positions of answers, each stage having read the
    same prompts and answers. texts: prompts and answers to them."""
    found: list[float] = []
    for prompt, answer in texts:
        text = (*prompt, *answer)
        rows = [Run([stage], capacity=len(text))(text).float().log_softmax(-1) for stage in (one, other)]
        found += (rows[0].exp() * (rows[0] - rows[1])).sum(-1)[len(prompt) - 1 : -1].tolist()
    return statistics.mean(found)


def cases(count: int) -> tuple[ModelFiles, list[tuple[int, ...]], list[str]]:
    """Return the demo pair's files, held-out requests as tokens, and the right answers to them."""
    files = read_model_files(DEMO / "target")
    chats = json.loads(Path(DEMO / "prompts.json").read_text(encoding="utf-8"))["chat"][:count]
    prompts = [chat_prompt(files, [{"role": "user", "content": chat["prompt"]}]).token_ids for chat in chats]
    return files, prompts, [chat["answer"] for chat in chats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=256)
    parser.add_argument("--dtype", default="float32", help="element type of activations")
    given = parser.parse_args()
    configure_logs("error")
    files, prompts, right = cases(given.chats)
    assert files.tokenizer is not None
    reference = load_stage(DEMO / "target", dtype=given.dtype)
    texts: list[tuple[Sequence[int], Sequence[int]]] = []
    for target, draft in CHOICES:
        run = answers(
            prompts,
            files.stop_token_ids,
            "cpu",
            quantization=target,
            draft_quantization=draft,
            dtype=given.dtype,
        )
        found = asyncio.run(run)
        texts = texts or [(prompt, answer.token_ids) for prompt, answer in zip(prompts, found, strict=True)]
        said = [files.tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in found]
        stage = load_stage(DEMO / "target", dtype=given.dtype, quantization=target)
        steps = sum(answer.stats.steps for answer in found)
        size = read_model_size(DEMO / "target", "bfloat16", quantization=target)
        print(
            f"{target or 'as it is'}{'' if draft is None else f', draft {draft}'}: "
            f"{sum(one == other for one, other in zip(said, right, strict=True))} of {len(right)} right; "
            f"{divergence(reference, stage, texts):.2e} nats; "
            f"{sum(len(answer.token_ids) for answer in found) / steps:.2f} tokens a step; "
            f"{size.weight_bytes / 1e6:.1f} MB in 16 bits",
            flush=True,
        )


if __name__ == "__main__":
    main()
