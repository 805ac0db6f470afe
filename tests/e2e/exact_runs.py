"""How far bfloat16 steps of one row and of sixteen differ, and whether plain and speculated answers do, with `--exact`
and without: the demo pair, held-out chats and beginnings of library files.

`python -m tests.e2e.exact_runs` prints what README says of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate
from coordinator.text.model_files import read_model_files
from coordinator.text.prompt import chat_prompt
from services.messages.sampling import SamplingParams
from services.processes.launch import Launch
from services.telemetry.logs import configure_logs
from shard_worker.stage.stage import Stage
from tests.e2e.conftest import ROOT
from tests.shard_worker.tiny import Run, load_stage

DEMO = ROOT / "deploy" / "demo"
ROWS = 16
COUNTS = ("positions", "differing", "flipped")
GREEDY, SEEDED = SamplingParams(), SamplingParams(temperature=1.0, seed=7)


def prompts(chats: int, code: int) -> list[tuple[int, ...]]:
    """Held-out questions, and beginnings of files of this test suite."""
    files = read_model_files(DEMO / "target")
    assert files.tokenizer is not None
    cases: list[dict[str, Any]] = json.loads((DEMO / "prompts.json").read_text())["chat"][:chats]
    texts = [path.read_text()[:600] for path in sorted((ROOT / "tests" / "shard_worker").glob("*.py"))[:code]]
    return [
        *(chat_prompt(files, [{"role": "user", "content": case["prompt"]}]).token_ids for case in cases),
        *(tuple(files.tokenizer.encode(text, add_special_tokens=True)) for text in texts),
    ]


async def answers(
    prompts: Sequence[tuple[int, ...]],
    devices: str,
    tokens: int,
    *,
    speculate: bool,
    exact: bool,
    sampling: SamplingParams = GREEDY,
) -> list[Answer]:
    """To all prompts, one after the other, of the demo pair in its own bfloat16, on workers of one thread each."""
    plan = make_plan(target_devices=devices, layer_split=None, draft_device=None, num_layers=12, has_draft=True)
    pair, launch = Checkpoints(DEMO / "target", DEMO / "draft", "bfloat16"), Launch(threads=1)
    found = []
    async with Cluster(plan, pair, launch=launch, exact=exact) as cluster:
        for number, prompt in enumerate(prompts):
            request = Request(f"r{number}", prompt, tokens, sampling, speculate=speculate)
            found.append(await generate(cluster, request, None))
    return found


@dataclass(frozen=True)
class Difference:
    """Between logits of one-row steps and of others. differing: positions with any; flipped: those whose most probable
    token is another; deviation: the logits' own standard deviation."""

    positions: int
    differing: int
    flipped: int
    largest: float
    deviation: float


@torch.no_grad()
def rounding(stage: Stage, prompt: Sequence[int], answer: Sequence[int], *, exact: bool) -> Difference:
    """Along an answer: in steps of one row, and of sixteen that all count."""
    logits = []
    for rows in (1, ROWS):
        run = Run([stage], batch_invariant_rows=ROWS if exact else None)
        run(prompt)
        made = []
        for first in range(0, len(answer), rows):
            part = answer[first : first + rows]
            made.append(run.verify(part) if rows > 1 else run(part))
            if rows > 1:
                run.commit(len(part))
        logits.append(torch.cat(made).float())
    one, other = logits
    return Difference(
        positions=len(answer),
        differing=int((one != other).any(-1).sum()),
        flipped=int((one.argmax(-1) != other.argmax(-1)).sum()),
        largest=(one - other).abs().max().item(),
        deviation=one.std().item(),
    )


def same(one: Sequence[Answer], other: Sequence[Answer]) -> int:
    """How many pairs have the same tokens."""
    return sum(left.token_ids == right.token_ids for left, right in zip(one, other, strict=True))


def ms_a_token(found: Sequence[Answer]) -> float:
    decoded = sum(answer.stats.completion_tokens - 1 for answer in found)
    return sum(answer.stats.decode_ms for answer in found) / decoded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=12)
    parser.add_argument("--code", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument(
        "--seeded", action="store_true", help="draw at temperature 1 instead of taking the most probable"
    )
    given = parser.parse_args()
    configure_logs("error")
    asked, sampling = prompts(given.chats, given.code), SEEDED if given.seeded else GREEDY
    for devices in ("cpu", "cpu,cpu"):
        for exact in (False, True):
            plain, dflash = (
                asyncio.run(answers(asked, devices, given.tokens, speculate=speculate, exact=exact, sampling=sampling))
                for speculate in (False, True)
            )
            print(
                f"{devices}{' --exact' if exact else ''}: {same(plain, dflash)} of {len(asked)} answers equal; ms a "
                f"token: plain {ms_a_token(plain):.2f}, DFlash {ms_a_token(dflash):.2f}",
                flush=True,
            )
    stage = load_stage(DEMO / "target", dtype="bfloat16")
    for exact in (False, True):
        found = [
            rounding(stage, prompt, answer.token_ids, exact=exact) for prompt, answer in zip(asked, plain, strict=True)
        ]
        positions, differing, flipped = (sum(getattr(one, name) for one in found) for name in COUNTS)
        print(
            f"logits{' --exact' if exact else ''}: other ones at {differing} of {positions} positions, by up to "
            f"{max(one.largest for one in found):.3g} at a standard deviation of {found[0].deviation:.3g}, another "
            f"most probable token at {flipped}",
            flush=True,
        )


if __name__ == "__main__":
    main()
