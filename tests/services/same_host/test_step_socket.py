"""Packets from thread to thread: who may speak, what is kept apart, what is not sent, and what ends when."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from services.errors import FailedPrecondition, InvalidArgument
from services.event_loop import run
from services.same_host.step_socket import MAX_PACKET_BYTES, StepListener, StepSocket, connect_steps
from tests.services.thread_watcher import ThreadWatcher

HERE, THERE = os.urandom(16), os.urandom(16)
LARGEST = MAX_PACKET_BYTES - 8


class Pair:
    """Both ends of a socket, each with its thread."""

    def __init__(self, here: socket.socket, there: socket.socket) -> None:
        self.watchers = ThreadWatcher(), ThreadWatcher()
        self.here, self.there = StepSocket(here, self.watchers[0]), StepSocket(there, self.watchers[1])

    def send(self, stream_id: int, message: bytes) -> bool:
        return self.watchers[0].call(lambda: self.here.send(stream_id, message))

    def answer(self, stream_id: int, message: bytes) -> bool:
        return self.watchers[1].call(lambda: self.there.send(stream_id, message))

    def close(self) -> None:
        self.here.close()
        self.there.close()
        for watcher in self.watchers:
            watcher.end()


class Heard:
    """What came for a stream, and on which thread."""

    def __init__(self, end: StepSocket, stream_id: int) -> None:
        self.messages: list[bytes] = []
        self.threads: set[int] = set()
        end.join(stream_id, self._take)

    def _take(self, message: memoryview) -> None:
        self.threads.add(threading.get_ident())
        self.messages.append(bytes(message))


async def accepted() -> tuple[StepListener, str, asyncio.Future[socket.socket]]:
    arrived: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    listener = StepListener(own=THERE, expected=HERE, on_connected=arrived.set_result)
    return listener, listener.start(), arrived


async def connected() -> Pair:
    _, name, arrived = await accepted()
    here = await connect_steps(name, own=HERE, expected=THERE)
    return Pair(here, await soon(arrived))


async def soon(coming: asyncio.Future[socket.socket]) -> socket.socket:
    async with asyncio.timeout(5):
        return await coming


def until(holds: Callable[[], bool]) -> None:
    """Until a condition holds: within five seconds."""
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def made() -> tuple[socket.socket, socket.socket]:
    """What `connect_steps` and a listener come to."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    return ends


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(*made())
    yield pair
    pair.close()


@dataclass(frozen=True, slots=True)
class Raw:
    """One end, and another process's socket at the other."""

    theirs: socket.socket
    end: StepSocket
    watcher: ThreadWatcher


@pytest.fixture
def raw() -> Iterator[Raw]:
    theirs, ours = made()
    watcher = ThreadWatcher()
    raw = Raw(theirs, StepSocket(ours, watcher), watcher)
    yield raw
    raw.end.close()
    watcher.end()
    theirs.close()


def open_sockets() -> int:
    """How many sockets for packets this process has open; those of gRPC are of other types, and come and go."""
    # Those that nobody holds any more must not go in between.
    gc.collect()
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=int(descriptor))
            count += sock.type == socket.SOCK_SEQPACKET
            sock.detach()
    return count


def talk(pair: Pair) -> None:
    """Two streams, both ways, small and as large as they may be, each in order."""
    down, up = [Heard(pair.there, number) for number in (1, 2)], [Heard(pair.here, number) for number in (1, 2)]
    messages = [b"a", b"", os.urandom(LARGEST), *(number.to_bytes(2, "little") for number in range(200))]
    for message in messages:
        # Two of the largest do not fit at once.
        for stream_id, sent in ((1, message), (2, message[::-1])):
            until(lambda sent=sent, stream_id=stream_id: pair.send(stream_id, sent))
            until(lambda sent=sent, stream_id=stream_id: pair.answer(stream_id, b"to" + sent[2:]))
    for heard, ident, begin in ((down, pair.watchers[1].ident, None), (up, pair.watchers[0].ident, b"to")):
        until(lambda heard=heard: [len(one.messages) for one in heard] == [len(messages)] * 2)
        for one, expected in zip(heard, (messages, [message[::-1] for message in messages]), strict=True):
            assert one.messages == [sent if begin is None else begin + sent[2:] for sent in expected]
            assert one.threads == {ident}


async def test_streams_are_kept_apart() -> None:
    """Each packet reaches who joined its stream, on the thread that watches, in order."""
    pair = await connected()
    talk(pair)
    pair.close()


def test_with_the_event_loop_that_processes_have() -> None:
    """Which is not the one of these tests."""

    async def main() -> None:
        pair = await connected()
        talk(pair)
        pair.close()
        listener, name, arrived = await accepted()
        with pytest.raises(FailedPrecondition):
            await connect_steps(name, own=os.urandom(16), expected=THERE)
        (await connect_steps(name, own=HERE, expected=THERE)).close()
        (await soon(arrived)).close()
        listener.close()

    run(main())


def test_packets_of_no_stream_are_nobodys(pair: Pair) -> None:
    """Those of one that was left too; others are not disturbed."""
    left, heard = Heard(pair.there, 1), Heard(pair.there, 2)
    assert pair.send(1, b"first")
    until(lambda: left.messages == [b"first"])
    pair.watchers[1].call(lambda: pair.there.leave(1))
    pair.watchers[1].call(lambda: pair.there.leave(99))
    for stream_id in (1, 2**64 - 1, 2):
        assert pair.send(stream_id, b"later")
    until(lambda: heard.messages == [b"later"])
    assert left.messages == [b"first"]


def test_what_is_too_large_is_not_sent(pair: Pair) -> None:
    """A message above the largest packet is refused, and the socket goes on."""
    heard = Heard(pair.there, 1)
    assert not pair.send(1, bytes(LARGEST + 1))
    assert pair.send(1, bytes(LARGEST))
    until(lambda: heard.messages == [bytes(LARGEST)])
    assert not pair.here.closed


@pytest.mark.parametrize("size", [5, 3000, LARGEST])
def test_what_has_no_room_is_not_sent(pair: Pair, size: int) -> None:
    """Nothing of it; what was sent comes whole and in order, and there is room again."""
    heard, sent = Heard(pair.there, 1), []
    with pair.watchers[1].held():
        while pair.send(1, message := len(sent).to_bytes(4, "little") + os.urandom(size - 4)):
            sent.append(message)
        assert sent
        assert not pair.here.closed
        assert heard.messages == []
    until(lambda: len(heard.messages) == len(sent))
    until(lambda: pair.send(1, b"room"))
    until(lambda: heard.messages == [*sent, b"room"])


@pytest.mark.parametrize("which", ["here", "there"])
def test_an_end_that_goes_closes_the_other(pair: Pair, which: str) -> None:
    """Both say so, and nothing is sent any more; closing twice is once."""
    heard = Heard(pair.there, 1)
    getattr(pair, which).close()
    until(lambda: pair.here.closed and pair.there.closed)
    assert not pair.send(1, b"x")
    assert not pair.answer(1, b"x")
    pair.here.close()
    pair.here.close()
    assert heard.messages == []


def test_what_was_sent_before_the_end_comes(pair: Pair) -> None:
    """A process that sends a step and goes has sent it."""
    heard = Heard(pair.there, 1)
    with pair.watchers[1].held():
        for number in range(3):
            assert pair.send(1, bytes([number]))
        pair.here.close()
    until(lambda: pair.there.closed)
    assert heard.messages == [b"\0", b"\1", b"\2"]


def test_who_hears_may_close(pair: Pair) -> None:
    """What comes behind it is not heard."""
    messages: list[bytes] = []

    def take(message: memoryview) -> None:
        messages.append(bytes(message))
        pair.there.close()

    pair.there.join(1, take)
    with pair.watchers[1].held():
        assert pair.send(1, b"last")
        assert pair.send(1, b"behind")
    until(lambda: pair.here.closed)
    assert messages == [b"last"]


@pytest.mark.parametrize("packet", [b"x", bytes(7)])
def test_a_packet_without_a_header_closes(raw: Raw, packet: bytes) -> None:
    """A packet that names no stream ends the socket, behind the messages that came before it."""
    heard = Heard(raw.end, 0)
    raw.theirs.send(struct.pack("<Q", 0) + b"good")
    raw.theirs.send(packet)
    until(lambda: raw.end.closed)
    assert heard.messages == [b"good"]
    raw.theirs.settimeout(5)
    assert raw.theirs.recv(1) == b""


def test_who_sends_without_end_does_not_keep_the_thread(raw: Raw) -> None:
    """It comes back to what else it has to do."""
    packet, over, heard = struct.pack("<Q", 1), False, 0

    def again(_: memoryview) -> None:
        """As if the other process were always faster."""
        nonlocal heard
        heard += 1
        if not over:
            raw.theirs.send(packet)

    raw.end.join(1, again)
    raw.theirs.send(packet)
    try:
        for _ in range(100):
            raw.watcher.call(lambda: None)
    finally:
        over = True
    assert heard > 100


# --- how two come to one


async def test_a_stranger_is_not_heard() -> None:
    """Who doesn't know the secret gets none, and does not keep the caller out that does; nor who says nothing."""
    before = open_sockets()
    listener, name, arrived = await accepted()
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(f"\0{name}")
    for own in (os.urandom(16), HERE + b"\0", HERE[:-1]):
        with pytest.raises(FailedPrecondition, match=f"no socket {name} can be reached"):
            await connect_steps(name, own=own, expected=THERE)
    assert not arrived.done()
    here = await connect_steps(name, own=HERE, expected=THERE)
    there = await soon(arrived)
    assert silent.recv(100) == b""
    for one in (here, there, silent):
        one.close()
    listener.close()
    assert open_sockets() == before


async def test_who_goes_before_the_greeting_is_forgotten() -> None:
    """Callers that connect and go leave no socket behind, and do not keep the caller out that stays."""
    before = open_sockets()
    listener, name, arrived = await accepted()
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as going:
            going.connect(f"\0{name}")
        await asyncio.sleep(0.01)
    (await connect_steps(name, own=HERE, expected=THERE)).close()
    (await soon(arrived)).close()
    assert open_sockets() == before


async def test_a_listener_waits_for_one() -> None:
    """Who comes later finds nobody; so does who comes when it was closed, which can be done twice."""
    listener, name, arrived = await accepted()
    here = await connect_steps(name, own=HERE, expected=THERE)
    (await soon(arrived)).close()
    here.close()
    with pytest.raises(FailedPrecondition, match="refused"):
        await connect_steps(name, own=HERE, expected=THERE)
    listener.close()
    other, name, arrived = await accepted()
    other.close()
    other.close()
    with pytest.raises(FailedPrecondition, match="refused"):
        await connect_steps(name, own=HERE, expected=THERE)
    assert not arrived.done()


async def test_a_wrong_answer_is_refused() -> None:
    """Of a listener that took the caller for its own: its end goes with the caller's."""
    before = open_sockets()
    _, name, arrived = await accepted()
    with pytest.raises(FailedPrecondition, match="another process answers") as caught:
        await connect_steps(name, own=HERE, expected=os.urandom(16))
    assert caught.value.reason == "NOT_SHARED"
    there = await soon(arrived)
    assert there.recv(1) == b""
    there.close()
    assert open_sockets() == before


@pytest.mark.parametrize("listens", [False, True])
async def test_who_does_not_answer(listens: bool) -> None:
    """Nobody there, and one that never says anything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        name = f"flashsplit-test-{os.urandom(8).hex()}"
        if listens:
            mute.bind(f"\0{name}")
            mute.listen()
        before = open_sockets()
        with pytest.raises(FailedPrecondition, match=f"no socket {name} can be reached"):
            async with asyncio.timeout(5):
                await connect_steps(name, own=HERE, expected=THERE, timeout_s=0.1)
        assert open_sockets() == before


async def test_a_caller_that_gives_up_leaves_nothing() -> None:
    """A caller that is cancelled while it waits for an answer closes its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        name = f"flashsplit-test-{os.urandom(8).hex()}"
        mute.bind(f"\0{name}")
        mute.listen()
        before = open_sockets()
        calling = asyncio.create_task(connect_steps(name, own=HERE, expected=THERE))
        async with asyncio.timeout(5):
            while open_sockets() != before + 1:
                await asyncio.sleep(0.005)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert open_sockets() == before


def test_a_number_in_use_is_refused(pair: Pair) -> None:
    """Another session's steps cannot be taken over; behind its end the number is free."""
    pair.here.join(1, lambda _: None)
    with pytest.raises(InvalidArgument, match="stream_id 1 is in use"):
        pair.here.join(1, lambda _: None)
    pair.here.leave(1)
    pair.here.join(1, lambda _: None)
