"""How large payloads travel to a worker: within the stream's frames, or through shared memory where that can be had."""

from __future__ import annotations

from enum import StrEnum

import grpc
import structlog

from services.addresses import is_loopback
from services.errors import FailedPrecondition, FlashsplitError, Unimplemented
from services.rpc.shared_memory import ClientLink, open_link
from services.same_host.step_socket import Watcher

log = structlog.get_logger()


class PayloadTransport(StrEnum):
    """AUTO shares memory with processes of this host, and passes over those that can't."""

    AUTO = "auto"
    STREAM = "stream"
    SHARED = "shared"


async def share_memory(
    channel: grpc.aio.Channel, address: str, transport: PayloadTransport, watcher: Watcher | None = None
) -> ClientLink | None:
    """A link to the worker there, None where payloads go in frames. watcher: as in `open_link`.

    Raises FailedPrecondition when it must be had and can't. What else is wrong with the worker, its next call tells.
    """
    if transport is PayloadTransport.STREAM or (transport is PayloadTransport.AUTO and not is_loopback(address)):
        return None
    try:
        return await open_link(channel, address, watcher)
    except FlashsplitError as error:
        if transport is PayloadTransport.SHARED and isinstance(error, FailedPrecondition | Unimplemented):
            error.message = f"--payload-transport shared: {address}: {error.message}"
            raise
        log.info("memory.not_shared", address=address, why=error.message)
        return None
