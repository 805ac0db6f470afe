"""LivenessService: heartbeats, by which the users of a worker know that it lives, and the watch over its own peers.

A worker's event loop is always free, so that it sends a heartbeat every quarter of a second whatever its devices do.
Heartbeats come unasked: an answer to a question would wait behind all that is on its way through a slow link to the
worker. Whether anything comes through to the worker is known from answers to heartbeats of the caller's own, which have
the time that such a link needs.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from services.same_host.process import ProcessId, own_process, state_of
from services.streams.client_stream import ClientStream

SERVICE = pb.DESCRIPTOR.services_by_name["LivenessService"].full_name

BEAT_S = 0.25
"""Between two heartbeats of a worker, and two looks at whether any have come."""

SILENT_S = 1.75
"""How long a worker may be silent whose heartbeats came regularly."""

GAPS, LONGEST_S = 4, 10.0
"""A worker may be silent for so many times the longest gap of late between its heartbeats, up to so many seconds: where
hosts are overloaded or links full, heartbeats come less regularly."""

_GAP_KEPT = 0.98
"""What counts of the longest gap after each heartbeat: half of it after 9 s."""

SLOWEST_BYTES_PER_S = 50_000
"""A link that brings fewer bytes a second to a worker, while there are some, passes for one that brings none."""

STARVED_S = 30.0
"""How long a process of this host may be silent that can be seen to compute, or to wait for its turn."""

LOADING_S = 30.0
"""How long a worker may be silent while it loads and compiles, when native code may hold up all of its threads."""

WORKER_SILENT, DEVICE_HUNG = "WORKER_SILENT", "DEVICE_HUNG"
"""The reasons of the errors that say that a worker is of no use though its process may run: nothing is heard of it or
comes through to it; its device has not done with what it began."""

log = structlog.get_logger()


class Life:
    """What a worker tells of itself with its heartbeats.

    trouble: why it cannot compute now, None while it can.
    """

    def __init__(self) -> None:
        self._trouble: FlashsplitError | None = None
        self._patient = 0
        self._listeners: set[asyncio.Event] = set()
        self._ending = asyncio.Event()

    @property
    def trouble(self) -> FlashsplitError | None:
        return self._trouble

    @trouble.setter
    def trouble(self, trouble: FlashsplitError | None) -> None:
        self._trouble = trouble
        self._tell()

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
        beat = pb.HeartbeatsResponse()
        process = beat.process
        process.boot_id, process.process_id, process.started_ticks = own.boot_id, own.process_id, own.started_ticks
        try:
            while not self._ending.is_set():
                changed.clear()
                beat.silence_ms = round(1e3 * LOADING_S) if self._patient else 0
                if self._trouble is not None:
                    beat.trouble, beat.trouble_reason = self._trouble.message, self._trouble.reason
                yield beat
                beat = pb.HeartbeatsResponse()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), BEAT_S)
        finally:
            self._listeners.discard(changed)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener.set()


class PeerWatch(Protocol):
    """A worker's connections to others, as `services.rpc.peers.Peers` has them."""

    async def reach(self, address: str) -> None:
        """Connect to the worker at an address, unless that is done. Raises Unavailable where it does not answer."""

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
            await first_done(_answer_all(context), self._life.ended())

    async def WatchPeer(self, request: pb.WatchPeerRequest, context: grpc.aio.ServicerContext) -> None:
        async with answering(context):
            await first_done(self._watch(request.address, context), self._life.ended())

    async def _watch(self, address: str, context: grpc.aio.ServicerContext) -> None:
        await self._peers.reach(address)
        await context.write(pb.WatchPeerResponse())
        raise await self._peers.lost(address)


async def _answer_all(context: grpc.aio.ServicerContext) -> None:
    while await context.read() is not grpc.aio.EOF:
        await context.write(pb.CallerHeartbeatsResponse())


class Regularity:
    """How regularly heartbeats come, and so when their silence means something.

    Silence is counted in looks, one every BEAT_S, so that a time in which this process itself did not run counts once.
    """

    def __init__(self) -> None:
        # The first one may take longer, as the worker may be in the midst of a load.
        self._longest_gap_s, self._announced_s = 0.0, LONGEST_S
        self._heard_at: float | None = None
        self._missed = 0

    @property
    def silent_s(self) -> float:
        """How long none has come."""
        return self._missed * BEAT_S

    @property
    def allowed_s(self) -> float:
        """How long none may come."""
        return max(SILENT_S, min(GAPS * self._longest_gap_s, LONGEST_S), self._announced_s)

    def heard(self, now: float, announced_s: float) -> None:
        """Count a heartbeat. now: by the event loop's clock. announced_s: how long the worker asks to be awaited."""
        if self._heard_at is not None:
            self._longest_gap_s = max(now - self._heard_at, self._longest_gap_s * _GAP_KEPT)
        self._heard_at, self._announced_s, self._missed = now, announced_s, 0

    def look(self) -> None:
        """Count a look since the last one."""
        self._missed += 1


class Answers:
    """This process's own heartbeats to the worker at the other end of a channel, and how regularly the answers come."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = pb_grpc.LivenessServiceStub(channel)
        self._regularity = Regularity()
        self._sent_bytes = deque[int]()
        """What had been sent to the worker before each heartbeat that is not answered."""
        self._heard_bytes = 0
        """What had been sent before the last heartbeat that is answered."""
        self._expected = True

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
            if not await stream.send(pb.CallerHeartbeatsRequest()):
                # Why it is over is for who reads the answers.
                await asyncio.Event().wait()
            await asyncio.sleep(BEAT_S)

    async def _take_answers(self, stream: ClientStream) -> None:
        loop = asyncio.get_running_loop()
        while await stream.read() is not grpc.aio.EOF:
            self._regularity.heard(loop.time(), 0.0)
            if self._sent_bytes:
                self._heard_bytes = self._sent_bytes.popleft()


class Heartbeats:
    """The heartbeats of the worker at the other end of a channel, and its answers to those of this process.

    Use `close`. lost: the error that says that it has fallen silent, None before. Workers that send no heartbeats are
    never lost.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._address = address
        self._stub = pb_grpc.LivenessServiceStub(channel)
        self._regularity, self._answers = Regularity(), Answers(channel)
        self._process: ProcessId | None = None
        self._cpu_ticks = 0
        self._streams: weakref.WeakSet[ClientStream] = weakref.WeakSet()
        self._troubled = asyncio.Event()
        self._trouble: Unavailable | None = None
        self.lost: Unavailable | None = None
        self._task = asyncio.ensure_future(self._run())

    def guard(self, stream: ClientStream) -> None:
        """End this stream when the worker falls silent, with the error that says so."""
        self._streams.add(stream)
        if self.lost is not None:
            stream.fail(self.lost)

    async def trouble(self) -> Unavailable:
        """Wait until the worker falls silent, or says that it cannot compute, and return the error that says so."""
        while (error := self.present_trouble) is None:
            await self._troubled.wait()
        return error

    @property
    def present_trouble(self) -> Unavailable | None:
        """What `trouble` would return at once; None where it would wait."""
        return self.lost or self._trouble

    async def close(self) -> None:
        """Listen no more. Safe to call twice."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        # The connection may break, as all who use it notice, and the worker may have no such service.
        with contextlib.suppress(FlashsplitError):
            await first_done(
                self._again_where_damaged(self._listen), self._again_where_damaged(self._answers.exchange), self._look()
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
            await asyncio.sleep(BEAT_S)
            self._regularity.look()
            self._answers.look()
        self.lost = Unavailable(f"the worker at {self._address} {fault}", reason=WORKER_SILENT, address=self._address)
        log.info("worker.silent", address=self._address, why=fault)
        self._troubled.set()
        for stream in [*self._streams]:
            stream.fail(self.lost)

    def _fault(self) -> str | None:
        """Return what has been wrong with the worker for too long, as the end of a sentence; None for nothing."""
        regularity, answers = self._regularity, self._answers
        if (silent_s := regularity.silent_s) >= regularity.allowed_s:
            return f"has been silent for {silent_s:.3g} s: its process hangs or was stopped, or the link passes nothing"
        # One look more than for silence, with which answers end too.
        if (silent_s := answers.missing_s) > max(answers.allowed_s, regularity.allowed_s):
            return (
                f"lives, and for {silent_s:.3g} s has heard nothing of what is sent to it: bytes were damaged or lost "
                "on the way there"
            )
        return None

    def _is_starved(self) -> bool:
        """Return whether the worker is silent because others keep its event loop from running.

        Only where its process is on this host and nothing is lost on the way: behind a Unix socket.
        """
        if self._process is None or socket_path(self._address) is None or self._regularity.silent_s >= STARVED_S:
            return False
        state = state_of(self._process)
        if state is None or state.stopped:
            return False
        computes, self._cpu_ticks = state.cpu_ticks > self._cpu_ticks, state.cpu_ticks
        return computes or state.wants_to_run


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
    """Have the worker at the other end of a channel, whose address this is, connect to another one and watch over that.

    Returns None where the worker cannot. Raises Unavailable where it does not reach the other one.
    """
    stub = pb_grpc.LivenessServiceStub(channel)
    stream = ClientStream(stub.WatchPeer(pb.WatchPeerRequest(address=peer)), address=address)
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
