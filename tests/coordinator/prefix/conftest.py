"""Stores to test with: a directory, and fsspec's memory, which stands for all remote ones."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from coordinator.prefix.disk.disk_cache import DiskCache
from coordinator.prefix.stores import Store, open_store
from tests.coordinator.prefix.disk.exports import DRAFTED, LAYERS, PLAIN

OpenCache = Callable[..., DiskCache]


@pytest.fixture(params=["directory", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of a store that isn't there yet."""
    if request.param == "directory":
        yield str(tmp_path / "cache")
        return
    name = uuid.uuid4().hex
    yield f"memory://{name}/cache"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(f"/{name}"):
        filesystem.rm(f"/{name}", recursive=True)


@pytest.fixture
def store(location: str) -> Store:
    """One that may be written to."""
    store = open_store(location)
    store.check()
    return store


def disk_cache(store: Store, *, budget_bytes: int = 1 << 30, min_tokens: int = 1) -> DiskCache:
    """A cache for the made-up model, not started."""
    return DiskCache(store, [PLAIN, DRAFTED], LAYERS, "tiny", budget_bytes=budget_bytes, min_tokens=min_tokens)


@pytest.fixture
async def cache(store: Store) -> AsyncIterator[DiskCache]:
    """A started one with plenty of room."""
    cache = disk_cache(store)
    await cache.start()
    yield cache
    await cache.close()
