"""Sessions beside which steps follow by themselves: who gets a lane for them, and that both ends belong together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from services.errors import FlashsplitError, InvalidArgument, Unavailable
from services.messages.batch_frames import BatchAnswer
from services.messages.steps import Commit, FeatureSlice, Forward, Proposal, StepKind
from services.rpc.shared_memory import SharedMemoryServicer, open_link
from services.rpc.stage import RemoteStage, RemoteStageSession, StageServicer
from services.same_host.link import SharedLink, SharedLinks
from services.same_host.loop_watcher import LoopWatcher
from services.streams.batch_lane import STREAM_ID
from services.streams.batch_stream import TogetherOnly
from services.streams.step_lane import MIN_SHARED_BYTES, StepLane
from tests.services.conftest import Dial, Serve
from tests.services.fakes import OPEN, FakeStage, FakeStageSession, commit, prefill, tensor, until
from tests.services.thread_watcher import ThreadWatcher

FEATURES = (FeatureSlice(3, tensor(1, MIN_SHARED_BYTES)), FeatureSlice(3, tensor(1, 16), 0))
DOWN = Forward(1, 3, (4,), StepKind.DECODE, 2, tensor(1, MIN_SHARED_BYTES), FEATURES, more=8)
UP = Forward(2, 4, (9,), StepKind.DECODE, more=7)


ON_LOOP = pytest.mark.parametrize("neighbours", [(LoopWatcher, True)], indirect=True)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """A stage, and who calls it over a link with a socket for steps.

    link, stage_link: the two ends of the link. watchers: the caller's and the stage's.
    """

    port: FakeStage
    stage: RemoteStage
    link: SharedLink
    stage_link: SharedLink
    watchers: tuple[ThreadWatcher, ThreadWatcher]


@pytest.fixture(params=[(True, True)])
async def neighbours(request: pytest.FixtureRequest, serve: Serve, dial: Dial) -> AsyncIterator[Neighbours]:
    """request.param: whether the caller and the stage have a thread that watches, or the caller its event loop."""
    port, links, watchers = FakeStage(), SharedLinks(), (ThreadWatcher(), ThreadWatcher())
    one, other = (watcher if has else None for watcher, has in zip(watchers, request.param, strict=True))
    if request.param[0] is LoopWatcher:
        one = LoopWatcher()
    server = await serve(StageServicer(port, links).register, SharedMemoryServicer(links, other).register)
    channel = await dial(server.address)
    shared = await open_link(channel, server.address, one)
    there = links.get(shared.link.link_id)
    if all(request.param):
        await until(lambda: there.step_socket is not None)
    yield Neighbours(port, RemoteStage(channel, server.address, shared.link), shared.link, there, watchers)
    await shared.close()
    await until(lambda: there.closed)
    for watcher in watchers:
        watcher.end()


class Heard:
    """What a lane hheard."""

    def __init__(self, lane: StepLane | None) -> None:
        assert lane is not None
        self.steps: list[Forward] = []
        self.failures: list[FlashsplitError] = []
        lane.listen(self.steps.append, self.failures.append, max_tensor_bytes=1 << 20, max_feature_slices=2)

    async def next(self) -> Forward:
        await until(lambda: bool(self.steps or self.failures))
        assert self.failures == []
        return self.steps.pop(0)


async def answered(session: RemoteStageSession, forward: Forward) -> None:
    """The session itself works, past its lane."""
    await session.forward(forward)
    async with asyncio.timeout(5):
        assert await anext(session.events()) == commit(forward)


async def test_both_ends_of_a_lane(neighbours: Neighbours) -> None:
    """Steps of two sessions go down and up between caller and port, each through its own; frames go on beside them."""
    sessions = [await neighbours.stage.open(replace(OPEN, request_id=name), steps=True) for name in "ab"]
    theirs = neighbours.port.sessions
    assert [one.request.request_id for one in theirs] == ["a", "b"]
    below = [Heard(one.above) for one in theirs]
    above = [Heard(session.step_lane) for session in sessions]
    caller, stage = neighbours.watchers
    for number in range(20):
        for index in (0, 1):
            down, up = replace(DOWN, step=2 * number, more=40 + index), replace(UP, step=2 * number + 1, more=index)
            assert caller.call(lambda index=index, down=down: sessions[index].step_lane.send(down))
            assert await below[index].next() == down
            assert stage.call(lambda index=index, up=up: theirs[index].above.send(up))
            assert await above[index].next() == up
            await answered(sessions[index], prefill(number))
    assert [heard.steps + heard.failures for heard in (*above, *below)] == [[]] * 4
    assert [len(one.forwards) for one in theirs] == [20, 20]
    for session in sessions:
        await session.close()


async def test_who_does_not_want_one(neighbours: Neighbours) -> None:
    """By default, and where the caller says so; the next session may have one all the same."""
    for wanted in ({}, {"steps": False}, {"steps": True}):
        session = await neighbours.stage.open(OPEN, **wanted)
        has = bool(wanted.get("steps"))
        assert (session.step_lane is not None, neighbours.port.session.above is not None) == (has, has)
        await answered(session, prefill())
        await session.close()


@pytest.mark.parametrize("neighbours", [(True, False), (False, True), (False, False)], indirect=True)
async def test_both_sides_must_watch(neighbours: Neighbours) -> None:
    """Where one side has no thread for steps, neither side has a lane, and the session goes on."""
    session = await neighbours.stage.open(OPEN, steps=True)
    assert session.step_lane is neighbours.port.session.above is None
    await answered(session, prefill())
    await session.close()


async def test_without_a_link_there_is_none(serve: Serve, dial: Dial) -> None:
    """Without shared memory there is no lane for steps, and the session goes on."""
    port = FakeStage()
    server = await serve(StageServicer(port).register)
    session = await RemoteStage(await dial(server.address), server.address).open(OPEN, steps=True)
    assert session.step_lane is port.session.above is None
    await answered(session, prefill())
    await session.close()


@pytest.mark.parametrize("side", ["caller", "stage"])
async def test_a_broken_socket_leaves_the_sessions(neighbours: Neighbours, side: str) -> None:
    """Steps go the other way then; new sessions have no lane, and those that had one find out when they send."""
    session = await neighbours.stage.open(OPEN, steps=True)
    theirs, ours = neighbours.port.session.above, session.step_lane
    assert theirs is not None
    assert ours is not None
    link, stage_link = neighbours.link, neighbours.stage_link
    broken = (link if side == "caller" else stage_link).step_socket
    assert broken is not None
    broken.close()
    await until(lambda: link.step_socket is stage_link.step_socket is None)
    caller, stage = neighbours.watchers
    assert not caller.call(lambda: ours.send(DOWN))
    assert not stage.call(lambda: theirs.send(UP))
    await answered(session, prefill())
    other = await neighbours.stage.open(OPEN, steps=True)
    assert other.step_lane is neighbours.port.session.above is None
    await answered(other, prefill())
    await session.close()
    await other.close()


async def test_what_followed_is_told(neighbours: Neighbours) -> None:
    """That the next step has begun already, with the answer to the one before."""
    events = [
        Commit(1, 4, (9,), (), more=7, followed=True),
        Proposal(1, (5, 6), 77, followed=True),
        Commit(2, 5, (8,), (), more=6),
    ]

    async def answer(session: FakeStageSession, forward: Forward) -> None:
        for event in events:
            session.out.put_nowait(event)

    neighbours.port.answer = answer
    session = await neighbours.stage.open(OPEN, steps=True)
    await session.forward(DOWN)
    received: Any = session.events()
    async with asyncio.timeout(5):
        assert [await anext(received) for _ in events] == events
    [forward] = neighbours.port.session.forwards
    assert forward == DOWN
    await session.close()


@ON_LOOP
async def test_answers_of_several_sessions_at_once(neighbours: Neighbours) -> None:
    """A caller that wants answers alone gets them on its own loop, in one order with what its streams bring, until the
    session is closed; steps go in the streams as ever."""
    sessions = [await neighbours.stage.open(replace(OPEN, request_id=name), answers=True) for name in "ab"]
    theirs, events = neighbours.port.sessions, [session.events() for session in sessions]
    above = [one.above for one in theirs]
    assert [type(lane) for lane in above] == [TogetherOnly, TogetherOnly]
    assert above[0].batches is above[1].batches
    assert not above[0].send(UP)
    _, stage = neighbours.watchers

    def answer(step: int, index: int) -> BatchAnswer:
        proposal = Proposal(step, (index, 3), 5, followed=True)
        return BatchAnswer(above[index].stream_id, replace(commit(prefill(step)), more=9, propose_tokens=2), proposal)

    together = [answer(1, 0), answer(1, 1)]
    assert stage.call(lambda: above[0].batches.send_answers(together))
    for index in (0, 1):
        await sessions[index].forward(prefill(0))
        async with asyncio.timeout(5):
            told = [await anext(events[index]) for _ in range(3)]
        assert told == [commit(prefill(0)), together[index].commit, together[index].proposal]
    await sessions[0].close()
    assert stage.call(lambda: above[0].batches.send_answers([answer(2, 0), answer(2, 1)]))
    async with asyncio.timeout(5):
        assert await anext(events[1]) == answer(2, 1).commit
    await sessions[1].close()


@ON_LOOP
async def test_answers_need_the_socket_of_the_frames(neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it breaks as a session is opened, nobody could put both ways in one order: the session is refused, and one
    whose answers come in its stream is not."""
    monkeypatch.setattr(neighbours.stage_link, "_frame_socket", None)
    with pytest.raises(Unavailable, match="socket for the session's frames broke"):
        await neighbours.stage.open(OPEN, answers=True)
    await until(lambda: neighbours.port.session.closed)
    session = await neighbours.stage.open(OPEN)
    await answered(session, prefill())
    await session.close()


@ON_LOOP
async def test_answers_that_make_no_sense(neighbours: Neighbours) -> None:
    """Bytes that are no answers end the sessions for which they may have been, with an error that says so."""
    session = await neighbours.stage.open(OPEN, answers=True)
    _, stage = neighbours.watchers
    socket = neighbours.stage_link.step_socket
    assert socket is not None
    assert stage.call(lambda: socket.send(STREAM_ID, b"\xff\xff"))
    async with asyncio.timeout(5):
        with pytest.raises(InvalidArgument, match="could not be parsed"):
            await anext(session.events())
    await session.close()
