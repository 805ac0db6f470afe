"""How long a step is on its way to a worker, measured with echoes over a stream like that of a session.

Between two echoes everything rests, as it does while a stage computes: without that pause the caches and cores of both
sides are warm, and the way takes a third of the time that a step takes.
"""

from __future__ import annotations

import asyncio
import statistics
import time

import grpc

from flashsplit.shard.v1 import measure_pb2 as pb
from services.errors import Unavailable
from services.messages.holder import own_holder
from services.messages.measure import ECHO_BYTES, LinkSpeed
from services.streams.client_stream import ClientStream

ROUND_TRIPS, PIECES = 40, 8
"""The echoes of one row, of which the median counts, and those of the largest piece, sent one behind the other."""

PAUSE_S = 0.005
"""The rest before each echo of one row, in seconds."""


async def measure_link(stream: ClientStream, row_bytes: int) -> LinkSpeed:
    """Return the speed of the way to a worker. row_bytes: the size of one row's activation.

    Raises the error that ended the stream, Unavailable where it ended without one.
    """
    holder_id = own_holder().holder_id
    row = pb.EchoRequest(payload=bytes(min(row_bytes, ECHO_BYTES)), holder_id=holder_id)
    trips_s = []
    for _ in range(ROUND_TRIPS):
        await asyncio.sleep(PAUSE_S)
        began = time.perf_counter()
        await stream.send(row)
        await _read_answer(stream)
        trips_s.append(time.perf_counter() - began)
    round_trip_s = statistics.median(trips_s)
    piece = pb.EchoRequest(payload=bytes(ECHO_BYTES), holder_id=holder_id)
    began = time.perf_counter()
    await stream.send(*[piece] * PIECES)
    for _ in range(PIECES):
        await _read_answer(stream)
    # The last answer is one round trip behind the last piece.
    large_s = max(time.perf_counter() - began - round_trip_s, 1e-9)
    return LinkSpeed(round_trip_s, PIECES * ECHO_BYTES / large_s)


async def _read_answer(stream: ClientStream) -> None:
    if await stream.read() is grpc.aio.EOF:
        raise Unavailable("the worker ended Echo without an answer").located(**stream.where)
