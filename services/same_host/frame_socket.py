"""A Unix socket between two processes that share memory: frames of streams, past gRPC's own threads.

gRPC wakes two threads for every message before the event loop hears of it; where these have slept for some milliseconds
that is most of what a step costs on its way. Streams begin and end as gRPC calls; the frames between go through here
where both ends have said so.

On the socket a frame lies behind a header of 12 bytes: the stream's number and the frame's size, little-endian. A size
of 0 ends the stream, a negative one says how many bytes of the other side's frames were read.
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
"""The bytes of one stream that may be on their way or unread; a writer waits when there are more."""

_HEADER = struct.Struct("<Qi")
_CONNECT_TIMEOUT_S = 2.0

BROKEN_S = 1.0
"""How long the calls have, when a socket breaks, to say why: mostly the other process is gone."""

log = structlog.get_logger()


class FrameLane:
    """One end of one stream. Use `close` when the stream is over."""

    def __init__(self, frame_socket: FrameSocket, stream_id: int) -> None:
        self._socket, self._stream_id = frame_socket, stream_id
        self._frames: asyncio.Queue[object] = asyncio.Queue()
        self._unread_bytes = self._unconfirmed_bytes = self._written_bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._over = False
        self.broken = False
        """Whether the socket is gone, so that only the stream's call can tell what became of it."""

    async def read(self) -> object:
        """Return the next frame's bytes, or what was put between them; None behind the last one: the other side has
        ended the stream, or is gone."""
        if self._over:
            return None
        frame = await self._frames.get()
        if frame is None:
            self._over = True
        if not isinstance(frame, bytes):
            return frame
        self._unread_bytes -= len(frame)
        self._unconfirmed_bytes += len(frame)
        # Not each time: the other side has half a window left by then.
        if self._unconfirmed_bytes >= WINDOW_BYTES // 2:
            self._socket.send(self._stream_id, -self._unconfirmed_bytes)
            self._unconfirmed_bytes = 0
        return frame

    def put(self, item: object) -> None:
        """Have `read` return something that came another way, behind the frames that came before."""
        self._frames.put_nowait(item)

    @property
    def has_room(self) -> bool:
        """Whether the window has room for a frame."""
        return self._writable.is_set()

    async def write(self, frame: bytes) -> bool:
        """Send a frame when the window has room; return False where nobody can be reached any more."""
        await self._writable.wait()
        return self.write_now(frame)

    def write_now(self, frame: bytes) -> bool:
        """Send a frame as `write` does, where the window has room."""
        self._written_bytes += len(frame)
        if self._written_bytes >= WINDOW_BYTES:
            self._writable.clear()
        return self._socket.send(self._stream_id, len(frame), frame)

    def end(self) -> None:
        """Tell the other side that it has all frames."""
        self._socket.send(self._stream_id, 0)

    def close(self) -> None:
        """Take and send no more frames. Safe to call twice."""
        self._socket.forget(self._stream_id)
        self.finish()

    # --- called by the socket

    def receive(self, frame: bytes) -> bool:
        """Queue a frame for `read`; return False where the other side does not keep to the window."""
        self._unread_bytes += len(frame)
        self._frames.put_nowait(frame)
        return self._unread_bytes <= WINDOW_BYTES + MAX_FRAME_BYTES

    def confirm(self, byte_count: int) -> None:
        """Take note that the other side has read so many bytes more."""
        self._written_bytes -= byte_count
        if self._written_bytes < WINDOW_BYTES:
            self._writable.set()

    def finish(self) -> None:
        """End `read` behind the frames that are there, and let no writer wait: what is sent arrives nowhere."""
        self._frames.put_nowait(None)
        self._writable.set()


class FrameSocket(asyncio.Protocol):
    """One end of the socket. Both ends are alike, but for who speaks first: the one that calls."""

    def __init__(
        self, own: bytes, expected: bytes, on_caller_known: Callable[[FrameSocket], None] | None = None
    ) -> None:
        """own, expected: the secret that this side shows, and the one by which it knows the other. on_caller_known:
        called at the end that was called, once the caller has shown its secret; None at the end that calls."""
        self._own, self._expected, self._on_caller_known = own, expected, on_caller_known
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._lanes: dict[int, FrameLane] = {}
        self._received = bytearray()
        self._outgoing: list[bytes] = []
        """What is written when the event loop has done what it is at: frames of many streams in one call."""
        self._loop = asyncio.get_running_loop()

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent: not yet, or not any more."""
        return self._transport is None or self._transport.is_closing()

    def lane(self, stream_id: int) -> FrameLane:
        """Return one end of a new stream. Raises InvalidArgument where another one has that number."""
        if stream_id in self._lanes:
            raise InvalidArgument(f"stream_id {stream_id} is in use", field="lane.stream_id")
        self._lanes[stream_id] = FrameLane(self, stream_id)
        return self._lanes[stream_id]

    def send(self, stream_id: int, size: int, frame: bytes = b"") -> bool:
        """Send a frame of `size` bytes or, without one, what the size says by itself; return whether it could be."""
        if self.closed:
            return False
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += (_HEADER.pack(stream_id, size), frame)
        return True

    def forget(self, stream_id: int) -> None:
        """Pass over what comes for a stream from now on."""
        self._lanes.pop(stream_id, None)

    def close(self) -> None:
        """End all streams. Safe to call twice."""
        if self._transport is not None:
            self._transport.abort()
        self._end_lanes()

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if not self.closed and self._transport is not None:
            self._transport.writelines(outgoing)

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._on_caller_known is None:
            self._transport.write(self._own)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self.ready.done() and not self._check_secret():
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
            # The other side may still write to a stream that is over here.
            if (lane := self._lanes.get(stream_id)) is not None:
                if size < 0:
                    lane.confirm(-size)
                elif size == 0:
                    lane.finish()
                elif not lane.receive(bytes(self._received[first:at])):
                    self._give_up(f"over {WINDOW_BYTES} bytes of one stream unread")
                    return
        del self._received[:at]

    def connection_lost(self, _: Exception | None) -> None:
        self._end_lanes()

    def _check_secret(self) -> bool:
        """Return whether the other side has shown the secret that is expected, and take it from the bytes received."""
        size = len(self._expected)
        if len(self._received) < size:
            return False
        if not hmac.compare_digest(bytes(self._received[:size]), self._expected):
            self._give_up("another process")
            return False
        del self._received[:size]
        self.ready.set_result(None)
        if self._on_caller_known is not None and self._transport is not None:
            self._on_caller_known(self)
            self._transport.write(self._own)
        return True

    def _give_up(self, why: str) -> None:
        log.warning("frame_socket.closed", why=why)
        self.close()

    def _end_lanes(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(FailedPrecondition("the socket beside the shared memory was closed"))
            # Nobody may be waiting: without this asyncio would log the error.
            self.ready.exception()
        for lane in self._lanes.values():
            lane.broken = True
            lane.finish()
        self._lanes.clear()


class FrameListener:
    """Waits for the one caller of a link, and hands over the socket to it."""

    def __init__(self, own: bytes, expected: bytes, on_connected: Callable[[FrameSocket], None]) -> None:
        """own, expected: as in `FrameSocket`. on_connected: called with the socket when the caller has come."""
        self._own, self._expected, self._on_connected = own, expected, on_connected
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> str:
        """Wait from now on, and return the name to call. Raises OSError where the system has no such sockets."""
        name = f"flashsplit-{secrets.token_hex(8)}"
        # Not by asyncio, here and below: uvloop takes no abstract names.
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(f"\0{name}")
            self._server = await asyncio.get_running_loop().create_unix_server(self._new_socket, sock=listening)
        except BaseException:
            listening.close()
            raise
        return name

    def close(self) -> None:
        """Wait no more. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _new_socket(self) -> FrameSocket:
        return FrameSocket(self._own, self._expected, self._accept)

    def _accept(self, caller: FrameSocket) -> None:
        if self._server is None:
            caller.close()
            return
        self.close()
        self._on_connected(caller)


async def connect_frames(name: str, own: bytes, expected: bytes) -> FrameSocket:
    """Connect to a listener. Raises FailedPrecondition where none answers."""
    frame_socket, calling = FrameSocket(own, expected), socket.socket(socket.AF_UNIX)
    try:
        calling.setblocking(False)
        calling.connect(f"\0{name}")
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().create_unix_connection(lambda: frame_socket, sock=calling)
            await frame_socket.ready
    except (OSError, TimeoutError) as error:
        calling.close()
        frame_socket.close()
        raise FailedPrecondition(f"no socket {name} can be reached: {error}", reason="NOT_SHARED") from error
    return frame_socket
