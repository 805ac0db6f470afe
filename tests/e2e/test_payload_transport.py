"""Large payloads through shared memory or within frames: the same tokens and snapshots, and memory really used."""

from __future__ import annotations

import os
import re
from pathlib import Path

from coordinator.answer import Request
from coordinator.cluster import Checkpoints, Cluster
from coordinator.generation import generate as complete
from coordinator.placement import make_plan
from coordinator.prefix.cache import PrefixCache, lineage_of
from coordinator.prefix.disk import DiskCache
from coordinator.prefix.stores import open_store
from services.launch import Launch
from services.shared_memory.transport import PayloadTransport
from tests.e2e.conftest import ROOT, children

DEMO = ROOT / "deploy" / "demo"
PROMPT = tuple(3 + 7 * number % 5000 for number in range(900))


def shared_bytes(pid: int) -> int:
    """Pages of payload segments that a process has touched."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    return sum(int(size) * 1024 for size in re.findall(r"memfd:flashsplit-payloads.*?Rss:\s+(\d+) kB", text, re.DOTALL))


async def answer(transport: PayloadTransport, store: Path) -> tuple[tuple[int, ...], int, list[int]]:
    """Of three workers, the draft in one of its own: tokens, of which so many prompt tokens came from the store, and
    what each process has touched of shared memory."""
    plan = make_plan(target_devices="cpu,cpu", layer_split=None, draft_device="cpu", num_layers=12, has_draft=True)
    checkpoints = Checkpoints(DEMO / "target", DEMO / "draft", "float32")
    launch = Launch(threads=1, transport=transport)
    async with Cluster(plan, checkpoints, launch=launch) as cluster:
        lineages = [lineage_of(cluster, "text", with_draft=True)]
        disk = DiskCache(open_store(str(store)), lineages, 12, "demo", budget_bytes=1 << 30, min_tokens=64)
        async with PrefixCache(cluster, "text", disk=disk) as cache:
            found = await complete(cluster, Request("r", PROMPT, 30, prefill_chunk=512), None, prefixes=cache)
        pids = [os.getpid(), *sorted(children(os.getpid()))]
        return found.token_ids, found.stats.cached_tokens, [shared_bytes(pid) for pid in pids]


async def test_the_same_answer_either_way(tmp_path: Path) -> None:
    """What one kept, exported to disk, the other imports."""
    tokens, cached, used = await answer(PayloadTransport.STREAM, tmp_path)
    assert (cached, sum(used)) == (0, 0)
    again = await answer(PayloadTransport.SHARED, tmp_path)
    assert again[0] == tokens
    assert again[1] > 800
    # Imports went from here to all workers.
    assert again[2][0] > 1 << 20
    cold = await answer(PayloadTransport.SHARED, tmp_path / "other")
    assert cold[:2] == (tokens, 0)
    # Prompt activations from stage to stage, features on to the draft, exports back.
    assert len(cold[2]) == 4
    assert min(cold[2]) > 1 << 19
