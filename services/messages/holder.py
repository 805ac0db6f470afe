"""The process that has a worker load something, and whose alone the worker is from then on."""

from __future__ import annotations

import functools
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashsplit.shard.v1 import worker_service_pb2 as pb
from services.errors import InvalidArgument

LEASE_S = 3.0
"""How long a worker waits for its holder to come back, when that listens to its heartbeats no more, before another
process may take it."""

ORPHAN_TIMEOUT_S = 60.0
"""How long by default what a worker's holder had loaded stays once that listens no more, for whoever takes the worker
next."""

WORKER_HELD = "WORKER_HELD"
"""The reason of the error that says that a worker is another process's."""

MAX_TEXT = 256


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has workers load parts.

    holder_id: chosen at random by each process. name: what it is called in errors that others get.
    """

    holder_id: str
    name: str


CheckHolder = Callable[[str | None], None]
"""Checks that a process may use what a worker has loaded and keeps; takes its holder_id, None for one that does not say
who it is. Raises FailedPrecondition while another process holds the worker."""


def anybody(_: str | None) -> None:
    """Let every process use a worker that nobody can hold: a `CheckHolder`."""


def holder_id_of(message: Any) -> str | None:
    """Return the holder_id in a message that has such a field, None where it is absent."""
    return message.holder_id if message.HasField("holder_id") else None


@functools.cache
def own_holder() -> Holder:
    """Return this process as workers know it."""
    return Holder(secrets.token_hex(16), f"process {os.getpid()} on {socket.gethostname()}")


def holder_from_message(request: pb.LoadRequest) -> Holder | None:
    """Return who wants to hold the worker, None for a caller that does not say.

    Raises InvalidArgument for an empty id, and for texts that are too long or cannot stand in a log line.
    """
    if not request.HasField("holder"):
        return None
    holder = request.holder
    for field, text in (("holder_id", holder.holder_id), ("name", holder.name)):
        if not text or len(text) > MAX_TEXT or not text.isprintable():
            raise InvalidArgument(
                f"holder.{field} has {len(text)} characters; it must be 1 to {MAX_TEXT} printable ones",
                field=f"holder.{field}",
            )
    return Holder(holder.holder_id, holder.name)
