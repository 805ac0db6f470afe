"""A server's status for people: its workers as a table, and below it what the draft and the prefix cache save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from coordinator.status.report import Cache, EdgeStatus, Memory, Shares, StandbyStatus, Status, WorkerStatus
from services.sizes import format_age, format_size

BAR = 20
"""How many characters a bar has."""

_SHARES = (("drafting", "█", "green"), ("computing", "█", "blue"), ("wire", "▒", "yellow"), ("waiting", "░", "dim"))
_HEIGHTS = "▁▂▃▄▅▆▇█"

Cell = Callable[[WorkerStatus, EdgeStatus | None], str | Text]


def picture(status: Status, console: Console, url: str = "") -> RenderableType:
    """Return the whole status, as wide as the console. url: the server's, for the heading."""
    return Group(*_parts(status, console, url))


def _parts(status: Status, console: Console, url: str) -> Iterator[RenderableType]:
    yield _heading(status, url)
    yield _activity(status)
    yield Text("")
    yield _chain(status, console)
    yield _legend()
    for worker in status.workers:
        if worker.error is not None:
            yield Text(f"{worker.name}: {worker.error}", style="bold red")
    if status.degraded is not None:
        yield Text(status.degraded, style="bold yellow")
    for standby in status.standbys:
        yield _standby(standby)
    yield Text("")
    yield _acceptance(status)
    yield _cache(status.cache)
    yield _versions(status)


def _heading(status: Status, url: str) -> Text:
    state = "shutting down" if status.draining else "ready" if _is_well(status) else "not ready"
    kept = "" if status.kv_dtype == status.dtype else f", keys and values in {status.kv_dtype}"
    return Text.assemble(
        (status.model, "bold"),
        (f"  {url}  ", "dim"),
        (state, "green" if state == "ready" else "bold red"),
        (f"  up {format_age(status.uptime_s)}, {status.num_layers} layers in {status.dtype}{kept}", "dim"),
    )


def _is_well(status: Status) -> bool:
    return status.ready and not any(worker.error for worker in status.workers)


def _activity(status: Status) -> Text:
    requests, tokens = status.requests, status.tokens
    ends = ", ".join(f"{number} {outcome}" for outcome, number in sorted(requests.finished.items()))
    parts = [
        f"{requests.running} of {requests.max_running} running",
        f"{requests.waiting} waiting",
        f"{tokens.completion_per_s:.1f} tokens/s",
        f"finished: {ends or 'none yet'}",
    ]
    return Text(" · ".join(parts))


# --- the chain

_COLUMNS: Sequence[tuple[str, Cell]] = (
    ("", lambda worker, _: Text(worker.name + (" + draft" if worker.draft and worker.layers else ""), "bold")),
    ("worker", lambda worker, _: f"{worker.device} on {worker.host}"),
    ("layers", lambda worker, _: f"{worker.layers.first}:{worker.layers.last}" if worker.layers else ""),
    ("weights", lambda worker, _: _weights(worker.memory)),
    ("caches", lambda worker, _: format_size(worker.memory.session_bytes)),
    ("prefixes", lambda worker, _: format_size(worker.memory.snapshot_bytes)),
    ("free", lambda worker, _: format_size(sum(device.free_bytes for device in worker.devices))),
    ("pages", lambda worker, _: _pages(worker.memory)),
    ("sessions", lambda worker, _: str(worker.sessions)),
    ("rows a step", lambda worker, _: "" if worker.batches is None else f"{worker.batches.rows:.1f}"),
    ("sent there", lambda _, edge: "" if edge is None else f"{format_size(round(edge.bytes_per_s))}/s"),
    ("hop ms", lambda _, edge: "" if edge is None or edge.step_ms is None else f"{edge.step_ms:.2f}"),
    ("load", lambda worker, _: Text("no answer", "bold red") if worker.error else f"{worker.load:.0%}"),
    ("a step's time", lambda worker, _: _bar(worker.shares)),
    ("busy/wire/wait", lambda worker, _: _percents(worker.shares)),
)
_LEAST_NEEDED = (
    "free",
    "prefixes",
    "sent there",
    "pages",
    "busy/wire/wait",
    "caches",
    "rows a step",
    "sessions",
    "hop ms",
    "weights",
)
"""Columns that are left out on a narrow console, in this order."""


def _weights(memory: Memory) -> str:
    beside = f" + {format_size(memory.host_weight_bytes)} in the host" if memory.host_weight_bytes else ""
    return format_size(memory.weight_bytes) + beside


def _pages(memory: Memory) -> str:
    """Return what pages take of what they may take together."""
    return (
        f"{memory.pool_used_bytes / memory.pool_bytes:.0%} of {format_size(memory.pool_bytes)}"
        if memory.pool_bytes
        else ""
    )


def _chain(status: Status, console: Console) -> Table:
    left_out: set[str] = set()
    for name in ("", *_LEAST_NEEDED):
        left_out |= {name} if name else set()
        table = _table(status, [column for column in _COLUMNS if column[0] not in left_out])
        if Measurement.get(console, console.options.update(max_width=1000), table).maximum <= console.width:
            break
    return table


def _table(status: Status, columns: Sequence[tuple[str, Cell]]) -> Table:
    edges = {edge.to: edge for edge in status.edges}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading, _ in columns:
        left = heading in ("", "worker", "a step's time")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for worker in status.workers:
        table.add_row(*(cell(worker, edges.get(worker.name)) for _, cell in columns))
    return table


def _bar(shares: Shares | None) -> Text:
    bar = Text(no_wrap=True)
    if shares is None:
        return bar.append("no step lately", style="dim")
    sizes = (shares.drafting, shares.busy - shares.drafting, shares.wire, shares.wait)
    filled, reached = 0, 0.0
    for (_, sign, style), share in zip(_SHARES, sizes, strict=True):
        reached += share
        count = min(BAR, round(reached * BAR)) - filled
        bar.append(sign * count, style=style)
        filled += count
    return bar


def _percents(shares: Shares | None) -> str:
    return "" if shares is None else f"{shares.busy:.0%} {shares.wire:.0%} {shares.wait:.0%}"


def _legend() -> Text:
    line = Text()
    for name, sign, style in _SHARES:
        line.append(f"{sign} ", style=style).append(f"{name}  ", style="dim")
    return line


def _standby(standby: StandbyStatus) -> Text:
    """Return a line about a worker that stands by: what it could replace, and how fast."""
    if standby.error is not None:
        return Text(f"{standby.place} is to stand by: {standby.error}", style="yellow")
    if standby.layers is None:
        return Text(f"{standby.place} stands by: for every stage, after reading its weights")
    stages = ", ".join(map(str, standby.stages))
    held = f"layers {standby.layers.first}:{standby.layers.last}"
    return Text(f"{standby.place} stands by: holds {held}, for stage {stages} at once")


# --- what is won


def _acceptance(status: Status) -> Text:
    acceptance = status.acceptance
    if acceptance.block_rows == 1:
        return _line("draft", ("none: one token a step", "dim"))
    if acceptance.tokens_per_verify is None:
        return _line("draft", (f"blocks of {acceptance.block_rows}, none verified yet", "dim"))
    most = max(acceptance.kept)
    # Every count above 0 has a bar, however small beside the others.
    heights = [math.ceil(number / most * len(_HEIGHTS)) for number in acceptance.kept]
    share = acceptance.accepted_tokens / max(acceptance.draft_tokens, 1)
    return _line(
        "draft",
        ("".join(_HEIGHTS[height - 1] if height else " " for height in heights), "green"),
        f"  {acceptance.tokens_per_verify:.2f} of {acceptance.block_rows} rows kept a verify, {share:.0%} of the "
        f"draft tokens right, {acceptance.verifies} verified",
    )


def _cache(cache: Cache) -> Text:
    if not cache.enabled:
        return _line("cache", ("off", "dim"))
    share = sum(hits.tokens for hits in cache.hits.values()) / max(cache.prompt_tokens, 1)
    filled = round(share * BAR)
    sources = [
        f"{hits.tokens} from {source} in {hits.requests} requests" for source, hits in sorted(cache.hits.items())
    ]
    text = f"  {share:.0%} of {cache.prompt_tokens} prompt tokens not computed"
    return _line(
        "cache",
        ("█" * filled, "cyan"),
        ("░" * (BAR - filled), "dim"),
        ": ".join([text, *([", ".join(sources)] if sources else [])]),
    )


def _versions(status: Status) -> Text:
    """Return one line where all workers run the same versions, as they should; else those of each."""
    versions = {
        worker.name: f"flashsplit {worker.versions.flashsplit}, torch {worker.versions.torch}, "
        f"Python {worker.versions.python}"
        for worker in status.workers
    }
    is_servers = {worker.versions.flashsplit for worker in status.workers} == {status.version}
    if is_servers and len(set(versions.values())) == 1:
        return _line("run by", (next(iter(versions.values())), "dim"))
    each = "; ".join(f"{name}: {text}" for name, text in versions.items())
    return _line("run by", (f"server: flashsplit {status.version}; {each}", "" if is_servers else "yellow"))


def _line(name: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((f"{name:8}", "bold"), *parts)
