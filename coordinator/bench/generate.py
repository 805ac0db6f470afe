"""`flashsplit bench generate`: what the split and the speculation cost and gain over prompts, in one run."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from coordinator.answer import Answer, Request
from coordinator.bench.counts import counts_option
from coordinator.bench.report import OutputOptions, empty_table
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.model import ModelOptions
from coordinator.cluster.cluster import Cluster
from coordinator.engine.batch_costs import BatchCosts
from coordinator.engine.generation import generate as complete
from coordinator.engine.step_times import StepTaken
from coordinator.text.model_files import ModelFiles, read_model_files
from coordinator.text.prompt import chat_prompt, text_prompt
from services.errors import InvalidArgument
from services.messages.description import WorkerDescription
from services.messages.steps import Grammar, GrammarKind


@dataclass(frozen=True, slots=True)
class GenerateFigures:
    """Figures of one placement on one kind of prompt.

    Times are milliseconds a step. hop_ms: on the way to a stage and back, the mean over the stages in plain decode;
    identical: prompts whose plain and speculated answers are the same tokens.
    """

    devices: str
    kind: str
    prompts: int
    plain_tokens_per_s: float
    dflash_tokens_per_s: float
    speedup: float
    acceptance_length: float
    plain_forward_ms: float
    verify_forward_ms: float
    draft_ms: float
    hop_ms: float
    identical: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked: token ids, and where the answer must be a given text, the grammar that allows nothing else."""

    token_ids: tuple[int, ...]
    grammar: Grammar | None = None


def prompts_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say what is answered, and how far."""
    for option in (
        click.option(
            "--max-tokens", type=click.IntRange(2), default=128, show_default=True, help="Tokens of each answer."
        ),
        click.option("--limit", type=click.IntRange(1), default=8, show_default=True, help="Prompts of each kind."),
        click.option(
            "--prompts",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            required=True,
            metavar="FILE",
            help='JSON object of kinds, each a list of prompts: strings, objects with "prompt", or lists of token ids. '
            'Strings of kinds other than "code" are asked through the chat template. An object with "forced_answer" as '
            "well has that text for an answer, whatever the model would say: so an edit of a given file can be "
            "measured with a model that makes none.",
        ),
    ):
        command = option(command)
    return command


@click.command(cls=Command)
@with_options
@config_option
@counts_option("--workers", default="1,2,3", help="Without --target-devices: numbers of CPU workers.")
@prompts_options
async def generate(
    model: ModelOptions,
    cluster: ClusterOptions,
    output: OutputOptions,
    workers: tuple[int, ...],
    prompts: Path,
    limit: int,
    max_tokens: int,
) -> None:
    """Measure decode speed, plain and with draft tokens, for one or more placements.

    Every prompt is answered twice in a row, plainly and with what --draft names, so that noise meets both alike.
    """
    if not model.drafts:
        raise InvalidArgument("--draft is missing: bench generate compares draft tokens with none", field="--draft")
    files = read_model_files(model.model)
    kinds = read_prompts(files, prompts, limit)
    devices = cluster.placement.target_devices
    rows: list[GenerateFigures] = []
    measured: dict[tuple[str, str], WorkerDescription] = {}
    for entries in [devices] if devices else [",".join(["cpu"] * count) for count in workers]:
        options = replace(cluster, placement=replace(cluster.placement, target_devices=entries))
        async with contextlib.AsyncExitStack() as stack:
            with LoadBars() as bars:
                started = await stack.enter_async_context(options.cluster(files, model.draft, bars))
            measured |= {(worker.host, worker.device): worker for worker in started.workers}
            progress = stack.enter_context(progress_bars())
            task = progress.add_task(f"answering over {entries}", total=sum(map(len, kinds.values())))
            for kind, kind_prompts in kinds.items():
                pairs = []
                # Once unseen: first touches of memory and code belong to nobody's figures.
                await answer(started, files, kind_prompts[0], max_tokens, speculate=True, lookup=model.prompt_lookup)
                for prompt in kind_prompts:
                    plain = await answer(started, files, prompt, max_tokens, speculate=False)
                    dflash = await answer(
                        started, files, prompt, max_tokens, speculate=True, lookup=model.prompt_lookup
                    )
                    pairs.append((plain, dflash))
                    progress.advance(task)
                rows.append(summarise(entries, kind, pairs))
    output.show(rows, table(rows), list(measured.values()))


def read_prompts(files: ModelFiles, path: Path, limit: int) -> dict[str, list[Prompt]]:
    """Return the prompts by kind. Raises InvalidArgument for a file of another form."""
    try:
        kinds = json.loads(path.read_text(encoding="utf-8"))
        if not kinds:
            raise ValueError("it has none")
        for kind, items in kinds.items():
            if not isinstance(items, list) or not items:
                raise ValueError(f"{kind!r} has none")
        return {str(kind): [_prompt(files, kind, item) for item in items[:limit]] for kind, items in kinds.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidArgument(
            f"--prompts {path} must be a JSON object of lists with prompts: {error}", field="--prompts"
        ) from error


def _prompt(files: ModelFiles, kind: str, item: Any) -> Prompt:
    """Return a prompt as it stands in a file. Raises ValueError, TypeError or KeyError for another item."""
    if isinstance(item, list):
        if not item or not all(type(token) is int and token >= 0 for token in item):
            raise ValueError(f"a list in {kind!r} is no list of token ids")
        return Prompt(tuple(item))
    text = item if isinstance(item, str) else str(item["prompt"])
    forced = None if isinstance(item, str) else item.get("forced_answer")
    if forced is not None and (not isinstance(forced, str) or not forced):
        raise ValueError(f'a "forced_answer" in {kind!r} is {forced!r}, and no text')
    # A JSON string is one of a grammar's too.
    grammar = None if forced is None else Grammar(GrammarKind.LARK, f"start: {json.dumps(forced)}")
    if kind == "code":
        return Prompt(text_prompt(files, text).token_ids, grammar)
    return Prompt(chat_prompt(files, [{"role": "user", "content": text}]).token_ids, grammar)


async def answer(
    cluster: Cluster,
    files: ModelFiles,
    prompt: Prompt,
    max_tokens: int,
    *,
    speculate: bool,
    lookup: bool = False,
    draft_tokens: int | None = None,
    costs: BatchCosts | None = None,
    on_step: Callable[[StepTaken], None] = lambda step: None,
) -> Answer:
    """Return the greedy answer to a prompt. speculate: with draft tokens; lookup: with such as are looked up too.
    draft_tokens, costs and on_step: as `Generation` takes them."""
    request = Request(
        request_id=secrets.token_hex(8),
        prompt_ids=prompt.token_ids,
        max_tokens=max_tokens,
        grammar=prompt.grammar,
        stop_token_ids=files.stop_token_ids,
        speculate=speculate,
    )
    return await complete(
        cluster,
        request,
        files.tokenizer,
        prompt_lookup=lookup,
        draft_tokens=draft_tokens,
        costs=costs,
        on_step=on_step,
    )


def summarise(devices: str, kind: str, pairs: list[tuple[Answer, Answer]]) -> GenerateFigures:
    """Return the figures of all prompts together: tokens over time, not means of ratios."""

    def rate(answers: list[Answer]) -> float:
        """Return the decoded tokens a second."""
        seconds = sum(answer.stats.decode_ms for answer in answers) / 1e3
        return sum(answer.stats.completion_tokens - 1 for answer in answers) / max(seconds, 1e-9)

    plain, dflash = [list(side) for side in zip(*pairs, strict=True)]
    plain_steps = max(1, sum(answer.stats.steps for answer in plain))
    steps = max(1, sum(answer.stats.steps for answer in dflash))
    produced = sum(answer.stats.completion_tokens - 1 for answer in dflash)
    edges = plain_steps * len(plain[0].stats.stages)
    return GenerateFigures(
        devices=devices,
        kind=kind,
        prompts=len(pairs),
        plain_tokens_per_s=rate(plain),
        dflash_tokens_per_s=rate(dflash),
        speedup=rate(dflash) / max(rate(plain), 1e-9),
        acceptance_length=produced / steps,
        plain_forward_ms=sum(stage.forward_ms for answer in plain for stage in answer.stats.stages) / plain_steps,
        verify_forward_ms=sum(stage.forward_ms for answer in dflash for stage in answer.stats.stages) / steps,
        draft_ms=sum(answer.stats.draft_ms for answer in dflash) / steps,
        hop_ms=sum(stage.wire_ms for answer in plain for stage in answer.stats.stages) / edges,
        identical=sum(first.token_ids == second.token_ids for first, second in pairs),
    )


def table(rows: list[GenerateFigures]) -> Table:
    """Return the figures for people."""
    figures = empty_table(
        "devices",
        "prompts",
        "plain tok/s",
        "DFlash tok/s",
        "ratio",
        "tokens a step",
        "plain step ms",
        "verify ms",
        "draft ms",
        "hop ms",
        "same tokens",
    )
    for row in rows:
        figures.add_row(
            row.devices,
            f"{row.prompts} {row.kind}",
            *(f"{value:.1f}" for value in (row.plain_tokens_per_s, row.dflash_tokens_per_s)),
            *(f"{value:.2f}" for value in (row.speedup, row.acceptance_length, row.plain_forward_ms)),
            *(f"{value:.2f}" for value in (row.verify_forward_ms, row.draft_ms, row.hop_ms)),
            f"{row.identical}/{row.prompts}",
        )
    return figures
