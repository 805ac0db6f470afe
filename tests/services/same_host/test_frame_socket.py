"""Frames past gRPC: who may speak, what is kept apart, and what ends when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import AsyncIterator

import pytest

from services.errors import FailedPrecondition, InvalidArgument
from services.event_loop import run
from services.same_host.frame_socket import (
    MAX_FRAME_BYTES,
    WINDOW_BYTES,
    FrameLane,
    FrameListener,
    FrameSocket,
    connect_frames,
)
from tests.services.fakes import settled

HERE, THERE = os.urandom(16), os.urandom(16)


class Pair:
    """Both ends of a socket."""

    def __init__(self, here: FrameSocket, there: FrameSocket) -> None:
        self.here, self.there = here, there

    def lanes(self, stream_id: int) -> tuple[FrameLane, FrameLane]:
        return self.here.lane(stream_id), self.there.lane(stream_id)


async def accepted() -> tuple[FrameListener, str, asyncio.Future[FrameSocket]]:
    arrived: asyncio.Future[FrameSocket] = asyncio.get_running_loop().create_future()
    listener = FrameListener(own=THERE, expected=HERE, on_connected=arrived.set_result)
    return listener, await listener.start(), arrived


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    listener, name, arrived = await accepted()
    here = await connect_frames(name, own=HERE, expected=THERE)
    made = Pair(here, await arrived)
    yield made
    made.here.close()
    made.there.close()
    listener.close()


async def soon(lane: FrameLane) -> bytes | None:
    async with asyncio.timeout(5):
        return await lane.read()


async def test_streams_are_kept_apart(pair: Pair) -> None:
    """Frames of two streams, both ways, small and as large as they may be, each in order."""
    (one, there), (two, other) = pair.lanes(1), pair.lanes(2)
    large = os.urandom(MAX_FRAME_BYTES)
    for frame in (b"a", large, b"c"):
        writing = asyncio.gather(
            one.write(frame), two.write(frame[::-1]), there.write(frame * 2 if frame == b"a" else b"x")
        )
        assert await soon(there) == frame
        assert await soon(other) == frame[::-1]
        assert await soon(one) == (b"aa" if frame == b"a" else b"x")
        assert await writing == [True, True, True]
    with pytest.raises(InvalidArgument, match="stream_id 1 is in use"):
        pair.here.lane(1)


def test_with_the_event_loop_that_processes_have() -> None:
    """Which is not the one of these tests."""

    async def main() -> None:
        listener, name, arrived = await accepted()
        here = await connect_frames(name, own=HERE, expected=THERE)
        there = await arrived
        one, other = here.lane(1), there.lane(1)
        await one.write(b"frame")
        assert await soon(other) == b"frame"
        here.close()
        assert await soon(other) is None
        listener.close()

    run(main())


async def test_who_writes_waits_for_who_reads(pair: Pair) -> None:
    """A window's worth is on the way and no more; another stream goes on meanwhile."""
    lane, there = pair.lanes(1)
    other, other_there = pair.lanes(2)
    piece, count = bytes(WINDOW_BYTES // 4), 40

    written = 0

    async def write() -> None:
        nonlocal written
        for _ in range(count):
            assert await lane.write(piece)
            written += 1

    writing = asyncio.create_task(write())
    assert await settled(lambda: written) * len(piece) <= WINDOW_BYTES
    assert await other.write(b"past")
    assert await soon(other_there) == b"past"
    for _ in range(count):
        assert await soon(there) == piece
    await writing


async def test_an_end_comes_behind_the_frames(pair: Pair) -> None:
    """Of one side's; the other side's go on."""
    lane, there = pair.lanes(7)
    await lane.write(b"last")
    lane.end()
    assert [await soon(there), await soon(there), await soon(there)] == [b"last", None, None]
    await there.write(b"still")
    assert await soon(lane) == b"still"


@pytest.mark.parametrize("which", ["here", "there"])
async def test_a_process_that_goes_ends_all_streams(pair: Pair, which: str) -> None:
    """On both sides; writing says so."""
    lanes = [*pair.lanes(1), *pair.lanes(2)]
    getattr(pair, which).close()
    for lane in lanes:
        assert await soon(lane) is None
    async with asyncio.timeout(5):
        while await lanes[0].write(b"x") or await lanes[1].write(b"x"):
            await asyncio.sleep(0.001)


async def test_a_stranger_is_not_heard() -> None:
    """Who doesn't know the secret gets none, and does not keep the caller out that does."""
    listener, name, arrived = await accepted()
    with pytest.raises(FailedPrecondition, match="closed"):
        await connect_frames(name, own=os.urandom(16), expected=THERE)
    assert not arrived.done()
    with pytest.raises(FailedPrecondition):
        await connect_frames(name, own=HERE, expected=os.urandom(16))
    (await arrived).close()
    with pytest.raises(FailedPrecondition, match="can be reached"):
        await connect_frames(name, own=HERE, expected=THERE)
    listener.close()


@pytest.mark.parametrize("frames", [struct.pack("<Qi", 1, MAX_FRAME_BYTES + 1), struct.pack("<Qi", 1, 4 << 20) * 9])
async def test_senseless_sizes_end_it(frames: bytes) -> None:
    """A frame beyond the most, and more than the window unread."""
    listener, name, arrived = await accepted()
    reader, writer = await asyncio.open_unix_connection(f"\0{name}")
    writer.write(HERE)
    assert await reader.readexactly(16) == THERE
    lane = (await arrived).lane(1)
    size = int.from_bytes(frames[8:12], "little")
    for _ in range(len(frames) // 12):
        writer.write(frames[:12] + bytes(min(size, 4 << 20)))
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        while await lane.read() is not None:
            pass
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    listener.close()


async def test_frames_of_no_stream_are_nobodys(pair: Pair) -> None:
    """A stream that is over on one side may still be written to; others are not disturbed."""
    lane, there = pair.lanes(1)
    there.close()
    for _ in range(3):
        await lane.write(b"nobody reads this")
    two, other = pair.lanes(2)
    await two.write(b"heard")
    assert await soon(other) == b"heard"
