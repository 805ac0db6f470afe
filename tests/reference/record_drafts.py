"""Records what a draft model proposes at each place of real answers, for `choice_played_again`.

`python -m tests.reference.record_drafts --model deploy/demo/target --draft deploy/demo/draft --target-devices cpu
--prompts FILE --max-tokens 256 --out tests/reference/recorded_drafts.json`: each answer is decoded plainly, and the
draft is asked for a whole block behind each of its tokens.

Of prompts and answers it keeps which tokens are the same ones and not which ones they are: all that looking up draft
tokens asks for, and nobody's text.
"""

from __future__ import annotations

import itertools
import json
import secrets
from pathlib import Path

import click

from coordinator.bench.generate import Prompt, prompts_options, read_prompts
from coordinator.bench.session_driver import SessionDriver
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.model import ModelOptions
from coordinator.cluster.cluster import Cluster
from coordinator.text.model_files import read_model_files
from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from services.messages.steps import StepKind

CHUNK = 512


@click.command(cls=Command)
@with_options
@prompts_options
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The JSON file to write.")
async def record(
    model: ModelOptions, cluster: ClusterOptions, prompts: Path, limit: int, max_tokens: int, out: Path
) -> None:
    """Record what a draft model proposes at each place of the answers to these prompts."""
    if model.draft is None:
        raise InvalidArgument("--draft is missing: name the draft model to record", field="--draft")
    files = read_model_files(model.model)
    kinds = read_prompts(files, prompts, limit)
    with LoadBars() as bars:
        async with cluster.cluster(files, model.draft, bars) as started:
            with progress_bars() as progress:
                task = progress.add_task("recording", total=sum(map(len, kinds.values())))
                recorded: dict[str, list[dict[str, list[int]]]] = {kind: [] for kind in kinds}
                for kind, asked in kinds.items():
                    for prompt in asked:
                        recorded[kind].append(await recorded_answer(started, prompt, max_tokens, files.stop_token_ids))
                        progress.advance(task)
    out.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")


async def recorded_answer(
    cluster: Cluster, prompt: Prompt, max_tokens: int, stop_token_ids: frozenset[int]
) -> dict[str, list[int]]:
    """Return the prompt, the greedy answer, and how many draft tokens of a whole block are right behind the first token
    of the answer, behind the second and so on."""
    assert cluster.draft is not None
    length, block = len(prompt.token_ids), cluster.draft.block_size - 1
    session = await cluster.open(
        request_id=secrets.token_hex(8),
        max_length=length + max_tokens,
        max_rows=CHUNK,
        block_rows=block + 1,
        prompt_length=length,
        sampling=SamplingParams(),
        stop_token_ids=stop_token_ids,
        speculate=True,
        grammar=prompt.grammar,
    )
    try:
        driver, answer, blocks = SessionDriver(session), list[int](), list[tuple[int, ...]]()
        await driver.prefill(prompt.token_ids[:-1], CHUNK)
        token = prompt.token_ids[-1]
        while len(answer) < max_tokens and token not in stop_token_ids:
            await driver.send(StepKind.DECODE, (token,), propose=block)
            [token] = (await driver.commit()).token_ids
            answer.append(token)
            blocks.append((await driver.proposal()).token_ids)
    finally:
        await session.close()
    right = [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, answer[place:], strict=False)))
        for place, tokens in enumerate(blocks[:-1], 1)
    ]
    numbers = {token: number for number, token in enumerate(dict.fromkeys((*prompt.token_ids, *answer)))}
    return {
        "prompt": [numbers[token] for token in prompt.token_ids],
        "answer": [numbers[token] for token in answer],
        "right": right,
    }


if __name__ == "__main__":
    record()
