"""The memory of a server's processes under many clients, from when the kept prefixes fill their room until the end."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.mixed_clients import ask_for
from tests.e2e.server import PAIR, Server, get, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200), pytest.mark.usefixtures("own_processes")]

MINUTES = float(os.environ.get("FLASHSPLIT_MEMORY_MINUTES", "20"))
"""How long clients ask; the first quarter of it is not measured."""

CLIENTS = 32
MEASURE_S = 2.0
BUDGET_MIB = 24
"""Of kept prefixes in each worker: so few that they fill it within a minute."""

GROWTH_MIB = 40
"""How much more a process may take in the last quarter than in the second one, at the median. It was 4 at most in 21
minutes, and 26 in seven, whose second quarter begins before the C library's arenas are as large as they get."""


async def test_memory_stays_level(tmp_path: Path) -> None:
    """32 clients of all kinds, two workers, and one for the draft: no request fails, and no process grows."""
    with serving(
        tmp_path,
        *(*PAIR, "--target-devices", "cpu,cpu", "--draft-device", "cpu", "--threads", 1),
        *("--prefix-cache-bytes", f"{BUDGET_MIB}MiB"),
        *("--max-concurrent-requests", CLIENTS, "--max-waiting-requests", 3 * CLIENTS),
    ) as server:
        asking = asyncio.ensure_future(ask_for(60 * MINUTES, server.url, CLIENTS))
        resident = [sample async for sample in samples(server, asking)]
        tally = await asking
    quarter = len(resident) // 4
    early, late = resident[quarter : 2 * quarter], resident[-quarter:]
    growth = {name: median(late, name) - median(early, name) for name in early[0]}
    print(json.dumps({"answered": tally.answered, "failures": tally.failures, "growth_mib": growth}, indent=1))
    for at in range(0, len(resident), max(1, len(resident) // 20)):
        print(resident[at])
    assert tally.failures == []
    assert all(mib < GROWTH_MIB for mib in growth.values()), growth


async def samples(server: Server, until: asyncio.Future[object]) -> AsyncIterator[dict[str, float]]:
    """MiB that each process has in memory, by its name in the server's status, until something is done."""
    pids = {"server": server.process.pid}
    while not until.done():
        began = time.monotonic()
        status = json.loads((await asyncio.to_thread(get, f"{server.url}/v1/status"))[1])
        pids |= {worker["name"]: worker["process_id"] for worker in status["workers"]}
        yield {name: resident_mib(pid) for name, pid in pids.items()}
        await asyncio.wait([until], timeout=max(0.0, MEASURE_S - (time.monotonic() - began)))


def resident_mib(pid: int) -> float:
    """What a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def median(resident: list[dict[str, float]], name: str) -> float:
    """The median of what one process had."""
    values = sorted(sample[name] for sample in resident)
    return values[len(values) // 2]
