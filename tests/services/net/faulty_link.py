"""A TCP proxy that stands for a bad network: bytes come later, slower, or damaged."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from services.addresses import socket_path

_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Fault:
    """What a link does to its bytes, each way alike.

    delay_s: how much later bytes arrive. jitter_s: at most so much more, anew for each piece; the order stays.
    bytes_per_s: how many pass at most. damage: returns the bytes that arrive in place of those that were sent.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = float("inf")
    damage: Callable[[bytes], bytes] | None = None


class FaultyLink:
    """A link to one address; use as `async with`.

    address: where to connect instead. fault: may be changed at any time.
    """

    def __init__(self, target: str, fault: Fault, *, seed: int = 0) -> None:
        """target: HOST:PORT or unix:PATH."""
        self._target, self.fault = target, fault
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> FaultyLink:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # The event loop closes what was aborted in its next round.
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await self._connect()
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
            for job in (self._take(source, way), self._give(way, sink)):
                task = asyncio.ensure_future(job)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if (path := socket_path(self._target)) is not None:
            return await asyncio.open_unix_connection(path)
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))

    async def _take(self, source: asyncio.StreamReader, way: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Give each piece the time at which it arrives. An empty piece ends the way."""
        loop = asyncio.get_running_loop()
        sent = arrives = 0.0
        piece = b"."
        while piece:
            try:
                piece = await source.read(_READ_BYTES)
            except OSError:
                piece = b""
            fault = self.fault
            sent = max(sent, loop.time()) + len(piece) / fault.bytes_per_s
            arrives = max(arrives, sent + fault.delay_s + self._random.uniform(0, fault.jitter_s))
            way.put_nowait((arrives, piece))
            # A slow link fills the sender's buffers, as a real one does.
            if fault.bytes_per_s < float("inf"):
                await asyncio.sleep(max(0.0, sent - loop.time() - 0.1))

    async def _give(self, way: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError):
                while True:
                    arrives, piece = await way.get()
                    if (early := arrives - loop.time()) > 0:
                        await asyncio.sleep(early)
                    if not piece:
                        break
                    sink.write(piece if self.fault.damage is None else self.fault.damage(piece))
                    await sink.drain()
            sink.close()
        except asyncio.CancelledError:
            sink.transport.abort()
            raise
