"""A chain of real stages and a real draft in one process, between which frames come later by random times.

What travels is the frames' dataclasses; a stream's order stays, as that of TCP does.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from services.errors import CLOSED, FlashsplitError, Unavailable
from services.messages.draft_session import OpenDraft
from services.messages.steps import DraftRoute, Event, Forward, OpenSession, SnapshotRestore, SnapshotSave
from services.rpc.stage import StageSession
from tests.coordinator.fakes import ScriptedCluster
from tests.shard_worker.chain import DRAFT_ADDRESS, Chain


class Way:
    """One direction of a stream: what is put in comes out in its order, each piece after a delay."""

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self._delay_s = delay_s
        self._pieces: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

    def put(self, piece: object) -> None:
        self._pieces.put_nowait((asyncio.get_running_loop().time() + self._delay_s(), piece))

    async def get(self) -> Any:
        due, piece = await self._pieces.get()
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        return piece


class DelayedSession:
    """A `StageSession` over which everything comes later, as that of a remote stage: what is wrong with a frame is
    told by `events`."""

    def __init__(self, session: StageSession, delay_s: Callable[[], float]) -> None:
        self._session = session
        self.stages, self.step_lane = session.stages, None
        self.max_tensor_bytes, self.max_feature_slices = session.max_tensor_bytes, session.max_feature_slices
        self._down, self._up = Way(delay_s), Way(delay_s)
        self._tasks = [asyncio.ensure_future(self._take()), asyncio.ensure_future(self._answer())]

    async def forward(self, forward: Forward) -> None:
        # The sender may overwrite its memory with the next step.
        own = forward.with_own_memory()
        self._down.put(lambda: self._session.forward(own))

    async def save_snapshot(self, save: SnapshotSave) -> None:
        self._down.put(lambda: self._session.save_snapshot(save))

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        self._down.put(lambda: self._session.restore_snapshot(restore))

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._up.get()) is not None:
            if isinstance(event, FlashsplitError):
                raise event
            yield event

    async def close(self, why: str = CLOSED) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._up.put(None)
        await self._session.close(why)

    async def _take(self) -> None:
        try:
            while True:
                await (await self._down.get())()
        except FlashsplitError as error:
            self._up.put(error)

    async def _answer(self) -> None:
        try:
            async for event in self._session.events():
                self._up.put(event)
            self._up.put(None)
        except FlashsplitError as error:
            self._up.put(error)


class DelayedDraft:
    """A draft's session over which everything comes later. lost_after: how many requests it takes before it is lost."""

    def __init__(self, session: Any, delay_s: Callable[[], float], lost_after: int | None) -> None:
        self._session, self._delay_s, self._left = session, delay_s, lost_after
        self.host, self.device, self.max_tensor_bytes = session.host, session.device, session.max_tensor_bytes
        self._in_order = asyncio.Lock()

    async def feature_slice(self, piece: Any) -> None:
        await self._after(self._session.feature_slice, piece)

    async def propose(self, request: Any) -> Any:
        return await self._after(self._session.propose, request)

    async def save_snapshot(self, save: Any) -> Any:
        return await self._after(self._session.save_snapshot, save)

    async def restore_snapshot(self, restore: Any) -> Any:
        return await self._after(self._session.restore_snapshot, restore)

    async def close(self, why: str = CLOSED) -> None:
        await asyncio.sleep(self._delay_s())
        await self._session.close(why)

    async def _after(self, call: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        async with self._in_order:
            await asyncio.sleep(self._delay_s())
            if self._left is not None:
                if not self._left:
                    raise Unavailable("the draft's worker is gone", reason="WORKER_UNREACHABLE", address=DRAFT_ADDRESS)
                self._left -= 1
            answer = await call(request)
            await asyncio.sleep(self._delay_s())
            return answer


class DelayedCluster(ScriptedCluster):
    """The cluster of a chain whose draft has a worker of its own; nothing else may use the chain beside it.

    delays_s: the longest delay of each edge: those into each stage, and last that to the draft. draft_lost_after: how
    many requests the draft of each session takes before it is lost; None for all.
    """

    def __init__(self, chain: Chain, block_size: int, seed: int) -> None:
        super().__init__(block_size=block_size)
        loaded = chain.roles[0].describe()
        assert loaded is not None
        self._chain, self.target, self._random = chain, loaded, random.Random(seed)
        self.workers = (replace(self.workers[0], target=loaded),)
        self.delays_s: tuple[float, ...] = (0.0,) * (len(chain.roles) + 1)
        self.draft_lost_after: int | None = None
        directory: Any = chain.directory
        directory.stage, directory.draft = self._stage_at, self._draft_at

    async def open(self, **opening: Any) -> Any:
        draft = DraftRoute(DRAFT_ADDRESS) if opening.pop("speculate") else None
        return await self._open(0, self._chain.request(draft=draft, **opening))

    async def snapshots(self, address: str) -> Any:
        raise Unavailable(f"{address} frees no snapshots here")

    def _delay(self, edge: int) -> Callable[[], float]:
        return lambda: self._random.uniform(0, self.delays_s[edge])

    async def _open(self, index: int, request: OpenSession, *, steps: bool = False) -> DelayedSession:
        await asyncio.sleep(self._delay(index)())
        session = await self._chain.roles[index].open(request)
        await asyncio.sleep(self._delay(index)())
        return DelayedSession(session, self._delay(index))

    async def _stage_at(self, address: str) -> Any:
        return SimpleNamespace(open=functools.partial(self._open, int(address.rpartition(":")[2])))

    async def _draft_at(self, _: str) -> Any:
        return SimpleNamespace(open=self._open_draft)

    async def _open_draft(self, request: OpenDraft) -> DelayedDraft:
        assert self._chain.draft_role is not None
        return DelayedDraft(await self._chain.draft_role.open(request), self._delay(-1), self.draft_lost_after)
