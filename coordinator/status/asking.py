"""Asks the workers how they are, over connections of its own, so that watching never stands in a request's way.

Waits for nobody: a worker that doesn't answer in time is told as such, with what it said last.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from coordinator.engine.engine import Engine
from services.errors import FlashsplitError
from services.messages.description import WorkerDescription
from services.rpc.payload_transport import PayloadTransport
from services.rpc.peers import Peers

ANSWER_S = 2.0
"""How long a worker may take to say how it is."""

FRESH_S = 0.5
"""So long an answer serves all who ask."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker, and what it says of itself.

    name: "stage 0", "draft", "prefill drafter". stage: its place in the chain, None for the other two. draft: whether
    the draft is here. error: why it could not be asked; then `said` is what it said last.
    """

    name: str
    address: str
    said: WorkerDescription
    error: str | None = None
    stage: int | None = None
    draft: bool = False

    @property
    def weight_bytes(self) -> int:
        """Of what it has in this role."""
        said, staged = self.said, self.stage is not None
        parts = (
            said.target if staged else None,
            said.draft if self.draft else None,
            said.drafter if not staged and not self.draft else None,
        )
        return sum(part.weight_bytes for part in parts if part is not None)


class Workers:
    """All workers of an engine. Close it at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._peers = Peers(
            timeout_s=ANSWER_S * 0.75, security=engine.cluster.launch.security, transport=PayloadTransport.STREAM
        )
        self._asking: asyncio.Task[list[Member]] | None = None
        self._asked_at = 0.0
        self._heard: dict[str, WorkerDescription] = {}

    async def ask(self) -> list[Member]:
        """In the order in which a request meets them: the prefill drafter, the stages, the draft. Within ANSWER_S."""
        now = time.monotonic()
        if self._asking is None or (self._asking.done() and now - self._asked_at > FRESH_S):
            self._asked_at, self._asking = now, asyncio.ensure_future(self._ask_all())
        # Others may wait for the same answers.
        return await asyncio.shield(self._asking)

    async def close(self) -> None:
        """Safe to call twice."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._peers.close()

    async def _ask_all(self) -> list[Member]:
        return list(await asyncio.gather(*(self._ask(member) for member in self._members())))

    def _members(self) -> list[Member]:
        """As last heard of, with the errors of those that are known to have ended."""
        engine, cluster, members = self._engine, self._engine.cluster, list[Member]()
        drafter = engine.compressor.worker if engine.compressor is not None else None
        if drafter is not None and drafter.known is not None and drafter.address is not None:
            members.append(Member("prefill drafter", drafter.address, drafter.known, drafter.death))
        stages = len(cluster.workers)
        for index, (address, known) in enumerate(zip(cluster.addresses, cluster.workers, strict=True)):
            beside = cluster.draft is not None and cluster.draft_address is None and index == stages - 1
            # The draft is loaded behind the stage: only the later description knows of it.
            said = cluster.draft_worker if beside and cluster.draft_worker is not None else known
            members.append(Member(f"stage {index}", address, said, cluster.death(index), index, beside))
        if cluster.draft_address is not None and cluster.draft_worker is not None:
            death = cluster.death(stages)
            members.append(Member("draft", cluster.draft_address, cluster.draft_worker, death, draft=True))
        return members

    async def _ask(self, member: Member) -> Member:
        last = replace(member, said=self._heard.get(member.name, member.said))
        if member.error is not None:
            return replace(last, error=member.error)
        try:
            async with asyncio.timeout(ANSWER_S):
                said = await (await self._peers.worker(member.address)).describe()
            self._heard[member.name] = said
            return replace(member, said=said)
        except TimeoutError:
            return replace(last, error=f"the worker at {member.address} did not answer within {ANSWER_S:g} s")
        except FlashsplitError as error:
            return replace(last, error=error.message.partition("\n")[0])
