"""Damaged, foreign and missing files: at worst a miss, always reported, never somebody else's bytes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from coordinator.prefix.disk.disk_cache import DiskCache, DiskEntry
from coordinator.prefix.disk.verify import verify_part
from coordinator.prefix.stores import EntryKey, StoreError, open_store
from coordinator.prefix.stores.directory import DirectoryEntryWriter, DirectoryPartWriter, DirectoryStore
from services.errors import DataLoss
from services.layers import LayerRange
from tests.coordinator.prefix.conftest import disk_cache
from tests.coordinator.prefix.disk.exports import (
    DRAFT,
    DRAFTED,
    FINGERPRINTS,
    LAYERS,
    PLAIN,
    STAGE,
    files_of,
    ids,
    leftovers,
    restore,
    save,
    take_in,
)

ROOT = Path(__file__).parents[4]
WHOLE = LayerRange(0, LAYERS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(root: Path) -> DirectoryStore:
    """Damage is done to real files."""
    return DirectoryStore(root)


@pytest.fixture
async def saved(cache: DiskCache) -> DiskEntry:
    """Two parts and a draft's."""
    await save(cache, ids(20), lineage=DRAFTED)
    entry = cache.find(DRAFTED, ids(20))
    assert entry is not None
    return entry


async def import_all(cache: DiskCache, entry: DiskEntry) -> None:
    await take_in(cache.frames(entry, STAGE, WHOLE, FINGERPRINTS[STAGE]))
    await take_in(cache.frames(entry, DRAFT, None, FINGERPRINTS[DRAFT]))


def problems(store: DirectoryStore, entry: DiskEntry) -> list[str]:
    """What `flashsplit cache verify` would say."""
    return [fault for part in entry.parts for fault in verify_part(store, entry, part, lambda size: None)]


def _cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut by a byte": lambda path: _cut(path, 1),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "missing": Path.unlink,
    "a bit in the data": lambda path: _flip(path, -5),
    "a bit in the header's length": lambda path: _flip(path, 0),
    "a bit in a name": lambda path: _flip(path, 12),
    "zeros at the end, as after a power cut": lambda path: path.write_bytes(path.read_bytes()[:-64] + bytes(64)),
    "something else": lambda path: path.write_bytes(b"GGUF" + bytes(path.stat().st_size - 4)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("file", ["stage-0-4.safetensors", "stage-4-6.safetensors", "draft.safetensors"])
@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_damaged_part_is_found_by_restore_and_by_verify(
    cache: DiskCache, store: DirectoryStore, root: Path, saved: DiskEntry, damage: str, file: str
) -> None:
    """Both say so; after discarding it nothing of it is left and the prefix can be saved again."""
    assert problems(store, saved) == []
    DAMAGE[damage](root / DRAFTED.key / saved.snapshot_id / file)
    with pytest.raises((DataLoss, StoreError)) as caught:
        await import_all(cache, saved)
    assert isinstance(caught.value, DataLoss) == (damage != "a directory")
    assert problems(store, saved) != []
    await cache.discard(saved, caught.value.message)
    assert cache.find(DRAFTED, ids(20)) is None
    assert files_of(store) == []
    assert (await save(cache, ids(20), lineage=DRAFTED)).written
    entry = cache.find(DRAFTED, ids(20))
    assert entry is not None
    await import_all(cache, entry)


async def test_a_part_cut_while_it_is_read_is_found(cache: DiskCache, root: Path) -> None:
    """After its header was checked."""
    await save(cache, ids(40_000))
    entry = cache.find(PLAIN, ids(40_000))
    assert entry is not None
    frames = cache.frames(entry, STAGE, LayerRange(0, 4), FINGERPRINTS[STAGE])
    await anext(frames)
    _cut(root / entry.lineage.key / entry.snapshot_id / "stage-0-4.safetensors", 1000)
    with pytest.raises(DataLoss, match="ends at"):
        async for _ in frames:
            pass


async def test_other_parts_restore_while_one_is_damaged(cache: DiskCache, root: Path, saved: DiskEntry) -> None:
    """Only files that hold what is asked for are looked at."""
    (root / DRAFTED.key / saved.snapshot_id / "stage-0-4.safetensors").unlink()
    await take_in(cache.frames(saved, STAGE, LayerRange(4, 6), FINGERPRINTS[STAGE]))
    with pytest.raises(DataLoss):
        await take_in(cache.frames(saved, STAGE, LayerRange(3, 6), FINGERPRINTS[STAGE]))


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


MANIFESTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "damaged"),
    "cut": (lambda path: _cut(path, 10), "damaged"),
    "no JSON": (lambda path: path.write_bytes(b"\x00" * 100), "damaged"),
    "missing": (Path.unlink, "damaged"),
    "of an older version": (lambda path: _edit(path, lambda v: v.update(version=0)), "foreign"),
    "of a newer version": (lambda path: path.write_text('{"version": 2, "chunks": {}}'), "foreign"),
    "a path out of the store": (
        lambda path: _edit(path, lambda v: v["parts"][0].update(file="../../../../etc/passwd")),
        "damaged",
    ),
    "an absolute path": (lambda path: _edit(path, lambda v: v["parts"][0].update(file="/etc/passwd")), "damaged"),
    "another entry's tokens": (lambda path: _edit(path, lambda v: v["token_ids"].reverse()), "damaged"),
    "swapped ids": (
        lambda path: _edit(path, lambda v: v.update(snapshot_id=DRAFTED.snapshot_id(ids(3)))),
        "damaged",
    ),
}


@pytest.mark.parametrize("damage", MANIFESTS)
async def test_a_bad_manifest_is_ignored_reported_and_replaced(
    cache: DiskCache, store: DirectoryStore, root: Path, saved: DiskEntry, damage: str
) -> None:
    """One warning, no hit, other entries unharmed; a save takes its place."""
    await save(cache, ids(30, seed=1), lineage=DRAFTED)
    change, fault = MANIFESTS[damage]
    change(root / DRAFTED.key / saved.snapshot_id / "manifest.json")
    later = disk_cache(store)
    with structlog.testing.capture_logs() as logs:
        await later.start()
        await later.refresh()
    (warning,) = [log for log in logs if log["log_level"] == "warning"]
    assert (warning["event"], warning["fault"]) == ("prefix.disk_unreadable", fault)
    assert warning["snapshot_id"] == saved.snapshot_id[:12]
    assert later.find(DRAFTED, ids(20)) is None
    other = later.find(DRAFTED, ids(30, seed=1))
    assert other is not None
    await import_all(later, other)
    assert (await save(later, ids(20), lineage=DRAFTED)).written
    entry = later.find(DRAFTED, ids(20))
    assert entry is not None
    await import_all(later, entry)
    assert leftovers(store) == []


async def test_manifests_in_each_others_places(
    cache: DiskCache, store: DirectoryStore, root: Path, saved: DiskEntry
) -> None:
    """Valid by themselves, but not where they lie: neither entry is offered."""
    await save(cache, ids(30, seed=1), lineage=DRAFTED)
    directory = root / DRAFTED.key / saved.snapshot_id
    two = root / DRAFTED.key / DRAFTED.snapshot_id(ids(30, seed=1))
    directory.rename(root / "x")
    two.rename(directory)
    (root / "x").rename(two)
    later = disk_cache(store)
    await later.start()
    assert later.find(DRAFTED, ids(20)) is None
    assert later.find(DRAFTED, ids(30, seed=1)) is None


@pytest.mark.parametrize("usage", [b"", b"{", b"[]", b'{"hits": -1}', b'{"hits": "x", "last_used": 1}', b"x" * 9999,
                                   b'{"hits": 1, "last_used": 1e999}'])  # fmt: skip
async def test_damaged_usage_is_no_usage(store: DirectoryStore, root: Path, usage: bytes) -> None:
    """The entry itself is well; the next use writes a new record."""
    cache = disk_cache(store)
    await cache.start()
    entry = (await save(cache, ids(20))).entry
    assert entry is not None
    path = root / entry.lineage.key / entry.snapshot_id / "usage.json"
    path.write_bytes(usage)
    later = disk_cache(store)
    await later.start()
    entry = later.find(entry.lineage, ids(20))
    assert entry is not None
    assert entry.usage.hits == 0
    await later.record_use(entry)
    assert json.loads(path.read_text())["hits"] == 1


async def test_a_store_that_goes_away_is_a_miss(cache: DiskCache, root: Path, saved: DiskEntry, tmp_path: Path) -> None:
    """Removed or made unreadable under a running server: nothing is raised, one warning says so, then it comes back."""
    root.rename(tmp_path / "away")
    root.write_text("not a directory")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            await cache.refresh()
        result = await save(cache, ids(50))
    assert result.refusal
    assert not result.written
    assert [log["event"] for log in logs] == ["prefix.disk_unreachable", "prefix.disk_save_failed"]
    with pytest.raises((DataLoss, StoreError)):
        await import_all(cache, saved)
    root.unlink()
    (tmp_path / "away").rename(root)
    await cache.refresh()
    await import_all(cache, saved)
    assert (await save(cache, ids(50))).written


async def test_a_directory_deleted_under_a_running_server(cache: DiskCache, root: Path, saved: DiskEntry) -> None:
    """`rm -r` on everything: the entries are gone, new ones can be saved."""
    subprocess.run(["rm", "-r", str(root)], check=True)
    await cache.refresh()
    assert cache.find(DRAFTED, ids(20)) is None
    # Only a start creates the directory.
    assert (await save(cache, ids(20))).refusal
    await cache.start()
    assert (await save(cache, ids(20))).written


@pytest.mark.parametrize("name", ["write", "close", "commit", "begin", "open_part"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
async def test_a_disk_that_is_full_is_told_and_serving_goes_on(
    cache: DiskCache, store: DirectoryStore, saved: DiskEntry, monkeypatch: pytest.MonkeyPatch, name: str, error: int
) -> None:
    """Wherever it happens: a warning, nothing raised, nothing left behind, earlier entries whole."""
    owner: type = {
        "write": DirectoryPartWriter,
        "close": DirectoryPartWriter,
        "commit": DirectoryEntryWriter,
        "begin": DirectoryStore,
        "open_part": DirectoryEntryWriter,
    }[name]

    def fail(*_: object) -> object:
        raise StoreError(f"disk: {errno.errorcode[error]}") from OSError(error, "fails")

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr(owner, name, fail)
        result = await save(cache, ids(60))
    assert not result.written
    assert errno.errorcode[error] in result.refusal
    assert [(log["event"], log["log_level"]) for log in logs] == [("prefix.disk_save_failed", "warning")]
    assert leftovers(store) == []
    await import_all(cache, saved)
    assert (await save(cache, ids(60))).written


FULL = """
import asyncio, sys
from coordinator.prefix.stores.directory import DirectoryStore
from tests.coordinator.prefix.conftest import disk_cache
from tests.coordinator.prefix.disk.exports import PLAIN, ids, leftovers, restore, save
from pathlib import Path

async def main():
    store = DirectoryStore(Path(sys.argv[1]))
    cache = disk_cache(store)
    await cache.start()
    small = await save(cache, ids(50))
    assert small.written, small
    large = await save(cache, ids(40_000))
    assert not large.written and large.refusal, large
    assert leftovers(store) == [], leftovers(store)
    assert (await save(cache, ids(60))).written
    await restore(cache, cache.find(PLAIN, ids(60)))
    print(large.refusal)

asyncio.run(main())
"""


def test_a_file_size_limit_as_a_full_disk(tmp_path: Path) -> None:
    """The kernel refuses to write on: no half file stays."""
    limited = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n{FULL}"
    command = [sys.executable, "-c", limited, str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """A file system of 1 MiB in a namespace of its own, where the machine allows that."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs {disk} && "
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*unshare, mount + "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here; the file size limit is tested instead")
    command = mount + f'exec "{sys.executable}" -c "$0" {disk}/cache'
    done = subprocess.run([*unshare, command, FULL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stdout


async def test_an_unreachable_entry_is_not_thrown_away(cache: DiskCache, root: Path, saved: DiskEntry) -> None:
    """A manifest that cannot be read now says nothing about the entry: it is tried again, and found when it can be."""
    path = root / DRAFTED.key / saved.snapshot_id / "manifest.json"
    path.rename(root / "aside")
    path.mkdir()
    with structlog.testing.capture_logs() as logs:
        await cache.refresh()
        await cache.refresh()
    assert [log["fault"] for log in logs] == ["unreachable"]
    assert cache.find(DRAFTED, ids(20)) is None
    assert (await save(cache, ids(20), lineage=DRAFTED)).refusal
    path.rmdir()
    (root / "aside").rename(path)
    await cache.refresh()
    entry = cache.find(DRAFTED, ids(20))
    assert entry is not None
    await import_all(cache, entry)


async def test_a_key_never_leads_out_of_the_store(cache: DiskCache) -> None:
    """Names that a caller hands in are held to the same rules."""
    with pytest.raises(Exception, match="40 hex digits"):
        cache.has("../../etc")
    assert not cache.has("0" * 40)
    assert open_store("/tmp").entries(EntryKey("0" * 32, "0" * 40).lineage) == {}


async def test_restore_helper_sees_damage(cache: DiskCache, root: Path) -> None:
    """The tests' own comparison would notice wrong bytes even if digests were wrong too."""
    await save(cache, ids(20), lineage=DRAFTED)
    entry = cache.find(DRAFTED, ids(20))
    assert entry is not None
    await restore(cache, entry)
    _flip(root / DRAFTED.key / entry.snapshot_id / "draft.safetensors", -1)
    with pytest.raises(DataLoss):
        await restore(cache, entry)
