"""The worker that reads prompts: started or connected, loaded, and started again after it was lost.

It is a worker of its own, so that a drafter that fails or runs out of memory takes nothing else with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from coordinator.cluster.loading import when_free
from coordinator.cluster.placement import WorkerPlace
from services.errors import FailedPrecondition, Unavailable
from services.messages.compression import Compressed, CompressRequest
from services.messages.description import DrafterDescription, Role, WorkerDescription
from services.messages.loading import LoadDrafter, LoadProgress
from services.processes.launch import DEFAULT_LAUNCH, Launch
from services.processes.worker_process import WorkerFailed, WorkerProcess
from services.rpc.liveness import LOST_AFTER_S
from services.rpc.peers import Peers

log = structlog.get_logger()

Bar = Callable[[LoadProgress], None]


class DrafterWorker:
    """A drafter and its worker. Use `start`, and in any case `close`.

    place: where the worker runs, or on which device to start it. drafter: the checkpoint's directory. on_progress:
    hears how far loading is.
    """

    def __init__(
        self,
        place: WorkerPlace,
        drafter: Path,
        *,
        dtype: str | None = None,
        launch: Launch = DEFAULT_LAUNCH,
        lost_after_s: float = LOST_AFTER_S,
        on_progress: Bar = lambda progress: None,
    ) -> None:
        self._place, self._part = place, LoadDrafter(str(drafter), dtype)
        self._launch, self._on_progress = replace(launch, prefix_cache_bytes=0), on_progress
        self._peers = Peers(lost_after_s=lost_after_s, security=launch.security, transport=launch.transport)
        self._process: WorkerProcess | None = None
        self._death: asyncio.Task[WorkerFailed] | None = None
        self._starting = asyncio.Lock()
        self._drafter: DrafterDescription | None = None
        self.description: WorkerDescription | None = None
        """How the worker described itself when it had loaded; None before."""

    @property
    def address(self) -> str | None:
        """The worker's address; None for a local one that is not started."""
        return self._place.address or (self._process.address if self._process is not None else None)

    @property
    def death(self) -> str | None:
        """How the worker ended, as a sentence; None while it runs."""
        task = self._death
        return task.result().message if task is not None and task.done() and not task.cancelled() else None

    async def start(self) -> DrafterDescription:
        """Start the worker, have it load the drafter, and return the drafter; what runs already is left as it is.

        Raises what starting, calling and loading raise.
        """
        async with self._starting:
            if self._drafter is None or (self._death is not None and self._death.done()):
                await self._end()
                self._drafter = await self._load(await self._address())
            return self._drafter

    async def compress(self, request_id: str, token_ids: tuple[int, ...], ratio: float) -> Compressed:
        """Return which tokens to keep. A failure is raised, and the next request starts the worker anew."""
        drafter = await self.start()
        try:
            remote = await self._peers.compressor(await self._address())
            return await remote.compress(CompressRequest(request_id, drafter.fingerprint, token_ids, ratio))
        except FailedPrecondition:
            # A remote worker that was started again holds nothing, or another coordinator's drafter.
            self._drafter = None
            raise
        except Unavailable as error:
            self._drafter = None
            if self._death is not None:
                await asyncio.wait([self._death], timeout=0.5)
                if self._death.done():
                    death = self._death.result()
                    raise WorkerFailed(death.message, death.log_lines, reason="WORKER_DIED") from error
            raise

    async def close(self) -> None:
        """End the worker and close the connections. Safe to call twice."""
        await self._peers.close()
        await self._end()

    async def _address(self) -> str:
        if self._place.address is not None:
            return self._place.address
        if self._process is None:
            assert self._place.devices is not None
            self._process = WorkerProcess(self._place.devices, [Role.COMPRESS], self._launch, self._place.memory)
            await self._process.start()
            self._death = asyncio.ensure_future(self._process.died())
        return self._process.address

    async def _load(self, address: str) -> DrafterDescription:
        worker = await self._peers.worker(address)
        loaded = await when_free(lambda: worker.load(self._part, self._on_progress))
        if loaded.drafter is None:
            raise FailedPrecondition(f"the worker at {address} loaded no drafter", reason="NOT_LOADED")
        self.description = loaded
        log.info("compress.ready", device=loaded.device, host=loaded.host, bytes=loaded.drafter.weight_bytes)
        return loaded.drafter

    async def _end(self) -> None:
        if self._death is not None:
            self._death.cancel()
            self._death = None
        if self._process is not None:
            process, self._process = self._process, None
            await process.stop()
