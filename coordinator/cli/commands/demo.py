"""`flashsplit demo`: one chat prompt, answered plainly and with DFlash over two workers, and a report of both runs."""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import replace
from pathlib import Path

import click
from rich.table import Table

from coordinator.answer import Answer, Request
from coordinator.cli.command import Command
from coordinator.cli.commands.generate import stream
from coordinator.cli.console import LoadBars, console
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.model import OptionalModelOptions
from coordinator.engine.generation import generate
from coordinator.text.model_files import read_model_files
from coordinator.text.prompt import chat_prompt
from services.errors import FailedPrecondition
from services.processes.worker_process import list_devices

PROMPT = "Calculate 4729 + 3485."
DEMO = Path("deploy/demo")


@click.command(cls=Command)
@with_options
@click.option("--prompt", default=PROMPT, show_default=True, metavar="TEXT", help="What to ask.")
@click.option("--max-tokens", type=click.IntRange(1), default=200, show_default=True, help="Most tokens to produce.")
async def demo(model: OptionalModelOptions, workers: ClusterOptions, prompt: str, max_tokens: int) -> None:
    """Show DFlash over a split model: the demo pair of deploy/demo, on the best two devices found.

    Streams an answer, then prints what the split and the speculation cost and gained.
    """
    target, draft = model.model or DEMO / "target", model.draft or DEMO / "draft"
    for directory in (target, draft):
        if not directory.is_dir():
            raise FailedPrecondition(
                f"{directory} is missing: run this in a checkout of flashsplit, or name --model and --draft"
            )
    files = read_model_files(target)
    devices = workers.placement.target_devices or ",".join(await best_two_devices())
    workers = replace(
        workers,
        placement=replace(workers.placement, target_devices=devices),
        # Exactness is the promise: float32 keeps it to the last token whatever the number of rows.
        compute=replace(workers.compute, dtype=workers.compute.dtype or "float32"),
    )
    with LoadBars() as bars:
        cluster = workers.cluster(files, draft, bars)
        await cluster.__aenter__()
    try:
        prompt_ids = chat_prompt(files, [{"role": "user", "content": prompt}]).token_ids
        console.print(f"[bold]{devices}[/bold]  {prompt}")

        async def answer(*, speculate: bool, shown: bool) -> Answer:
            """Answer the prompt. shown: on stdout while it comes."""
            request = Request(
                request_id=secrets.token_hex(8),
                prompt_ids=prompt_ids,
                max_tokens=max_tokens,
                stop_token_ids=files.stop_token_ids,
                speculate=speculate,
            )
            return await generate(
                cluster, request, files.tokenizer, lambda piece: stream(piece.text) if shown else None
            )

        # Once unseen, so that neither measured run pays for first touches of memory and code.
        await answer(speculate=True, shown=False)
        dflash = await answer(speculate=True, shown=True)
        print()
        plain = await answer(speculate=False, shown=False)
        report(plain, dflash)
        if plain.token_ids != dflash.token_ids:
            sys.exit(1)
    finally:
        await cluster.close()


async def best_two_devices() -> list[str]:
    """Return two GPUs, or one and the CPU, or the CPU twice."""
    devices = await asyncio.to_thread(list_devices)
    return [*devices, "cpu"][:2]


def report(plain: Answer, dflash: Answer) -> None:
    """Print to stderr what the split and the speculation cost and gained."""
    runs = Table(box=None, pad_edge=False)
    for heading in ("", "tokens", "tokens/s", "steps", "tokens a verify"):
        runs.add_column(heading, justify="left" if not heading else "right")
    for name, answer in (("plain", plain), ("DFlash", dflash)):
        stats = answer.stats
        length = "" if stats.acceptance_length is None else f"{stats.acceptance_length:.2f}"
        speed = f"{stats.decode_tokens_per_s:.1f}"
        runs.add_row(name, str(stats.completion_tokens), speed, str(stats.steps), length)
    console.print(runs)
    stages = Table(box=None, pad_edge=False)
    for heading in ("stage", "device", "layers", "plain step", "hop to it", "verify step", "hop to it"):
        stages.add_column(heading, justify="right")
    for index, (plain_stage, dflash_stage) in enumerate(zip(plain.stats.stages, dflash.stats.stages, strict=True)):
        cells = [
            f"{total / max(answer.stats.steps, 1):.2f} ms"
            for answer, stage in ((plain, plain_stage), (dflash, dflash_stage))
            for total in (stage.forward_ms, stage.wire_ms)
        ]
        layers = f"[{plain_stage.first_layer}, {plain_stage.last_layer})"
        stages.add_row(str(index), plain_stage.device, layers, *cells, style=None)
    console.print(stages, markup=False)
    draft_ms = dflash.stats.draft_ms / max(dflash.stats.steps, 1)
    console.print(f"draft: {draft_ms:.2f} ms a block")
    ratio = dflash.stats.decode_tokens_per_s / max(plain.stats.decode_tokens_per_s, 1e-9)
    same = "the same tokens" if plain.token_ids == dflash.token_ids else "DIFFERENT TOKENS"
    console.print(f"[bold]DFlash is {ratio:.2f} times as fast as plain decode; both runs gave {same}.[/bold]")
