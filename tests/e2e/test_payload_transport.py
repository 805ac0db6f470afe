"""Large payloads through shared memory or within frames: the same tokens and snapshots, and memory really used."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.answer import Request
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import make_plan
from coordinator.engine.generation import generate as complete
from coordinator.prefix.cache import PrefixCache, lineage_of
from coordinator.prefix.disk.disk_cache import DiskCache
from coordinator.prefix.stores import open_store
from services.processes.launch import Launch
from services.rpc.payload_transport import PayloadTransport
from tests import forking
from tests.e2e.conftest import ROOT

DEMO = ROOT / "deploy" / "demo"
PROMPT = tuple(3 + 7 * number % 5000 for number in range(640))


def shared_bytes(pid: int) -> int:
    """Pages of payload segments that a process has touched."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    return sum(int(size) * 1024 for size in re.findall(r"memfd:flashsplit-payloads.*?Rss:\s+(\d+) kB", text, re.DOTALL))


@dataclass(frozen=True)
class Told:
    """An answer: how many of the prompt's tokens came from a store, and what each process has touched of shared memory
    since its start."""

    token_ids: tuple[int, ...]
    cached_tokens: int
    used: list[int]


@contextlib.asynccontextmanager
async def asking(transport: PayloadTransport) -> AsyncIterator[Callable[[Path], Awaitable[Told]]]:
    """Three workers, the draft in one of its own. Each question brings a store of prefixes; memory keeps nothing."""
    plan = make_plan(target_devices="cpu,cpu", layer_split=None, draft_device="cpu", num_layers=12, has_draft=True)
    checkpoints = Checkpoints(DEMO / "target", DEMO / "draft", "float32")
    launch = Launch(threads=1, transport=transport)
    async with Cluster(plan, checkpoints, launch=launch) as cluster:
        started = [process.process_id for process in cluster.processes.values()]
        pids = [os.getpid(), *(forking.forked(pid) for pid in started if pid is not None)]
        lineage = lineage_of(cluster, "text", with_draft=True)

        async def ask(store: Path) -> Told:
            disk = DiskCache(open_store(str(store)), [lineage], 12, "demo", budget_bytes=1 << 30, min_tokens=64)
            async with PrefixCache(cluster, "text", disk=disk) as cache:
                found = await complete(cluster, Request("r", PROMPT, 10, prefill_chunk=512), None, prefixes=cache)
            sequence = (*PROMPT, *found.token_ids)
            names = [lineage.snapshot_id(sequence[:length]) for length in range(len(sequence), 0, -1)]
            for address in cluster.addresses:
                await (await cluster.snapshots(address)).free_snapshots(names)
            return Told(found.token_ids, found.stats.cached_tokens, [shared_bytes(pid) for pid in pids])

        yield ask


async def test_the_same_answer_either_way(tmp_path: Path) -> None:
    """What one kept, exported to disk, the other imports."""
    async with asking(PayloadTransport.STREAM) as ask:
        streamed = await ask(tmp_path / "streamed")
        assert (streamed.cached_tokens, sum(streamed.used)) == (0, 0)
    async with asking(PayloadTransport.SHARED) as ask:
        cold = await ask(tmp_path / "shared")
        assert (cold.token_ids, cold.cached_tokens) == (streamed.token_ids, 0)
        # Prompt activations from stage to stage, features on to the draft, exports back.
        assert len(cold.used) == 4
        assert min(cold.used) > 1 << 19
        again = await ask(tmp_path / "streamed")
        assert again.token_ids == streamed.token_ids
        assert again.cached_tokens > 600
        # Imports went from here to all workers.
        assert again.used[0] > cold.used[0] + (1 << 20)
