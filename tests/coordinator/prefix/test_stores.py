"""What every store must do, and how one is chosen."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec
import pytest

from coordinator.prefix import stores
from coordinator.prefix.stores import EntryKey, Store, StoreError, check_part_name, open_store
from coordinator.prefix.stores.directory import DirectoryStore
from coordinator.prefix.stores.remote import RemoteStore
from services.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.coordinator.prefix.disk.exports import files_of


@pytest.fixture(params=["directory", "memory", "files through fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Two kinds of remote ones: file systems name and list things differently."""
    store: Store
    if request.param == "memory":
        store = open_store("memory://stores/cache")
    elif request.param == "directory":
        store = DirectoryStore(tmp_path / "cache")
    else:
        root = str(tmp_path / "cache")
        store = RemoteStore(fsspec.filesystem("file"), root, root, "--kv-cache-url")
    store.check()
    yield store
    if request.param == "memory":
        fsspec.filesystem("memory").rm("/stores", recursive=True)


KEY = EntryKey("0" * 32, "a" * 40)
OTHER = EntryKey("0" * 32, "b" * 40)
FILE = "stage-0-6.safetensors"


def write(store: Store, key: EntryKey = KEY, content: bytes = b"content", manifest: bytes = b"{}") -> bool:
    writer = store.begin(key)
    part = writer.open_part(FILE)
    for start in range(0, len(content), 3):
        part.write(content[start : start + 3])
    part.close()
    return writer.commit(manifest)


def test_an_entry_comes_and_goes(store: Store) -> None:
    """Seen only once it is committed; read at any offset; gone in one step."""
    assert store.lineages() == []
    assert store.entries(KEY.lineage) == {}
    writer = store.begin(KEY)
    part = writer.open_part(FILE)
    part.write(memoryview(b"0123456789"))
    part.close()
    assert store.entries(KEY.lineage) == {}
    assert writer.commit(b'{"a": 1}')
    writer.abort()
    assert store.lineages() == [KEY.lineage]
    assert list(store.entries(KEY.lineage)) == [KEY.snapshot_id]
    assert store.read_manifest(KEY) == b'{"a": 1}'
    reader = store.open_part(KEY, FILE)
    assert reader.size_bytes == 10
    assert [reader.read(*where) for where in ((0, 3), (3, 4), (8, 9), (10, 1))] == [b"012", b"3456", b"89", b""]
    reader.close()
    reader.close()
    assert store.size_bytes(KEY) == 18
    assert store.remove(KEY)
    assert not store.remove(KEY)
    assert store.entries(KEY.lineage) == {}
    assert files_of(store) == []
    with pytest.raises(NotFound):
        store.read_manifest(KEY)
    with pytest.raises(NotFound):
        store.open_part(KEY, FILE)
    assert store.size_bytes(KEY) == 0


def test_what_is_given_up_leaves_nothing(store: Store) -> None:
    """Open parts, closed parts, no parts."""
    for closed in (True, False):
        writer = store.begin(KEY)
        part = writer.open_part(FILE)
        part.write(b"abc")
        if closed:
            part.close()
        writer.abort()
        writer.abort()
        assert files_of(store) == []
    store.begin(KEY).abort()
    assert store.entries(KEY.lineage) == {}


def test_the_first_of_two_writers_wins(store: Store) -> None:
    """The second one's files are dropped, the first one's stay as they are."""
    late = store.begin(KEY)
    part = late.open_part(f"stage-0-6.{late.tag}.safetensors" if late.tag else FILE)
    part.write(b"late")
    part.close()
    assert write(store, content=b"early", manifest=b'{"early": 1}')
    assert not late.commit(b'{"late": 1}')
    assert store.read_manifest(KEY) == b'{"early": 1}'
    assert [Path(path).name for path in files_of(store)] == ["manifest.json", FILE]
    reader = store.open_part(KEY, FILE)
    assert reader.read(0, 100) == b"early"
    reader.close()


def test_the_stamp_changes_with_the_entry(store: Store) -> None:
    """The same name with other content is told apart, use is not."""
    write(store)
    write(store, OTHER)
    before = store.entries(KEY.lineage)
    store.write_usage(KEY, b"{}")
    assert store.entries(KEY.lineage) == before
    store.remove(KEY)
    write(store, manifest=b"{ }")
    after = store.entries(KEY.lineage)
    assert after[OTHER.snapshot_id] == before[OTHER.snapshot_id]
    assert after[KEY.snapshot_id] != before[KEY.snapshot_id]
    assert all(after.values())


def test_usage_is_kept_beside_the_entry(store: Store) -> None:
    """Replaced as a whole, removed with the entry, never written for one that is gone."""
    write(store)
    assert store.read_usage(KEY) is None
    store.write_usage(KEY, b'{"hits": 1}')
    store.write_usage(KEY, b'{"hits": 2}')
    assert store.read_usage(KEY) == b'{"hits": 2}'
    store.remove(KEY)
    assert store.read_usage(KEY) is None
    store.write_usage(KEY, b'{"hits": 3}')
    assert files_of(store) == []


def test_a_manifest_that_is_too_large_is_not_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies there, memory is bounded."""
    write(store, manifest=b"x" * 101)
    for module in ("directory", "remote"):
        monkeypatch.setattr(f"coordinator.prefix.stores.{module}.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(StoreError, match="101"):
        store.read_manifest(KEY)


@pytest.mark.parametrize(
    "file",
    [
        "",
        "..",
        "../x",
        "/etc/passwd",
        "manifest.json",
        "usage.json",
        "stage-0-6.safetensors/..",
        "stage-0-6.safetensors\n",
        "stage-0-6.safetensors\0",
        "stage-00-6.safetensors",
        "stage--1-6.safetensors",
        "stage-0-0.safetensors",
        "draft.SAFETENSORS",
        "draft..safetensors",
        "draft.0badcaf.safetensors",
        "stage-0-6.pt",
        "x/draft.safetensors",
    ],
)
def test_file_names_that_no_part_has(store: Store, file: str) -> None:
    """Refused by the store itself, whoever asks."""
    write(store)
    with pytest.raises(InvalidArgument, match="file"):
        check_part_name(file)
    with pytest.raises(InvalidArgument, match="file"):
        store.open_part(KEY, file)
    writer = store.begin(OTHER)
    with pytest.raises(InvalidArgument, match="file"):
        writer.open_part(file)
    writer.abort()


@pytest.mark.parametrize(("lineage", "name"), [("..", "a" * 40), ("0" * 32, "../../x"), ("0" * 31, "a" * 40),
                                               ("0" * 32, "A" * 40), ("0" * 32, "a" * 40 + "\n")])  # fmt: skip
def test_names_that_no_entry_has(lineage: str, name: str) -> None:
    """Refused before any path is made of them."""
    with pytest.raises(InvalidArgument):
        EntryKey(lineage, name)


# --- the directory


def test_files_are_private(tmp_path: Path) -> None:
    """0700 and 0600, whatever the umask."""
    before = os.umask(0)
    try:
        store = DirectoryStore(tmp_path / "a" / "cache")
        store.check()
        write(store)
        store.write_usage(KEY, b"{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700
    for path in (tmp_path / "a" / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("name", ["file", "file/below/it"])
def test_a_directory_that_cannot_be_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    """A file in its place, or on the way: the error names the option and the path."""
    (tmp_path / "file").write_text("here")
    store = open_store(tmp_path / name)
    with pytest.raises(StoreError, match="--kv-cache-dir '.*file.*' is not a directory"):
        store.check()


def test_a_directory_that_cannot_be_written_is_refused_at_the_start() -> None:
    """Where even root may not create anything."""
    with pytest.raises(StoreError, match=r"--kv-cache-dir '/proc/.*' cannot be written"):
        open_store("/proc/flashsplit").check()


@pytest.mark.parametrize(
    ("mode", "owner", "group", "says"),
    [
        (0o755, None, None, None),
        (0o777, None, None, "every user"),
        (0o1777, None, None, "every user"),
        (0o775, None, "daemon", "group daemon"),
        (0o775, None, 54321, None),
        (0o700, 54321, None, "user 54321"),
        (0o700, "daemon", None, "user daemon"),
    ],
)
def test_a_directory_that_others_may_write_is_refused(
    tmp_path: Path, mode: int, owner: str | int | None, group: str | int | None, says: str | None
) -> None:
    """Whoever writes there could forge prefixes, and with them answers; a container's own group is no other user."""
    if (owner or group) and os.geteuid():
        pytest.skip("only root can give a directory away")
    if owner or group:
        shutil.chown(tmp_path, owner, group)
    tmp_path.chmod(mode)
    store = DirectoryStore(tmp_path)
    if says is None:
        store.check()
        return
    with pytest.raises(StoreError, match=f"{says}, .* chmod go-w") as error:
        store.check()
    assert error.value.where["field"] == "--kv-cache-dir"
    (tmp_path / "below").mkdir(mode=0o700)
    DirectoryStore(tmp_path / "below").check()


def test_a_volume_of_a_container_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes gives volumes to root and opens them to a group, some provisioners to all."""
    if os.geteuid():
        pytest.skip("only root owns volumes")
    tmp_path.chmod(0o777)
    # To mount one takes more rights than a test has.
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    DirectoryStore(tmp_path).check()
    tmp_path.chmod(0o1777)
    with pytest.raises(StoreError, match="every user"):
        DirectoryStore(tmp_path).check()


def test_foreign_names_are_left_alone(tmp_path: Path) -> None:
    """Files, links and directories that are not ours are neither listed nor swept nor followed."""
    store = DirectoryStore(tmp_path)
    store.check()
    write(store)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "manifest.json").write_text("{}")
    (tmp_path / KEY.lineage / ("c" * 40)).symlink_to(elsewhere)
    (tmp_path / KEY.lineage / ("d" * 40)).write_text("a file")
    (tmp_path / KEY.lineage / "notes").mkdir()
    (tmp_path / ("1" * 32)).symlink_to(elsewhere)
    (tmp_path / KEY.lineage / KEY.snapshot_id / "draft.safetensors").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / KEY.lineage / KEY.snapshot_id / "stage-0-1.safetensors")
    assert store.lineages() == [KEY.lineage]
    assert list(store.entries(KEY.lineage)) == [KEY.snapshot_id]
    for file in ("draft.safetensors", "stage-0-1.safetensors"):
        with pytest.raises(StoreError):
            store.open_part(KEY, file)
    assert store.sweep() == 0
    assert sorted(path.name for path in (tmp_path / KEY.lineage).iterdir()) == ["a" * 40, "c" * 40, "d" * 40, "notes"]
    store.remove(KEY)
    assert (elsewhere / "manifest.json").exists()
    assert Path("/etc/passwd").exists()


def test_sweeping_takes_what_nobody_writes(tmp_path: Path) -> None:
    """Temporary directories without a lock and half-removed entries go; one that is being written stays."""
    store = DirectoryStore(tmp_path)
    store.check()
    write(store)
    live = store.begin(OTHER)
    part = live.open_part(FILE)
    part.write(b"abc")
    lineage = tmp_path / KEY.lineage
    for name in (".tmp-1-dead", ".gone-1-dead"):
        (lineage / name).mkdir()
        (lineage / name / FILE).write_text("half")
    for name, age in ((".tmp-1-old", 3600), (".tmp-1-new", 0)):
        (lineage / name).write_text("{}")
        os.utime(lineage / name, (time.time() - age,) * 2)
    assert store.sweep() == 1
    left = sorted(path.name for path in lineage.iterdir() if not path.name.startswith(f".tmp-{os.getpid()}-"))
    assert left == [".tmp-1-new", "a" * 40]
    part.write(b"def")
    part.close()
    assert live.commit(b"{}")
    reader = store.open_part(OTHER, FILE)
    assert reader.read(0, 10) == b"abcdef"
    reader.close()


def test_a_reader_keeps_what_is_removed_under_it(tmp_path: Path) -> None:
    """Eviction during a restore: what is open can be read to its end."""
    store = DirectoryStore(tmp_path)
    store.check()
    write(store, content=b"x" * 1000)
    reader = store.open_part(KEY, FILE)
    store.remove(KEY)
    assert reader.read(0, 1000) == b"x" * 1000
    reader.close()


# --- remote ones


def test_remote_orphans_are_swept_after_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts without a manifest; younger ones may belong to a live writer, committed ones always stay."""
    store = open_store("memory://sweeping/cache")
    store.check()
    write(store)
    for key in (OTHER, EntryKey("0" * 32, "c" * 40)):
        part = store.begin(key).open_part(FILE)
        part.write(b"half")
        part.close()
    filesystem = fsspec.filesystem("memory")
    try:
        for path, file in filesystem.store.items():
            if path.startswith("/sweeping/") and "c" * 40 not in path:
                file.modified = datetime.now(tz=UTC) - timedelta(hours=2)
        assert store.sweep() == 1
        assert {Path(path).parts[1] for path in files_of(store)} == {"a" * 40, "c" * 40}
    finally:
        filesystem.rm("/sweeping", recursive=True)


def test_remote_writers_have_names_of_their_own() -> None:
    """So that two of them never write one file."""
    store = open_store("memory://tags/cache")
    first, second = store.begin(KEY), store.begin(KEY)
    assert first.tag != second.tag
    check_part_name(f"draft.{first.tag}.safetensors")


def test_remote_failures_become_store_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a file system raises, with its own words."""
    store = open_store("memory://failing/cache")

    def fail(*_: object, **__: object) -> object:
        raise RuntimeError("credentials expired\nstack of the vendor")

    filesystem = fsspec.filesystem("memory")
    for name in ("open", "_open", "find", "ls", "cat_file", "pipe_file", "rm_file", "exists", "size"):
        monkeypatch.setattr(filesystem, name, fail, raising=False)
    for call in (
        store.check,
        store.exists,
        store.lineages,
        store.sweep,
        lambda: store.entries(KEY.lineage),
        lambda: store.read_manifest(KEY),
        lambda: store.remove(KEY),
        lambda: store.write_usage(KEY, b"{}"),
        lambda: store.open_part(KEY, FILE),
        lambda: store.begin(KEY).open_part(FILE),
        lambda: store.begin(KEY).commit(b"{}"),
    ):
        with pytest.raises(StoreError, match="credentials expired") as caught:
            call()
        assert "stack" not in caught.value.message


# --- choosing one


def test_paths_and_urls_choose_the_store(tmp_path: Path) -> None:
    """A path, a file URL, a remote URL; nothing is created by that."""
    for location in (tmp_path / "x", str(tmp_path / "x"), f"file://{tmp_path}/x", f"FILE://localhost{tmp_path}/x"):
        assert isinstance(open_store(location), DirectoryStore)
        assert open_store(location).location == str(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert open_store("file:///a%20b/c").location == "/a b/c"
    assert open_store("~/x").location == str(Path("~/x").expanduser())
    # A directory may be called like that.
    assert isinstance(open_store(tmp_path / "s3:" / "x"), DirectoryStore)
    remote = open_store("memory://somewhere/x")
    assert isinstance(remote, RemoteStore)
    assert not remote.exists()
    assert (remote.refresh_interval_s, open_store("/x").refresh_interval_s) == (0.0, 0.0)


@pytest.mark.parametrize("url", ["http://host/x", "https://host/x", "zip://a.zip", "nonsense://x", "github://a:b@/"])
def test_schemes_that_cannot_be_written_are_refused(url: str) -> None:
    """By name, with those that can be."""
    with pytest.raises(InvalidArgument, match=r"--kv-cache-url .* known: .*\bgs\b.*\bs3\b.*\bsftp\b"):
        open_store(url)


def test_a_new_kind_of_store_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the room that names a scheme is found by it, and stands among the known ones."""
    (tmp_path / "tape.py").write_text(
        "from pathlib import Path\n"
        "from coordinator.prefix.stores.directory import DirectoryStore\n"
        "SCHEMES = ('tape',)\n"
        "def open_location(location, scheme, field):\n"
        "    return DirectoryStore(Path(location.removeprefix('tape:/')), field)\n"
    )
    monkeypatch.setattr(stores, "__path__", [*stores.__path__, str(tmp_path)])
    try:
        store = open_store(f"tape:/{tmp_path}/cache")
        store.check()
        assert write(store)
        assert store.location == f"{tmp_path}/cache"
        with pytest.raises(InvalidArgument, match=r"known: .*\bfile\b.*\btape\b"):
            open_store("nonsense://x")
    finally:
        sys.modules.pop("coordinator.prefix.stores.tape", None)


@pytest.mark.parametrize("url", ["", "file://host/x", "file:///", "memory://"])
def test_locations_that_are_none(url: str) -> None:
    """Empty, on another host, or without a path."""
    with pytest.raises(InvalidArgument, match="--kv-cache-"):
        open_store(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec itself, or what it needs for a scheme."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(FailedPrecondition, match="s3fs"):
        open_store("s3://bucket/x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(FailedPrecondition, match=r"flashsplit\[remote-store\]"):
        open_store("s3://bucket/x")
    assert isinstance(open_store("/x"), DirectoryStore)
