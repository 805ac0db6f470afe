"""Snapshots in a local directory: `<root>/<lineage>/<snapshot id>/`, files private to the user.

An entry is written into a temporary sibling directory and renamed, so it is there whole or not at all, and synced to
the disk before it can be seen. Its writer holds a lock on the temporary directory; one that is not locked was left by
a process that died. Every failure is a `StoreError` or, for reading what is not there, NotFound.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from coordinator.prefix.stores import (
    ENTRY_NAME,
    LINEAGE_NAME,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_USAGE_BYTES,
    USAGE,
    EntryKey,
    StoreError,
    check_part_name,
)
from services.errors import InvalidArgument, NotFound

SCHEMES = ("", "file")
"""The URL schemes of this kind of store; a plain path has none."""

# How the names begin of what is being written, and of what is removed but not yet deleted.
_WRITING, _REMOVED = ".tmp-", ".gone-"
# Single files are not locked while they are written: one that is this old has no writer any more.
_FILE_ORPHAN_S = 60.0
# Never through a link, and never waiting for the other end of a pipe that somebody put there.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def open_location(location: str, scheme: str, field: str) -> DirectoryStore:
    """Return the store at a path or file URL. Raises InvalidArgument for a URL that isn't absolute or names a host."""
    if not scheme:
        return DirectoryStore(Path(location).expanduser(), field)
    parts = urlsplit(location)
    if parts.netloc not in ("", "localhost") or not parts.path.strip("/"):
        raise InvalidArgument(f"{field} {location!r} must be like file:///absolute/path", field=field)
    return DirectoryStore(Path(unquote(parts.path)), field)


class DirectoryStore:
    """A `Store` in a local directory. field: the option that errors name."""

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
            _create_file(probe)
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
        why = _why_forgeable(self._root)
        if why is not None:
            raise StoreError(
                f"{self._field} {self.location!r} {why}, who could put false prefixes there and so change answers: "
                "chown it to the user that serves and chmod go-w it, or name a directory below it or another one",
                field=self._field,
            )
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
        with _reading(self._root):
            return sorted(entry.name for entry in _directories(self._root) if LINEAGE_NAME.fullmatch(entry.name))

    def entries(self, lineage: str) -> dict[str, str]:
        path = self._root / lineage
        with _reading(path):
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
        with _writing(parent), self._locked(fcntl.LOCK_SH):
            try:
                parent.mkdir(mode=0o700)
                _sync_directory(self._root)
            except FileExistsError:
                pass
            temporary.mkdir(mode=0o700)
            lock = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return DirectoryEntryWriter(temporary, parent / key.snapshot_id, lock)

    def read_manifest(self, key: EntryKey) -> bytes:
        return _read_file(self._entry(key) / MANIFEST, MAX_MANIFEST_BYTES)

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
        with _writing(path):
            try:
                path.rename(removed)
            except FileNotFoundError:
                return False
            # What cannot be deleted now is swept later.
            shutil.rmtree(removed, ignore_errors=True)
            return True

    def read_usage(self, key: EntryKey) -> bytes | None:
        try:
            return _read_file(self._entry(key) / USAGE, MAX_USAGE_BYTES)
        except NotFound:
            return None

    def write_usage(self, key: EntryKey, usage: bytes) -> None:
        path = self._entry(key) / USAGE
        temporary = path.parent.with_name(f"{_WRITING}{_unique()}")
        with _writing(path):
            try:
                _write_file(temporary, usage, sync=False)
                temporary.replace(path)
            except FileNotFoundError:
                pass
            finally:
                temporary.unlink(missing_ok=True)

    def sweep(self) -> int:
        swept = 0
        with _writing(self._root):
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


class DirectoryEntryWriter:
    """An `EntryWriter` into a temporary directory. lock: a descriptor of that directory, locked, closed at the end."""

    tag = ""

    def __init__(self, temporary: Path, final: Path, lock: int) -> None:
        self._temporary, self._final, self._lock = temporary, final, lock
        self._parts: list[DirectoryPartWriter] = []
        self._open = True

    def open_part(self, file: str) -> DirectoryPartWriter:
        part = DirectoryPartWriter(self._temporary / check_part_name(file))
        self._parts.append(part)
        return part

    def commit(self, manifest: bytes) -> bool:
        with _writing(self._final):
            _write_file(self._temporary / MANIFEST, manifest, sync=True)
            _sync_directory(self._temporary)
            try:
                self._temporary.rename(self._final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                self.abort()
                return False
            self._release()
            _sync_directory(self._final.parent)
            return True

    def abort(self) -> None:
        if not self._open:
            return
        for part in self._parts:
            part.drop()
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        self._open = False
        os.close(self._lock)


class DirectoryPartWriter:
    """A `PartWriter` that syncs its file when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _writing(path):
            self._file: int | None = os.open(path, _CREATE, 0o600)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self._file is not None
        with _writing(self._path):
            _write_all(self._file, data)

    def close(self) -> None:
        if self._file is not None:
            try:
                with _writing(self._path):
                    os.fsync(self._file)
            finally:
                self.drop()

    def drop(self) -> None:
        """Close the file without waiting for the disk."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class DirectoryPartReader:
    """A `PartReader` of a regular file, which it can read to the end even when the entry is removed meanwhile.

    Raises NotFound, or StoreError for what is no regular file or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with _reading(path):
            self._file: int | None = os.open(path, _READ)
            status = os.fstat(self._file)
            self._size_bytes = status.st_size
            if not stat.S_ISREG(status.st_mode):
                self.close()
                raise OSError(errno.EINVAL, "not a regular file")

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read(self, offset: int, size_bytes: int) -> bytes:
        assert self._file is not None
        pieces: list[bytes] = []
        with _reading(self._path):
            while size_bytes:
                piece = os.pread(self._file, size_bytes, offset)
                if not piece:
                    break
                pieces.append(piece)
                offset, size_bytes = offset + len(piece), size_bytes - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _set_aside_orphans(lineage: Path) -> int:
    """Mark what nobody writes any more as removed; return how many entries those were.

    It deletes nothing, so that it is quick: others wait for the lock meanwhile.
    """
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
    """Tell whether a process is writing into a temporary directory; also true of one that cannot be opened."""
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
    # It may have been renamed meanwhile: then the lock was that of an entry that is in its place by now.
    return not path.exists()


def _directories(path: Path) -> list[os.DirEntry[str]]:
    """Return the directories in a directory, but no links to directories; none when it isn't there."""
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _stamp(manifest: Path) -> str:
    try:
        status = manifest.stat(follow_symlinks=False)
    except OSError:
        return "none"
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _unique() -> str:
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def _create_file(path: Path) -> None:
    """Create an empty file. Raises OSError."""
    os.close(os.open(path, _CREATE, 0o600))


def _write_file(path: Path, data: bytes, *, sync: bool) -> None:
    """Create a file with this content. Raises OSError."""
    file = os.open(path, _CREATE, 0o600)
    try:
        _write_all(file, data)
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def _read_file(path: Path, max_bytes: int) -> bytes:
    """Return all of a file. Raises NotFound, and StoreError for one that is larger than it may be."""
    reader = DirectoryPartReader(path)
    try:
        if reader.size_bytes > max_bytes:
            raise StoreError(f"{path} has {reader.size_bytes} bytes, more than the {max_bytes} it may have")
        return reader.read(0, reader.size_bytes)
    finally:
        reader.close()


def _sync_directory(path: Path) -> None:
    """Make it durable which names a directory holds. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into NotFound or StoreError."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_all(file: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(file, view) :]


def _why_forgeable(root: Path) -> str | None:
    """Return who else may write to a directory, None where nobody may.

    A container's volume often belongs to root and is open to all users or to a group (fsGroup of Kubernetes): whoever
    mounted it decided who reaches it. A sticky one is a place for all, such as /tmp.
    """
    status, user = root.stat(), os.geteuid()
    if status.st_uid not in (0, user):
        return f"belongs to the user {_name(pwd.getpwuid, status.st_uid)}"
    if status.st_uid == 0 and root.is_mount() and not status.st_mode & stat.S_ISVTX:
        return None
    if status.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    group = _name(grp.getgrgid, status.st_gid)
    # A group without a name is a container's; one with the name of its user has no other members on most systems.
    if status.st_mode & stat.S_IWGRP and group not in (str(status.st_gid), _name(pwd.getpwuid, user)):
        return f"can be written by the group {group}"
    return None


def _name(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    """Return the name of a user or group, its number where it has none."""
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)
