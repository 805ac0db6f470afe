"""`flashsplit bench drafts`: several drafts of one model on the same prompts, beside plain decode, in one run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.table import Table

from coordinator.answer import Answer
from coordinator.bench.generate import answer, prompts_options, read_prompts, summarise
from coordinator.bench.report import OutputOptions, empty_table
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.model import LOOKUP, ComparedDrafts
from coordinator.engine.step_times import StepTaken
from coordinator.text.model_files import read_model_files
from services.errors import InvalidArgument
from services.messages.description import WorkerDescription
from services.messages.steps import StepKind
from services.model.checkpoint_files import read_config
from services.model.drafts import check_draft_kind, draft_format


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Figures of one draft on one kind of prompt.

    layout: what drafts of its kind are called, "ngram" for tokens looked up in the text. tokens_a_step: those of a step
    of an answer with draft tokens. identical: prompts whose plain and drafted answers are the same tokens.
    """

    draft: str
    layout: str
    kind: str
    prompts: int
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speedup: float
    tokens_a_step: float
    draft_ms: float
    identical: int


@dataclass(slots=True)
class Positions:
    """How often draft tokens are accepted by their place in the block, from the first one on."""

    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, step: StepTaken) -> None:
        """Add a step of an answer, of which verifies count."""
        if step.kind is not StepKind.VERIFY:
            return
        missing = step.rows - 1 - len(self.offered)
        self.offered += [0] * missing
        self.accepted += [0] * missing
        for place in range(step.rows - 1):
            self.offered[place] += 1
            self.accepted[place] += int(place < step.kept - 1)

    @property
    def shares(self) -> list[float]:
        """Of the blocks that had a draft token at a place, those in which it was accepted."""
        return [accepted / offered for accepted, offered in zip(self.accepted, self.offered, strict=True)]


@click.command(cls=Command)
@with_options
@config_option
@prompts_options
async def drafts(
    compared: ComparedDrafts,
    cluster: ClusterOptions,
    output: OutputOptions,
    prompts: Path,
    limit: int,
    max_tokens: int,
) -> None:
    """Compare drafts of a model on your own prompts, each beside plain decode.

    For each draft the workers are started anew. Every prompt is answered twice in a row, plainly and with its draft
    tokens, greedily, so that noise meets both alike.
    """
    if not compared.drafts:
        raise InvalidArgument("--draft is missing: name each draft to compare, or ngram", field="--draft")
    files = read_model_files(compared.model)
    kinds = read_prompts(files, prompts, limit)
    layouts = {source: _layout(source) for source in compared.drafts}
    rows: list[DraftFigures] = []
    positions: dict[str, dict[str, list[float]]] = {}
    measured: dict[tuple[str, str], WorkerDescription] = {}
    for source in compared.drafts:
        name, lookup = _names(compared.drafts)[source], source == LOOKUP
        async with contextlib.AsyncExitStack() as stack:
            with LoadBars() as bars:
                started = await stack.enter_async_context(cluster.cluster(files, None if lookup else source, bars))
            measured |= {(worker.host, worker.device): worker for worker in started.workers}
            progress = stack.enter_context(progress_bars())
            task = progress.add_task(f"answering with {name}", total=sum(map(len, kinds.values())))
            for kind, kind_prompts in kinds.items():
                pairs: list[tuple[Answer, Answer]] = []
                places = Positions()
                # Once unseen: first touches of memory and code belong to nobody's figures.
                await answer(started, files, kind_prompts[0], max_tokens, speculate=True, lookup=lookup)
                for prompt in kind_prompts:
                    plain = await answer(started, files, prompt, max_tokens, speculate=False)
                    drafted = await answer(
                        started, files, prompt, max_tokens, speculate=True, lookup=lookup, on_step=places.add
                    )
                    pairs.append((plain, drafted))
                    progress.advance(task)
                rows.append(_figures(name, layouts[source], kind, pairs))
                positions.setdefault(name, {})[kind] = places.shares
    output.show(rows, _table(rows, positions), list(measured.values()), accepted_by_position=positions)


def _layout(source: Path) -> str:
    """Return what drafts like this one are called. Raises as reading its config.json does."""
    if source == LOOKUP:
        return str(LOOKUP)
    raw = read_config(source, "--draft")
    return draft_format(check_draft_kind(raw, source)).read_config(raw).layout


def _names(sources: Sequence[Path]) -> dict[Path, str]:
    """Return what to call each draft: its directory's own name, or all of it where others have the same."""
    names = [source.absolute().name for source in sources]
    return {source: str(source) if names.count(name) > 1 else name for source, name in zip(sources, names, strict=True)}


def _figures(name: str, layout: str, kind: str, pairs: list[tuple[Answer, Answer]]) -> DraftFigures:
    """Return the figures of all prompts together."""
    both = summarise(name, kind, pairs)
    return DraftFigures(
        draft=name,
        layout=layout,
        kind=kind,
        prompts=both.prompts,
        plain_tokens_per_s=both.plain_tokens_per_s,
        drafted_tokens_per_s=both.dflash_tokens_per_s,
        speedup=both.speedup,
        tokens_a_step=both.acceptance_length,
        draft_ms=both.draft_ms,
        identical=both.identical,
    )


def _table(rows: list[DraftFigures], positions: dict[str, dict[str, list[float]]]) -> Table:
    """Return the figures for people."""
    figures = empty_table(
        "",
        "",
        "prompts",
        "plain tok/s",
        "drafted tok/s",
        "ratio",
        "tokens a step",
        "draft ms",
        "same tokens",
        "accepted by position, %",
    )
    for row in rows:
        shares = " ".join(f"{share:.0%}".rstrip("%") for share in positions[row.draft][row.kind])
        figures.add_row(
            row.draft,
            row.layout,
            f"{row.prompts} {row.kind}",
            *(f"{value:.1f}" for value in (row.plain_tokens_per_s, row.drafted_tokens_per_s)),
            *(f"{value:.2f}" for value in (row.speedup, row.tokens_a_step, row.draft_ms)),
            f"{row.identical}/{row.prompts}",
            shares,
        )
    return figures
