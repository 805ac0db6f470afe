"""A worker that takes the place of another one which goes on until then, and how people name the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.cluster.member import Member
from services.errors import InvalidArgument
from services.rpc.liveness import Heartbeats


@dataclass(frozen=True, slots=True)
class Successor:
    """A worker that holds what another one holds, and is to take its place.

    index: the place: the stage's; that of the draft's own worker follows the last stage's. name: what it is called.
    member: the worker; gone: whose place it takes. process_id, gone_process_id: their processes.
    """

    index: int
    name: str
    member: Member
    gone: Member
    process_id: int
    gone_process_id: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A worker that was told to stop. name: what it is called. to: the address of the one that can take its place.
    heartbeats: by which it is asked to wait for that."""

    name: str
    to: str
    heartbeats: Heartbeats


def find_worker(text: str, names: Sequence[str], members: Sequence[Member]) -> int:
    """Return the index of the worker that a text names: "stage 0", "0", "draft worker", its address, or its place as
    the command line says it where no other one has that.

    Raises InvalidArgument for a text that names none, or several.
    """
    wanted = text.strip()
    for index, (name, member) in enumerate(zip(names, members, strict=True)):
        if wanted in (name, name.removeprefix("stage "), name.removesuffix(" worker"), member.address):
            return index
    at = [index for index, member in enumerate(members) if str(member.place) == wanted]
    if len(at) == 1:
        return at[0]
    known = ", ".join(f"{name} ({member.place})" for name, member in zip(names, members, strict=True))
    why = "names several workers" if at else "is no worker of this server"
    raise InvalidArgument(f"worker {text!r} {why}: name one of {known}, or its address", field="worker")
