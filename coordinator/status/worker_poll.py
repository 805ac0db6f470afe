"""Asks the workers to describe themselves, over connections of its own, so that watching never delays a request.

A worker that doesn't answer in time is reported with an error and its last description.
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
"""How long a worker may take to describe itself."""

FRESH_S = 0.5
"""How long an answer serves everybody who asks, while the same workers hold the same layers."""


@dataclass(frozen=True, slots=True)
class PolledWorker:
    """A worker and how it describes itself.

    name: "stage 0", "draft", "prefill drafter". error: why it could not be asked; then `description` is its last one.
    stage: its place in the chain, None for the other two. draft: whether the draft is in this worker.
    """

    name: str
    address: str
    description: WorkerDescription
    error: str | None = None
    stage: int | None = None
    draft: bool = False

    @property
    def cache_usage(self) -> float:
        """The share of the memory for sessions' caches that open ones take, 0 to 1.

        That memory is what they take and what is free on the worker's devices. A worker that runs requests on several
        devices counts with all of them; one that doesn't say how much is free counts as empty.
        """
        free = sum(device.free_bytes for device in self.description.devices)
        return self.description.session_bytes / (self.description.session_bytes + free) if free else 0.0

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights that it has in this role."""
        description, has_stage = self.description, self.stage is not None
        parts = (
            description.target if has_stage else None,
            description.draft if self.draft else None,
            description.drafter if not has_stage and not self.draft else None,
        )
        return sum(part.weight_bytes for part in parts if part is not None)


class WorkerPoll:
    """Asks all workers of an engine. Close it at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._peers = Peers(
            timeout_s=ANSWER_S * 0.75, security=engine.cluster.launch.security, transport=PayloadTransport.STREAM
        )
        self._asking: asyncio.Task[list[PolledWorker]] | None = None
        self._asked_at = 0.0
        self._asked: tuple[object, ...] = ()
        self._last_descriptions: dict[str, WorkerDescription] = {}

    async def ask(self) -> list[PolledWorker]:
        """Return all workers in the order in which a request meets them, within ANSWER_S seconds.

        That order is: the prefill drafter, the stages, the draft. Where the layers are split anew while workers are
        asked, they are asked again, because these answers would contradict what else is said of the cluster by then.
        """
        while True:
            cluster, now = self._engine.cluster, time.monotonic()
            loaded = cluster.addresses, cluster.workers, cluster.draft_worker
            late = self._asking is not None and self._asking.done() and now - self._asked_at > FRESH_S
            if self._asking is None or late or self._asked != loaded:
                self._asked, self._asked_at, self._asking = loaded, now, asyncio.ensure_future(self._ask_all())
            # Others may wait for the same answers, so a caller that is cancelled must not end them.
            workers = await asyncio.shield(self._asking)
            if loaded == (cluster.addresses, cluster.workers, cluster.draft_worker):
                return workers

    async def close(self) -> None:
        """Stop asking and close the connections. Safe to call twice."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._peers.close()

    async def _ask_all(self) -> list[PolledWorker]:
        return list(await asyncio.gather(*(self._ask(worker) for worker in self._workers())))

    def _workers(self) -> list[PolledWorker]:
        """Return the workers as they were loaded, with the errors of those that are known to have ended."""
        engine, cluster, workers = self._engine, self._engine.cluster, list[PolledWorker]()
        drafter = engine.compressor.worker if engine.compressor is not None else None
        if drafter is not None and drafter.description is not None and drafter.address is not None:
            workers.append(PolledWorker("prefill drafter", drafter.address, drafter.description, drafter.death))
        stages = len(cluster.workers)
        for index, (address, known) in enumerate(zip(cluster.addresses, cluster.workers, strict=True)):
            beside = cluster.draft is not None and cluster.draft_address is None and index == stages - 1
            # The draft is loaded after the stage: only the later description knows of it.
            description = cluster.draft_worker if beside and cluster.draft_worker is not None else known
            workers.append(PolledWorker(f"stage {index}", address, description, cluster.loss(index), index, beside))
        if cluster.draft_address is not None and cluster.draft_worker is not None:
            death = cluster.loss(stages)
            workers.append(PolledWorker("draft", cluster.draft_address, cluster.draft_worker, death, draft=True))
        return workers

    async def _ask(self, worker: PolledWorker) -> PolledWorker:
        last = replace(worker, description=self._last_descriptions.get(worker.name, worker.description))
        if worker.error is not None:
            return last
        try:
            async with asyncio.timeout(ANSWER_S):
                description = await (await self._peers.worker(worker.address)).describe()
            self._last_descriptions[worker.name] = description
            return replace(worker, description=description)
        except TimeoutError:
            return replace(last, error=f"the worker at {worker.address} did not answer within {ANSWER_S:g} s")
        except FlashsplitError as error:
            return replace(last, error=error.message.partition("\n")[0])
