"""Whether a worker lives of which no heartbeat comes: over a connection of its own, so that nothing is in front of it.

gRPC's own threads take a connection, whatever holds up the worker's threads of Python; and nobody takes one where the
process was stopped, its host is gone or the link passes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib

from flashsplit.shard.v1 import liveness_service_pb2 as pb, liveness_service_pb2_grpc as pb_grpc
from services.errors import FlashsplitError
from services.net.channel import connect
from services.net.security import Security
from services.streams.client_stream import ClientStream

ANSWER_S = 0.5
"""How long the event loop of a worker may take to answer that nothing holds up."""


async def is_held_up(address: str, security: Security, timeout_s: float) -> bool:
    """Return whether a worker's process lives and something keeps its event loop from running.

    False where it takes no connection within timeout_s, and where its event loop answers there: then it sends
    heartbeats, and what is wrong is the connection by which they should come.
    """
    try:
        channel = await connect(address, timeout_s=timeout_s, security=security)
    except FlashsplitError:
        return False
    stream = ClientStream(pb_grpc.LivenessServiceStub(channel).Heartbeats(pb.HeartbeatsRequest()))
    try:
        with contextlib.suppress(FlashsplitError):
            async with asyncio.timeout(ANSWER_S):
                await stream.read()
        return False
    except TimeoutError:
        return True
    finally:
        stream.cancel()
        await channel.close()
