"""`flashsplit bench drafts`: the ways to draft for one model on the same prompts, fixed ones and the choice among them,
beside plain decode, in one run."""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.table import Table

from coordinator.answer import Answer
from coordinator.bench.counts import counts_option
from coordinator.bench.generate import Prompt, answer, prompts_options, read_prompts
from coordinator.bench.report import OutputOptions, Row, empty_table
from coordinator.cli.command import Command
from coordinator.cli.console import LoadBars, progress_bars
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.model import LOOKUP, ComparedDrafts
from coordinator.cluster.cluster import Cluster
from coordinator.engine.batch_costs import BatchCosts
from coordinator.engine.step_times import StepTaken
from coordinator.text.model_files import ModelFiles, read_model_files
from services.errors import InvalidArgument
from services.messages.description import WorkerDescription
from services.messages.steps import StepKind
from services.model.checkpoint_files import read_config
from services.model.drafts import DraftConfig, check_draft_kind, draft_format

PLAIN, CHOICE = "plain", "choice"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to answer prompts.

    name: for people. draft_tokens: how many of the draft model's each step verifies, None to choose. lookup: whether
    draft tokens are looked up in the text too.
    """

    name: str
    draft_tokens: int | None
    lookup: bool = False


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """Figures of one way to answer one kind of prompt.

    draft: the draft model that the workers had, with what drafts of its layout are called; "ngram" where they had none.
    way: "plain", so many draft tokens a step, "ngram" for tokens looked up in the text alone, or "choice" for all that
    there is, as requests have it. tokens_per_s: all tokens over all time, where a prompt's time is the median of its
    repeats; least and most: of the repeats by themselves. of_plain: as a ratio to plain's. of_best: to that of the
    fixed way that is the fastest for this kind of prompt; least and most: of the repeats by themselves. tokens_a_step:
    those of a step of an answer. identical: answers that have the plain one's tokens.
    """

    draft: str
    layout: str
    kind: str
    way: str
    prompts: int
    repeats: int
    tokens_per_s: float
    least_tokens_per_s: float
    most_tokens_per_s: float
    of_plain: float
    of_best: float
    least_of_best: float
    most_of_best: float
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


@dataclass(slots=True)
class Answers:
    """All answers to one kind of prompt in one way, by the prompt's place, each in the order of the repeats; and what
    became of their draft tokens."""

    by_prompt: dict[int, list[Answer]] = field(default_factory=dict)
    positions: Positions = field(default_factory=Positions)

    def rate(self, repeat: int | None = None) -> float:
        """Return the decoded tokens a second of one repeat, or with None those of the prompts' median times."""
        tokens, seconds = 0, 0.0
        for answers in self.by_prompt.values():
            times = [answer.stats.decode_ms / 1e3 for answer in answers]
            tokens += answers[0].stats.completion_tokens - 1
            seconds += statistics.median(times) if repeat is None else times[repeat]
        return tokens / max(seconds, 1e-9)

    @property
    def rates(self) -> list[float]:
        """`rate` of each repeat."""
        return [self.rate(repeat) for repeat in range(len(self.all) // len(self.by_prompt))]

    @property
    def all(self) -> list[Answer]:
        """The answers one after the other."""
        return list(itertools.chain.from_iterable(self.by_prompt.values()))


@dataclass(slots=True)
class Asked:
    """The answers of one cluster. kinds: of prompts. costs: of each way what its answers
    have learnt, as a server's have."""

    cluster: Cluster
    files: ModelFiles
    kinds: Mapping[str, Sequence[Prompt]]
    max_tokens: int
    answers: dict[tuple[str, Way], Answers] = field(default_factory=dict)
    costs: dict[Way, BatchCosts] = field(default_factory=dict)

    async def answer(self, kind: str, place: int, way: Way) -> None:
        """Answer the prompt of a kind at a place, and keep the answer."""
        answers = self.answers.setdefault((kind, way), Answers())
        answered = await answer(
            self.cluster,
            self.files,
            self.kinds[kind][place],
            self.max_tokens,
            speculate=way.name != PLAIN,
            lookup=way.lookup,
            draft_tokens=way.draft_tokens,
            costs=self.costs.setdefault(way, BatchCosts()),
            on_step=answers.positions.add,
        )
        answers.by_prompt.setdefault(place, []).append(answered)


@click.command(cls=Command)
@with_options
@config_option
@counts_option(
    "--draft-tokens",
    default=None,
    help="Draft tokens of each step, for every number a way of its own. Default: as many as a block of the draft has.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="How often each prompt is answered each way.",
)
@prompts_options
async def drafts(
    compared: ComparedDrafts,
    cluster: ClusterOptions,
    output: OutputOptions,
    draft_tokens: tuple[int, ...],
    repeats: int,
    prompts: Path,
    limit: int,
    max_tokens: int,
) -> None:
    """Compare drafts of a model on your own prompts: each at fixed lengths, and what is chosen where nothing is fixed.

    For each draft model the workers are started anew. Every prompt is answered in all ways in a row, greedily, so that
    noise meets all alike: plainly; with blocks of the draft of one length, whatever they bring; with --draft ngram by
    what is looked up in the text alone; and as requests are answered, where kind and length of each block are chosen by
    what is measured on the way. The kinds of prompts take turns, and the choice learns over all of them as a server
    does. "of best" is the ratio to the fastest fixed way for that kind of prompt, with the least and the most of the
    repeats. Ctrl-C shows the figures of the prompts that were answered in all ways by then.

    \b
    flashsplit bench drafts --model M --draft A --draft B --draft ngram --prompts F.json --draft-tokens 3,7,15
    """
    if not compared.drafts:
        raise InvalidArgument("--draft is missing: name each draft to compare, or ngram", field="--draft")
    files = read_model_files(compared.model)
    kinds = read_prompts(files, prompts, limit)
    models = [source for source in compared.drafts if source != LOOKUP] or [LOOKUP]
    ways = {source: _ways(source, draft_tokens, looks_up=LOOKUP in compared.drafts) for source in models}
    layouts = {source: _layout(source) for source in models}
    asked: dict[Path, Asked] = {}
    measured: dict[tuple[str, str], WorkerDescription] = {}
    try:
        for source in models:
            async with contextlib.AsyncExitStack() as stack:
                with LoadBars() as bars:
                    draft = None if source == LOOKUP else source
                    started = await stack.enter_async_context(cluster.cluster(files, draft, bars))
                measured |= {(worker.host, worker.device): worker for worker in started.workers}
                progress = stack.enter_context(progress_bars())
                name = _names(models)[source]
                task = progress.add_task(f"answering with {name}", total=repeats * sum(map(len, kinds.values())))
                asked[source] = Asked(started, files, kinds, max_tokens)
                async for _ in _answer_all(asked[source], ways[source], repeats):
                    progress.advance(task)
    finally:
        rows: list[DraftFigures] = []
        positions: dict[str, dict[str, dict[str, list[float]]]] = {}
        for (source, of), kind in itertools.product(asked.items(), kinds):
            answered = in_all_ways({way: of.answers.get((kind, way), Answers()) for way in ways[source]})
            if answered:
                name = _names(models)[source]
                rows += figures_of(name, layouts[source], kind, answered)
                shares = {way.name: answers.positions.shares for way, answers in answered.items() if way.name != PLAIN}
                positions.setdefault(name, {})[kind] = shares
        if rows:
            output.show(
                rows,
                _table(rows, positions),
                list(measured.values()),
                picture=draw_ways,
                accepted_by_position=positions,
            )


def in_all_ways(answered: Mapping[Way, Answers]) -> dict[Way, Answers]:
    """Return the answers to those prompts of a kind that were answered in all ways, so many repeats of each as of all;
    nothing where there is no such prompt."""
    places = set.intersection(*(set(answers.by_prompt) for answers in answered.values()))
    if not places:
        return {}
    repeats = min(len(answers.by_prompt[place]) for answers in answered.values() for place in places)
    return {
        way: Answers({place: answers.by_prompt[place][:repeats] for place in sorted(places)}, answers.positions)
        for way, answers in answered.items()
    }


def _ways(source: Path, draft_tokens: Sequence[int], *, looks_up: bool) -> list[Way]:
    """Return the ways to answer with this draft, plainly first. Raises InvalidArgument for more draft tokens than its
    blocks have."""
    plain, lookup = Way(PLAIN, 0), [Way(str(LOOKUP), 0, lookup=True)] if looks_up else []
    if source == LOOKUP:
        if draft_tokens:
            raise InvalidArgument(
                f"--draft-tokens {','.join(map(str, draft_tokens))}: only a draft model has blocks of fixed length; "
                f"name one with --draft beside {LOOKUP}, or leave this out",
                field="--draft-tokens",
            )
        return [plain, *lookup]
    longest = _config(source).block_size - 1
    if draft_tokens and max(draft_tokens) > longest:
        raise InvalidArgument(
            f"--draft-tokens {max(draft_tokens)}: the blocks of {source} have at most {longest} draft tokens",
            field="--draft-tokens",
        )
    fixed = [Way(f"{count} a step", count) for count in dict.fromkeys(draft_tokens or (longest,))]
    return [plain, *fixed, *lookup, Way(CHOICE, None, lookup=looks_up)]


async def _answer_all(asked: Asked, ways: Sequence[Way], repeats: int) -> AsyncIterator[None]:
    """Answer all prompts in all ways, and yield behind each prompt of each repeat."""
    for way in ways:
        # Once unseen: first touches of memory and code belong to nobody's figures.
        await asked.answer(next(iter(asked.kinds)), 0, way)
    asked.answers.clear()
    turns = itertools.product(range(repeats), range(max(map(len, asked.kinds.values()))))
    for turn, (_, place) in enumerate(turns):
        first = turn % len(ways)
        for kind, prompts in asked.kinds.items():
            if place < len(prompts):
                for way in (*ways[first:], *ways[:first]):
                    await asked.answer(kind, place, way)
                yield


def _config(source: Path) -> DraftConfig:
    """Return what a draft's config.json says. Raises as reading it does."""
    raw = read_config(source, "--draft")
    return draft_format(check_draft_kind(raw, source)).read_config(raw)


def _layout(source: Path) -> str:
    """Return what drafts like this one are called. Raises as reading its config.json does."""
    return str(LOOKUP) if source == LOOKUP else _config(source).layout


def _names(sources: Sequence[Path]) -> dict[Path, str]:
    """Return what to call each draft: its directory's own name, or all of it where others have the same."""
    names = [source.absolute().name for source in sources]
    return {source: str(source) if names.count(name) > 1 else name for source, name in zip(sources, names, strict=True)}


def figures_of(draft: str, layout: str, kind: str, answered: Mapping[Way, Answers]) -> list[DraftFigures]:
    """Return a row for each way to answer one kind of prompt."""
    plain = next(answers for way, answers in answered.items() if way.name == PLAIN)
    best = max((answers for way, answers in answered.items() if way.name != CHOICE), key=Answers.rate)
    rows = []
    for way, answers in answered.items():
        rates = answers.rates
        of_best = [rate / most for rate, most in zip(rates, best.rates, strict=True)]
        stats = [answer.stats for answer in answers.all]
        steps = max(1, sum(one.steps for one in stats))
        rows.append(
            DraftFigures(
                draft=draft,
                layout=layout,
                kind=kind,
                way=way.name,
                prompts=len(answers.by_prompt),
                repeats=len(rates),
                tokens_per_s=answers.rate(),
                least_tokens_per_s=min(rates),
                most_tokens_per_s=max(rates),
                of_plain=answers.rate() / plain.rate(),
                of_best=answers.rate() / best.rate(),
                least_of_best=min(of_best),
                most_of_best=max(of_best),
                tokens_a_step=sum(one.completion_tokens - 1 for one in stats) / steps,
                draft_ms=sum(one.draft_ms for one in stats) / steps,
                identical=sum(
                    one.token_ids == other.token_ids for one, other in zip(answers.all, plain.all, strict=True)
                ),
            )
        )
    return rows


def _table(rows: Sequence[DraftFigures], positions: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> Table:
    """Return the figures for people."""
    figures = empty_table(
        "",
        "",
        "prompts",
        "",
        "tok/s",
        "of plain",
        "of best",
        "least-most",
        "tokens a step",
        "draft ms",
        "same tokens",
        "accepted by position, %",
    )
    before = None
    for row in rows:
        shares = positions[row.draft][row.kind].get(row.way, [])
        part = (row.draft, row.layout, f"{row.prompts} {row.kind}")
        figures.add_row(
            *(part if part != before else ("", "", "")),
            row.way,
            f"{row.tokens_per_s:.1f}",
            *(f"{value:.2f}" for value in (row.of_plain, row.of_best)),
            f"{row.least_of_best:.2f}-{row.most_of_best:.2f}",
            *(f"{value:.2f}" for value in (row.tokens_a_step, row.draft_ms)),
            f"{row.identical}/{row.prompts * row.repeats}",
            " ".join(f"{share:.0%}".rstrip("%") for share in shares),
        )
        before = part
    return figures


def draw_ways(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a report into a file: a picture for each draft, a group of bars for each kind of prompt, a bar
    with the least and the most of its repeats for each way."""
    from matplotlib.figure import Figure

    drafts = list(dict.fromkeys(row["draft"] for row in rows))
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure = Figure(figsize=(max(6.0, 2.4 * len(kinds)), 3.2 * len(drafts)), layout="constrained")
    for place, draft in enumerate(drafts):
        axes = figure.add_subplot(len(drafts), 1, place + 1)
        ways = list(dict.fromkeys(row["way"] for row in rows if row["draft"] == draft))
        width = 0.8 / len(ways)
        for number, way in enumerate(ways):
            drawn = [row for row in rows if (row["draft"], row["way"]) == (draft, way)]
            at = [kinds.index(row["kind"]) - 0.4 + (number + 0.5) * width for row in drawn]
            # The median of each prompt's times may lie beyond all repeats.
            around = [
                [max(0.0, row["tokens_per_s"] - row["least_tokens_per_s"]) for row in drawn],
                [max(0.0, row["most_tokens_per_s"] - row["tokens_per_s"]) for row in drawn],
            ]
            axes.bar(at, [row["tokens_per_s"] for row in drawn], width, label=way, yerr=around, capsize=2)
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set_title(draft)
        axes.set_ylabel("tokens a second")
        axes.legend(fontsize="small")
    figure.savefig(path)
