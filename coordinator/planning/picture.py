"""A plan for people: tables of placement, edges and times, and one bar a device."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from coordinator.planning.planner import CONTEXT
from coordinator.planning.report import DeviceLoad, Report, ranges_text
from services.sizes import format_size

BAR = 48
"""How many characters wide a bar is."""


def show(report: Report, console: Console) -> None:
    """Print everything, in the order in which one asks for it."""
    for part in _parts(report):
        console.print(part, soft_wrap=isinstance(part, Text))


def _parts(report: Report) -> Iterator[RenderableType]:
    target, sessions = report.models.target, report.sessions
    count = "1 session" if sessions == 1 else f"{sessions} sessions"
    cached_in = "" if target.kv_dtype == target.dtype else f", keys and values in {target.kv_dtype}"
    yield Text(
        f"{len(target.layers)} layers, {format_size(target.weight_bytes)} in {target.dtype}{cached_in}; "
        f"caches of {count}",
        style="bold",
    )
    yield _placement(report)
    yield Text("")
    yield from _bars(report)
    if report.fitting is not None:
        counts = ", ".join(f"{sessions} of {length} tokens" for length, sessions in report.fitting.items())
        yield Text(f"\nSessions that find memory for keys and values at once: {counts}.", style="bold")
    yield Text("")
    yield _edges(report)
    if report.draft_reason is not None and report.models.draft is not None:
        layout = report.models.draft.config.layout
        yield Text(f"\nThe draft is {report.draft_reason}. It is a {layout} draft.")
    if report.forecast is not None:
        yield Text("")
        yield _speeds(report)
        forecast = report.forecast
        rates = ", ".join(f"{rate:.1f} behind {length} tokens" for length, rate in forecast.by_length.items())
        yield Text(f"\nPlain decode, predicted tokens/s: {rates}.", style="bold")
        yield Text(f"Bottleneck: {forecast.bottleneck}.")
    for note in report.notes:
        yield Text(f"Note: {note}.")
    experts = report.plan.expert_devices
    line = f"--target-devices {_devices(report)} --target-layers {ranges_text(report.plan)}"
    yield Text(f"\n{line}{'' if experts is None else f' --expert-devices {experts}'}", style="dim")


def _devices(report: Report) -> str:
    return ",".join(str(stage.place) for stage in report.plan.stages)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 2 else "right")
    return table


def _placement(report: Report) -> Table:
    table = _table("", "device", "layers", "weights", *(f"caches at {length}" for length in report.lengths), "free")
    for load in report.devices:
        layers = "" if load.share.layers is None else f"{load.share.layers.first}:{load.share.layers.last}"
        table.add_row(
            load.owner + (" + draft" if load.share.draft and load.owner != "draft" else ""),
            _where(load),
            layers,
            format_size(load.weight_bytes),
            *(format_size(load.cache_bytes[length]) for length in report.lengths),
            "not asked" if load.free_bytes is None else format_size(load.free_bytes),
        )
    return table


def _where(load: DeviceLoad) -> str:
    return load.device if load.device in load.worker else f"{load.device} at {load.worker}"


def _bars(report: Report) -> Iterator[Text]:
    """A bar for every memory, its workers' parts in turn; without a known size, as wide as the fullest one."""
    length = max(report.lengths)
    memories = list(dict.fromkeys(load.memory for load in report.devices))
    used = {
        memory: sum(load.weight_bytes + load.cache_bytes[length] for load in report.devices if load.memory == memory)
        for memory in memories
    }
    widest = max(len(memory) for memory in memories)
    for memory in memories:
        members = [load for load in report.devices if load.memory == memory]
        free = members[0].free_bytes
        whole = max(used[memory], free) if free is not None else max(used.values())
        bar = Text(f"{memory:{widest}}  ", no_wrap=True)
        left = BAR
        for index, load in enumerate(members):
            for sign, size in (("█", load.weight_bytes), ("▒", load.cache_bytes[length])):
                # What is there is seen, however small beside the rest.
                count = min(left, max(round(BAR * size / max(whole, 1)), 1 if size else 0))
                bar.append(sign * count, style=("cyan", "magenta")[index % 2])
                left -= count
        bar.append(("░" if free is not None else " ") * left, style="dim")
        text = f"  {format_size(used[memory])}"
        bar.append(text + (f" of {format_size(free)} free" if free is not None else ""))
        yield bar
    yield Text(f"{'':{widest}}  █ weights  ▒ caches at {length} tokens  ░ free", style="dim")


def _edges(report: Report) -> Table:
    table = _table("bytes a step", "", "decode", "verify", "prefill of 512")
    for edge in report.edges:
        verify = format_size(edge.verify_bytes) if edge.verify_bytes else ""
        decode = format_size(edge.decode_bytes) if edge.decode_bytes else ""
        table.add_row(f"{edge.source} → {edge.to}", "", decode, verify, format_size(edge.prefill_bytes))
    return table


def _speeds(report: Report) -> Table:
    assert report.forecast is not None
    stages = report.forecast.prediction.stages
    beside = any(stage.host_s for stage in stages)
    table = _table(
        "measured",
        "",
        "reads GB/s",
        "GFLOP/s",
        "round trip ms",
        "link MB/s",
        "weights ms",
        *(["experts ms"] if beside else []),
        "operators ms",
        "hop ms",
    )
    for index, worker in enumerate(report.workers):
        times = [""] * (4 if beside else 3)
        if index < len(stages):
            stage = stages[index]
            parts = (stage.read_s, *([stage.host_s] if beside else []), stage.operators_s, stage.hop_s)
            times = [f"{seconds * 1e3:.2f}" for seconds in parts]
        table.add_row(
            f"stage {index}" if index < len(stages) else "draft",
            f"{worker.place} on {worker.host}",
            " + ".join(f"{device.read_bytes_per_s / 1e9:.1f}" for device in worker.devices),
            " + ".join(f"{device.matmul_flops_per_s / 1e9:.0f}" for device in worker.devices),
            f"{worker.link.round_trip_s * 1e3:.2f}",
            f"{worker.link.bytes_per_s / 1e6:.0f}",
            *times,
        )
    table.caption = f"times of a plain step behind {CONTEXT} tokens"
    return table
