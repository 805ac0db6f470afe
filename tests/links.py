"""TCP links with faults between real processes: slow ones, and ones that swallow everything without being closed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from services.event_loop import first_done

_PIECE_BYTES = 16 << 10
_BUFFER_BYTES = 64 << 10
_LOOK_S = 0.01


class Link:
    """A TCP link from `address` to a port of this host; see `link`.

    bytes_per_s: how fast bytes go, in each direction of each connection; None for as fast as they can. silent: whether
    everything that comes is swallowed while the connections stay, as behind a cable that was cut. Both may be changed
    at any time. A connection from which something was swallowed is reset when the link is silent no more.
    """

    def __init__(self, target_port: int, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s, self.silent = bytes_per_s, False
        self._target = "127.0.0.1", target_port
        self._listener = _socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    async def run(self, ending: asyncio.Event) -> None:
        """Pass bytes on until told to end."""
        with self._listener:
            await first_done(self._accept(), _wait(ending))

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as connections:
            while True:
                near, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                connections.create_task(self._connected(near))

    async def _connected(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, _socket() as far:
            near.setblocking(False)
            await asyncio.get_running_loop().sock_connect(far, self._target)
            await first_done(self._pass_on(near, far), self._pass_on(far, near))

    async def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        loop, due = asyncio.get_running_loop(), 0.0
        while piece := await loop.sock_recv(source, _PIECE_BYTES):
            if self.silent:
                break
            if self.bytes_per_s is not None:
                due = max(due, time.monotonic()) + len(piece) / self.bytes_per_s
                await asyncio.sleep(due - time.monotonic())
            await loop.sock_sendall(sink, piece)
        while self.silent:
            await asyncio.sleep(_LOOK_S)


@contextlib.contextmanager
def link(target_port: int, bytes_per_s: float | None = None) -> Iterator[Link]:
    """Give a link that passes bytes on within the context, on a thread of its own."""
    made, ending, loop = Link(target_port, bytes_per_s), asyncio.Event(), asyncio.new_event_loop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(made.run(ending))

    thread = threading.Thread(target=run, name="link")
    thread.start()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(10)


def _socket() -> socket.socket:
    """Return a TCP socket with small buffers, so that a sender finds a slow link full soon."""
    made = socket.socket()
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    made.setblocking(False)
    return made


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
