"""A checksum on every message between hosts, so that damaged bytes end a call by name and are never computed with.

TCP's own sum lets one of some ten thousand damaged segments through. Each message of a call to a TCP address ends with
the XXH3 hash, 64 bits, of all bytes before it, as a protobuf field that no message declares; Unix sockets damage
nothing, so that calls to these have none. The hash is seeded with the call's own number, which its metadata carry, and
with the message's place in it: messages that are lost, repeated, out of order or another call's are found too. The
number is also how a worker is told that the caller knows of all this; who doesn't is of another release, and may only
ask for the worker's description.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import xxhash

from services.errors import DataLoss, FailedPrecondition
from services.net.channel_around import ChannelAround

FIELD = 15
"""The number of the field, a fixed64, at the end of a message; no message of a call may declare it."""

HEADER = "flashsplit-checksums"
"""The call's number: 16 hex digits."""

DESCRIBE = "/flashsplit.shard.v1.WorkerService/Describe"
_SERVICES = "/flashsplit.shard."
_TAG = bytes([FIELD << 3 | 1])
_TRAILER_BYTES = len(_TAG) + 8
_MASK = (1 << 64) - 1

Serialize = Callable[[Any], bytes]
Parse = Callable[[bytes], Any]


class Checksums:
    """Those of one call at one end of it.

    where: the call and its two ends, in words for errors.
    """

    def __init__(self, call: int, where: str, *, server: bool) -> None:
        self._where = where
        # Each direction has every other seed.
        self._sent, self._received = call + int(server), call + int(not server)
        self._count = 0

    def adding(self, serialize: Serialize) -> Serialize:
        """Return a serializer of this call's messages that puts the checksum behind each."""

        def serialize_and_add(message: Any) -> bytes:
            raw = serialize(message)
            seed = self._sent & _MASK
            self._sent += 2
            return b"".join((raw, _TAG, xxhash.xxh3_64_intdigest(raw, seed).to_bytes(8, "little")))

        return serialize_and_add

    def check(self, raw: bytes) -> bytes:
        """Return the next message that came, which protobuf parses as it is. Raises DataLoss for a damaged one."""
        seed, self._received, self._count = self._received & _MASK, self._received + 2, self._count + 1
        # Without a copy, as a message may have a megabyte.
        body = memoryview(raw)[:-_TRAILER_BYTES]
        if (
            len(raw) < _TRAILER_BYTES
            or raw[-_TRAILER_BYTES] != _TAG[0]
            or xxhash.xxh3_64_intdigest(body, seed) != int.from_bytes(raw[-8:], "little")
        ):
            raise DataLoss(
                f"message {self._count} of {self._where}, {len(raw)} bytes long, does not match its checksum: it was "
                "damaged on its way, or another one was lost; look for faults of the network between the two",
                reason="CHECKSUM_MISMATCH",
            )
        return raw


def call_number(method: str, metadata: Iterable[tuple[str, str | bytes]], where: str, *, required: bool) -> int | None:
    """Return the number of a call; None where its messages have no checksums.

    where: where the worker listens, for errors. required: whether a call needs them. Raises FailedPrecondition for one
    that does not have them then, DataLoss for what is no number.
    """
    if not method.startswith(_SERVICES):
        return None
    for key, value in metadata:
        if key == HEADER:
            try:
                return int(value, 16) & _MASK
            except ValueError:
                raise DataLoss(f"the metadata of a call of {method} came damaged", reason="CHECKSUM_MISMATCH") from None
    if not required or method == DESCRIBE:
        return None
    raise FailedPrecondition(
        f"a call of {method} carried no {HEADER}, as all calls to the worker at {where} do from other hosts: it came "
        "from another release; install the same flashsplit on both",
        reason="PROTOCOL_MISMATCH",
    )


class Damaged:
    """Stands for a message that came damaged: whatever is asked of it raises why.

    gRPC itself would put None in its place. without_checksum: the message, where it is one of a release that adds no
    checksum, or one that was damaged there.
    """

    def __init__(self, error: DataLoss, without_checksum: Any) -> None:
        self.error, self.without_checksum = error, without_checksum

    def __getattr__(self, name: str) -> Any:
        raise self.error


class CheckedChannel(ChannelAround):
    """A channel to another host: every message of its calls has a checksum."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        """address: the worker's."""
        super().__init__(channel)
        self._address, self._sent_bytes = address, 0

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    def _calls(
        self,
        make: Callable[..., Any],
        method: str,
        request_serializer: Serialize = bytes,
        response_deserializer: Parse = bytes,
        **options: Any,
    ) -> Callable[..., Any]:
        if not method.startswith(_SERVICES):
            # Health checks and reflection, which other programs use too.
            return make(method, request_serializer, response_deserializer, **options)
        where = f"the answer to {method.rpartition('/')[2]} from the worker at {self._address}"

        def begin(*request: Any, metadata: Iterable[tuple[str, str | bytes]] = (), **more: Any) -> Any:
            call = random.getrandbits(64)
            checksums = Checksums(call, where, server=False)

            def parse(raw: bytes) -> Any:
                try:
                    return response_deserializer(checksums.check(raw))
                except DataLoss as error:
                    return Damaged(error, _parsed(response_deserializer, raw))

            add = checksums.adding(request_serializer)

            def serialize(message: Any) -> bytes:
                raw = add(message)
                self._sent_bytes += len(raw)
                return raw

            calls = make(method, serialize, parse, **options)
            return calls(*request, metadata=((HEADER, f"{call:016x}"), *metadata), **more)

        return begin


def _parsed(parse: Parse, raw: bytes) -> Any:
    """Return a message, None where the bytes are none."""
    try:
        return parse(raw)
    except Exception:
        return None
