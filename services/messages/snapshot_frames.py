"""Saving and restoring a prefix within a session: between the dataclasses of `steps` and their messages."""

from __future__ import annotations

from flashsplit.shard.v1 import snapshot_pb2 as pb
from services.errors import InvalidArgument
from services.messages.locations import location_from_message, location_to_message
from services.messages.snapshots import check_id
from services.messages.steps import SnapshotPart, SnapshotRestore, SnapshotRestored, SnapshotSave, SnapshotSaved


def save_to_message(save: SnapshotSave) -> pb.SnapshotSave:
    return pb.SnapshotSave(snapshot_id=save.snapshot_id, length=save.length, parent_id=save.parent_id)


def save_from_message(message: pb.SnapshotSave) -> SnapshotSave:
    """Raises InvalidArgument for names that are none."""
    return SnapshotSave(
        snapshot_id=check_id(message.snapshot_id),
        length=message.length,
        parent_id=check_id(message.parent_id, "parent_id") if message.HasField("parent_id") else None,
    )


def restore_to_message(restore: SnapshotRestore) -> pb.SnapshotRestore:
    return pb.SnapshotRestore(snapshot_id=restore.snapshot_id, length=restore.length, token_ids=restore.token_ids)


def restore_from_message(message: pb.SnapshotRestore) -> SnapshotRestore:
    """Raises InvalidArgument for a name that is none and for tokens that are not `length` many."""
    if len(message.token_ids) != message.length:
        raise InvalidArgument(
            f"token_ids has {len(message.token_ids)} tokens where length is {message.length}", field="token_ids"
        )
    return SnapshotRestore(check_id(message.snapshot_id), message.length, tuple(message.token_ids))


def part_to_message(part: SnapshotPart) -> pb.SnapshotPart:
    return pb.SnapshotPart(
        location=location_to_message(part.location),
        size_bytes=part.size_bytes,
        elapsed_ns=part.elapsed_ns,
        evicted_ids=part.evicted_ids,
        refusal=part.refusal,
    )


def part_from_message(message: pb.SnapshotPart) -> SnapshotPart:
    return SnapshotPart(
        location=location_from_message(message.location),
        size_bytes=message.size_bytes,
        elapsed_ns=message.elapsed_ns,
        evicted_ids=tuple(message.evicted_ids),
        refusal=message.refusal,
    )


def saved_to_message(saved: SnapshotSaved) -> pb.SnapshotSaved:
    parts = [part_to_message(part) for part in saved.parts]
    return pb.SnapshotSaved(snapshot_id=saved.snapshot_id, length=saved.length, parts=parts)


def saved_from_message(message: pb.SnapshotSaved) -> SnapshotSaved:
    parts = tuple(part_from_message(part) for part in message.parts)
    return SnapshotSaved(message.snapshot_id, message.length, parts)


def restored_to_message(restored: SnapshotRestored) -> pb.SnapshotRestored:
    parts = [part_to_message(part) for part in restored.parts]
    return pb.SnapshotRestored(snapshot_id=restored.snapshot_id, length=restored.length, parts=parts)


def restored_from_message(message: pb.SnapshotRestored) -> SnapshotRestored:
    parts = tuple(part_from_message(part) for part in message.parts)
    return SnapshotRestored(message.snapshot_id, message.length, parts)
