"""A TCP link that stands for a bad network between real processes: bytes come later, slower, damaged, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from services.addresses import socket_path
from services.event_loop import first_done

_PIECE_BYTES = 16 << 10
_BUFFER_BYTES = 64 << 10
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Fault:
    """What a link does to its bytes, each way alike.

    delay_s: how much later bytes arrive. jitter_s: at most so much more, anew for each piece; the order stays.
    bytes_per_s: how many pass at most. damage: returns the bytes that arrive in place of those that were sent. silent:
    whether everything that comes is swallowed while the connections stay, as behind a cable that was cut. A connection
    from which something was swallowed is closed when the link is silent no more.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = float("inf")
    damage: Callable[[bytes], bytes] | None = None
    silent: bool = False


GOOD = Fault()


class Link:
    """A link to one address, on the event loop; use as `async with`. For tests without one there is `link`.

    address: where to connect instead. fault: may be changed at any time, from any thread.
    """

    def __init__(self, target: str, fault: Fault = GOOD, *, seed: int = 0) -> None:
        """target: HOST:PORT or unix:PATH. seed: of the jitter."""
        self._target, self.fault = target, fault
        self._random = random.Random(seed)
        self._listener = _with_small_buffers(socket.socket())
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Link:
        self._accepting = asyncio.ensure_future(self._accept())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()

    async def _accept(self) -> None:
        async with asyncio.TaskGroup() as connections:
            while True:
                near, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                connections.create_task(self._connected(near))

    async def _connected(self, near: socket.socket) -> None:
        path, (host, _, port) = socket_path(self._target), self._target.rpartition(":")
        with near, _with_small_buffers(socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)) as far:
            near.setblocking(False)
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_connect(far, (host, int(port)) if path is None else path)
                ways: list[asyncio.Queue[tuple[float, bytes]]] = [asyncio.Queue(), asyncio.Queue()]
                await first_done(
                    self._take(near, ways[0]),
                    self._give(ways[0], far),
                    self._take(far, ways[1]),
                    self._give(ways[1], near),
                )

    async def _take(self, source: socket.socket, way: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Put each piece on its way with the time at which it arrives, and behind the last one an empty piece."""
        loop = asyncio.get_running_loop()
        sent = arrives = 0.0
        while True:
            try:
                piece = await loop.sock_recv(source, _PIECE_BYTES)
            except OSError:
                piece = b""
            fault = self.fault
            if fault.silent:
                while self.fault.silent:
                    await asyncio.sleep(_LOOK_S)
                piece = b""
            sent = max(sent, loop.time()) + len(piece) / fault.bytes_per_s
            arrives = max(arrives, sent + fault.delay_s + self._random.uniform(0, fault.jitter_s))
            way.put_nowait((arrives, piece))
            if not piece:
                break
            # A slow link fills the sender's buffers, as a real one does.
            await asyncio.sleep(sent - loop.time())
        # The connection lasts until the last piece has arrived.
        await asyncio.Event().wait()

    async def _give(self, way: asyncio.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        """Hand over each piece when it arrives, until an empty one comes."""
        loop = asyncio.get_running_loop()
        while True:
            arrives, piece = await way.get()
            await asyncio.sleep(arrives - loop.time())
            if not piece:
                break
            damage = self.fault.damage
            await loop.sock_sendall(sink, piece if damage is None else damage(piece))


@contextlib.contextmanager
def link(target: str) -> Iterator[Link]:
    """Give a link that passes bytes on within the context, on a thread of its own."""
    made, ending, loop = Link(target), asyncio.Event(), asyncio.new_event_loop()

    async def run() -> None:
        async with made:
            await ending.wait()

    def run_loop() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    thread = threading.Thread(target=run_loop, name="link")
    thread.start()
    try:
        yield made
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(10)


def _with_small_buffers(made: socket.socket) -> socket.socket:
    """Return the socket with small buffers, so that a sender finds a slow link full soon; it does not block."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    made.setblocking(False)
    return made
