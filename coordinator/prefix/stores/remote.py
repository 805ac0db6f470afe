"""Snapshots in whatever fsspec can write to: S3, Google Cloud Storage, Azure, HDFS, SFTP …, or memory.

`<root>/<lineage>/<snapshot id>/`: parts first, then the manifest, whose presence makes the entry. Parts of different
writers have different names. What lies there without a manifest for an hour was left by a writer that died. Every
failure is a `StoreError` or, for reading what is not there, NotFound.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from datetime import datetime
from importlib import import_module
from typing import Any

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
from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, NotFound

SCHEMES = ()
"""None by name: it has every scheme that fsspec can write to and no other kind of store names."""

# What fsspec also calls file systems: read-only ones, layers over others, and those that keep a history of every write.
_UNFIT = frozenset({
    "arrow_hdfs", "async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "data", "dir", "dvc",
    "filecache", "generic", "gist", "git", "github", "hf", "http", "https", "jlab", "jupyter", "lakefs", "libarchive",
    "local", "pyscript", "reference", "root", "simplecache", "tar", "wandb", "zip",
})  # fmt: skip
_ORPHAN_S = 3600.0
"""How old a file without a manifest must be to count as left by a writer that died."""

_REFRESH_S = 30.0
"""How long a listing is good for."""

_UPLOAD_BYTES = 16 << 20
"""Size of the pieces in which parts are uploaded."""

# Where the kinds of file systems say when a file was written, or which version of it this is.
_VERSION_KEYS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "modified", "created")


def open_location(location: str, scheme: str, field: str, other_schemes: Collection[str] = ()) -> RemoteStore:
    """Return the store at a URL. other_schemes: those that other kinds of stores have, which errors list too.

    Raises InvalidArgument for a scheme that cannot be used, FailedPrecondition for one whose package is missing.
    """
    try:
        fsspec = import_module("fsspec")
        import_module("fsspec.core")
    except ImportError:
        raise FailedPrecondition(
            f"{field} {location!r} needs fsspec: pip install 'flashsplit[remote-store]', and the package for {scheme} "
            "(s3fs for s3, gcsfs for gs, adlfs for az, paramiko for sftp); or name a local directory",
            reason="PACKAGE_MISSING",
            field=field,
        ) from None
    usable = set(fsspec.available_protocols()) - _UNFIT
    if scheme not in usable:
        raise InvalidArgument(
            f"{field} {location!r} has the scheme {scheme!r}, which snapshots cannot be kept in; known: "
            f"{', '.join(sorted(filter(None, {*usable, *other_schemes})))}",
            field=field,
        )
    try:
        filesystem, path = fsspec.core.url_to_fs(location)
    except ImportError as error:
        raise FailedPrecondition(
            f"{field} {location!r} needs a package that is not installed: {error}",
            reason="PACKAGE_MISSING",
            field=field,
        ) from error
    except Exception as error:
        raise StoreError(f"{field} {location!r} cannot be opened: {error}", field=field) from error
    if not str(path).strip("/"):
        raise InvalidArgument(f"{field} {location!r} names no bucket or path", field=field)
    return RemoteStore(filesystem, str(path), location, field)


class RemoteStore:
    """A `Store` in a file system of fsspec's. root: its path there. field: the option that errors name."""

    def __init__(self, filesystem: Any, root: str, location: str, field: str) -> None:
        self._fs, self._root, self._location, self._field = filesystem, root.rstrip("/"), location, field
        # A listing of memory costs nothing.
        self.refresh_interval_s = 0.0 if location.startswith("memory:") else _REFRESH_S

    @property
    def location(self) -> str:
        return self._location

    def check(self) -> None:
        probe = f"{self._root}/.probe-{secrets.token_hex(8)}"
        try:
            self._make_directory(self._root)
            self._fs.pipe_file(probe, b"flashsplit")
            self._fs.rm_file(probe)
        except Exception as error:
            raise StoreError(
                f"{self._field} {self._location!r} cannot be written ({_sentence(error)}): check the address, the "
                "credentials and that they allow writing and deleting",
                field=self._field,
            ) from error

    def exists(self) -> bool:
        with _reading(self._location):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._root))

    def lineages(self) -> list[str]:
        with _reading(self._location):
            self._fs.invalidate_cache()
            try:
                names = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []
        return sorted({name for name in names if LINEAGE_NAME.fullmatch(name)})

    def entries(self, lineage: str) -> dict[str, str]:
        stamps = {}
        for path, info in self._files(f"{self._root}/{lineage}").items():
            name, _, file = path.rpartition("/")
            if file == MANIFEST and ENTRY_NAME.fullmatch(name):
                stamps[name] = f"{info.get('size')}-{_version(info)}"
        return stamps

    def begin(self, key: EntryKey) -> RemoteEntryWriter:
        with _writing(self._entry(key)):
            self._make_directory(self._entry(key))
        return RemoteEntryWriter(self._fs, self._entry(key))

    def read_manifest(self, key: EntryKey) -> bytes:
        return _read_file(self._fs, f"{self._entry(key)}/{MANIFEST}", MAX_MANIFEST_BYTES)

    def open_part(self, key: EntryKey, file: str) -> RemotePartReader:
        return RemotePartReader(self._fs, f"{self._entry(key)}/{check_part_name(file)}")

    def size_bytes(self, key: EntryKey) -> int:
        return sum(int(info.get("size") or 0) for info in self._files(self._entry(key)).values())

    def remove(self, key: EntryKey) -> bool:
        path = self._entry(key)
        with _writing(path):
            self._fs.invalidate_cache()
            try:
                self._fs.rm_file(f"{path}/{MANIFEST}")
            except FileNotFoundError:
                return False
            # From here on it is no entry; what cannot be deleted now is swept later.
            with contextlib.suppress(Exception):
                self._fs.rm(path, recursive=True)
            return True

    def read_usage(self, key: EntryKey) -> bytes | None:
        try:
            return _read_file(self._fs, f"{self._entry(key)}/{USAGE}", MAX_USAGE_BYTES)
        except NotFound:
            return None

    def write_usage(self, key: EntryKey, usage: bytes) -> None:
        path = self._entry(key)
        with _writing(path):
            self._fs.invalidate_cache()
            if self._fs.exists(f"{path}/{MANIFEST}"):
                self._fs.pipe_file(f"{path}/{USAGE}", usage)

    def sweep(self) -> int:
        entries: dict[str, dict[str, Mapping[str, Any]]] = {}
        for path, info in self._files(self._root).items():
            folder, _, file = path.rpartition("/")
            lineage, _, name = folder.partition("/")
            if LINEAGE_NAME.fullmatch(lineage) and ENTRY_NAME.fullmatch(name):
                entries.setdefault(folder, {})[file] = info
        swept = 0
        for folder, files in entries.items():
            if MANIFEST not in files and all(self._is_old(f"{self._root}/{folder}/{file}") for file in files):
                with _writing(folder):
                    self._fs.rm([f"{self._root}/{folder}/{file}" for file in files])
                swept += 1
        return swept

    def _is_old(self, path: str) -> bool:
        """Tell whether a file was written over an hour ago; false where the file system cannot say."""
        try:
            modified = self._fs.modified(path)
        except Exception:
            return False
        return isinstance(modified, datetime) and time.time() - modified.timestamp() > _ORPHAN_S

    def _entry(self, key: EntryKey) -> str:
        return f"{self._root}/{key.lineage}/{key.snapshot_id}"

    def _files(self, path: str) -> dict[str, Mapping[str, Any]]:
        """Return all files below a path: the name relative to it, and what the file system knows about the file."""
        with _reading(path):
            self._fs.invalidate_cache()
            try:
                files = self._fs.find(path, detail=True)
            except FileNotFoundError:
                return {}
        start = str(self._fs._strip_protocol(path)).rstrip("/") + "/"
        return {str(name).removeprefix(start): info for name, info in files.items() if str(name).startswith(start)}

    def _make_directory(self, path: str) -> None:
        # Object stores have none, and some refuse to be asked.
        with contextlib.suppress(Exception):
            self._fs.makedirs(path, exist_ok=True)


class RemoteEntryWriter:
    """An `EntryWriter` that uploads the parts under names of its own, and the manifest last."""

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
        with _writing(path):
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
    """A `PartWriter` that uploads as bytes come."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs, self._path = filesystem, path
        with _writing(path):
            self._file: Any = filesystem.open(path, "wb", block_size=_UPLOAD_BYTES)
        self._open = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with _writing(self._path):
            self._file.write(data)

    def close(self) -> None:
        if self._open:
            with _writing(self._path):
                self._file.close()
                self._open = False

    def drop(self) -> None:
        """Give up an upload that isn't complete; remove the file of one that is."""
        if self._open:
            self._open = False
            try:
                self._file.discard()
                # Otherwise it would upload its buffer when it is collected as garbage.
                self._file.closed = True
            except Exception:
                with contextlib.suppress(Exception):
                    self._file.close()
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._path)


class RemotePartReader:
    """A `PartReader` of which each read is a request of its own, so that several can be under way."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs, self._path = filesystem, path
        with _reading(path):
            filesystem.invalidate_cache()
            self._size_bytes = int(filesystem.size(path) or 0)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read(self, offset: int, size_bytes: int) -> bytes:
        end = min(offset + size_bytes, self._size_bytes)
        if offset >= end:
            return b""
        with _reading(self._path):
            return bytes(self._fs.cat_file(self._path, start=offset, end=end))

    def close(self) -> None:
        pass


def _version(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")


def _read_file(filesystem: Any, path: str, max_bytes: int) -> bytes:
    """Return all of a file. Raises NotFound, and StoreError for one that is larger than it may be."""
    with _reading(path):
        filesystem.invalidate_cache()
        size = int(filesystem.size(path) or 0)
        if size > max_bytes:
            raise StoreError(f"{path} has {size} bytes, more than the {max_bytes} it may have")
        return bytes(filesystem.cat_file(path))


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn whatever the file system raises into NotFound or StoreError."""
    try:
        yield
    except FlashsplitError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{path} is not there") from error
    except Exception as error:
        raise StoreError(f"{path} cannot be read: {_sentence(error)}") from error


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    """Turn whatever the file system raises into StoreError."""
    try:
        yield
    except FlashsplitError:
        raise
    except Exception as error:
        raise StoreError(f"{path} cannot be written: {_sentence(error)}") from error


def _sentence(error: Exception) -> str:
    """Return the first line of an exception's text, or its kind where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
