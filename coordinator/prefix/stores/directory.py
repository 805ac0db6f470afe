"""Snapshots in a local directory: `<root>/<lineage>/<snapshot id>/`, files private to the user.

An entry is written into a temporary sibling and renamed, so it is there whole or not at all. Its writer holds a lock on
the temporary directory; what is not locked was left by a process that died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from coordinator.prefix.stores import (
    ENTRY_NAME,
    LINEAGE_NAME,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    USAGE,
    EntryKey,
    StoreError,
    check_part_name,
)
from coordinator.prefix.stores.directory_files import (
    DirectoryEntryWriter,
    DirectoryPartReader,
    create_file,
    read_file,
    reading,
    sync_directory,
    write_file,
    writing,
)
from services.errors import InvalidArgument, NotFound

_WRITING, _REMOVED = ".tmp-", ".gone-"
# Single files are not locked while they are written: one that is this old has no writer any more.
_FILE_ORPHAN_S = 60.0
_MAX_USAGE_BYTES = 4096


def open_location(location: str, scheme: str, field: str) -> DirectoryStore:
    """Raises InvalidArgument for a file URL that isn't absolute or names a host."""
    if not scheme:
        return DirectoryStore(Path(location).expanduser(), field)
    parts = urlsplit(location)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise InvalidArgument(f"{field} {location!r} must be like file:///absolute/path", field=field)
    return DirectoryStore(Path(unquote(parts.path)), field)


class DirectoryStore:
    """Implements `Store`."""

    refresh_interval_s = 0.0

    def __init__(self, root: Path, field: str = "--kv-cache-dir") -> None:
        self._root, self._field = root, field

    @property
    def location(self) -> str:
        return str(self._root)

    def check(self) -> None:
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = self._root / f".probe-{_unique()}"
            create_file(probe)
            probe.unlink()
        except (FileExistsError, NotADirectoryError):
            raise StoreError(
                f"{self._field} {self.location!r} is not a directory: name one, or a path where it can be created",
                field=self._field,
            ) from None
        except OSError as error:
            raise StoreError(
                f"{self._field} {self.location!r} cannot be written ({error.strerror}): give this user write "
                "permission and the disk some room, or name another directory",
                field=self._field,
            ) from error
        try:
            with self._locked(fcntl.LOCK_SH):
                pass
        except OSError as error:
            raise StoreError(
                f"{self._field} {self.location!r} is on a file system without file locks ({error.strerror}): name a "
                "directory on another one",
                field=self._field,
            ) from error

    def exists(self) -> bool:
        return self._root.is_dir()

    def lineages(self) -> list[str]:
        with reading(self._root):
            return sorted(entry.name for entry in _directories(self._root) if LINEAGE_NAME.fullmatch(entry.name))

    def entries(self, lineage: str) -> dict[str, str]:
        path = self._root / lineage
        with reading(path):
            return {
                entry.name: _stamp(path / entry.name / MANIFEST)
                for entry in _directories(path)
                if ENTRY_NAME.fullmatch(entry.name)
            }

    def begin(self, key: EntryKey) -> DirectoryEntryWriter:
        parent = self._root / key.lineage
        temporary = parent / f"{_WRITING}{_unique()}"
        # A sweeper looks for unlocked directories under the other kind of this lock, so it cannot come between creating
        # ours and locking it.
        with writing(parent), self._locked(fcntl.LOCK_SH):
            try:
                parent.mkdir(mode=0o700)
                sync_directory(self._root)
            except FileExistsError:
                pass
            temporary.mkdir(mode=0o700)
            lock = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return DirectoryEntryWriter(temporary, parent / key.snapshot_id, lock)

    def read_manifest(self, key: EntryKey) -> bytes:
        return read_file(self._entry(key) / MANIFEST, MAX_MANIFEST_BYTES)

    def open_part(self, key: EntryKey, file: str) -> DirectoryPartReader:
        return DirectoryPartReader(self._entry(key) / check_part_name(file))

    def size_bytes(self, key: EntryKey) -> int:
        try:
            with os.scandir(self._entry(key)) as files:
                return sum(file.stat(follow_symlinks=False).st_size for file in files)
        except OSError:
            return 0

    def remove(self, key: EntryKey) -> bool:
        path = self._entry(key)
        removed = path.with_name(f"{_REMOVED}{_unique()}")
        with writing(path):
            try:
                path.rename(removed)
            except FileNotFoundError:
                return False
            # What cannot be deleted now is swept later.
            shutil.rmtree(removed, ignore_errors=True)
            return True

    def read_usage(self, key: EntryKey) -> bytes | None:
        try:
            return read_file(self._entry(key) / USAGE, _MAX_USAGE_BYTES)
        except NotFound:
            return None

    def write_usage(self, key: EntryKey, usage: bytes) -> None:
        path = self._entry(key) / USAGE
        temporary = path.parent.with_name(f"{_WRITING}{_unique()}")
        with writing(path):
            try:
                write_file(temporary, usage, sync=False)
                temporary.replace(path)
            except FileNotFoundError:
                pass
            finally:
                temporary.unlink(missing_ok=True)

    def sweep(self) -> int:
        swept = 0
        with writing(self._root):
            with self._locked(fcntl.LOCK_EX):
                for lineage in self.lineages():
                    swept += _set_aside_orphans(self._root / lineage)
            for lineage in self.lineages():
                for entry in _directories(self._root / lineage):
                    if entry.name.startswith(_REMOVED):
                        shutil.rmtree(entry.path, ignore_errors=True)
        return swept

    def _entry(self, key: EntryKey) -> Path:
        return self._root / key.lineage / key.snapshot_id

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        # Opened anew each time: a lock belongs to the open file, so threads exclude each other as processes do.
        lock = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, kind)
            yield
        finally:
            os.close(lock)


def _set_aside_orphans(lineage: Path) -> int:
    """Mark what nobody is writing any more as removed. Quick: others wait for the lock meanwhile."""
    count = 0
    with os.scandir(lineage) as entries:
        for entry in entries:
            if not entry.name.startswith(_WRITING):
                continue
            path = lineage / entry.name
            if entry.is_dir(follow_symlinks=False):
                if not _is_locked(path):
                    path.rename(lineage / f"{_REMOVED}{_unique()}")
                    count += 1
            else:
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _FILE_ORPHAN_S:
                        path.unlink()
    return count


def _is_locked(path: Path) -> bool:
    """Whether a process is writing into this temporary directory, or it isn't ours to judge."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    # Renamed while we looked: the lock was that of an entry in its place.
    return not path.exists()


def _directories(path: Path) -> Iterator[os.DirEntry[str]]:
    """The directories in one, links to them left out; none when it isn't there."""
    try:
        entries = os.scandir(path)
    except FileNotFoundError:
        return
    with entries:
        yield from (entry for entry in entries if entry.is_dir(follow_symlinks=False))


def _stamp(manifest: Path) -> str:
    try:
        status = manifest.stat(follow_symlinks=False)
    except OSError:
        return "none"
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _unique() -> str:
    return f"{os.getpid()}-{secrets.token_hex(8)}"
