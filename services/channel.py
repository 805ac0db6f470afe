"""Channel options, the same on both sides of every edge, and opening a channel to a worker.

Message sizes are bounded by the chunk size: larger payloads are cut (`services.tensors`). Keepalive notices a dead host
within about ten seconds; a dead process on a living host is noticed at once by its closed socket.
"""

from __future__ import annotations

import asyncio
import time

import grpc

from services.errors import Unavailable
from services.tensors import CHUNK_BYTES

# A frame carries at most one piece of each of its tensors: an activation and up to some captured blocks.
MAX_MESSAGE_BYTES = 32 * CHUNK_BYTES

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.keepalive_time_ms", 8_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.max_pings_without_data", 0),
]
CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    # Each edge has a connection of its own: a snapshot must not sit in front of a decode step.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 4_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its calls at random.
    ("grpc.so_reuseport", 0),
]


async def connect(address: str, *, timeout_s: float) -> grpc.aio.Channel:
    """A channel that is ready. Raises Unavailable when the worker doesn't answer in time."""
    channel = grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    deadline = time.monotonic() + timeout_s
    try:
        await asyncio.wait_for(channel.channel_ready(), timeout=deadline - time.monotonic())
    except TimeoutError:
        await channel.close()
        raise Unavailable(
            f"no worker answers at {address} within {timeout_s:g} s: start one there with "
            f"flashsplit-worker --listen {address}, or correct the address",
            reason="WORKER_UNREACHABLE",
            address=address,
        ) from None
    except BaseException:
        await channel.close()
        raise
    return channel
