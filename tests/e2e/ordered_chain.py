"""A chain of real stages and a real draft in one process, whose frames arrive in any order that a test chooses.

What travels is the frames' dataclasses; the order within a stream stays, as that of TCP does.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from services.errors import CLOSED, FlashsplitError, Unavailable
from services.messages.draft_session import OpenDraft
from services.messages.steps import DraftRoute, Event, Forward, OpenSession, SnapshotRestore, SnapshotSave, StepLimit
from services.rpc.stage import StageSession
from shard_worker.device.executor import DeviceThread
from tests.coordinator.fakes import ScriptedCluster
from tests.shard_worker.chain import DRAFT_ADDRESS, Chain


class Post:
    """Decides which of the frames that are on their way arrives next, each time when nobody is about to send another
    one. Use as `async with`; without it frames arrive at once.

    delivered: how many frames have arrived.
    """

    def __init__(self, picks: Sequence[int], threads: Sequence[DeviceThread]) -> None:
        """picks: which of the frames that have waited longest arrives, one number after the other, over and over.
        threads: those that compute."""
        self._picks, self._threads = itertools.cycle(picks), threads
        self._waiting: list[asyncio.Future[None]] = []
        self._delivering: asyncio.Task[None] | None = None
        self.delivered = 0

    async def __aenter__(self) -> Post:
        self._delivering = asyncio.ensure_future(self._deliver())
        return self

    async def __aexit__(self, *ending: object) -> None:
        delivering, self._delivering = self._delivering, None
        assert delivering is not None
        delivering.cancel()
        await asyncio.wait([delivering])
        while self._waiting:
            self._arrive(0)

    async def turn(self) -> None:
        """Wait until the frame arrives that the caller has on its way."""
        if self._delivering is not None:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]

    async def _deliver(self) -> None:
        while True:
            for _ in range(2):
                for thread in self._threads:
                    await thread.submit(int)
                for _ in range(5):
                    await asyncio.sleep(0)
            if self._waiting:
                self._arrive(next(self._picks) % len(self._waiting))
            else:
                await asyncio.sleep(0.001)

    def _arrive(self, index: int) -> None:
        frame = self._waiting.pop(index)
        self.delivered += 1
        # Who waited for it may have gone.
        if not frame.done():
            frame.set_result(None)


Turn = Callable[[], Awaitable[None]]
"""Waits until a frame arrives."""


class Way:
    """One direction of a stream: what is put in comes out in its order, each piece when its turn has come."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._pieces: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, piece: object) -> None:
        self._pieces.put_nowait(piece)

    async def get(self) -> Any:
        piece = await self._pieces.get()
        await self._turn()
        return piece


class OrderedSession:
    """A `StageSession` as that of a remote stage: frames are on their way for a while, and `events` tells what is wrong
    with one."""

    def __init__(self, session: StageSession, turn: Turn) -> None:
        self._session = session
        self.stages, self.step_lane = session.stages, None
        self.max_tensor_bytes, self.max_feature_slices = session.max_tensor_bytes, session.max_feature_slices
        self._down, self._up = Way(turn), Way(turn)
        self._tasks = [asyncio.ensure_future(self._take()), asyncio.ensure_future(self._answer())]

    async def forward(self, forward: Forward) -> None:
        # The sender may overwrite its memory with the next step.
        own = forward.with_own_memory()
        self._down.put(lambda: self._session.forward(own))

    async def limit_steps(self, limit: StepLimit) -> None:
        self._down.put(lambda: self._session.limit_steps(limit))

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


class OrderedDraft:
    """A draft's session as that of a remote draft. lost_after: how many requests it takes before it is lost."""

    def __init__(self, session: Any, turn: Turn, lost_after: int | None) -> None:
        self._session, self._turn, self._left = session, turn, lost_after
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
        await self._turn()
        await self._session.close(why)

    async def _after(self, call: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        async with self._in_order:
            await self._turn()
            if self._left is not None:
                if not self._left:
                    raise Unavailable("the draft's worker is gone", reason="WORKER_UNREACHABLE", address=DRAFT_ADDRESS)
                self._left -= 1
            answer = await call(request)
            await self._turn()
            return answer


class OrderedCluster(ScriptedCluster):
    """The cluster of a chain whose draft has a worker of its own; nothing else may use the chain beside it.

    post: decides in which order frames arrive; None where they arrive at once. draft_lost_after: how many requests the
    draft of each session takes before it is lost; None for all.
    """

    def __init__(self, chain: Chain, block_size: int) -> None:
        super().__init__(block_size=block_size)
        loaded = chain.roles[0].describe()
        assert loaded is not None
        self._chain, self.target = chain, loaded
        self.workers = (replace(self.workers[0], target=loaded),)
        self.post: Post | None = None
        self.draft_lost_after: int | None = None
        directory: Any = chain.directory
        directory.stage, directory.draft = self._stage_at, self._draft_at

    async def open(self, **opening: Any) -> Any:
        draft = DraftRoute(DRAFT_ADDRESS) if opening.pop("speculate") else None
        return await self._open(0, self._chain.request(draft=draft, **opening))

    async def snapshots(self, address: str) -> Any:
        raise Unavailable(f"{address} frees no snapshots here")

    async def _turn(self) -> None:
        if self.post is not None:
            await self.post.turn()

    async def _open(self, index: int, request: OpenSession, *, steps: bool = False) -> OrderedSession:
        await self._turn()
        session = await self._chain.roles[index].open(request)
        await self._turn()
        return OrderedSession(session, self._turn)

    async def _stage_at(self, address: str) -> Any:
        return SimpleNamespace(open=functools.partial(self._open, int(address.rpartition(":")[2])))

    async def _draft_at(self, _: str) -> Any:
        return SimpleNamespace(open=self._open_draft)

    async def _open_draft(self, request: OpenDraft) -> OrderedDraft:
        assert self._chain.draft_role is not None
        return OrderedDraft(await self._chain.draft_role.open(request), self._turn, self.draft_lost_after)
