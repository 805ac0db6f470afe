"""The GGUF container: metadata by key, and a table of tensors that says where each one's bytes lie.

A file is little endian: magic, version, counts, key/value pairs, the table, and the tensors' bytes from the next
multiple of the alignment on. A model may be split into several files, of which each has its own table. Files come from
anywhere: every count, length and offset is checked before it is used.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from services.errors import DataLoss, FlashsplitError, InvalidArgument, NotFound, Unimplemented
from services.model.gguf.blocks import BLOCK_TYPES, BlockType

SUFFIX = ".gguf"

MAX_HEADER_BYTES = 256 << 20
"""How long the part before the tensors may be. That of a large vocabulary takes some 15 MB."""

MAX_PARTS = 1000
"""Into how many files a model may be split."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_NAME_BYTES = 65535
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_LEAST_PAIR_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_READ_BYTES = 1 << 20

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The codes that `struct` has for the types of metadata, by their numbers in files."""

_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufArray:
    """A list in the metadata, whose items are decoded when they are asked for: vocabularies are large.

    kind: the number of the items' type. content: the items as the file has them.
    """

    key: str
    kind: int
    count: int
    content: bytes

    def items(self) -> list[str] | list[int] | list[float] | list[bool]:
        """Return the items. Raises DataLoss for a string that is not UTF-8."""
        if self.kind != _STRING:
            return list(struct.unpack(f"<{self.count}{_SCALARS[self.kind]}", self.content))
        items, at = [], 0
        try:
            for _ in range(self.count):
                end = at + 8 + int.from_bytes(self.content[at : at + 8], "little")
                items.append(self.content[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError as error:
            raise DataLoss(f"{self.key}: item {len(items)} is not UTF-8", field=self.key) from error
        return items


Value = str | int | float | bool | GgufArray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as a file's table describes it.

    shape: the extents, the slowest first, as torch has them; rows lie one behind the other, and each is whole blocks.
    path, begin, nbytes: where its bytes lie, counted from the start of the file.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    path: Path
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in one or several files. paths: in order. metadata: that of the first one."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file, by its name."""
    return path.suffix.lower() == SUFFIX


def gguf_stem(path: Path) -> str:
    """Return a file's name without .gguf, and without its place among the files that a model is split into."""
    part = _PART.fullmatch(path.name)
    return part["stem"] if part else path.stem


def read_gguf(path: Path, field: str = "--model") -> GgufFile:
    """Read the header of a model. path: its file, or the first of those that it is split into.

    field: the option that named the file, for errors.

    Raises NotFound for a missing file, InvalidArgument for a part that is not the first one, DataLoss for files that
    are cut off, damaged or do not belong together, Unimplemented for versions and types of tensors that are unknown.
    """
    first = _read_file(path, field)
    parts = first.metadata.get("split.count", 1)
    if parts in (0, 1):
        return first
    if type(parts) is not int or not 1 < parts <= MAX_PARTS:
        raise DataLoss(f"{path}: split.count is {parts!r}; it must be a whole number up to {MAX_PARTS}", field=field)
    files = [first, *(_read_file(other, field) for other in _other_parts(path, parts, field))]
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        place = (file.metadata.get("split.no"), file.metadata.get("split.count"))
        if place != (number, parts):
            raise DataLoss(
                f"{file.paths[0]}: split.no and split.count are {place[0]!r} and {place[1]!r}, its place is {number} "
                f"of {parts}: it is of another model",
                field=field,
            )
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise DataLoss(
                    f"tensor {name} is in {tensors[name].path} and in {tensor.path}; it may be in one of a model's "
                    "files only",
                    field=name,
                )
            tensors[name] = tensor
    asked = first.metadata.get("split.tensors.count", len(tensors))
    if asked != len(tensors):
        raise DataLoss(
            f"{path}: split.tensors.count is {asked!r}, the {parts} files have {len(tensors)} tensors", field=field
        )
    return GgufFile(tuple(file.paths[0] for file in files), first.metadata, tensors)


def _other_parts(path: Path, parts: int, field: str) -> list[Path]:
    """Return the files behind the first one, by its name."""
    match = _PART.fullmatch(path.name)
    wanted = f"NAME-00001-of-{parts:05d}.gguf"
    if match is None or int(match["parts"]) != parts:
        raise InvalidArgument(
            f"{path} is one of {parts} files of a model, and its name does not say which: files of a split model are "
            f"found by names like {wanted}",
            field=field,
        )
    if int(match["part"]) != 1:
        raise InvalidArgument(f"{path} is not the first of its model's {parts} files: name {wanted}", field=field)
    return [path.with_name(f"{match['stem']}-{part:05d}-of-{parts:05d}.gguf") for part in range(2, parts + 1)]


def _read_file(path: Path, field: str) -> GgufFile:
    """Read one file's header, which is kept for a while: several readers of a model begin with it."""
    try:
        status = path.stat()
        return _read_unchanged(path, status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        raise NotFound(f"{field}: there is no file {path}", field=field) from None
    except OSError as error:
        raise DataLoss(f"{field}: {path} cannot be read: {error}", field=field) from error
    except FlashsplitError as error:
        # What is kept is told to nobody else, so each one who asks is told anew.
        raise error.copied().located(field=field) from None


@functools.lru_cache(maxsize=16)
def _read_unchanged(path: Path, file_bytes: int, _changed_ns: int) -> GgufFile:
    with path.open("rb") as file:
        return read_header(file, file_bytes, path)


def read_header(file: BinaryIO, file_bytes: int, path: Path) -> GgufFile:
    """Read the header of one file from its start. path: named in errors, and where the tensors lie.

    Raises DataLoss and Unimplemented as `read_gguf`.
    """
    return _HeaderReader(file, file_bytes, path).read()


class _HeaderReader:
    """Reads a header in order; it takes no byte that the file does not have."""

    def __init__(self, file: BinaryIO, file_bytes: int, path: Path) -> None:
        self._file, self._file_bytes, self._path = file, file_bytes, path
        self._held = bytearray()
        self._at = 0

    def read(self) -> GgufFile:
        magic = self._bytes(4, "the magic")
        if magic != _MAGIC:
            raise self._damage(f"it begins with {magic!r}, a GGUF file with {_MAGIC!r}")
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = f"big-endian version {swapped}" if swapped in (1, *_VERSIONS) else f"version {version}"
            raise Unimplemented(f"{self._path}: {kind} of GGUF is not supported, only little-endian 2 and 3 are")
        tensors = self._count("tensors", _LEAST_TENSOR_BYTES)
        pairs = self._count("key/value pairs", _LEAST_PAIR_BYTES)
        metadata: dict[str, Value] = {}
        for number in range(pairs):
            key = self._string(f"key {number}", _MAX_NAME_BYTES)
            if key in metadata:
                raise self._damage(f"key {key!r} is there twice")
            metadata[key] = self._value(key)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damage(f"general.alignment is {alignment!r}; it must be a power of two up to {_MAX_ALIGNMENT}")
        table = [self._table_entry(number) for number in range(tensors)]
        start = -(-self._at // alignment) * alignment
        return GgufFile((self._path,), metadata, self._placed(table, start, alignment))

    def _placed(
        self, table: list[tuple[str, BlockType, tuple[int, ...], int]], start: int, alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors of the table by name. start: where offsets count from."""
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in table:
            if name in tensors:
                raise self._damage(f"tensor {name} is there twice")
            size = math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
            if offset % alignment:
                raise self._damage(f"tensor {name} is at offset {offset}, which must be a multiple of {alignment}")
            if start + offset + size > self._file_bytes:
                raise self._damage(
                    f"tensor {name} has {size} bytes from {start + offset} on, the file {self._file_bytes} in all: it "
                    "is cut off or damaged"
                )
            tensors[name] = GgufTensor(name, kind, shape, self._path, start + offset, size)
        in_order = sorted(tensors.values(), key=lambda tensor: tensor.begin)
        for one, following in zip(in_order, in_order[1:], strict=False):
            if one.begin + one.nbytes > following.begin:
                raise self._damage(
                    f"tensor {following.name} begins at {following.begin}, within {one.name}, which ends at "
                    f"{one.begin + one.nbytes}"
                )
        return tensors

    def _table_entry(self, number: int) -> tuple[str, BlockType, tuple[int, ...], int]:
        """Return name, type, shape and offset of a tensor. number: its place in the table."""
        name = self._string(f"the name of tensor {number}", _MAX_NAME_BYTES)
        dimensions = self._number("I", f"tensor {name}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damage(f"tensor {name} has {dimensions} dimensions; it may have 1 to {_MAX_DIMENSIONS}")
        extents = [self._number("Q", f"tensor {name}") for _ in range(dimensions)]
        if min(extents) < 1:
            raise self._damage(f"tensor {name} has the extents {extents}; each must be at least 1")
        type_number = self._number("I", f"tensor {name}")
        kind = BLOCK_TYPES.get(type_number)
        if kind is None:
            raise Unimplemented(
                f"{self._path}: tensor {name} is of type {type_number}, which is unknown; known are "
                f"{', '.join(known.name for known in BLOCK_TYPES.values())}",
                field=name,
            )
        if extents[0] % kind.values:
            raise self._damage(
                f"tensor {name} has rows of {extents[0]} values; in {kind.name} they must be a multiple of "
                f"{kind.values}"
            )
        return name, kind, tuple(reversed(extents)), self._number("Q", f"tensor {name}")

    def _value(self, key: str) -> Value:
        kind = self._number("I", key)
        if kind == _STRING:
            return self._string(key, MAX_HEADER_BYTES)
        if kind == _ARRAY:
            return self._array(key)
        if kind in _SCALARS:
            value: int | float | bool = self._unpacked(_SCALARS[kind], key)
            return value
        raise self._damage(f"{key} is of type {kind}, which no value has")

    def _array(self, key: str) -> GgufArray:
        kind = self._number("I", key)
        if kind == _STRING:
            count = self._count(f"items of {key}", 8)
            begin = self._at
            for _ in range(count):
                at = self._at
                self._skip(8, key)
                self._skip(int.from_bytes(self._held[at : at + 8], "little"), key)
        elif kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
            count = self._count(f"items of {key}", size)
            begin = self._at
            self._skip(count * size, key)
        else:
            raise self._damage(f"{key} is a list of items of type {kind}, which must be numbers or texts")
        return GgufArray(key, kind, count, bytes(self._held[begin : self._at]))

    def _count(self, what: str, least_bytes: int) -> int:
        """Read how many there are of something. least_bytes: what one of them takes at least."""
        count = self._number("Q", f"the number of {what}")
        room = min(self._file_bytes, MAX_HEADER_BYTES) - self._at
        if count * least_bytes > room:
            raise self._damage(f"{count} {what} cannot be in the {room} bytes that a header may still have")
        return count

    def _string(self, what: str, most: int) -> str:
        size = self._number("Q", what)
        if size > most:
            raise self._damage(f"{what} has {size} bytes; at most {most} are taken")
        content = self._bytes(size, what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self._damage(f"{what} is not UTF-8: {content[:40]!r}") from error

    def _number(self, code: str, what: str) -> int:
        number: int = self._unpacked(code, what)
        return number

    def _unpacked(self, code: str, what: str) -> Any:
        at = self._at
        self._skip(struct.calcsize(code), what)
        return struct.unpack_from(f"<{code}", self._held, at)[0]

    def _bytes(self, size: int, what: str) -> bytes:
        at = self._at
        self._skip(size, what)
        return bytes(self._held[at : self._at])

    def _skip(self, size: int, what: str) -> None:
        """Go on by so many bytes, which are in `_held` then."""
        end = self._at + size
        if end > len(self._held):
            if end > min(self._file_bytes, MAX_HEADER_BYTES):
                raise self._damage(
                    f"{what} ends at byte {end}; the file has {self._file_bytes} bytes, and a header at most "
                    f"{MAX_HEADER_BYTES}"
                )
            while len(self._held) < end:
                read = self._file.read(_READ_BYTES)
                if not read:
                    raise self._damage(f"it ends at byte {len(self._held)}, within {what}")
                self._held += read
        self._at = end

    def _damage(self, what: str) -> DataLoss:
        return DataLoss(f"{self._path} is not a GGUF file that can be used: {what}")
