"""How large payloads travel to a worker: within the stream's frames, or through shared memory where they can."""

from __future__ import annotations

from enum import StrEnum

import grpc
import structlog

from services.addresses import is_loopback
from services.errors import FailedPrecondition, FlashsplitError, Unimplemented
from services.rpc.shared_memory import ClientLink, open_link
from services.same_host.step_socket import Watcher
from services.streams.client_stream import Guard, unguarded

log = structlog.get_logger()


class PayloadTransport(StrEnum):
    """How large payloads travel.

    AUTO: through shared memory to processes of this host that can share it, else within frames. STREAM: within frames.
    SHARED: through shared memory, or not at all.
    """

    AUTO = "auto"
    STREAM = "stream"
    SHARED = "shared"


async def share_memory(
    channel: grpc.aio.Channel,
    address: str,
    transport: PayloadTransport,
    watcher: Watcher | None = None,
    guard: Guard = unguarded,
) -> ClientLink | None:
    """Return a link to the worker at the other end of a channel, None where payloads go within frames.

    watcher, guard: as in `open_link`. Raises FailedPrecondition where memory must be shared and can't be. Whatever else
    is wrong with the worker, the next call to it says.
    """
    if transport is PayloadTransport.STREAM or (transport is PayloadTransport.AUTO and not is_loopback(address)):
        return None
    try:
        return await open_link(channel, address, watcher, guard)
    except FlashsplitError as error:
        if transport is PayloadTransport.SHARED and isinstance(error, FailedPrecondition | Unimplemented):
            error.message = f"--payload-transport shared: {address}: {error.message}"
            raise
        log.info("memory.not_shared", address=address, why=error.message)
        return None
