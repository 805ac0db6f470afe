"""The files of one entry in a local directory: written durably from front to back, read at any offset.

Every failure is a `StoreError` or, for reading what isn't there, NotFound.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from coordinator.prefix.stores import MANIFEST, StoreError, check_part_name
from services.errors import NotFound

# Never through a link, and never waiting for the other end of a pipe that somebody put there.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class DirectoryEntryWriter:
    """Implements `EntryWriter`. lock: a descriptor of the temporary directory, locked, closed at the end."""

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
        with writing(self._final):
            write_file(self._temporary / MANIFEST, manifest, sync=True)
            sync_directory(self._temporary)
            try:
                self._temporary.rename(self._final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                self.abort()
                return False
            self._release()
            sync_directory(self._final.parent)
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
    """Implements `PartWriter`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file: int | None = os.open(path, _CREATE, 0o600)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert self._file is not None
        with writing(self._path):
            _write_all(self._file, data)

    def close(self) -> None:
        if self._file is not None:
            try:
                with writing(self._path):
                    os.fsync(self._file)
            finally:
                self.drop()

    def drop(self) -> None:
        """Close without waiting for the disk."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class DirectoryPartReader:
    """Implements `PartReader`. Raises NotFound and StoreError when it is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path):
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
        with reading(self._path):
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


def create_file(path: Path) -> None:
    """An empty file. Raises OSError."""
    os.close(os.open(path, _CREATE, 0o600))


def write_file(path: Path, data: bytes, *, sync: bool) -> None:
    """A new file with this content. Raises OSError."""
    file = os.open(path, _CREATE, 0o600)
    try:
        _write_all(file, data)
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def read_file(path: Path, max_bytes: int) -> bytes:
    """All of a file. Raises NotFound, and StoreError for one that is larger than it may be."""
    reader = DirectoryPartReader(path)
    try:
        if reader.size_bytes > max_bytes:
            raise StoreError(f"{path} has {reader.size_bytes} bytes, more than the {max_bytes} it may have")
        return reader.read(0, reader.size_bytes)
    finally:
        reader.close()


def sync_directory(path: Path) -> None:
    """Make names that came into or went from a directory durable. Raises OSError."""
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """OSErrors inside become NotFound and StoreError."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """OSErrors inside become StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_all(file: int, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(file, view) :]
