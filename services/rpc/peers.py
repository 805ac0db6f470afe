"""Connections to other workers, opened on first use and kept: for each address one for steps and one for snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable

import grpc
import structlog

from services.errors import FlashsplitError, ResourceExhausted, Unavailable
from services.event_loop import first_done
from services.messages.description import WorkerDescription
from services.net.channel import connect
from services.net.security import OPEN, Security
from services.rpc.compress import RemoteCompressor
from services.rpc.draft import RemoteDraft
from services.rpc.liveness import LOST_AFTER_S, Edge, Heartbeats, watch_edge
from services.rpc.payload_transport import PayloadTransport, share_memory
from services.rpc.shared_memory import ClientLink
from services.rpc.snapshots import RemoteSnapshots
from services.rpc.stage import RemoteBatches, RemoteStage
from services.rpc.worker import RemoteWorker
from services.same_host.link import SharedLink
from services.same_host.step_socket import Watcher

MAX_RETIRED = 16
"""The most connections that take no new calls and are kept for those that run on them."""

log = structlog.get_logger()


class Connection:
    """A channel to a worker, what tells that the worker lives, and the memory shared with it, if any.

    heartbeats: by which it is known that the worker lives. has_own: whether they are this connection's own, and end
    with it.
    """

    def __init__(self, channel: grpc.aio.Channel, address: str, heartbeats: Heartbeats, *, has_own: bool) -> None:
        self.channel, self.heartbeats, self._owns_heartbeats = channel, heartbeats, has_own
        self._shared: ClientLink | None = None
        self.batches = RemoteBatches(channel, address, self.heartbeats.guard)

    def share(self, shared: ClientLink | None) -> None:
        """Use this memory from now on."""
        self._shared = shared

    @property
    def link(self) -> SharedLink | None:
        """The memory shared with the worker; None where there is none, and once the other side has given it up: the
        channel goes on for its other calls."""
        return None if self._shared is None or self._shared.closed else self._shared.link

    @property
    def usable(self) -> bool:
        """Whether new calls can use it."""
        return self.heartbeats.lost is None and self.channel.get_state() == grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """Close the channel; running calls end."""
        if self._owns_heartbeats:
            await self.heartbeats.close()
        await self.batches.close()
        if self._shared is not None:
            await self._shared.close()
        await self.channel.close()


class Peers:
    """The workers that this process talks to. Every method raises Unavailable when a worker doesn't answer in time.

    timeout_s: how long to wait for a worker's answer. transport: how large payloads travel. caller: returns how this
    process calls itself in errors that others read; None where nobody else does. watcher: the thread to which steps may
    come directly, None where they may not. lost_after_s: how long nothing need be heard of a worker until it is lost.
    """

    def __init__(
        self,
        timeout_s: float = 5.0,
        *,
        lost_after_s: float = LOST_AFTER_S,
        security: Security = OPEN,
        transport: PayloadTransport = PayloadTransport.AUTO,
        caller: Callable[[], str] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._timeout_s, self._security, self._transport, self._caller = timeout_s, security, transport, caller
        self._watcher, self._lost_after_s = watcher, lost_after_s
        self._connections: dict[tuple[str, str], Connection] = {}
        self._retired: deque[Connection] = deque()
        self._connecting: dict[tuple[str, str], asyncio.Task[Connection]] = {}
        """Attempts that run: all who want a connection wait for the same one."""
        self._connect_s: dict[str, float] = {}
        """How long connecting to each address took the last time."""

    async def worker(self, address: str) -> RemoteWorker:
        """Return the worker at an address."""
        connection = await self._connection(address)
        return RemoteWorker(connection.channel, address, connection.heartbeats.guard)

    async def description(self, address: str, within_s: float) -> WorkerDescription:
        """Return what a worker says of itself.

        within_s: how long connecting and the answer may take, or four times as long as connecting took the last time
        where that is more: connecting can be as short as the way back, since a server sends its settings unasked, and
        an answer is a way there and back. Raises Unavailable where the worker is not reached or lost meanwhile,
        ResourceExhausted where it lives and its answer is late.
        """
        within_s = max(within_s, 4 * self._connect_s.get(address, self._timeout_s))
        worker: RemoteWorker | None = None
        found: list[WorkerDescription] = []

        async def ask(worker: RemoteWorker) -> None:
            found.append(await worker.describe(timeout_s=None))

        async def be_lost() -> None:
            raise await self.lost(address)

        try:
            async with asyncio.timeout(within_s):
                worker = await self.worker(address)
                await first_done(ask(worker), be_lost())
        except TimeoutError:
            if worker is None:
                message = f"no connection to the worker at {address} within {within_s:.3g} s"
                raise Unavailable(message, reason="WORKER_UNREACHABLE", address=address) from None
            raise ResourceExhausted(
                f"the worker at {address} lives, and has not answered within {within_s:.3g} s: much is on its way to "
                "it, or it is overloaded",
                reason="ANSWER_LATE",
                address=address,
            ) from None
        return found[0]

    async def stage(self, address: str) -> RemoteStage:
        """Return the stage of the worker at an address."""
        connection = await self._connection(address)
        batches = None if self._watcher is None else connection.batches
        return RemoteStage(connection.channel, address, connection.link, connection.heartbeats.guard, batches)

    async def draft(self, address: str) -> RemoteDraft:
        """Return the draft of the worker at an address."""
        connection = await self._connection(address)
        return RemoteDraft(connection.channel, address, connection.link, connection.heartbeats.guard)

    async def compressor(self, address: str) -> RemoteCompressor:
        """Return the drafter with which the worker at an address compresses prompts."""
        connection = await self._connection(address)
        return RemoteCompressor(connection.channel, address, connection.heartbeats.guard)

    async def snapshots(self, address: str) -> RemoteSnapshots:
        """Return the kept prefixes of the worker at an address, on a connection of their own: no step may wait behind a
        snapshot."""
        heartbeats = (await self._connection(address)).heartbeats
        connection = await self._connection(address, "snapshots", heartbeats)
        return RemoteSnapshots(connection.channel, address, connection.link, heartbeats.guard)

    async def awaited(self, address: str, seconds: float) -> None:
        """Call a worker that is still starting until it answers, for at most so many seconds.

        Raises nothing: where it never came, or something else is wrong, the next call says so.
        """
        with contextlib.suppress(FlashsplitError, TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        await self._connection(address)
                        return
                    except Unavailable as error:
                        if error.reason != "WORKER_UNREACHABLE":
                            return
                        log.info("worker.awaited", address=address, why=error.message)

    async def reach(self, address: str, lost_after_s: float | None = None, *, within_s: float = math.inf) -> None:
        """Connect to a worker, unless that is done, and take it for lost when nothing has been heard of it for so long;
        None leaves that as it is.

        within_s: how long that may take, or four times as long as the last time where that is more; in any case no
        longer than any connection. Raises Unavailable where it takes longer; the attempt goes on for the next caller.
        """
        within_s = max(within_s, 4 * self._connect_s.get(address, 0.0))
        try:
            async with asyncio.timeout(None if within_s == math.inf else within_s):
                connection = await self._connection(address)
        except TimeoutError:
            raise Unavailable(
                f"no worker answers at {address} within {within_s:.3g} s: start one there with flashsplit-worker "
                f"--listen {address}, or correct the address",
                reason="WORKER_UNREACHABLE",
                address=address,
            ) from None
        if lost_after_s is not None:
            connection.heartbeats.lost_after_s = lost_after_s

    async def lost(self, address: str) -> Unavailable:
        """Wait until the connection for steps breaks or cannot be made, or the worker there falls silent or says that
        it cannot compute, and return the error that says so."""
        try:
            connection = await self._connection(address)
        except Unavailable as error:
            return error
        broken = asyncio.ensure_future(connection.channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        troubled = asyncio.ensure_future(connection.heartbeats.trouble())
        try:
            await asyncio.wait([broken, troubled], return_when=asyncio.FIRST_COMPLETED)
        finally:
            broken.cancel()
            troubled.cancel()
            await asyncio.gather(broken, troubled, return_exceptions=True)
        if not troubled.cancelled():
            return troubled.result()
        return Unavailable(
            f"the connection to the worker at {address} broke", reason="WORKER_UNREACHABLE", address=address
        )

    def trouble(self, address: str) -> Unavailable | None:
        """Return what is known to be wrong with a worker now; None where nothing is, and where it was never called."""
        connection = self._connections.get((address, "steps"))
        return None if connection is None else connection.heartbeats.present_trouble

    def leaving(self, address: str) -> Heartbeats | None:
        """Return the heartbeats of a worker that says that it was told to stop, by which it can be asked to wait; None
        for all others."""
        connection = self._connections.get((address, "steps"))
        return connection.heartbeats if connection is not None and connection.heartbeats.leaving else None

    @property
    def doubts(self) -> int:
        """How often workers were silent and asked whether they live, over the connections that there are."""
        connections = [connection for (_, use), connection in self._connections.items() if use == "steps"]
        return sum(connection.heartbeats.doubts for connection in connections)

    def is_connected(self, address: str) -> bool:
        """Return whether a worker can be called now without connecting to it first."""
        connection = self._connections.get((address, "steps"))
        return connection is not None and connection.usable

    async def edge(self, address: str, peer: str) -> Edge | None:
        """Have the worker at an address connect to another one, and watch over that connection; None where it is of a
        release that cannot."""
        connection = await self._connection(address)
        return await watch_edge(connection.channel, address, peer, connection.heartbeats)

    async def leave(self, address: str) -> None:
        """End the attempts to connect to a worker that is gone, of which those who wait get Unavailable, and take no
        new calls to the connections that there are."""
        for key in [key for key in self._connecting if key[0] == address]:
            self._connecting[key].cancel()
        for key in [key for key in self._connections if key[0] == address]:
            await self._retire(self._connections.pop(key))

    async def close(self) -> None:
        """Close all connections; running calls end."""
        attempts = [*self._connecting.values()]
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)
        connections, self._connections = self._connections, {}
        for connection in (*connections.values(), *self._retired):
            await connection.close()
        self._retired.clear()

    async def _connection(self, address: str, use: str = "steps", heartbeats: Heartbeats | None = None) -> Connection:
        """heartbeats: those of another connection to the same worker, where this one is to have none of its own."""
        key = address, use
        if key not in self._connecting:
            connection = self._connections.get(key)
            if connection is not None and connection.usable and heartbeats in (None, connection.heartbeats):
                return connection
            self._connecting[key] = asyncio.ensure_future(self._reconnect(key, heartbeats))
            # Where nobody waits for it any more, nobody needs to know how it ended.
            self._connecting[key].add_done_callback(lambda attempt: attempt.cancelled() or attempt.exception())
        attempt = self._connecting[key]
        # Who stops waiting leaves the others their attempt.
        await asyncio.wait([attempt])
        if attempt.cancelled():
            raise Unavailable(
                f"the worker at {address} is gone, and is not called any more",
                reason="WORKER_UNREACHABLE",
                address=address,
            )
        if isinstance(error := attempt.exception(), FlashsplitError):
            # Each of those who wait adds its own place to it.
            raise error.copied()
        return attempt.result()

    async def _reconnect(self, key: tuple[str, str], heartbeats: Heartbeats | None) -> Connection:
        try:
            if (old := self._connections.pop(key, None)) is not None:
                # A worker that was gone is called anew, without waiting out the old channel's back-off.
                await self._retire(old)
            connection = self._connections[key] = await self._connect(key[0], heartbeats)
            return connection
        finally:
            del self._connecting[key]

    async def _retire(self, connection: Connection) -> None:
        """Keep a connection for the calls that run on it: a worker that stops still answers them."""
        self._retired.append(connection)
        if len(self._retired) > MAX_RETIRED:
            await self._retired.popleft().close()

    async def _connect(self, address: str, heartbeats: Heartbeats | None) -> Connection:
        began = time.monotonic()
        try:
            channel = await connect(address, timeout_s=self._timeout_s, security=self._security)
        except Unavailable as error:
            if self._caller is not None:
                error.message = f"{self._caller()}: {error.message}"
            raise
        self._connect_s[address] = time.monotonic() - began
        own = heartbeats or Heartbeats(channel, address, self._lost_after_s, self._security)
        connection = Connection(channel, address, own, has_own=heartbeats is None)
        watcher = self._watcher if heartbeats is None else None
        try:
            connection.share(
                await share_memory(channel, address, self._transport, watcher, connection.heartbeats.guard)
            )
        except BaseException:
            await connection.close()
            raise
        return connection
