"""A cluster with its prefix cache, as the commands put them together, for tests that look inside."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coordinator.answer import Answer, Request
from coordinator.cluster.cluster import Cluster, StandbyPlan
from coordinator.cluster.loading import Checkpoints
from coordinator.cluster.placement import WorkerPlace, make_plan
from coordinator.engine.engine import Engine
from coordinator.engine.generation import generate
from coordinator.engine.step_times import StepTaken
from coordinator.prefix.cache import PrefixCache, lineage_of
from coordinator.prefix.disk.disk_cache import DiskCache
from coordinator.prefix.policy import KeepPolicy
from coordinator.prefix.stores import open_store
from services.messages.sampling import SamplingParams
from services.messages.steps import StepKind
from services.model.quantization import Quantization
from services.processes.launch import Launch
from tests.e2e.conftest import Pair

TOKENS = 40
POLICY = KeepPolicy(min_tokens=8, checkpoint_tokens=24)
GREEDY = SamplingParams()


@dataclass
class Client:
    """One cluster with its cache."""

    cluster: Cluster
    cache: PrefixCache
    asked: int = 0

    async def ask(
        self,
        prompt: tuple[int, ...],
        *,
        sampling: SamplingParams = GREEDY,
        speculate: bool = True,
        cached: bool = True,
        boundaries: tuple[int, ...] = (),
        tokens: int = TOKENS,
        stop: frozenset[int] = frozenset(),
    ) -> Answer:
        self.asked += 1
        request = Request(
            f"p{self.asked}",
            prompt,
            tokens,
            sampling,
            stop,
            speculate=speculate,
            prefill_chunk=16,
            boundaries=boundaries,
        )
        return await generate(self.cluster, request, None, prefixes=self.cache if cached else None)

    async def settle(self) -> None:
        """Wait until what was asked so far is kept, and written where there is a store."""
        while self.cache.pending:
            await asyncio.sleep(0.01)


async def tokens_of(engine: Engine, request: Request, *, waits_for: asyncio.Event | None = None) -> tuple[int, ...]:
    """The tokens of an answer. waits_for: until that the client reads no more than three pieces."""
    told: list[int] = []
    async with engine.answering(request) as generation:
        pieces = 0
        async for piece in generation.pieces():
            told += piece.token_ids
            pieces += 1
            if pieces == 3 and waits_for is not None:
                await waits_for.wait()
    return tuple(told)


def about_to_pause(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """What is set when answers are told to wait behind their next steps."""
    told, paused = asyncio.Event(), engine.paused

    @contextlib.asynccontextmanager
    async def tell_and_pause(timeout_s: float) -> AsyncIterator[int]:
        told.set()
        async with paused(timeout_s) as going_on:
            yield going_on

    monkeypatch.setattr(engine, "paused", tell_and_pause)
    return told


@dataclass(frozen=True, slots=True)
class PauseWithinPrompt:
    """A pause of an engine that comes while one more request is in the midst of its prompt.

    request: that one, asked with each pause. kept: how many tokens of each request steps have kept. prefilled: that the
    first chunk of its prompt is. asked: the task that reads its tokens.
    """

    request: Request
    kept: Counter[str] = field(default_factory=Counter)
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[asyncio.Task[tuple[int, ...]]] = field(default_factory=list)

    @classmethod
    def of(cls, engine: Engine, request: Request, monkeypatch: pytest.MonkeyPatch) -> PauseWithinPrompt:
        """Have the engine's pauses come so."""
        self, paused = cls(request), engine.paused

        def count(step: StepTaken) -> None:
            self.kept[step.request_id] += step.kept
            if step.request_id == request.request_id and step.kind is StepKind.PREFILL:
                self.prefilled.set()

        @contextlib.asynccontextmanager
        async def pause(timeout_s: float) -> AsyncIterator[int]:
            self.asked.append(asyncio.create_task(tokens_of(engine, request)))
            await self.prefilled.wait()
            async with paused(timeout_s) as going_on:
                yield going_on

        engine.step_listeners.append(count)
        monkeypatch.setattr(engine, "paused", pause)
        return self

    def forget(self) -> None:
        """Begin anew."""
        self.kept.clear()
        self.prefilled.clear()


@contextlib.asynccontextmanager
async def client(
    pair: Pair,
    devices: str,
    split: str | None = None,
    *,
    draft_device: str | None = None,
    prefix_cache_bytes: int | None = None,
    store: Path | None = None,
    has_draft: bool = True,
    kv_dtype: str | None = None,
    quantization: Quantization | None = None,
    standbys: Sequence[str] = (),
) -> AsyncIterator[Client]:
    """standbys: the addresses of workers that stand by."""
    plan = make_plan(
        target_devices=devices,
        layer_split=split,
        draft_device=draft_device,
        num_layers=pair.layers,
        has_draft=has_draft,
    )
    draft = pair.draft if has_draft else None
    files = Checkpoints(pair.target, draft, "float32", kv_dtype=kv_dtype, quantization=quantization)
    launch = Launch(threads=1, prefix_cache_bytes=prefix_cache_bytes)
    waiting = StandbyPlan(tuple(WorkerPlace(None, address) for address in standbys))
    async with Cluster(plan, files, launch=launch, standbys=waiting) as cluster:
        disk = None
        if store is not None:
            lineages = [lineage_of(cluster, "text", with_draft=with_draft) for with_draft in (False, True)]
            disk = DiskCache(open_store(str(store)), lineages, pair.layers, "tiny", budget_bytes=1 << 30, min_tokens=8)
        async with PrefixCache(cluster, "text", disk=disk, policy=POLICY) as cache:
            yield Client(cluster, cache)
