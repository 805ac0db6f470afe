"""A Unix socket between two processes that share memory: frames of streams, past gRPC's own threads.

gRPC wakes two threads for every message before the event loop hears of it; where these have slept for some milliseconds
that is most of what a step costs on its way. Streams begin and end as gRPC calls; the frames between go through here
where both ends have said so.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import cast

import structlog

from services.errors import FailedPrecondition, InvalidArgument

MAX_FRAME_BYTES = 16 << 20
WINDOW_BYTES = 1 << 20
"""Of one stream, on their way or not yet read; who writes more waits."""

_HEADER = struct.Struct("<Qi")
_CONNECT_S = 2.0

BROKEN_S = 1.0
"""A socket mostly breaks because a process is gone: so long its calls have to say that."""

log = structlog.get_logger()


class Lane:
    """One end of one stream. Use `close` when the stream is over."""

    def __init__(self, frames: FrameSocket, stream_id: int) -> None:
        self._socket, self._stream_id = frames, stream_id
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._unread_bytes = self._read_bytes = self._written_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._over = False
        self.broken = False
        """The socket is gone: what became of the stream only its call can tell."""

    async def read(self) -> bytes | None:
        """The next frame; None behind the last one: the other side has ended the stream, or is gone."""
        if self._over:
            return None
        frame = await self._frames.get()
        if frame is None:
            self._over = True
            return None
        self._unread_bytes -= len(frame)
        self._read_bytes += len(frame)
        # Not each time: the other side has half a window left by then.
        if self._read_bytes >= WINDOW_BYTES // 2:
            self._socket.send(self._stream_id, -self._read_bytes)
            self._read_bytes = 0
        return frame

    async def write(self, frame: bytes) -> bool:
        """Waits for room. False where nobody can be reached any more."""
        await self._room.wait()
        self._written_bytes += len(frame)
        if self._written_bytes >= WINDOW_BYTES:
            self._room.clear()
        return self._socket.send(self._stream_id, len(frame), frame)

    def end(self) -> None:
        """Tell the other side that it has all frames."""
        self._socket.send(self._stream_id, 0)

    def close(self) -> None:
        """Take and send no more frames. Safe to call twice."""
        self._socket.forget(self._stream_id)
        self.lost()

    # --- the socket's side

    def put(self, frame: bytes) -> bool:
        """A frame has come; False where the other side doesn't keep to the window."""
        self._unread_bytes += len(frame)
        self._frames.put_nowait(frame)
        return self._unread_bytes <= WINDOW_BYTES + MAX_FRAME_BYTES

    def give(self, count: int) -> None:
        """The other side has read so many bytes more."""
        self._written_bytes -= count
        if self._written_bytes < WINDOW_BYTES:
            self._room.set()

    def lost(self) -> None:
        """No more will come, and nothing arrives."""
        self._frames.put_nowait(None)
        self._room.set()


class FrameSocket(asyncio.Protocol):
    """Both ends are alike, but for who speaks first: the one that calls."""

    def __init__(self, own: bytes, expected: bytes, then: Callable[[FrameSocket], None] | None = None) -> None:
        """own, expected: what this side says and what it waits for, to know the other. then: at the end that is called,
        what to do when the caller is known."""
        self._own, self._expected, self._then = own, expected, then
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._lanes: dict[int, Lane] = {}
        self._received = bytearray()

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def lane(self, stream_id: int) -> Lane:
        """One end of a stream. Raises InvalidArgument where another one has that number."""
        if stream_id in self._lanes:
            raise InvalidArgument(f"stream_id {stream_id} is in use", field="lane.stream_id")
        self._lanes[stream_id] = Lane(self, stream_id)
        return self._lanes[stream_id]

    def send(self, stream_id: int, size: int, frame: bytes = b"") -> bool:
        """A frame of `size` bytes; without bytes the end of a stream, or so many read ones as a negative size says."""
        if self.closed or self._transport is None:
            return False
        self._transport.writelines((_HEADER.pack(stream_id, size), frame))
        return True

    def forget(self, stream_id: int) -> None:
        self._lanes.pop(stream_id, None)

    def close(self) -> None:
        """End all streams. Safe to call twice."""
        if self._transport is not None:
            self._transport.abort()
        self._ended()

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._then is None:
            self._transport.write(self._own)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.ready.done() and not self._known():
            return
        at, end = 0, len(self._received)
        while end - at >= _HEADER.size:
            stream_id, size = _HEADER.unpack_from(self._received, at)
            first = at + _HEADER.size
            if size > MAX_FRAME_BYTES:
                self._give_up(f"a frame of {size} bytes; the most is {MAX_FRAME_BYTES}")
                return
            if end - first < size:
                break
            at = first + max(0, size)
            # A stream that is over here may still be written to by who does not know.
            if (lane := self._lanes.get(stream_id)) is not None:
                if size < 0:
                    lane.give(-size)
                elif size == 0:
                    lane.lost()
                elif not lane.put(bytes(self._received[first:at])):
                    self._give_up(f"over {WINDOW_BYTES} bytes of one stream unread")
                    return
        del self._received[:at]

    def connection_lost(self, _: Exception | None) -> None:
        self._ended()

    def _known(self) -> bool:
        """Whether the other side has shown that it is the one; what it said is taken away."""
        size = len(self._expected)
        if len(self._received) < size:
            return False
        if not hmac.compare_digest(bytes(self._received[:size]), self._expected):
            self._give_up("another process")
            return False
        del self._received[:size]
        self.ready.set_result(None)
        if self._then is not None and self._transport is not None:
            self._then(self)
            self._transport.write(self._own)
        return True

    def _give_up(self, why: str) -> None:
        log.warning("frame_socket.closed", why=why)
        self.close()

    def _ended(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(FailedPrecondition("the socket beside the shared memory was closed"))
            # Nobody may be waiting.
            self.ready.exception()
        for lane in self._lanes.values():
            lane.broken = True
            lane.lost()
        self._lanes.clear()


class Listener:
    """Waits for the one caller of a link, and hands over the socket to it."""

    def __init__(self, own: bytes, expected: bytes, then: Callable[[FrameSocket], None]) -> None:
        """own, expected: as in `FrameSocket`. then: called with the socket when the caller has come."""
        self._own, self._expected, self._then = own, expected, then
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> str:
        """The name to call. Raises OSError where the system has no such sockets."""
        name = f"flashsplit-{secrets.token_hex(8)}"
        # Made by hand, here and below: uvloop takes no abstract names.
        made = socket.socket(socket.AF_UNIX)
        try:
            made.bind(f"\0{name}")
            self._server = await asyncio.get_running_loop().create_unix_server(self._called, sock=made)
        except BaseException:
            made.close()
            raise
        return name

    def close(self) -> None:
        """Wait no more. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _called(self) -> FrameSocket:
        return FrameSocket(self._own, self._expected, then=self._accept)

    def _accept(self, frames: FrameSocket) -> None:
        if self._server is None:
            frames.close()
            return
        self.close()
        self._then(frames)


async def call(name: str, own: bytes, expected: bytes) -> FrameSocket:
    """To a listener. Raises FailedPrecondition where none answers."""
    frames, made = FrameSocket(own, expected), socket.socket(socket.AF_UNIX)
    try:
        made.setblocking(False)
        made.connect(f"\0{name}")
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().create_unix_connection(lambda: frames, sock=made)
            await frames.ready
    except (OSError, TimeoutError) as error:
        made.close()
        frames.close()
        raise FailedPrecondition(f"no socket {name} can be reached: {error}", reason="NOT_SHARED") from error
    return frames
