"""Several processes on one store, some of them killed: at worst a miss, and nothing is left lying about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.prefix.disk.entries import DiskEntry, scan_all
from coordinator.prefix.disk.verify import verify_part
from coordinator.prefix.stores.directory import DirectoryStore
from tests.coordinator.prefix.conftest import disk_cache
from tests.coordinator.prefix.disk.exports import PLAIN, ids, leftovers, restore, save

ROOT = Path(__file__).parents[4]


class Zygote:
    """See zygote.py."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.coordinator.prefix.disk.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def start(self, *words: object) -> int:
        """The child's pid."""
        return self._ask(*words)

    def wait(self, pid: int) -> int:
        """The child's exit status; minus the signal that killed it."""
        return self._ask("wait", pid)

    def errors(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._log.close()

    def _ask(self, *words: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "log")
    yield zygote
    zygote.close()


async def whole(store: DirectoryStore, budget_bytes: int = 1 << 30) -> list[DiskEntry]:
    """Start on the store as the next process would a minute later, and read all that is offered."""
    for path in Path(store.location).glob("*/.tmp-*"):
        # Records of use on their way: files, which are swept by their age.
        os.utime(path, (time.time() - 100,) * 2)
    cache = disk_cache(store, budget_bytes=budget_bytes)
    await cache.start()
    assert leftovers(store) == []
    entries = scan_all(store, {}).entries
    for entry in entries:
        assert isinstance(entry, DiskEntry), entry
        assert [fault for part in entry.parts for fault in verify_part(store, entry, part, lambda size: None)] == []
        if cache.find(entry.lineage, entry.token_ids, whole=True) is not None:
            await restore(cache, cache.find(entry.lineage, entry.token_ids))  # type: ignore[arg-type]
    assert sum(entry.size_bytes for entry in entries) <= budget_bytes
    return [entry for entry in entries if isinstance(entry, DiskEntry)]


async def test_a_writer_killed_at_any_moment_leaves_a_miss_at_worst(zygote: Zygote, tmp_path: Path) -> None:
    """Right before calls to the operating system: what the next process finds is whole, the rest is swept."""
    store = DirectoryStore(tmp_path / "cache")
    status, at, counts = -signal.SIGKILL, 0, set()
    while status == -signal.SIGKILL:
        pid = zygote.start("killed", tmp_path / "cache", at, at % 7)
        status = zygote.wait(pid)
        if at % 4 == 0:
            # At times others come before the next start has swept.
            counts.add(len(await whole(store, 14_000)))
        # The first save at every call; what follows, at every other one.
        at += 1 if at < 48 else 2
    assert status == 0, zygote.errors()
    assert at > 100
    # The store was neither always empty nor always full.
    assert len(counts) > 1
    await whole(store, 14_000)


async def test_a_live_writers_files_are_not_swept(zygote: Zygote, tmp_path: Path) -> None:
    """They go when the process has died, and not before."""
    root = tmp_path / "cache"
    store = DirectoryStore(root)
    store.check()
    pid = zygote.start("holding", root)
    deadline = time.monotonic() + 10
    while not (root / "ready").exists():
        assert time.monotonic() < deadline, zygote.errors()
        time.sleep(0.005)
    cache = disk_cache(store)
    await cache.start()
    assert (await save(cache, ids(20))).written
    assert store.sweep() == 0
    (writing,) = root.glob("*/.tmp-*")
    assert f"-{pid}-" in writing.name
    assert (writing / "draft.safetensors").exists()
    (root / "ready").unlink()
    os.kill(pid, signal.SIGKILL)
    assert zygote.wait(pid) == -signal.SIGKILL
    assert store.sweep() == 1
    assert leftovers(store) == []
    assert list(store.entries(PLAIN.key)) == [PLAIN.snapshot_id(ids(20))]


async def test_two_processes_on_one_directory(zygote: Zygote, tmp_path: Path) -> None:
    """Saving, restoring, discarding and pruning the same prefixes at once: all that is restored is right."""
    root = tmp_path / "cache"
    pids = [zygote.start("busy", root, seed, 1.5) for seed in (1, 2)]
    assert [zygote.wait(pid) for pid in pids] == [0, 0], zygote.errors()
    assert await whole(DirectoryStore(root), 60_000)
