"""The server's present state: its own figures and the workers' descriptions, put together as a report."""

from __future__ import annotations

import asyncio
from importlib import metadata
from types import TracebackType

from coordinator.engine.engine import Engine
from coordinator.status import report
from coordinator.status.figures import Figures
from coordinator.status.recent import RECENT_S, RecentWork
from coordinator.status.rolling import KEPT_S, Sums
from coordinator.status.worker_poll import PolledWorker, WorkerPoll

RATE_S = 5
"""Rates are means over so many seconds."""


class Board:
    """Reports the state of an engine. Use as `async with`.

    The attribute `figures` holds what the engine has counted since the board was made.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.figures, self._poll = engine, Figures(engine), WorkerPoll(engine)
        self._recent: dict[str, RecentWork] = {}
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Board:
        self._watching = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._poll.close()

    async def _watch(self) -> None:
        """Ask the workers now and then, so that there is always something to compare with."""
        while True:
            for worker in await self._poll.ask():
                self._work_of(worker)
            await asyncio.sleep(RECENT_S)

    async def status(self) -> report.Status:
        """Return the present state, as soon as the workers have answered or their time is over."""
        workers = await self._poll.ask()
        engine, figures = self._engine, self.figures
        target, load, totals = engine.cluster.target, engine.load, figures.totals
        recent, seconds = figures.rolling.last(RATE_S)
        return report.Status(
            model=engine.name,
            aliases=list(engine.aliases),
            version=metadata.version("flashsplit"),
            uptime_s=round(figures.uptime_s, 1),
            ready=engine.ready,
            draining=load.draining,
            max_model_len=engine.max_model_len,
            num_layers=target.num_layers,
            dtype=target.dtype,
            kv_dtype=target.kv_dtype or target.dtype,
            requests=report.Requests(
                running=load.running,
                waiting=load.waiting,
                max_running=load.max_running,
                max_waiting=load.max_waiting,
                finished=dict(totals.outcomes),
            ),
            tokens=report.Tokens(
                prompt=totals.prompt_tokens,
                completion=totals.completion_tokens,
                completion_per_s=round(recent.produced / seconds, 1),
            ),
            acceptance=self._acceptance(),
            cache=report.Cache(
                enabled=engine.prefixes is not None,
                prompt_tokens=totals.prompt_tokens,
                hits={
                    source: report.CacheHits(requests=hits.requests, tokens=hits.tokens)
                    for source, hits in totals.hits.items()
                },
            ),
            workers=[self._worker(worker) for worker in workers],
            edges=self._edges(),
            standbys=[
                report.StandbyStatus(
                    place=one.place,
                    layers=None
                    if one.layers is None
                    else report.LayerBounds(first=one.layers.first, last=one.layers.last),
                    stages=list(one.stages),
                    error=one.why,
                )
                for one in engine.cluster.standbys
            ],
            degraded=engine.cluster.degraded,
        )

    async def workers(self) -> list[PolledWorker]:
        """Return the workers with what they say of themselves, in the order in which a request meets them."""
        return await self._poll.ask()

    def _worker(self, worker: PolledWorker) -> report.WorkerStatus:
        description, index, rolling = worker.description, worker.stage, self.figures.rolling
        target = description.target if index is not None else None
        load, batches = self._work_of(worker)
        return report.WorkerStatus(
            name=worker.name,
            address=worker.address,
            host=description.host,
            device=description.device,
            devices=[
                report.DeviceStatus(
                    name=device.name,
                    product=device.product,
                    total_bytes=device.total_bytes,
                    free_bytes=device.free_bytes,
                )
                for device in description.devices
            ],
            process_id=description.process_id,
            error=worker.error,
            layers=None if target is None else report.LayerBounds(first=target.layers.first, last=target.layers.last),
            draft=worker.draft,
            memory=report.Memory(
                weight_bytes=worker.weight_bytes,
                host_weight_bytes=0 if target is None else target.host_weight_bytes,
                session_bytes=description.session_bytes,
                snapshot_bytes=description.snapshot_bytes,
                snapshot_budget_bytes=description.snapshot_budget_bytes,
                pool_bytes=sum(device.pool_bytes for device in description.devices),
                pool_used_bytes=sum(device.pool_used_bytes for device in description.devices),
            ),
            sessions=description.open_sessions,
            load=round(load, 3),
            shares=shares_of(rolling.last(KEPT_S)[0], index, draft=worker.draft),
            batches=None if index is None else batches,
            versions=report.Versions(
                flashsplit=description.flashsplit_version,
                torch=description.torch_version,
                python=description.python_version,
            ),
        )

    def _work_of(self, worker: PolledWorker) -> tuple[float, report.Batches | None]:
        return self._recent.setdefault(worker.name, RecentWork()).add(worker.description)

    def _edges(self) -> list[report.EdgeStatus]:
        """Return the connections down the chain, and the one to the draft where it has a worker of its own."""
        cluster, rolling = self._engine.cluster, self.figures.rolling
        (recent, seconds), (minute, _) = rolling.last(RATE_S), rolling.last(KEPT_S)
        stages = [f"stage {index}" for index in range(len(cluster.workers))]
        sources, ends = ["coordinator", *stages], list(stages)
        if cluster.draft_address is not None:
            ends.append("draft")
        return [
            report.EdgeStatus(
                source=source,
                to=to,
                bytes_per_s=round(recent.sent_bytes[index] / seconds, 1),
                total_bytes=rolling.total.sent_bytes[index],
                step_ms=round(minute.wire_ns[index] / minute.steps / 1e6, 3)
                if minute.steps and index < len(stages)
                else None,
            )
            for index, (source, to) in enumerate(zip(sources, ends, strict=False))
        ]

    def _acceptance(self) -> report.Acceptance:
        rolling = self.figures.rolling
        total, (minute, _) = rolling.total, rolling.last(KEPT_S)

        def length(sums: Sums) -> float | None:
            return round(1 + sums.accepted / sums.verifies, 3) if sums.verifies else None

        return report.Acceptance(
            block_rows=len(total.kept),
            verifies=total.verifies,
            draft_tokens=total.offered,
            accepted_tokens=total.accepted,
            kept=total.kept,
            tokens_per_verify=length(total),
            recent_tokens_per_verify=length(minute),
        )


def shares_of(sums: Sums, stage: int | None, *, draft: bool) -> report.Shares | None:
    """Return where the time of decode steps went, seen from one worker; None where it had no part in any.

    stage: the worker's stage; None for one without. draft: whether the draft is in the worker.
    """
    if not sums.step_ns or (stage is None and not draft):
        return None
    drafting_ns = sums.draft_ns if draft else 0
    forward_ns, wire_ns = (0, 0) if stage is None else (sums.forward_ns[stage], sums.wire_ns[stage])
    busy, wire = _share(forward_ns + drafting_ns, sums.step_ns), _share(wire_ns, sums.step_ns)
    return report.Shares(
        busy=busy,
        drafting=_share(drafting_ns, sums.step_ns),
        wire=wire,
        wait=round(max(0.0, 1 - busy - wire), 4),
    )


def _share(part: float, whole: float) -> float:
    return round(min(1.0, part / whole), 4)
