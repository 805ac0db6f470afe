"""Channel options, the same on both sides of every edge, and opening a channel to a worker.

Message sizes are bounded: larger payloads are cut into chunks (`services.messages.tensors`). A dead process is noticed
at once by its closed socket. Whether a worker lives that says nothing is known from its heartbeats
(`services.rpc.liveness`); pings notice half a minute later what those don't, above all callers that are gone.
"""

from __future__ import annotations

import asyncio

import grpc

from services.addresses import grpc_target, parse_address, socket_path
from services.errors import Unavailable
from services.messages.tensors import CHUNK_BYTES
from services.net.checksums import CheckedChannel
from services.net.cluster_token import TokenChannel
from services.net.handshake import is_trusted, why_refused
from services.net.security import OPEN, Security

MAX_MESSAGE_BYTES = 8 * CHUNK_BYTES
"""All tensors of a frame together have at most one chunk; the rest is for its lists, such as token ids."""

_COMMON: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.keepalive_time_ms", 10_000),
    # Anything that comes counts as an answer here.
    ("grpc.keepalive_timeout_ms", 20_000),
    # Here only the answer counts, to pings that gRPC sends of its own accord while data flows: over a slow link it
    # waits behind the data for longer than any number here could say.
    ("grpc.http2.ping_timeout_ms", 2**31 - 1),
    ("grpc.http2.max_pings_without_data", 0),
]
CLIENT_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    # Each edge has a connection of its own: a snapshot must not sit in front of a decode step.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A connection without calls is no connection without use: its end tells that a worker is gone.
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
SERVER_OPTIONS: list[tuple[str, int]] = [
    *_COMMON,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 4_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its calls at random.
    ("grpc.so_reuseport", 0),
    # A client that connects and sends nothing holds a socket this long.
    ("grpc.server_handshake_timeout_ms", 10_000),
]

_TRUST_S = 0.1
"""Between two looks at the certificate of a worker that is not there yet."""


async def connect(address: str, *, timeout_s: float, security: Security = OPEN) -> grpc.aio.Channel:
    """Open a channel and return it when it is ready.

    Raises Unavailable when the worker doesn't answer in time or the two don't trust each other, InvalidArgument for a
    text that is no address.
    """
    channel = _channel(parse_address(address), security)
    try:
        async with asyncio.timeout(timeout_s):
            await _ready(channel, address, security)
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


def _channel(address: str, security: Security) -> grpc.aio.Channel:
    target, tls = grpc_target(address), security.tls
    if tls is None or socket_path(address) is not None:
        # A Unix socket is private to its user already.
        channel = grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    else:
        name = tls.files.server_name
        options = CLIENT_OPTIONS if name is None else [*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", name)]
        channel = grpc.aio.secure_channel(target, tls.for_channel(), options=options)
    if socket_path(address) is None:
        channel = CheckedChannel(channel, address)
    return channel if security.token is None else TokenChannel(channel, security.token)


async def _ready(channel: grpc.aio.Channel, address: str, security: Security) -> None:
    """Wait until a channel is ready.

    Raises Unavailable for what waiting does not mend: certificates that one side refuses, TLS on one side only.
    """
    if security.tls is not None and security.tls.revocations and socket_path(address) is None:
        # gRPC takes revoked certificates: no channel is made before the worker has shown another one.
        while not await is_trusted(address, security.tls):
            await asyncio.sleep(_TRUST_S)
    states = grpc.ChannelConnectivity
    while (state := channel.get_state(try_to_connect=True)) is not states.READY:
        if state is states.TRANSIENT_FAILURE and socket_path(address) is None:
            why = await why_refused(address, security.tls)
            if why is not None:
                raise Unavailable(why, reason="HANDSHAKE_FAILED", address=address)
        await channel.wait_for_state_change(state)
