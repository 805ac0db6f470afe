"""Snapshots in whatever fsspec can write to: S3, Google Cloud Storage, Azure, HDFS, SFTP …, or memory.

`<root>/<lineage>/<snapshot id>/`: parts first, then the manifest, whose presence makes the entry. Parts of different
writers have different names. What lies there without a manifest for an hour was left by a writer that died.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping
from datetime import datetime
from importlib import import_module
from typing import Any

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
from coordinator.prefix.stores.remote_files import (
    RemoteEntryWriter,
    RemotePartReader,
    read_file,
    reading,
    sentence,
    writing,
)
from services.errors import FailedPrecondition, InvalidArgument, NotFound

# What fsspec also calls file systems: read-only ones, layers over others, and those that keep a history of every write.
_UNFIT = frozenset({
    "arrow_hdfs", "async_wrapper", "asynclocal", "asyncwrapper", "blockcache", "cached", "data", "dir", "dvc",
    "filecache", "generic", "gist", "git", "github", "hf", "http", "https", "jlab", "jupyter", "lakefs", "libarchive",
    "local", "pyscript", "reference", "root", "simplecache", "tar", "wandb", "zip",
})  # fmt: skip
_ORPHAN_S = 3600.0
_REFRESH_S = 30.0
_MAX_USAGE_BYTES = 4096
# Where the kinds of file systems say when a file was written, or which version of it this is.
_VERSION_KEYS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "modified", "created")


def open_location(location: str, scheme: str, field: str) -> RemoteStore:
    """Raises InvalidArgument for a scheme that cannot be used, FailedPrecondition for one whose package is missing."""
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
    usable = sorted(set(fsspec.available_protocols()) - _UNFIT)
    if scheme not in usable:
        raise InvalidArgument(
            f"{field} {location!r} has the scheme {scheme!r}, which snapshots cannot be kept in; known: "
            f"{', '.join(usable)}",
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
    """Implements `Store`. filesystem: one of fsspec's."""

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
                f"{self._field} {self._location!r} cannot be written ({sentence(error)}): check the address, the "
                "credentials and that they allow writing and deleting",
                field=self._field,
            ) from error

    def exists(self) -> bool:
        with reading(self._location):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._root))

    def lineages(self) -> list[str]:
        with reading(self._location):
            self._fs.invalidate_cache()
            try:
                names = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []
        return sorted({name for name in names if LINEAGE_NAME.fullmatch(name)})

    def entries(self, lineage: str) -> dict[str, str]:
        found = {}
        for path, info in self._files(f"{self._root}/{lineage}").items():
            name, _, file = path.rpartition("/")
            if file == MANIFEST and ENTRY_NAME.fullmatch(name):
                found[name] = f"{info.get('size')}-{_version(info)}"
        return found

    def begin(self, key: EntryKey) -> RemoteEntryWriter:
        with writing(self._entry(key)):
            self._make_directory(self._entry(key))
        return RemoteEntryWriter(self._fs, self._entry(key))

    def read_manifest(self, key: EntryKey) -> bytes:
        return read_file(self._fs, f"{self._entry(key)}/{MANIFEST}", MAX_MANIFEST_BYTES)

    def open_part(self, key: EntryKey, file: str) -> RemotePartReader:
        return RemotePartReader(self._fs, f"{self._entry(key)}/{check_part_name(file)}")

    def size_bytes(self, key: EntryKey) -> int:
        return sum(int(info.get("size") or 0) for info in self._files(self._entry(key)).values())

    def remove(self, key: EntryKey) -> bool:
        path = self._entry(key)
        with writing(path):
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
            return read_file(self._fs, f"{self._entry(key)}/{USAGE}", _MAX_USAGE_BYTES)
        except NotFound:
            return None

    def write_usage(self, key: EntryKey, usage: bytes) -> None:
        path = self._entry(key)
        with writing(path):
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
                with writing(folder):
                    self._fs.rm([f"{self._root}/{folder}/{file}" for file in files])
                swept += 1
        return swept

    def _is_old(self, path: str) -> bool:
        """Whether a file was written over an hour ago; false where the file system cannot say."""
        try:
            modified = self._fs.modified(path)
        except Exception:
            return False
        return isinstance(modified, datetime) and time.time() - modified.timestamp() > _ORPHAN_S

    def _entry(self, key: EntryKey) -> str:
        return f"{self._root}/{key.lineage}/{key.snapshot_id}"

    def _files(self, path: str) -> dict[str, Mapping[str, Any]]:
        """All files below a path: name relative to it, and what is known about it."""
        with reading(path):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(path, detail=True)
            except FileNotFoundError:
                return {}
        start = str(self._fs._strip_protocol(path)).rstrip("/") + "/"
        return {str(name).removeprefix(start): info for name, info in found.items() if str(name).startswith(start)}

    def _make_directory(self, path: str) -> None:
        # Object stores have none, and some refuse to be asked.
        with contextlib.suppress(Exception):
            self._fs.makedirs(path, exist_ok=True)


def _version(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
