"""`flashsplit cache`: what is in a store of prefix snapshots, whether it is well, and making room in it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from coordinator.cli.command import Command
from coordinator.cli.console import progress_bars
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.prefix import ShortStoreOptions
from coordinator.cli.running import EXIT_ERROR
from coordinator.prefix.disk.entries import DiskEntry, Fault, UnreadableEntry
from coordinator.prefix.disk.entry_tree import DiskIndex
from coordinator.prefix.disk.report import (
    ID_DIGITS,
    entries_table,
    entry_json,
    entry_lines,
    in_order,
    parts_table,
    show_json,
    unreadable_json,
)
from coordinator.prefix.disk.threads import in_thread
from coordinator.prefix.disk.verify import broken_chain, verify_part
from coordinator.prefix.stores import EntryKey
from services.errors import FailedPrecondition, InvalidArgument, NotFound
from services.sizes import format_size, parse_age, parse_size

_EPILOG = """Examples:

\b
  flashsplit cache ls --kv-cache-dir ~/.cache/flashsplit
  flashsplit cache show 3fa9 --kv-cache-dir ~/.cache/flashsplit
  flashsplit cache verify --kv-cache-url s3://bucket/prefixes
  flashsplit cache prune --budget 4GiB --older-than 7d --kv-cache-dir ~/.cache/flashsplit

With FLASHSPLIT_KV_CACHE_DIR or FLASHSPLIT_KV_CACHE_URL set, the option can be left out.
"""


@click.group(epilog=_EPILOG)
def cache() -> None:
    """See, check and clean up the prefix snapshots kept on disk.

    A snapshot is the state of all layers behind the first tokens of some prompt, so that a later prompt that begins
    with the same tokens need not compute them again. One that builds on another holds only what it adds: both are
    needed to restore it. All of this is safe while servers use the same store.
    """


@cache.command(cls=Command)
@with_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
async def ls(store: ShortStoreOptions, as_json: bool) -> None:
    """List all snapshots, whatever model they are of.

    The size is a snapshot's own, without those it builds on; tokens A-B means that it holds the rows of the tokens from
    A to B. Those that cannot be read come last, with the reason below the table.
    """
    opened, catalog = await store.load()
    index = catalog.index
    bad = sorted(index.unreadable(), key=lambda entry: entry.key)
    if as_json:
        listing = {
            "store": opened.location,
            "entries": [entry_json(index, entry) for entry in in_order(index)],
            "unreadable": [unreadable_json(entry) for entry in bad],
            "total_bytes": index.total_bytes,
        }
        print(json.dumps(listing, ensure_ascii=False))
        return
    out = stdout()
    if len(index) or bad:
        out.print(entries_table(index))
    for entry in bad:
        _print_line(out, f"{entry.key.snapshot_id[:ID_DIGITS]} is {entry.fault}: {entry.why}")
    broken = sum(not index.chain(entry) for entry in index.entries())
    notes = [f"{len(index)} snapshots", format_size(index.total_bytes)]
    notes += [f"{len(bad)} unreadable"] if bad else []
    notes += [f"{broken} without what they build on"] if broken else []
    _print_line(out, " · ".join(notes))


@cache.command(cls=Command, short_help="Tell everything about one snapshot.")
@click.argument("id_prefix", metavar="ID-PREFIX")
@with_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all tokens and tensors.")
async def show(id_prefix: str, store: ShortStoreOptions, as_json: bool) -> None:
    """Tell everything about one snapshot: its model, tokens, files, and what it builds on.

    ID-PREFIX is the beginning of its id, as much as is unique.
    """
    _, catalog = await store.load()
    entry = _find_entry(catalog.index, id_prefix)
    if isinstance(entry, UnreadableEntry):
        raise FailedPrecondition(f"{entry.key.snapshot_id} is {entry.fault}: {entry.why}", field="ID-PREFIX")
    if as_json:
        print(json.dumps(show_json(catalog.index, entry), ensure_ascii=False))
        return
    out = stdout()
    for line in entry_lines(catalog.index, entry):
        _print_line(out, line)
    out.print()
    out.print(parts_table(entry))


@cache.command(cls=Command)
@click.argument("id_prefixes", metavar="[ID-PREFIX]...", nargs=-1)
@with_options
async def verify(id_prefixes: tuple[str, ...], store: ShortStoreOptions) -> None:
    """Read every byte and compare it with what was saved.

    Checks the digest of every tensor, every file's header, every manifest, and that what a snapshot builds on is there.
    Ends with exit code 1 when something is wrong, naming it. Snapshots of another release are named, but not wrong.
    """
    wrong: list[str] = []

    opened, catalog = await store.load()
    index = catalog.index
    chosen = [_find_entry(index, prefix) for prefix in id_prefixes] or [*in_order(index), *index.unreadable()]
    out = stdout()

    def report(entry: DiskEntry | UnreadableEntry, problem: str) -> None:
        """Print what is wrong with an entry, and remember that it is."""
        _print_line(out, f"{entry.key.snapshot_id}: {problem}")
        wrong.append(entry.key.snapshot_id)

    readable = [entry for entry in chosen if isinstance(entry, DiskEntry)]
    with _progress() as progress:
        task = progress.add_task("reading", total=sum(entry.size_bytes for entry in readable))
        for entry in chosen:
            if isinstance(entry, UnreadableEntry):
                if entry.fault is Fault.FOREIGN:
                    _print_line(out, f"{entry.key.snapshot_id}: skipped, {entry.why}")
                else:
                    report(entry, entry.why)
                continue
            if (broken := broken_chain(index, entry)) is not None:
                report(entry, broken)
            for part in entry.parts:
                for problem in await in_thread(
                    verify_part, opened, entry, part, lambda size: progress.advance(task, size)
                ):
                    report(entry, problem)
    size = format_size(sum(entry.size_bytes for entry in readable))
    verdict = f"{len(set(wrong))} bad" if wrong else "all good"
    _print_line(out, f"{len(readable)} snapshots, {size} read: {verdict}")
    if wrong:
        sys.exit(EXIT_ERROR)


@cache.command(cls=Command)
@click.argument("id_prefixes", metavar="[ID-PREFIX]...", nargs=-1)
@with_options
@click.option("--all", "everything", is_flag=True, help="Remove all snapshots of all models, unreadable ones too.")
@click.option("--recursive", "-r", is_flag=True, help="Also remove the snapshots that build on these.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
async def rm(
    id_prefixes: tuple[str, ...],
    store: ShortStoreOptions,
    everything: bool,
    recursive: bool,
    yes: bool,
) -> None:
    """Remove snapshots.

    One that others build on is only removed together with them: give --recursive.
    """
    if everything == bool(id_prefixes):
        raise InvalidArgument("name the snapshots to remove, or give --all", field="--all")
    _, catalog = await store.load()
    index = catalog.index
    if everything:
        named = [*(entry.key for entry in index.entries()), *(entry.key for entry in index.unreadable())]
    else:
        named = [_find_entry(index, prefix).key for prefix in id_prefixes]
    keys = _with_children(index, named, recursive=recursive or everything)
    size = sum(entry.size_bytes for key in keys if (entry := index.get(key) or index.fault(key)) is not None)
    if keys and not yes:
        click.confirm(f"Remove {len(keys)} snapshots ({format_size(size)})?", abort=True, err=True)
    # What builds on others goes first: whoever is cut off in between leaves nothing half.
    removed = [await catalog.remove(key) for key in reversed(keys)]
    _print_line(stdout(), f"{sum(removed)} snapshots removed, {format_size(size)} freed")


@cache.command(cls=Command, short_help="Make room in the store.")
@with_options
@click.option("--budget", metavar="SIZE", help="Remove the least useful until what is left takes at most this: 4GiB.")
@click.option("--older-than", metavar="AGE", help="Remove what was not used for so long: 12h, 7d.")
async def prune(store: ShortStoreOptions, budget: str | None, older_than: str | None) -> None:
    """Make room: first what was not used for long, then the least useful down to a budget.

    Useful is what spares many tokens per byte and was restored often and lately. A snapshot that others build on
    outlives them. Servers do the same by themselves whenever they save.
    """
    if budget is None and older_than is None:
        raise InvalidArgument("give --budget, --older-than or both", field="--budget")
    budget_bytes = None if budget is None else parse_size(budget, "--budget")
    age_s = None if older_than is None else parse_age(older_than, "--older-than")
    _, catalog = await store.load()
    count = freed = 0
    if age_s is not None:
        idle = await catalog.prune_idle(time.time() - age_s)
        count, freed = len(idle.snapshot_ids), idle.freed_bytes
    if budget_bytes is not None:
        evicted = await catalog.prune(budget_bytes)
        count, freed = count + len(evicted.snapshot_ids), freed + evicted.freed_bytes
    left = catalog.index.total_bytes
    _print_line(stdout(), f"{count} snapshots removed, {format_size(freed)} freed, {format_size(left)} left")
    if budget_bytes is not None and left > budget_bytes:
        raise FailedPrecondition(
            f"{format_size(left)} are left, more than --budget {budget}: the rest cannot be removed",
            field="--budget",
        )


def stdout() -> Console:
    """Return a console on stdout; where that is no terminal, tables are not squeezed to one's width."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 240)


def _print_line(out: Console, line: str) -> None:
    """Print a line without breaking it."""
    out.print(line, soft_wrap=True)


def _progress() -> Progress:
    """Return bars that show how many bytes are read."""
    return progress_bars(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    )


def _find_entry(index: DiskIndex, id_prefix: str) -> DiskEntry | UnreadableEntry:
    """Return the only entry whose id begins so. Raises NotFound for none, InvalidArgument for several."""
    entries: list[DiskEntry | UnreadableEntry] = [*index.entries(), *index.unreadable()]
    matches = [entry for entry in entries if entry.key.snapshot_id.startswith(id_prefix.lower())]
    if not matches:
        raise NotFound(
            f"no snapshot's id begins with {id_prefix!r}: `flashsplit cache ls` lists them", field="ID-PREFIX"
        )
    if len(matches) > 1:
        names = ", ".join(_ids(entry.key for entry in matches))
        raise InvalidArgument(
            f"{id_prefix!r} begins the ids of {len(matches)}: {names}; give more digits", field="ID-PREFIX"
        )
    return matches[0]


def _with_children(index: DiskIndex, named: Sequence[EntryKey], *, recursive: bool) -> list[EntryKey]:
    """Return what to remove, each after what it builds on.

    Raises FailedPrecondition when others build on it and are not to be removed too.
    """
    keys = set(named)
    for key in named:
        above = [child for child in index.descendants(key) if child not in keys]
        if above and not recursive:
            raise FailedPrecondition(
                f"{', '.join(_ids(above))} build on {key.snapshot_id[:ID_DIGITS]}: give --recursive to remove them too",
                field="--recursive",
            )
        keys.update(above)

    def depth(key: EntryKey) -> int:
        """Return how many tokens an entry ends behind: more than those that it builds on."""
        entry = index.get(key)
        return 0 if entry is None else entry.token_count

    return sorted(keys, key=depth)


def _ids(keys: Iterable[EntryKey]) -> list[str]:
    """Return the beginnings of the ids, at most eight of them, and how many more there are."""
    names = sorted(key.snapshot_id[:ID_DIGITS] for key in keys)
    return names if len(names) <= 8 else [*names[:8], f"{len(names) - 8} more"]
