"""LivenessService: heartbeats, by which the users of a worker know that it lives, and the watch over its own peers.

A worker's event loop is always free, so that it sends a heartbeat every quarter of a second whatever its devices do.
Heartbeats come unasked: an answer to a question would wait behind all that is on its way through a slow link to the
worker. Whether anything comes through to the worker is known from answers to heartbeats of the caller's own, which have
the time that such a link needs. Where heartbeats are missing, `services.rpc.probe` finds out whether the process lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Protocol

import grpc
import structlog

from flashsplit.shard.v1 import liveness_service_pb2 as pb, liveness_service_pb2_grpc as pb_grpc
from services.addresses import socket_path
from services.errors import DataLoss, FlashsplitError, Unavailable, Unimplemented, answering
from services.event_loop import first_done
from services.messages.holder import own_holder
from services.net.channel_around import sent_bytes
from services.net.security import OPEN, Security
from services.rpc.probe import is_held_up
from services.same_host.process import ProcessId, ProcessState, own_process, state_of
from services.streams.client_stream import ClientStream

SERVICE = pb.DESCRIPTOR.services_by_name["LivenessService"].full_name

BEAT_S = 0.25
"""Between two heartbeats of a worker, and two looks at whether any have come.

All processes of a host send at the multiples of it by the host's clock: a process wakes up once for all of its peers.
"""

LOOK_SHARE = 0.8
"""How far the time is towards the next heartbeat when a process looks: one that comes late is there by then, and none
that comes early is."""

LOST_AFTER_S = 2.0
"""How long nothing need have been heard by default of a worker whose heartbeats came regularly, until it is lost."""

SILENT_S = LOST_AFTER_S - BEAT_S
"""How long such a worker may be silent by then: the last heartbeat was heard up to BEAT_S before the silence began."""

SUSPECTED_S = 2 * BEAT_S
"""How long a worker may be silent before it is asked whether it lives."""

GAPS, LONGEST_S = 4, 10.0
"""A worker may be silent for so many times the longest gap of late between its heartbeats, up to so many seconds: where
hosts are overloaded or links full, heartbeats come less regularly. So many seconds also where it runs elsewhere and
takes connections: something holds up its event loop."""

_GAP_KEPT = 0.98
"""What counts of the longest gap after each heartbeat: half of it after 9 s."""

SLOWEST_BYTES_PER_S = 50_000
"""A link that brings fewer bytes a second to a worker, while there are some, passes for one that brings none."""

STARVED_S = 30.0
"""How long a process of this host may be silent that can be seen to compute, or to wait for its turn."""

LEAVING_S = 1.0
"""How long a worker that was told to stop waits to hear that another one is about to take its place."""

LOADING_S = 30.0
"""How long a worker that can be seen to live may be silent while it loads and compiles, when native code may hold up
all of its threads."""

WORKER_SILENT, DEVICE_HUNG = "WORKER_SILENT", "DEVICE_HUNG"
"""The reasons of the errors that say that a worker is of no use though its process may run: nothing is heard of it or
comes through to it; its device has not done with what it began."""

log = structlog.get_logger()


def until_next(share: float = 0.0) -> float:
    """Return the seconds until the host's clock is a multiple of BEAT_S, and so large a share of one more; at least
    half of BEAT_S, so that a timer that comes early is not followed by another one at once."""
    seconds = (share * BEAT_S - time.monotonic()) % BEAT_S
    return seconds if seconds >= BEAT_S / 2 else seconds + BEAT_S


class Life:
    """What a worker tells of itself with its heartbeats.

    trouble: why it cannot compute now, None while it can. leaving: whether it was told to stop.
    """

    def __init__(self) -> None:
        self._leaving = False
        self._awaited_at = -math.inf
        """When a caller said last that another worker takes this one's place, by `time.monotonic`."""
        self._trouble: FlashsplitError | None = None
        self._patient = 0
        self._listeners: set[asyncio.Event] = set()
        self._timer: asyncio.TimerHandle | None = None
        """Of the next heartbeat to all of them."""
        self._ending = asyncio.Event()

    @property
    def trouble(self) -> FlashsplitError | None:
        return self._trouble

    @trouble.setter
    def trouble(self, trouble: FlashsplitError | None) -> None:
        self._trouble = trouble
        self._tell()

    async def leave(self, is_held: Callable[[], bool]) -> None:
        """Say that the worker was told to stop, and wait while another one takes its place. is_held: whether its holder
        listens: nobody else could see to that."""
        self._leaving = True
        self._tell()
        began = time.monotonic()
        while is_held() and time.monotonic() - max(began, self._awaited_at) < LEAVING_S:
            await asyncio.sleep(BEAT_S / 4)

    def is_awaited(self) -> None:
        """Hear that another worker is about to take this one's place."""
        self._awaited_at = time.monotonic()

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Ask for LOADING_S of patience within the context."""
        self._patient += 1
        self._tell()
        try:
            yield
        finally:
            self._patient -= 1
            self._tell()

    def end(self) -> None:
        """End the heartbeats: the worker stops."""
        self._ending.set()
        self._tell()

    async def ended(self) -> None:
        """Wait for `end`."""
        await self._ending.wait()

    async def beats(self) -> AsyncIterator[pb.HeartbeatsResponse]:
        """Yield a heartbeat whenever one is due, until `end`."""
        changed, own = asyncio.Event(), own_process()
        self._listeners.add(changed)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(until_next(), self._beat)
        beat = pb.HeartbeatsResponse()
        process = beat.process
        process.boot_id, process.process_id, process.started_ticks = own.boot_id, own.process_id, own.started_ticks
        try:
            while not self._ending.is_set():
                changed.clear()
                beat.silence_ms = round(1e3 * LOADING_S) if self._patient else 0
                beat.leaving = self._leaving
                if self._trouble is not None:
                    beat.trouble, beat.trouble_reason = self._trouble.message, self._trouble.reason
                yield beat
                beat = pb.HeartbeatsResponse()
                await changed.wait()
        finally:
            self._listeners.discard(changed)

    def _beat(self) -> None:
        """Have a heartbeat sent to all listeners, again and again while there are any."""
        self._timer = asyncio.get_running_loop().call_later(until_next(), self._beat) if self._listeners else None
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener.set()


class PeerWatch(Protocol):
    """A worker's connections to others, as `services.rpc.peers.Peers` has them."""

    async def reach(self, address: str, lost_after_s: float | None = None) -> None:
        """Connect to the worker at an address, unless that is done, and take it for lost when nothing has been heard of
        it for so long; None leaves that as it is. Raises Unavailable where it does not answer."""

    async def lost(self, address: str) -> Unavailable:
        """Wait until that worker is lost, and return the error that says how."""


Listening = Callable[[str], contextlib.AbstractContextManager[None]]
"""Notes, within the context that it returns, that the process with this holder_id listens to the heartbeats."""


class LivenessServicer(pb_grpc.LivenessServiceServicer):
    """Tells callers in other processes how this worker and its peers do."""

    def __init__(self, life: Life, peers: PeerWatch, listening: Listening = lambda _: contextlib.nullcontext()) -> None:
        self._life, self._peers, self._listening = life, peers, listening

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server, and return its full name."""
        pb_grpc.add_LivenessServiceServicer_to_server(self, server)
        return SERVICE

    async def Heartbeats(self, request: pb.HeartbeatsRequest, context: grpc.aio.ServicerContext) -> None:
        async with answering(context), contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._listening(request.holder_id))
            async for beat in self._life.beats():
                await context.write(beat)

    async def CallerHeartbeats(self, _: object, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            await first_done(self._answer_all(context), self._life.ended())

    async def _answer_all(self, context: grpc.aio.ServicerContext) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.takes_over:
                self._life.is_awaited()
            await context.write(pb.CallerHeartbeatsResponse())

    async def WatchPeer(self, request: pb.WatchPeerRequest, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            await first_done(self._watch(request, context), self._life.ended())

    async def _watch(self, request: pb.WatchPeerRequest, context: grpc.aio.ServicerContext) -> None:
        address = request.address
        await self._peers.reach(address, request.lost_after_ms / 1e3 or None)
        await context.write(pb.WatchPeerResponse())
        raise await self._peers.lost(address)


class Regularity:
    """How regularly heartbeats come, and so when their silence means something.

    Silence is counted in looks, one every BEAT_S, so that a time in which this process itself did not run counts once.
    lost_after_s: how long nothing need be heard of a worker whose heartbeats come regularly, until it is lost.
    """

    def __init__(self, lost_after_s: float = LOST_AFTER_S) -> None:
        self.lost_after_s = lost_after_s
        self._longest_gap_s = self._announced_s = self._granted_s = 0.0
        self._heard_at: float | None = None
        self._missed = self._unseen = 0
        """Looks since the last heartbeat, and since the last one or other sign of life."""

    @property
    def silent_s(self) -> float:
        """How long none has come."""
        return self._missed * BEAT_S

    @property
    def unseen_s(self) -> float:
        """How long neither one nor another sign of life has come."""
        return self._unseen * BEAT_S

    @property
    def allowed_s(self) -> float:
        """How long none may come."""
        return max(self.allowed_unseen_s, self._announced_s, self._granted_s)

    @property
    def allowed_unseen_s(self) -> float:
        """How long neither may come."""
        if self._heard_at is None:
            # The first heartbeat may take longer: much may be on its way to the worker in front of what asks for it.
            return max(self.lost_after_s, LONGEST_S)
        return max(self.lost_after_s - BEAT_S, min(GAPS * self._longest_gap_s, LONGEST_S))

    def heard(self, now: float, announced_s: float) -> None:
        """Count a heartbeat. now: by the event loop's clock. announced_s: how long the worker asks to be awaited."""
        if self._heard_at is not None:
            self._longest_gap_s = max(now - self._heard_at, self._longest_gap_s * _GAP_KEPT)
        self._heard_at, self._announced_s, self._granted_s = now, announced_s, 0.0
        self._missed = self._unseen = 0

    def seen(self, granted_s: float) -> None:
        """Count another sign that the worker lives, with which it may be silent for so long."""
        self._granted_s, self._unseen = granted_s, 0

    def look(self) -> None:
        """Count a look since the last one."""
        self._missed += 1
        self._unseen += 1


class Answers:
    """This process's own heartbeats to the worker at the other end of a channel, and how regularly the answers come.

    Behind a Unix socket nothing is lost on the way, so that what the worker sends by itself says enough: there are
    heartbeats only while `takes_over`, which they say: that another worker is about to take its place.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._channel = channel
        self._stub = pb_grpc.LivenessServiceStub(channel)
        self._taking_over = asyncio.Event()
        self._regularity = Regularity()
        self._sent_bytes = deque[int]()
        """What had been sent to the worker before each heartbeat that is not answered."""
        self._heard_bytes = 0
        """What had been sent before the last heartbeat that is answered."""
        self._always = self._expected = socket_path(address) is None

    @property
    def takes_over(self) -> bool:
        return self._taking_over.is_set()

    @takes_over.setter
    def takes_over(self, takes_over: bool) -> None:
        if takes_over:
            self._taking_over.set()
        else:
            self._taking_over.clear()

    @property
    def missing_s(self) -> float:
        """How long none has come that should have; 0 where none is expected."""
        return self._regularity.silent_s if self._expected else 0.0

    @property
    def allowed_s(self) -> float:
        """How long none may come: longer where much is on its way to the worker."""
        on_the_way = sent_bytes(self._channel) - self._heard_bytes
        return self._regularity.allowed_s + on_the_way / SLOWEST_BYTES_PER_S

    def look(self) -> None:
        """Count a look since the last one."""
        self._regularity.look()

    async def exchange(self) -> None:
        """Send heartbeats and take the answers, until the worker ends the call. Raises what ended it otherwise."""
        if not self._always:
            await self._taking_over.wait()
        stream = ClientStream(self._stub.CallerHeartbeats())
        self._sent_bytes.clear()
        try:
            await first_done(self._take_answers(stream), self._send_heartbeats(stream))
        except Unimplemented:
            # An older release.
            self._expected = False
            await asyncio.Event().wait()
        finally:
            stream.cancel()

    async def _send_heartbeats(self, stream: ClientStream) -> None:
        while True:
            self._sent_bytes.append(sent_bytes(self._channel))
            if not await stream.send(pb.CallerHeartbeatsRequest(takes_over=self.takes_over)):
                # Why it is over is for who reads the answers.
                await asyncio.Event().wait()
            await asyncio.sleep(until_next())
            if not self._always:
                await self._taking_over.wait()

    async def _take_answers(self, stream: ClientStream) -> None:
        loop = asyncio.get_running_loop()
        while await stream.read() is not grpc.aio.EOF:
            self._regularity.heard(loop.time(), 0.0)
            if self._sent_bytes:
                self._heard_bytes = self._sent_bytes.popleft()


class Heartbeats:
    """The heartbeats of the worker at the other end of a channel, and its answers to those of this process.

    Use `close`. lost: the error that says that it has fallen silent, None before. Workers that send no heartbeats are
    never lost. leaving: whether it says that it was told to stop. lost_after_s: how long nothing need be heard of it
    until it is lost, where its heartbeats came regularly. doubts: how often it was asked whether it lives, since it was
    silent.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        lost_after_s: float = LOST_AFTER_S,
        security: Security = OPEN,
    ) -> None:
        self._address, self._security = address, security
        self._stub = pb_grpc.LivenessServiceStub(channel)
        self._regularity, self._answers = Regularity(lost_after_s), Answers(channel, address)
        self._process: ProcessId | None = None
        self._cpu_ticks = 0
        self._streams: weakref.WeakSet[ClientStream] = weakref.WeakSet()
        self._troubled, self._suspected = asyncio.Event(), asyncio.Event()
        self._trouble: Unavailable | None = None
        self.lost: Unavailable | None = None
        self.leaving = False
        self.doubts = 0
        self._task = asyncio.ensure_future(self._run())

    def guard(self, stream: ClientStream) -> None:
        """End this stream when the worker falls silent, with the error that says so."""
        self._streams.add(stream)
        if self.lost is not None:
            stream.fail(self.lost)

    @contextlib.contextmanager
    def taking_over(self) -> Iterator[None]:
        """Tell the worker within the context that another one is about to take its place, so that it does not stop."""
        self._answers.takes_over = True
        try:
            yield
        finally:
            self._answers.takes_over = False

    async def trouble(self) -> Unavailable:
        """Wait until the worker falls silent, or says that it cannot compute, and return the error that says so."""
        while (error := self.present_trouble) is None:
            await self._troubled.wait()
        return error

    @property
    def present_trouble(self) -> Unavailable | None:
        """What `trouble` would return at once; None where it would wait."""
        return self.lost or self._trouble

    @property
    def lost_after_s(self) -> float:
        """How long nothing need be heard of the worker until it is lost, where its heartbeats came regularly."""
        return self._regularity.lost_after_s

    @lost_after_s.setter
    def lost_after_s(self, seconds: float) -> None:
        self._regularity.lost_after_s = seconds

    async def close(self) -> None:
        """Listen no more. Safe to call twice."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        # The connection may break, as all who use it notice, and the worker may have no such service.
        with contextlib.suppress(FlashsplitError):
            await first_done(
                self._again_where_damaged(self._listen),
                self._again_where_damaged(self._answers.exchange),
                self._look(),
                self._doubt(),
            )

    async def _again_where_damaged(self, call: Callable[[], Coroutine[None, None, None]]) -> None:
        """Make a call of heartbeats, and make it again where one of them came damaged: that says nothing of the worker.

        Where all come damaged none is heard, which does.
        """
        while True:
            try:
                return await call()
            except DataLoss as error:
                log.warning("worker.heartbeat_damaged", address=self._address, why=error.message)
                await asyncio.sleep(BEAT_S)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        stream = ClientStream(self._stub.Heartbeats(pb.HeartbeatsRequest(holder_id=own_holder().holder_id)))
        try:
            while (beat := await stream.read()) is not grpc.aio.EOF:
                self._regularity.heard(loop.time(), beat.silence_ms / 1e3)
                if beat.HasField("process"):
                    process = beat.process
                    self._process = ProcessId(process.boot_id, process.process_id, process.started_ticks)
                self.leaving = self.leaving or beat.leaving
                self._take_trouble(beat)
        finally:
            stream.cancel()

    def _take_trouble(self, beat: pb.HeartbeatsResponse) -> None:
        if not beat.trouble:
            self._trouble = None
            self._troubled.clear()
        elif self._trouble is None:
            reason = beat.trouble_reason or None
            self._trouble = Unavailable(beat.trouble, reason=reason, address=self._address)
            self._troubled.set()

    async def _look(self) -> None:
        """Look again and again whether heartbeats and answers come, until they don't."""
        while (fault := self._fault()) is None or self._is_starved():
            await asyncio.sleep(until_next(LOOK_SHARE))
            self._regularity.look()
            self._answers.look()
            if self._regularity.silent_s >= SUSPECTED_S:
                self._suspected.set()
        self.lost = Unavailable(f"the worker at {self._address} {fault}", reason=WORKER_SILENT, address=self._address)
        log.info("worker.silent", address=self._address, why=fault)
        self._troubled.set()
        for stream in [*self._streams]:
            stream.fail(self.lost)

    async def _doubt(self) -> None:
        """Ask the worker whether it lives whenever it is silent."""
        while True:
            await self._suspected.wait()
            log.debug("worker.suspected", address=self._address, silent_s=self._regularity.silent_s)
            self.doubts += 1
            if await is_held_up(self._address, self._security, self.lost_after_s):
                # Whether a process of this host has a reason to be silent is seen in what it does.
                self._regularity.seen(0.0 if self._state() is not None else LONGEST_S)
            # Until the next look at the earliest.
            self._suspected.clear()

    def _fault(self) -> str | None:
        """Return what has been wrong with the worker for too long, as the end of a sentence; None for nothing."""
        regularity, answers = self._regularity, self._answers
        silent_s, regular_s = regularity.silent_s, regularity.lost_after_s - BEAT_S
        if (
            silent_s >= regularity.allowed_s
            or regularity.unseen_s >= regularity.allowed_unseen_s
            or (silent_s >= regular_s and (state := self._state()) is not None and state.stopped)
        ):
            return f"has been silent for {silent_s:.3g} s: its process hangs or was stopped, or the link passes nothing"
        # One look more than for silence, with which answers end too.
        if (silent_s := answers.missing_s) > max(answers.allowed_s, regularity.allowed_s):
            return (
                f"lives, and for {silent_s:.3g} s has heard nothing of what is sent to it: bytes were damaged or lost "
                "on the way there"
            )
        return None

    def _is_starved(self) -> bool:
        """Return whether the worker is silent because others keep its event loop from running."""
        state = self._state()
        if state is None or state.stopped or self._regularity.silent_s >= STARVED_S:
            return False
        computes, self._cpu_ticks = state.cpu_ticks > self._cpu_ticks, state.cpu_ticks
        return computes or state.wants_to_run

    def _state(self) -> ProcessState | None:
        """Return what the worker's process does; None where that does not say what its silence means.

        Only where its process is on this host and nothing is lost on the way: behind a Unix socket.
        """
        if self._process is None or socket_path(self._address) is None:
            return None
        return state_of(self._process)


class Edge:
    """A worker's connection to another one, as that worker tells of it. Use `close`."""

    def __init__(self, stream: ClientStream) -> None:
        self._stream = stream

    async def lost(self) -> FlashsplitError:
        """Wait until the connection is lost, and return the error that says how."""
        return await self._stream.ended()

    def close(self) -> None:
        """Watch no more. Safe to call twice."""
        self._stream.cancel()


async def watch_edge(channel: grpc.aio.Channel, address: str, peer: str, heartbeats: Heartbeats) -> Edge | None:
    """Have the worker at the other end of a channel, whose address this is, connect to another one and watch over that,
    as patiently as over it by these heartbeats.

    Returns None where the worker cannot. Raises Unavailable where it does not reach the other one.
    """
    stub = pb_grpc.LivenessServiceStub(channel)
    request = pb.WatchPeerRequest(address=peer, lost_after_ms=round(1e3 * heartbeats.lost_after_s))
    stream = ClientStream(stub.WatchPeer(request), address=address)
    heartbeats.guard(stream)
    try:
        if await stream.read() is grpc.aio.EOF:
            raise Unavailable(f"the worker at {address} stops", address=address)
    except Unimplemented:
        return None
    except BaseException:
        stream.cancel()
        raise
    return Edge(stream)
