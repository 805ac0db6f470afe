"""Heartbeats between real processes and through real links: who is lost, who is merely slow, and who hears of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from services.errors import Unavailable
from services.messages.snapshots import SnapshotOwner
from services.net.checksums import FIELD
from services.rpc.liveness import (
    BEAT_S,
    DEVICE_HUNG,
    LEAVING_S,
    LOADING_S,
    LONGEST_S,
    LOOK_SHARE,
    SILENT_S,
    WORKER_SILENT,
    Life,
    LivenessServicer,
    Regularity,
    until_next,
)
from services.rpc.peers import Peers
from services.rpc.snapshots import SnapshotServicer
from services.rpc.stage import StageServicer
from services.rpc.worker import WorkerServicer
from services.same_host.process import ProcessId, own_process, state_of
from tests.links import GOOD, Fault, Link
from tests.services.conftest import Serve
from tests.services.fakes import OPEN, WORKER, FakeSnapshots, FakeStage, FakeWorker, prefill, stays, until

ROOT = Path(__file__).parents[3]

_FRAME_BYTES, _DATA = 9, 0
"""The bytes before the payload of a frame of HTTP/2, and the kind of a frame with a piece of a message."""


@pytest.fixture
async def peers() -> AsyncIterator[Peers]:
    """Connections that wait a second for an answer."""
    peers = Peers(timeout_s=1.0)
    yield peers
    await peers.close()


async def watching(peers: Peers, address: str) -> asyncio.Task[Unavailable]:
    """Wait for the loss of a worker in a task that has begun to watch it."""
    await peers.reach(address)
    lost = asyncio.create_task(peers.lost(address))
    # The first heartbeat is there by then.
    assert await stays(lambda: not lost.done(), 2 * BEAT_S)
    return lost


# --- silence


async def test_a_worker_behind_a_silent_link_is_lost(serve: Serve, peers: Peers) -> None:
    """Where nothing comes through any more, without an end of the connection: sessions, snapshots and the connection
    itself end with an error that names the worker; when the link is back the worker is reached again."""
    registrations = [StageServicer(FakeStage()).register, WorkerServicer(FakeWorker()).register]
    registrations += [SnapshotServicer(FakeSnapshots()).register, LivenessServicer(Life(), peers).register]
    server = await serve(*registrations, address="127.0.0.1:0")
    async with Link(server.address) as way:
        session = await (await peers.stage(way.address)).open(OPEN)
        snapshots = await peers.snapshots(way.address)
        lost = await watching(peers, way.address)
        events = session.events()
        await session.forward(prefill())
        await anext(events)
        way.fault = Fault(silent=True)
        with pytest.raises(Unavailable, match=f"{way.address} has been silent for") as raised:
            await anext(events)
        assert raised.value.reason == WORKER_SILENT
        assert raised.value.where["stage"] == "1"
        assert (await lost).reason == WORKER_SILENT
        with pytest.raises(Unavailable, match="silent"):
            await anext(snapshots.export_snapshot(SnapshotOwner.STAGE, "one"))
        with pytest.raises(Unavailable, match="no worker answers"):
            await peers.worker(way.address)
        way.fault = GOOD
        assert await (await peers.worker(way.address)).describe() == WORKER
        again = await (await peers.stage(way.address)).open(OPEN)
        await again.forward(prefill())
        await anext(again.events())
        await again.close()


async def test_a_damaged_heartbeat_ends_no_watch(serve: Serve, peers: Peers) -> None:
    """After one that came damaged others are heard, so that a link that falls silent later is noticed as ever."""
    server = await serve(LivenessServicer(Life(), peers).register, address="127.0.0.1:0")
    damaged = asyncio.Event()

    def damage(piece: bytes) -> bytes:
        """Flip a bit of the checksum at the end of a heartbeat."""
        if damaged.is_set() or piece[-9:-8] != bytes([FIELD << 3 | 1]):
            return piece
        damaged.set()
        return piece[:-1] + bytes([piece[-1] ^ 1])

    async with Link(server.address) as way:
        lost = await watching(peers, way.address)
        way.fault = Fault(damage=damage)
        await damaged.wait()
        assert await stays(lambda: not lost.done(), SILENT_S + 4 * BEAT_S)
        way.fault = Fault(silent=True)
        async with asyncio.timeout(LONGEST_S + SILENT_S):
            assert (await lost).reason == WORKER_SILENT


@pytest.mark.parametrize(
    ("messages_before", "wrong"), [(0, "has heard nothing of what is sent"), (1, "has been silent")], ids=["to", "from"]
)
async def test_a_frame_whose_length_was_damaged_is_noticed(
    messages_before: int, wrong: str, serve: Serve, peers: Peers
) -> None:
    """Who waits for bytes that nobody sends takes all that comes for those, and says nothing: a session on such a
    connection, to the worker or from it, ends by name although heartbeats go on the other way. The next connection is
    as good as ever."""
    registrations = [StageServicer(FakeStage()).register, LivenessServicer(Life(), peers).register]
    server = await serve(*registrations, address="127.0.0.1:0")
    left = messages_before

    def damage(piece: bytes) -> bytes:
        """Let an HTTP/2 frame with a step or, behind that, its answer say that it is 4 KiB longer than it is."""
        nonlocal left
        at = 0
        while at + _FRAME_BYTES < len(piece):
            length, kind = int.from_bytes(piece[at : at + 3], "big"), piece[at + 3]
            # What both begin with, behind the message's length: the tag of their field.
            if kind == _DATA and piece[at + _FRAME_BYTES + 5 :][:1] == b"\x12":
                left -= 1
                if left == -1:
                    return piece[: at + 1] + bytes([piece[at + 1] ^ 0x10]) + piece[at + 2 :]
            at += _FRAME_BYTES + length
        return piece

    async with Link(server.address) as way:
        session = await (await peers.stage(way.address)).open(OPEN)
        events = session.events()
        await session.forward(prefill())
        await anext(events)
        # Until then a worker may be silent for longer.
        await asyncio.sleep(4 * BEAT_S)
        way.fault = Fault(damage=damage)
        async with asyncio.timeout(2 * LONGEST_S):
            # The message within the frame is whole; it is the next one that is lost.
            await session.forward(prefill(1, 3))
            await anext(events)
            await session.forward(prefill(2, 6))
            with pytest.raises(Unavailable, match=f"{way.address}.* {wrong}") as raised:
                await anext(events)
        assert raised.value.reason == WORKER_SILENT
        assert left < 0
        again = await (await peers.stage(way.address)).open(OPEN)
        await again.forward(prefill())
        await anext(again.events())
        await again.close()


async def test_the_neighbours_edge_is_watched(serve: Serve, peers: Peers) -> None:
    """A caller hears of the link between two workers, of which it uses neither end itself."""
    far = await serve(LivenessServicer(Life(), peers).register, address="127.0.0.1:0")
    between = Peers(timeout_s=1.0)
    near = await serve(LivenessServicer(Life(), between).register)
    async with Link(far.address) as way:
        edge = await peers.edge(near.address, way.address)
        assert edge is not None
        lost = asyncio.create_task(edge.lost())
        assert await stays(lambda: not lost.done(), 0.2)
        way.fault = Fault(silent=True)
        error = await lost
        assert (error.code_name, error.reason) == ("UNAVAILABLE", WORKER_SILENT)
        assert way.address in error.message
        with pytest.raises(Unavailable, match=f"no worker answers at {way.address}"):
            await peers.edge(near.address, way.address)
    await between.close()


async def test_a_worker_without_heartbeats_is_not_lost(serve: Serve, peers: Peers) -> None:
    """One of an older release is used as before, and its links to others are not watched."""
    server = await serve(WorkerServicer(FakeWorker()).register)
    lost = await watching(peers, server.address)
    assert await peers.edge(server.address, server.address) is None
    assert await stays(lambda: not lost.done(), SILENT_S + 2 * BEAT_S)
    lost.cancel()


@dataclass(frozen=True)
class LivingWorker:
    """A process with heartbeats at an address."""

    process: subprocess.Popen[str]
    address: str

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)


async def started(address: str, peers: Peers) -> AsyncIterator[LivingWorker]:
    """Start a process that listens there, and end it."""
    command = [sys.executable, "-m", "tests.services.rpc.living_worker", address]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = await asyncio.to_thread(process.stdout.readline)
        await peers.awaited(address.strip(), 30)
        yield LivingWorker(process, address.strip())
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
async def living(tmp_path: Path, peers: Peers) -> AsyncIterator[LivingWorker]:
    """A process of this host, of which /proc tells what it does."""
    async for worker in started(f"unix:{tmp_path}/a.sock", peers):
        yield worker


@pytest.fixture
async def remote(peers: Peers) -> AsyncIterator[LivingWorker]:
    """A process that is reached over TCP, as one of another host: nothing is known of it but what it sends."""
    async for worker in started("127.0.0.1:0", peers):
        yield worker


async def test_a_process_that_computes_is_awaited(living: LivingWorker, peers: Peers) -> None:
    """A process of this host that can be seen to compute is not lost, though its event loop is held up."""
    lost = await watching(peers, living.address)
    living.tell(f"compute {SILENT_S + 6 * BEAT_S}")
    assert await stays(lambda: not lost.done(), SILENT_S + 8 * BEAT_S)
    lost.cancel()


async def test_a_process_that_waits_is_lost(living: LivingWorker, peers: Peers) -> None:
    """A process of this host whose event loop waits for something else than events is lost."""
    lost = await watching(peers, living.address)
    living.tell("sleep 60")
    assert (await lost).reason == WORKER_SILENT


async def test_a_stopped_process_is_lost_until_it_goes_on(living: LivingWorker, peers: Peers) -> None:
    """SIGSTOP leaves its sockets open; after SIGCONT it is reached again."""
    lost = await watching(peers, living.address)
    living.process.send_signal(signal.SIGSTOP)
    assert (await lost).reason == WORKER_SILENT
    living.process.send_signal(signal.SIGCONT)
    (await watching(peers, living.address)).cancel()


async def test_a_remote_process_that_is_held_up_is_awaited(remote: LivingWorker, peers: Peers) -> None:
    """One that sends no heartbeats because native code holds up its threads of Python still takes connections: it is
    not lost, without having said a word before."""
    lost = await watching(peers, remote.address)
    remote.tell(f"hold {SILENT_S + 6 * BEAT_S}")
    assert await stays(lambda: not lost.done(), SILENT_S + 8 * BEAT_S)
    lost.cancel()


async def test_a_stopped_process_is_lost_while_it_loads(remote: LivingWorker, peers: Peers) -> None:
    """The patience that a load is given is for processes that live."""
    lost = await watching(peers, remote.address)
    remote.tell("load")
    await asyncio.sleep(2 * BEAT_S)
    remote.process.send_signal(signal.SIGSTOP)
    async with asyncio.timeout(LOADING_S / 2):
        assert (await lost).reason == WORKER_SILENT


# --- what a worker says of itself


async def test_trouble_is_told_and_taken_back(serve: Serve, peers: Peers) -> None:
    """A worker whose device hangs is lost for those who watch it, until it says otherwise; its sessions stay."""
    life = Life()
    server = await serve(LivenessServicer(life, peers).register, StageServicer(FakeStage()).register)
    lost = await watching(peers, server.address)
    session = await (await peers.stage(server.address)).open(OPEN)
    life.trouble = Unavailable("cpu has not done with a step", reason=DEVICE_HUNG)
    error = await lost
    assert (error.reason, error.message) == (DEVICE_HUNG, "cpu has not done with a step")
    assert (await peers.lost(server.address)).reason == DEVICE_HUNG
    await session.forward(prefill())
    await anext(session.events())
    life.trouble = None
    await asyncio.sleep(2 * BEAT_S)
    lost = await watching(peers, server.address)
    assert await stays(lambda: not lost.done(), 2 * BEAT_S)
    lost.cancel()
    await session.close()


async def test_a_worker_that_stops_says_so(serve: Serve, peers: Peers) -> None:
    """The end of the heartbeats is no silence, and holds up no server that stops."""
    life = Life()
    server = await serve(LivenessServicer(life, peers).register)
    lost = await watching(peers, server.address)
    edge = await peers.edge(server.address, server.address)
    assert edge is not None
    life.end()
    assert (await edge.lost()).code_name == "UNAVAILABLE"
    assert await stays(lambda: not lost.done(), SILENT_S + 2 * BEAT_S)
    async with asyncio.timeout(2):
        await server.stop(10)
    assert (await lost).reason == "WORKER_UNREACHABLE"


@pytest.mark.parametrize("is_held", [True, False])
async def test_a_worker_that_is_told_to_stop_waits_for_one_that_takes_its_place(
    is_held: bool, serve: Serve, peers: Peers
) -> None:
    """For as long as its holder says that, and a second for that to be said; where nobody holds it, not at all."""
    life = Life()
    server = await serve(LivenessServicer(life, peers).register)
    (await watching(peers, server.address)).cancel()
    assert peers.leaving(server.address) is None
    leaving = asyncio.create_task(life.leave(lambda: is_held))
    if is_held:
        await until(lambda: peers.leaving(server.address) is not None, 10)
        heartbeats = peers.leaving(server.address)
        assert heartbeats is not None
        with heartbeats.taking_over():
            assert await stays(lambda: not leaving.done(), LEAVING_S + 4 * BEAT_S)
    await asyncio.wait_for(leaving, 10)


class Counting(LivenessServicer):
    """Counts the callers that send heartbeats of their own."""

    callers = 0

    async def CallerHeartbeats(self, request: object, context: grpc.aio.ServicerContext) -> None:
        self.callers += 1
        await super().CallerHeartbeats(request, context)


@pytest.mark.parametrize(("address", "callers"), [("127.0.0.1:0", 1), (None, 0)], ids=["over TCP", "on this host"])
async def test_who_sends_heartbeats_to_a_worker(address: str | None, callers: int, serve: Serve, peers: Peers) -> None:
    """Who calls it over TCP, where bytes can be lost on the way; behind a Unix socket nobody does."""
    servicer = Counting(Life(), peers)
    server = await (serve(servicer.register) if address is None else serve(servicer.register, address=address))
    lost = await watching(peers, server.address)
    assert await stays(lambda: not lost.done(), SILENT_S + 2 * BEAT_S)
    assert servicer.callers == callers
    lost.cancel()


@pytest.mark.parametrize("share", [0.0, LOOK_SHARE])
def test_all_processes_of_a_host_wake_up_at_the_same_times(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At multiples of BEAT_S or between two, whenever they were asked; not at once behind a timer that came early."""
    for number in range(100):
        now = 1000.0 + 0.01 * number
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        seconds = until_next(share)
        assert BEAT_S / 2 <= seconds < 1.5 * BEAT_S
        beats_since = (now + seconds) / BEAT_S - share
        assert beats_since == pytest.approx(round(beats_since), abs=1e-6)


# --- how long silence may last


def beats(regularity: Regularity, gaps_s: list[float], announced_s: float = 0.0) -> None:
    now = 0.0
    regularity.heard(now, announced_s)
    for gap_s in gaps_s:
        now += gap_s
        regularity.heard(now, announced_s)


@pytest.mark.parametrize(
    ("gaps_s", "announced_s", "allowed_s"),
    [
        ([0.25] * 100, 0.0, SILENT_S),
        ([0.25, 1.0], 0.0, 4.0),
        ([0.25, 100.0], 0.0, LONGEST_S),
        ([1.0, *[0.25] * 200], 0.0, SILENT_S),
        ([0.25], 30.0, 30.0),
    ],
    ids=["regular", "late of late", "very late", "regular again", "loading"],
)
def test_how_long_a_worker_may_be_silent(gaps_s: list[float], announced_s: float, allowed_s: float) -> None:
    """Longer where its heartbeats came less regularly of late, and as long as it asks for."""
    regularity = Regularity()
    beats(regularity, gaps_s, announced_s)
    assert regularity.allowed_s == allowed_s


def test_signs_of_life_give_time() -> None:
    """Without one a worker may be silent for as long as its heartbeats' gaps say, whatever it asked for; with one for
    as long as it asks for, or as the sign grants."""
    regularity = Regularity(lost_after_s=3.0)
    regularity.heard(0.0, 30.0)
    regularity.look()
    assert (regularity.allowed_s, regularity.allowed_unseen_s) == (30.0, 2.75)
    regularity.heard(0.25, 0.0)
    assert (regularity.allowed_s, regularity.allowed_unseen_s) == (2.75, 2.75)
    regularity.look()
    regularity.seen(LONGEST_S)
    assert (regularity.silent_s, regularity.unseen_s) == (BEAT_S, 0.0)
    assert (regularity.allowed_s, regularity.allowed_unseen_s) == (LONGEST_S, 2.75)
    regularity.heard(1.0, 0.0)
    assert regularity.allowed_s == 3.0
    assert Regularity().allowed_unseen_s == LONGEST_S


def test_silence_is_counted_in_looks() -> None:
    """Whoever did not run itself has looked once, however long that was."""
    regularity = Regularity()
    regularity.heard(0.0, 0.0)
    regularity.look()
    regularity.look()
    assert regularity.silent_s == 2 * BEAT_S
    regularity.heard(60.0, 0.0)
    assert regularity.silent_s == 0


# --- processes


def test_processes_are_told_apart() -> None:
    """A process is seen by its number and its start, and not where either is another one's or it is on another host."""
    own = own_process()
    state = state_of(own)
    assert state is not None
    assert not state.stopped
    assert state.wants_to_run
    assert own.process_id == os.getpid()
    for other in (
        ProcessId("", own.process_id, own.started_ticks),
        ProcessId("other", own.process_id, own.started_ticks),
        ProcessId(own.boot_id, own.process_id, own.started_ticks + 1),
        ProcessId(own.boot_id, 2**22 + 1, own.started_ticks),
    ):
        assert state_of(other) is None
