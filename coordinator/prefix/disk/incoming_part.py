"""One part of a snapshot on its way from a worker's export into a store's file, checked frame by frame.

The digests are the worker's own: whoever imports the part compares them, so that whatever happened to the bytes on the
way is found. One chunk is in memory at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from coordinator.prefix.disk.manifest import Part
from coordinator.prefix.disk.safetensors_file import SafetensorsWriter
from coordinator.prefix.disk.threads import in_thread
from coordinator.prefix.stores import EntryWriter
from services.errors import FlashsplitError, InvalidArgument
from services.layers import LayerRange
from services.messages.snapshots import SnapshotChunk, SnapshotFrame, SnapshotHeader, SnapshotOwner, SnapshotTrailer


@dataclass(frozen=True, slots=True)
class PartSource:
    """One worker's export. layers: the worker's; None for the draft's state. frames: header, chunks, trailer."""

    owner: SnapshotOwner
    layers: LayerRange | None
    frames: AsyncIterator[SnapshotFrame]

    async def header(self, snapshot_id: str, first_token: int, token_count: int) -> SnapshotHeader:
        """Return the first frame. Raises InvalidArgument when it is no header or announces something else."""
        frame = await anext(self.frames, None)
        if not isinstance(frame, SnapshotHeader):
            raise _unexpected("frame", "the export begins", frame, "a header")
        # Not the parent's name: the worker need not know which entry holds the rows before.
        for name, expected in (
            ("snapshot_id", snapshot_id),
            ("owner", self.owner),
            ("layers", self.layers),
            ("first_token", first_token),
            ("token_count", token_count),
        ):
            value = getattr(frame, name)
            if value != expected:
                raise InvalidArgument(
                    f"the export's header has {name} {value} where {expected} was asked for", field=f"header.{name}"
                )
        return frame

    async def close(self) -> None:
        """End the export, wherever it is."""
        close = getattr(self.frames, "aclose", None)
        if close is not None:
            # An error at its end changes nothing any more.
            with contextlib.suppress(FlashsplitError):
                await close()


async def write_part(source: PartSource, part: Part, writer: EntryWriter) -> Part:
    """Write what follows the header into the part's file, make it durable, and return the part with its digests.

    Raises:
        InvalidArgument: chunks with gaps, too many or too few bytes, or a trailer that doesn't fit.
        StoreError: the file cannot be written.
    """
    output = await in_thread(writer.open_part, part.file)
    file = await in_thread(
        SafetensorsWriter, output, [(tensor.name, tensor.dtype, tensor.shape) for tensor in part.tensors]
    )
    total, received = sum(tensor.size_bytes for tensor in part.tensors), 0
    async for frame in source.frames:
        if isinstance(frame, SnapshotTrailer):
            if not frame.total_bytes == received == total or len(frame.tensor_sha256) != len(part.tensors):
                raise InvalidArgument(
                    f"{part.file}: {total} bytes of {len(part.tensors)} tensors were announced, {received} came and "
                    f"the trailer says {frame.total_bytes} of {len(frame.tensor_sha256)}",
                    field="trailer",
                )
            break
        if not isinstance(frame, SnapshotChunk):
            raise _unexpected("frame", f"{part.file}: after the header came", frame, "a chunk or the trailer")
        size = len(frame.data)
        if frame.offset != received or received + size > total:
            raise InvalidArgument(
                f"{part.file}: chunk [{frame.offset}, {frame.offset + size}) is out of order: expected to go on at "
                f"{received} of {total}",
                field="chunk.offset",
            )
        await in_thread(file.write, frame.data)
        received += size
    else:
        raise InvalidArgument(
            f"{part.file}: the export ended without a trailer after {received} bytes", field="trailer"
        )
    extra = await anext(source.frames, None)
    if extra is not None:
        raise _unexpected("frame", f"{part.file}: after the trailer came", extra, "nothing")
    file.finish()
    await in_thread(output.close)
    return part.with_digests(frame.tensor_sha256)


def _unexpected(field: str, where: str, frame: SnapshotFrame | None, expected: str) -> InvalidArgument:
    shown = "nothing" if frame is None else f"a {type(frame).__name__}"
    return InvalidArgument(f"{where} {shown} where {expected} was expected", field=field)
