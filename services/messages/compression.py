"""Which tokens of a prompt are worth computing: the question and the answer as frozen dataclasses, and their messages.

Of the answer the caller checks that its ranges are those of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashsplit.shard.v1 import compress_service_pb2 as pb
from services.errors import DataLoss, InvalidArgument

MAX_TOKENS = 1 << 20
"""The most tokens of a prompt that is to be compressed."""


@dataclass(frozen=True, slots=True)
class CompressRequest:
    """A prompt in the drafter's vocabulary, and the share of it to keep, above 0 and at most 1."""

    request_id: str
    fingerprint: str
    token_ids: tuple[int, ...]
    keep_ratio: float


@dataclass(frozen=True, slots=True)
class CompressProgress:
    """How many of the drafter's layers are done, and how many there are."""

    layers: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class Compressed:
    """The half-open token ranges to keep, in ascending order and apart from each other."""

    kept: tuple[tuple[int, int], ...]
    forward_ns: int


def request_to_message(request: CompressRequest) -> pb.CompressRequest:
    """Return the request's message."""
    return pb.CompressRequest(
        request_id=request.request_id,
        fingerprint=request.fingerprint,
        token_ids=request.token_ids,
        keep_ratio=request.keep_ratio,
    )


def request_from_message(message: pb.CompressRequest) -> CompressRequest:
    """Return the request. Raises InvalidArgument for more than MAX_TOKENS."""
    if len(message.token_ids) > MAX_TOKENS:
        raise InvalidArgument(
            f"token_ids has {len(message.token_ids)} tokens; at most {MAX_TOKENS} are taken", field="token_ids"
        )
    return CompressRequest(message.request_id, message.fingerprint, tuple(message.token_ids), message.keep_ratio)


def event_to_message(event: CompressProgress | Compressed) -> pb.CompressResponse:
    """Return the answer's message."""
    match event:
        case CompressProgress():
            progress = pb.CompressProgress(layers=event.layers, num_layers=event.num_layers)
            return pb.CompressResponse(progress=progress)
        case Compressed():
            message = pb.Compressed(forward_ns=event.forward_ns)
            for first, last in event.kept:
                message.kept.add(first=first, last=last)
            return pb.CompressResponse(compressed=message)


def event_from_message(response: pb.CompressResponse, prompt_length: int) -> CompressProgress | Compressed | None:
    """Return the answer, None for one of a later version.

    Raises DataLoss where nothing is kept, and for ranges that are none of a prompt of `prompt_length` tokens.
    """
    match response.WhichOneof("event"):
        case "progress":
            return CompressProgress(response.progress.layers, response.progress.num_layers)
        case "compressed":
            return _compressed_from_message(response.compressed, prompt_length)
        case _:
            return None


def _compressed_from_message(message: pb.Compressed, prompt_length: int) -> Compressed:
    kept, end = list[tuple[int, int]](), 0
    for span in message.kept:
        if not end <= span.first < span.last <= prompt_length:
            raise DataLoss(f"kept has [{span.first}, {span.last}) of a prompt of {prompt_length} tokens", field="kept")
        kept.append((span.first, span.last))
        end = span.last
    if not kept:
        raise DataLoss("kept is empty: something is always kept", field="kept")
    return Compressed(tuple(kept), message.forward_ns)
