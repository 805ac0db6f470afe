"""The files of one entry in an fsspec file system: written from front to back, read at any offset.

Every failure is a `StoreError` or, for what isn't there, NotFound.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Any

from coordinator.prefix.stores import MANIFEST, StoreError, check_part_name
from services.errors import FlashsplitError, NotFound

_UPLOAD_BYTES = 16 << 20


class RemoteEntryWriter:
    """Implements `EntryWriter`."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs, self._path, self.tag = filesystem, path, secrets.token_hex(4)
        self._parts: list[RemotePartWriter] = []
        self._open = True

    def open_part(self, file: str) -> RemotePartWriter:
        part = RemotePartWriter(self._fs, f"{self._path}/{check_part_name(file)}")
        self._parts.append(part)
        return part

    def commit(self, manifest: bytes) -> bool:
        path = f"{self._path}/{MANIFEST}"
        with writing(path):
            self._fs.invalidate_cache()
            if self._fs.exists(path):
                self.abort()
                return False
            self._fs.pipe_file(path, manifest)
            self._open = False
            return True

    def abort(self) -> None:
        if self._open:
            self._open = False
            for part in self._parts:
                part.drop()


class RemotePartWriter:
    """Implements `PartWriter`."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs, self._path = filesystem, path
        with writing(path):
            self._file: Any = filesystem.open(path, "wb", block_size=_UPLOAD_BYTES)
        self._open = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with writing(self._path):
            self._file.write(data)

    def close(self) -> None:
        if self._open:
            with writing(self._path):
                self._file.close()
                self._open = False

    def drop(self) -> None:
        """Give up an upload that isn't complete; take away one that is."""
        if self._open:
            self._open = False
            try:
                self._file.discard()
                # Otherwise it would upload what it has when it is collected.
                self._file.closed = True
            except Exception:
                with contextlib.suppress(Exception):
                    self._file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path)


class RemotePartReader:
    """Implements `PartReader`: each read is a request of its own, so that several can be under way."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs, self._path = filesystem, path
        with reading(path):
            filesystem.invalidate_cache()
            self._size_bytes = int(filesystem.size(path) or 0)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read(self, offset: int, size_bytes: int) -> bytes:
        end = min(offset + size_bytes, self._size_bytes)
        if offset >= end:
            return b""
        with reading(self._path):
            return bytes(self._fs.cat_file(self._path, start=offset, end=end))

    def close(self) -> None:
        pass


def read_file(filesystem: Any, path: str, max_bytes: int) -> bytes:
    """All of a file. Raises StoreError for one that is larger than it may be."""
    with reading(path):
        filesystem.invalidate_cache()
        size = int(filesystem.size(path) or 0)
        if size > max_bytes:
            raise StoreError(f"{path} has {size} bytes, more than the {max_bytes} it may have")
        return bytes(filesystem.cat_file(path))


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Whatever the file system raises becomes NotFound or StoreError."""
    try:
        yield
    except FlashsplitError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there") from error
    except Exception as error:
        raise StoreError(f"{path} cannot be read: {sentence(error)}") from error


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Whatever the file system raises becomes StoreError."""
    try:
        yield
    except FlashsplitError:
        raise
    except Exception as error:
        raise StoreError(f"{path} cannot be written: {sentence(error)}") from error


def sentence(error: Exception) -> str:
    """The first line of what went wrong, whatever kind of exception it is."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
