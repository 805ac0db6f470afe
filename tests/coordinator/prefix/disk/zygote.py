"""A process that forks writers on demand, so that many of them can be killed in a second.

Reads lines from stdin: `WRITER ARGUMENTS…` forks a child that runs it and answers with its pid, `wait PID` answers with
its exit status. Has no threads when it forks.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.prefix.stores import EntryKey
from coordinator.prefix.stores.directory import DirectoryStore
from tests.coordinator.prefix.conftest import disk_cache
from tests.coordinator.prefix.disk.exports import PLAIN, ids, restore, save

CALLS = ("open", "mkdir", "write", "fsync", "rename", "close", "unlink", "rmdir", "replace")


def killed(root: str, at: str, seed: str) -> None:
    """Save, use and evict, and be killed right before the given call to the operating system, counted from 0."""
    left = int(at)

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            nonlocal left
            # Whatever is not about the store (pipes of the event loop, say) doesn't count.
            place = str(args[0])
            if place.startswith("/") and not place.startswith(root):
                return call(*args, **options)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return call(*args, **options)

        return run

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))

    async def main() -> None:
        cache = disk_cache(DirectoryStore(Path(root)), budget_bytes=14_000)
        await cache.start()
        await save(cache, ids(30, seed=int(seed)))
        await save(cache, ids(50, seed=int(seed)), 30)
        entry = cache.find(PLAIN, ids(50, seed=int(seed)))
        if entry is not None:
            await cache.record_use(entry)
        await save(cache, ids(40, seed=int(seed) + 1000))

    asyncio.run(main())


def holding(root: str) -> None:
    """Begin an entry and never end."""
    store = DirectoryStore(Path(root))
    writer = store.begin(EntryKey(PLAIN.key, "a" * 40))
    writer.open_part("draft.safetensors").write(b"half")
    (Path(root) / "ready").write_text("")
    time.sleep(60)


def busy(root: str, seed: str, seconds: str) -> None:
    """Save, restore, discard and prune at random, in a store with too little room; every restore must be right."""
    rng = random.Random(int(seed))

    async def main() -> None:
        cache = disk_cache(DirectoryStore(Path(root)), budget_bytes=60_000)
        await cache.start()
        end = time.monotonic() + float(seconds)
        restored = 0
        while time.monotonic() < end:
            tokens = ids(rng.randrange(20, 90), seed=rng.randrange(6))
            await cache.refresh()
            entry = cache.find(PLAIN, tokens)
            if entry is not None:
                restored += await _restored(cache, entry)
            first = entry.token_count if entry is not None and rng.random() < 0.7 else 0
            if first < len(tokens):
                await save(cache, tokens, first, edges=(0, rng.randrange(1, 6), 6))
            if entry is not None and rng.random() < 0.1:
                await cache.discard(entry, "at random")
        if not restored:
            raise SystemExit("nothing was ever restored")

    asyncio.run(main())


async def _restored(cache: object, entry: object) -> bool:
    from coordinator.prefix.disk.disk_cache import DiskCache, DiskEntry
    from coordinator.prefix.stores import StoreError
    from services.errors import DataLoss

    assert isinstance(cache, DiskCache)
    assert isinstance(entry, DiskEntry)
    try:
        await restore(cache, entry)
        await cache.record_use(entry)
    except (DataLoss, StoreError) as error:
        # The other process removed it: a file is gone, but never do bytes differ.
        if "digest" in error.message:
            raise
        return False
    except AssertionError as error:
        if "the chain is broken" not in str(error):
            raise
        return False
    return True


if __name__ == "__main__":
    for line in sys.stdin:
        name, *arguments = line.split()
        if name == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(int(arguments[0]), 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            # What it logs must not look like an answer.
            os.dup2(2, 1)
            globals()[name](*arguments)
            os._exit(0)
        print(pid, flush=True)
