"""What a worker is asked to load, and how far it is: frozen dataclasses, and their protobuf form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashsplit.shard.v1 import worker_service_pb2 as pb
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.description import (
    HEAD_PLACES,
    FeatureTransport,
    HeadPlace,
    Role,
    range_from_message,
    range_to_message,
    transport_from_number,
    transport_to_number,
)
from services.messages.quantization import quantization_from_message, quantization_to_message
from services.messages.tensors import dtype_name, dtype_number, kv_dtype_name
from services.model.quantization import Quantization
from services.model.rope import parse_rope_scaling


@dataclass(frozen=True, slots=True)
class FeatureCapture:
    """The features to capture for a draft.

    draft_path: the draft's directory on the worker's host. transport: how the features shall travel.
    """

    draft_path: str
    transport: FeatureTransport


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A stage to load.

    dtype: the element type of weights and activations, None for the checkpoint's own. kv_dtype: the element type of
    attention keys and values, None for that of the weights. quantization: how its matrices are packed, None for as the
    checkpoint has them. rope_scaling: what `services.model.rope.parse_rope_scaling` returned, None for the checkpoint's
    own. host_experts: the share of each layer's routed experts, 0 to 1, that a GPU leaves to the host's memory and CPU.
    batch_invariant_rows: what sessions will ask for by `OpenSession.batch_invariant_rows`, which is tried out once the
    stage is loaded; None for nothing.
    """

    role: ClassVar = Role.TARGET
    model_path: str
    layers: LayerRange
    dtype: str | None = None
    capture: FeatureCapture | None = None
    kv_dtype: str | None = None
    quantization: Quantization | None = None
    rope_scaling: str | None = None
    host_experts: float = 0.0
    batch_invariant_rows: int | None = None


@dataclass(frozen=True, slots=True)
class LoadDraft:
    """A draft to load.

    model_path: the target's checkpoint, for its lm_head with HeadPlace.LOADED and for rows of its embedding with
    HeadPlace.SHARED. dtype: None for the checkpoint's own. quantization: how the draft's own matrices are packed.
    target_quantization: how the target's are, those two among them.
    """

    role: ClassVar = Role.DRAFT
    draft_path: str
    model_path: str
    head_place: HeadPlace
    feature_transport: FeatureTransport
    dtype: str | None = None
    quantization: Quantization | None = None
    target_quantization: Quantization | None = None


@dataclass(frozen=True, slots=True)
class LoadDrafter:
    """A model to compress prompts with. dtype: None for the checkpoint's own."""

    role: ClassVar = Role.COMPRESS
    drafter_path: str
    dtype: str | None = None


LoadPart = LoadTarget | LoadDraft | LoadDrafter


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of weights read so far, and in all."""

    loaded_bytes: int
    total_bytes: int


def part_to_message(part: LoadPart) -> pb.LoadRequest:
    """Return the request's message."""
    match part:
        case LoadTarget():
            target = pb.LoadTarget(
                model_path=part.model_path,
                layers=range_to_message(part.layers),
                dtype=dtype_number(part.dtype),
                kv_dtype=dtype_number(part.kv_dtype),
                quantization=quantization_to_message(part.quantization),
                rope_scaling=part.rope_scaling or "",
                host_experts=part.host_experts,
                exact_rows=part.batch_invariant_rows,
            )
            if part.capture is not None:
                target.capture.draft_path = part.capture.draft_path
                target.capture.transport = transport_to_number(part.capture.transport)
            return pb.LoadRequest(target=target)
        case LoadDraft():
            draft = pb.LoadDraft(
                draft_path=part.draft_path,
                model_path=part.model_path,
                head_place=HEAD_PLACES.number(part.head_place),
                feature_transport=transport_to_number(part.feature_transport),
                dtype=dtype_number(part.dtype),
                quantization=quantization_to_message(part.quantization),
                target_quantization=quantization_to_message(part.target_quantization),
            )
            return pb.LoadRequest(draft=draft)
        case LoadDrafter():
            drafter = pb.LoadDrafter(drafter_path=part.drafter_path, dtype=dtype_number(part.dtype))
            return pb.LoadRequest(drafter=drafter)


def part_from_message(request: pb.LoadRequest) -> LoadPart:
    """Return the part to load. Raises InvalidArgument where none is named, and for values that make no sense."""
    match request.WhichOneof("part"):
        case "target":
            target = request.target
            capture = None
            if target.HasField("capture"):
                capture = FeatureCapture(target.capture.draft_path, _required_transport(target.capture.transport))
            return LoadTarget(
                model_path=target.model_path,
                layers=range_from_message(target.layers),
                dtype=dtype_name(target.dtype),
                capture=capture,
                kv_dtype=kv_dtype_name(target.kv_dtype),
                quantization=quantization_from_message(target),
                rope_scaling=parse_rope_scaling(target.rope_scaling) if target.rope_scaling else None,
                host_experts=_share(target.host_experts),
                batch_invariant_rows=target.exact_rows if target.HasField("exact_rows") else None,
            )
        case "draft":
            draft = request.draft
            return LoadDraft(
                draft_path=draft.draft_path,
                model_path=draft.model_path,
                head_place=HEAD_PLACES.value(draft.head_place, "head_place"),
                feature_transport=_required_transport(draft.feature_transport),
                dtype=dtype_name(draft.dtype),
                quantization=quantization_from_message(draft),
                target_quantization=quantization_from_message(draft, "target_quantization"),
            )
        case "drafter":
            return LoadDrafter(request.drafter.drafter_path, dtype_name(request.drafter.dtype))
        case _:
            raise InvalidArgument("part is missing: name a target, a draft or a drafter to load", field="part")


def _share(number: float) -> float:
    if not 0.0 <= number <= 1.0:
        raise InvalidArgument(f"host_experts is {number}; it must be from 0 to 1", field="host_experts")
    return number


def _required_transport(number: int) -> FeatureTransport:
    transport = transport_from_number(number)
    if transport is None:
        raise InvalidArgument("feature_transport is missing", field="feature_transport")
    return transport
