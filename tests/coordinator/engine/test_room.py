"""Answers that find no memory wait for each other; one always goes on."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from coordinator.engine.room import Place, Room
from services.errors import OUT_OF_MEMORY, ResourceExhausted
from tests.coordinator.fakes import Script, ScriptedCluster, ScriptedSession, engine, request, says

TEXT = "the quick brown fox jumps over the lazy dog"


class Memory(dict[int, ResourceExhausted]):
    """Failures of a script: steps find no memory where the rows of all open sessions have it. sessions: of the cluster
    whose script it is."""

    def __init__(self, room_for: int) -> None:
        self._room_for = room_for
        self.sessions: list[ScriptedSession] = []

    def get(self, key: int, default: object = None) -> object:
        opened = (session for session in self.sessions if not session.closed)
        if sum(len(forward.token_ids) for session in opened for forward in session.forwards) <= self._room_for:
            return default
        full = f"{self._room_for} of {self._room_for} rows are in use"
        return ResourceExhausted(f"no memory is left for keys and values: {full}", reason=OUT_OF_MEMORY)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_came_first_is_called_back_first() -> None:
    """At the end of another, and when one that was called back goes on; new ones begin behind all of them."""
    room = Room()
    places = [Place(room) for _ in range(4)]
    for place in places:
        await room.enter(place)
    third, second = (asyncio.ensure_future(places[index].step_aside()) for index in (3, 2))
    await settled()
    assert room.set_aside == room.preemptions == 2
    new = Place(room)
    entering = asyncio.ensure_future(room.enter(new))
    room.leave(places[1])
    await settled()
    assert (second.done(), third.done(), entering.done()) == (True, False, False)
    assert second.result()
    places[2].goes_on()
    await settled()
    assert third.result()
    assert not entering.done()
    places[3].goes_on()
    await settled()
    assert entering.done()
    assert room.set_aside == 0


async def test_the_last_one_goes_on_or_ends() -> None:
    """It tries again once, because the others' memory may come late; then waiting would bring nothing."""
    room = Room()
    one, other = Place(room), Place(room)
    await room.enter(other)
    await room.enter(one)
    waiting = asyncio.ensure_future(one.step_aside())
    await settled()
    assert await other.step_aside()
    assert not await other.step_aside()
    other.goes_on()
    await settled()
    assert waiting.done()


async def test_the_youngest_gives_way() -> None:
    """To all that came before it and find no memory, who go on once it has been set aside; it is called back when one
    has ended, not when they go on."""
    room = Room()
    oldest, middle, youngest = places = [Place(room) for _ in range(3)]
    for place in places:
        await room.enter(place)
    olders = [asyncio.ensure_future(place.step_aside()) for place in (oldest, middle)]
    await settled()
    assert youngest.is_asked
    assert not any(older.done() for older in olders)
    waiting = asyncio.ensure_future(youngest.step_aside())
    assert [await older for older in olders] == [True, True]
    assert (room.set_aside, youngest.is_asked) == (1, False)
    oldest.goes_on()
    middle.goes_on()
    await settled()
    assert not waiting.done()
    room.leave(oldest)
    await settled()
    assert waiting.result()


async def test_one_that_does_not_give_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client may not read: the one that found no memory is set aside itself. One that ends gives way as well."""
    monkeypatch.setattr("coordinator.engine.room.GIVE_WAY_S", 0.01)
    room = Room()
    oldest, middle, youngest = places = [Place(room) for _ in range(3)]
    for place in places:
        await room.enter(place)
    waiting = asyncio.ensure_future(oldest.step_aside())
    while not room.set_aside:
        await asyncio.sleep(0.005)
    assert not youngest.is_asked
    monkeypatch.setattr("coordinator.engine.room.GIVE_WAY_S", 60)
    older = asyncio.ensure_future(middle.step_aside())
    await settled()
    room.leave(youngest)
    assert await older
    await settled()
    assert waiting.result()


async def test_one_that_is_cancelled_leaves_its_place() -> None:
    room = Room()
    places = [Place(room) for _ in range(3)]
    for place in places:
        await room.enter(place)
    first, second = (asyncio.ensure_future(place.step_aside()) for place in (places[2], places[1]))
    await settled()
    first.cancel()
    await settled()
    room.leave(places[2])
    await settled()
    assert second.result()
    assert room.set_aside == 0


@pytest.mark.parametrize("room_for", [50, 60, 100, 200])
async def test_more_answers_than_there_is_memory_for(room_for: int) -> None:
    """Each takes 46 tokens of a memory for so many; all come to the same end, and no one takes memory that is not
    there."""
    memory = Memory(room_for)
    served = engine(Script(says(TEXT), failures=memory), max_running=6)
    sessions = memory.sessions = cast(ScriptedCluster, served.cluster).sessions

    async def answer() -> tuple[str | None, int]:
        async with served.answering(request()) as generation:
            async for _ in generation.pieces():
                await asyncio.sleep(0)
        assert generation.answer is not None
        return generation.answer.text, generation.answer.stats.resumed

    answers = await asyncio.wait_for(asyncio.gather(*(answer() for _ in range(12))), 30)
    assert [text for text, _ in answers] == [TEXT] * 12
    assert sum(resumed for _, resumed in answers) >= 6 - room_for // 40
    assert served.load.set_aside == 0
    assert all(session.closed for session in sessions)


async def test_an_answer_that_fits_nowhere_ends_with_the_numbers() -> None:
    memory = Memory(7)
    served = engine(Script(says(TEXT), failures=memory))
    memory.sessions = cast(ScriptedCluster, served.cluster).sessions
    async with served.answering(request()) as generation:
        with pytest.raises(ResourceExhausted, match="7 of 7 rows are in use"):
            async for _ in generation.pieces():
                pass
    assert served.load.running == 0
