"""How much answers differ with keys and values in 8-bit floats, what they take and how fast they decode: the demo pair,
held-out chats and beginnings of this test suite's files.

`python -m tests.e2e.kv_runs` prints what README says of it.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate
from coordinator.planning.model_size import read_model_size
from services.dtypes import FLOAT8
from services.processes.launch import Launch
from services.telemetry.logs import configure_logs
from shard_worker.stage.stage import Stage
from tests.e2e.exact_runs import DEMO, ms_a_token, prompts, same
from tests.shard_worker.tiny import Run, load_stage


async def answers(
    asked: Sequence[tuple[int, ...]],
    devices: str,
    tokens: int,
    *,
    speculate: bool,
    kv_dtype: str | None,
    dtype: str = "float32",
    exact: bool = False,
) -> list[Answer]:
    """To all prompts, one after the other, of the demo pair, on workers of one thread each."""
    plan = make_plan(target_devices=devices, layer_split=None, draft_device=None, num_layers=12, has_draft=True)
    pair, launch = Checkpoints(DEMO / "target", DEMO / "draft", dtype, kv_dtype=kv_dtype), Launch(threads=1)
    found = []
    async with Cluster(plan, pair, launch=launch, exact=exact) as cluster:
        for number, prompt in enumerate(asked):
            found.append(await generate(cluster, Request(f"r{number}", prompt, tokens, speculate=speculate), None))
    return found


@dataclass(frozen=True)
class Difference:
    """Over all positions: mean Kullback-Leibler divergence in nats, and how many have the same most probable token."""

    positions: int
    divergence: float
    agreeing: int


@torch.no_grad()
def difference(one: Stage, other: Stage, texts: Sequence[Sequence[int]]) -> Difference:
    """Of the distributions after every token of some texts, each stage having read the same."""
    divergences: list[float] = []
    agreeing = 0
    for text in texts:
        rows = [Run([stage], capacity=len(text))(text).float().log_softmax(-1) for stage in (one, other)]
        divergences += (rows[0].exp() * (rows[0] - rows[1])).sum(-1).tolist()
        agreeing += int((rows[0].argmax(-1) == rows[1].argmax(-1)).sum())
    return Difference(len(divergences), statistics.mean(divergences), agreeing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--code", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exact", action="store_true")
    given = parser.parse_args()
    configure_logs("error")
    asked = prompts(given.chats, given.code)
    kept: dict[str | None, list[Answer]] = {}
    for kv_dtype in (None, FLOAT8):
        size = read_model_size(DEMO / "target", given.dtype, kv_dtype)
        runs = [
            asyncio.run(
                answers(
                    asked,
                    devices,
                    given.tokens,
                    speculate=speculate,
                    kv_dtype=kv_dtype,
                    dtype=given.dtype,
                    exact=given.exact,
                )
            )
            for devices, speculate in (("cpu", False), ("cpu", True), ("cpu,cpu", True))
        ]
        kept[kv_dtype] = runs[0]
        print(
            f"{kv_dtype or 'auto'}: {sum(layer.token_bytes for layer in size.layers)} bytes a token; DFlash equals "
            f"plain in {same(*runs[:2])} of {len(asked)} answers, split unsplit in {same(*runs[1:])}; ms a token: "
            f"plain {ms_a_token(runs[0]):.2f}, DFlash {ms_a_token(runs[1]):.2f}",
            flush=True,
        )
    print(f"answers that are the same: {same(kept[None], kept[FLOAT8])} of {len(asked)}")
    stages = [load_stage(DEMO / "target", dtype=given.dtype, kv_dtype=kv_dtype) for kv_dtype in (None, FLOAT8)]
    texts = [(*prompt, *answer.token_ids) for prompt, answer in zip(asked, kept[None], strict=True)]
    found = difference(stages[0], stages[1], texts)
    print(
        f"over {found.positions} positions: divergence {found.divergence:.2g} nats, the same most probable token at "
        f"{found.agreeing / found.positions:.2%}"
    )


if __name__ == "__main__":
    main()
