"""Saving and restoring within a session: its frames to protobuf and back, and what is refused."""

from __future__ import annotations

import pytest

from flashsplit.shard.v1 import failure_pb2, snapshot_pb2 as pb
from services.errors import InvalidArgument
from services.messages.session_frames import (
    location_from_message,
    location_to_message,
    part_from_message,
    part_to_message,
    restore_from_message,
    restore_to_message,
    save_from_message,
    save_to_message,
)
from services.messages.steps import Location, SnapshotPart, SnapshotRestore, SnapshotSave
from tests.services.fakes import PARTS


@pytest.mark.parametrize(
    "save",
    [SnapshotSave("a", 1), SnapshotSave("~" * 128, 2**32 - 1, "parent of it"), SnapshotSave("a", 0, "a")],
)
def test_saves_round_trip(save: SnapshotSave) -> None:
    """Every field survives the wire; no parent stays none."""
    assert save_from_message(pb.SnapshotSave.FromString(save_to_message(save).SerializeToString())) == save


@pytest.mark.parametrize("restore", [SnapshotRestore("a", 0), SnapshotRestore("b", 4, (0, 2**32 - 1, 7, 7))])
def test_restores_round_trip(restore: SnapshotRestore) -> None:
    """Every field survives the wire."""
    raw = restore_to_message(restore).SerializeToString()
    assert restore_from_message(pb.SnapshotRestore.FromString(raw)) == restore


@pytest.mark.parametrize("part", [*PARTS, SnapshotPart(Location(0, "", "", ""), 2**64 - 1, 2**64 - 1)])
def test_parts_round_trip(part: SnapshotPart) -> None:
    """Every field survives the wire; stage 0 and no stage stay different."""
    assert part_from_message(pb.SnapshotPart.FromString(part_to_message(part).SerializeToString())) == part


def test_locations_round_trip() -> None:
    """A place comes back as it was, with a stage, with stage 0 and without one."""
    for stage in (None, 0, 7):
        location = Location(stage, "alpha", "cuda:0+cuda:1", "unix:/run/a.sock")
        raw = location_to_message(location).SerializeToString()
        assert location_from_message(failure_pb2.Location.FromString(raw)) == location


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SnapshotSave(snapshot_id="", length=1), "snapshot_id"),
        (pb.SnapshotSave(snapshot_id="a\n", length=1), "snapshot_id"),
        (pb.SnapshotSave(snapshot_id="a", length=1, parent_id=""), "parent_id"),
        (pb.SnapshotSave(snapshot_id="a", length=1, parent_id="ü"), "parent_id"),
        (pb.SnapshotSave(snapshot_id="a" * 129, length=1), "snapshot_id"),
    ],
)
def test_saves_under_no_name_are_refused(message: pb.SnapshotSave, field: str) -> None:
    """What is no name is refused, naming the field."""
    with pytest.raises(InvalidArgument) as refused:
        save_from_message(message)
    assert refused.value.where["field"] == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SnapshotRestore(snapshot_id="", length=1, token_ids=[1]), "snapshot_id"),
        (pb.SnapshotRestore(snapshot_id="\0", length=0), "snapshot_id"),
        (pb.SnapshotRestore(snapshot_id="a", length=2, token_ids=[1]), "token_ids"),
        (pb.SnapshotRestore(snapshot_id="a", length=1, token_ids=[1, 2]), "token_ids"),
        (pb.SnapshotRestore(snapshot_id="a", length=2**32 - 1), "token_ids"),
    ],
)
def test_restores_of_other_tokens_than_their_length_are_refused(message: pb.SnapshotRestore, field: str) -> None:
    """A name that is none, and tokens that are more or fewer than `length`, are refused by field."""
    with pytest.raises(InvalidArgument) as refused:
        restore_from_message(message)
    assert refused.value.where["field"] == field
