"""What a worker says of itself, to protobuf and back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flashsplit.shard.v1 import model_pb2
from services.errors import FailedPrecondition, InvalidArgument
from services.layers import LayerRange
from services.messages.description import (
    HEAD_PLACES,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    FeatureTransport,
    HeadPlace,
    Role,
    WorkerDescription,
    check_protocol,
    range_from_message,
    range_to_message,
    transport_from_number,
    transport_to_number,
    worker_from_message,
    worker_to_message,
)
from services.model.quantization import Quantization, QuantizedTo
from tests.services.fakes import WORKER


def over_the_wire(worker: WorkerDescription) -> WorkerDescription:
    raw = worker_to_message(worker).SerializeToString()
    return worker_from_message(model_pb2.WorkerDescription.FromString(raw))


@pytest.mark.parametrize(
    "worker",
    [
        WORKER,
        replace(WORKER, target=None),
        replace(WORKER, draft=None, roles=(Role.TARGET,)),
        replace(WORKER, target=None, draft=None, devices=(), roles=(), open_sessions=0),
        replace(WORKER, target=replace(WORKER.target, feature_transport=None, capture_layers=())),
        replace(WORKER, protocol_minor=7, max_tensor_bytes=2**64 - 1),
        replace(WORKER, batches=None),
        replace(WORKER, snapshot_bytes=0, snapshot_budget_bytes=2**64 - 1),
        replace(WORKER, target=replace(WORKER.target, state_trimmable=False)),
        replace(WORKER, target=replace(WORKER.target, state_trimmable=False, is_recurrent=True)),
        replace(WORKER, target=replace(WORKER.target, kv_dtype="float8_e4m3fn")),
        replace(WORKER, target=replace(WORKER.target, batch_row_counts=(16, 64, 512))),
        replace(WORKER, target=replace(WORKER.target, is_mixture=True)),
        replace(WORKER, target=replace(WORKER.target, quantization=Quantization(QuantizedTo.INT4, ends=True))),
        replace(WORKER, draft=replace(WORKER.draft, state_trimmable=False)),
        replace(WORKER, draft=replace(WORKER.draft, quantization=Quantization(QuantizedTo.FP8))),
    ],
)
def test_round_trip(worker: WorkerDescription) -> None:
    """Every field of a description survives the wire, absent parts stay absent."""
    assert over_the_wire(worker) == worker


@pytest.mark.parametrize("trimmable", [True, False])
def test_a_release_that_gives_nothing_back_behind_windows(trimmable: bool) -> None:
    """It does not say whether layers are recurrent: they are where its prefixes cannot be cut."""
    assert WORKER.target is not None
    message = worker_to_message(replace(WORKER, target=replace(WORKER.target, state_trimmable=trimmable)))
    message.target.ClearField("recurrent")
    target = worker_from_message(message).target
    assert target is not None
    assert (target.state_trimmable, target.is_recurrent) == (trimmable, not trimmable)


def test_every_member_has_a_number() -> None:
    """All transports and head places travel, and no two share a number."""
    for transport in FeatureTransport:
        assert transport_from_number(transport_to_number(transport)) is transport
    assert transport_from_number(transport_to_number(None)) is None
    for place in HeadPlace:
        assert HEAD_PLACES.value(HEAD_PLACES.number(place), "head_place") is place
    assert over_the_wire(replace(WORKER, roles=tuple(Role))).roles == tuple(Role)


def test_device_joins_names() -> None:
    """The devices read as the command line writes them."""
    assert WORKER.device == "cuda:0+cuda:1"


def test_unknown_roles_are_left_out() -> None:
    """A newer worker may offer a role that this side has no name for."""
    message = worker_to_message(WORKER)
    message.roles.append(99)
    assert worker_from_message(message).roles == WORKER.roles


def change(**fields: object) -> Callable[[model_pb2.WorkerDescription], None]:
    def apply(message: model_pb2.WorkerDescription) -> None:
        for name, value in fields.items():
            part, _, field = name.partition("__")
            setattr(getattr(message, part), field, value)

    return apply


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (change(target__dtype=77), "target.dtype is 77, not one of 1 (float32)"),
        (change(target__dtype=0), "target.dtype is missing"),
        (change(target__kv_dtype=2), "target.kv_dtype is 2, not one of 0 (that of the weights), 5 (float8_e4m3fn)"),
        (change(target__feature_transport=9), "feature_transport is 9, not one of 1 (sum), 2 (slices)"),
        (change(draft__dtype=-3), "draft.dtype is -3"),
        (change(draft__feature_transport=0), "draft.feature_transport is missing"),
        (change(draft__head_place=0), "head_place is 0, not one of 1 (shared), 2 (loaded), 3 (projected)"),
        (change(draft__head_place=4), "head_place is 4"),
        (lambda message: message.target.layers.Clear(), "target.layers is [0, 0): it must hold at least one layer"),
    ],
)
def test_unknown_numbers_are_refused_by_name(spoil: Callable[..., None], text: str) -> None:
    """Enum numbers of another version are refused, naming field, value and what is known."""
    message = worker_to_message(WORKER)
    spoil(message)
    with pytest.raises(InvalidArgument) as refused:
        worker_from_message(message)
    assert text in refused.value.message


@pytest.mark.parametrize("counts", [[0], [16, 16], [64, 16]])
def test_numbers_of_rows_rise(counts: list[int]) -> None:
    message = worker_to_message(WORKER)
    message.target.batch_row_counts.extend(counts)
    with pytest.raises(InvalidArgument) as refused:
        worker_from_message(message)
    assert refused.value.message == f"target.batch_row_counts is {counts}; it must rise, from 1 at least"


@pytest.mark.parametrize(("first", "last"), [(0, 0), (5, 5), (6, 5), (2**32 - 1, 0)])
def test_empty_ranges_are_refused(first: int, last: int) -> None:
    """An empty or reversed range is refused, naming it."""
    with pytest.raises(InvalidArgument, match="hop.layers is"):
        range_from_message(model_pb2.LayerRange(first=first, last=last), "hop.layers")


def test_ranges_travel() -> None:
    """A range comes back as it was."""
    assert range_from_message(range_to_message(LayerRange(0, 2**32 - 1))) == LayerRange(0, 2**32 - 1)


@pytest.mark.parametrize("minor", [0, 1, 99])
def test_any_minor_version_is_accepted(minor: int) -> None:
    """Minor versions understand each other."""
    check_protocol((PROTOCOL_MAJOR, minor), "the caller")


def test_another_major_version_is_refused_naming_both_sides() -> None:
    """The refusal says who speaks which version, and what to do."""
    with pytest.raises(FailedPrecondition) as refused:
        check_protocol((PROTOCOL_MAJOR + 1, 3), "the worker at h:1")
    assert f"the worker at h:1 speaks protocol {PROTOCOL_MAJOR + 1}.3" in refused.value.message
    assert f"this side {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}" in refused.value.message
    assert refused.value.reason == "PROTOCOL_MISMATCH"
