"""A Unix socket between the threads that compute in two processes: steps that follow each other, past both event loops.

An event loop and a thread that sleep wake up one after the other for every frame; for small models, and for GPUs, that
takes as long as a layer or several. Packets are small and are sent whole or not at all, so that nobody waits here.
A packet begins with its stream's number: 8 bytes, little-endian.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import structlog

from services.errors import FailedPrecondition, InvalidArgument

MAX_PACKET_BYTES = 128 << 10
"""The largest packet: less than a socket of this kind holds by default."""

_HEADER = struct.Struct("<Q")
CONNECT_TIMEOUT_S = 2.0
_PACKETS_AT_ONCE = 16
"""The packets that are read before the thread does something else: whoever sends without end must not keep it."""

T = TypeVar("T")

log = structlog.get_logger()


class Watcher(Protocol):
    """A thread that waits for sockets when it has nothing else to do."""

    def watch(self, connection: socket.socket, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` on that thread whenever there is something to read."""

    def unwatch(self, connection: socket.socket) -> None:
        """Stop watching the socket, and close it."""


class StepSocket:
    """One end of the socket.

    A stream joins before packets for it may come. `join` and `close` may be called on any thread, all else is called on
    the watcher's.
    """

    def __init__(self, sock: socket.socket, watcher: Watcher) -> None:
        """sock: connected, not blocking, of type SOCK_SEQPACKET."""
        self._socket, self._watcher = sock, watcher
        self._streams: dict[int, Callable[[memoryview], None]] = {}
        self._packet = memoryview(bytearray(MAX_PACKET_BYTES))
        self._shared: object = None
        self.closed = False
        watcher.watch(sock, self._read_packets)

    def join(self, stream_id: int, on_message: Callable[[memoryview], None]) -> None:
        """Begin a stream. on_message: called with each message for it; its argument lasts only for the call.

        Raises InvalidArgument where another stream has that number.
        """
        if stream_id in self._streams:
            raise InvalidArgument(f"stream_id {stream_id} is in use", field="lane.stream_id")
        self._streams[stream_id] = on_message

    def shared(self, make: Callable[[], T]) -> T:
        """Return what all users of the socket share; `make` makes it at the first call. To be called on one thread."""
        if self._shared is None:
            self._shared = make()
        return cast(T, self._shared)

    def leave(self, stream_id: int) -> None:
        """Pass over what comes for a stream from now on."""
        self._streams.pop(stream_id, None)

    def send(self, stream_id: int, *pieces: bytes | memoryview) -> bool:
        """Send a message, given in pieces.

        Returns False where it was not sent: it is too large, there is no room now, or nobody there any more.
        """
        if self.closed or _HEADER.size + sum(map(len, pieces)) > MAX_PACKET_BYTES:
            return False
        try:
            self._socket.sendmsg([_HEADER.pack(stream_id), *pieces])
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End all streams. Safe to call twice."""
        if not self.closed:
            self.closed = True
            self._watcher.unwatch(self._socket)

    def _read_packets(self) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            if self.closed:
                return
            try:
                size = self._socket.recv_into(self._packet)
            except BlockingIOError:
                return
            except OSError:
                size = 0
            if not size:
                self.close()
                return
            if size < _HEADER.size:
                log.warning("step_socket.closed", why=f"a packet of {size} bytes")
                self.close()
                return
            [stream_id] = _HEADER.unpack_from(self._packet)
            # The other side may still write to a stream that is over here.
            if (on_message := self._streams.get(stream_id)) is not None:
                on_message(self._packet[_HEADER.size : size])


class StepListener:
    """Waits for the one caller of a link, and hands over the socket to it."""

    def __init__(self, own: bytes, expected: bytes, on_connected: Callable[[socket.socket], None]) -> None:
        """own, expected: the secret that this side shows, and the one by which it knows the other. on_connected: called
        with the socket when the caller has come."""
        self._own, self._expected, self._on_connected = own, expected, on_connected
        self._waiting: list[socket.socket] = []
        """The listening socket, and those of callers that have not shown their secret yet."""

    def start(self) -> str:
        """Wait from now on, and return the name to call. Raises OSError where the system has no such sockets."""
        name = f"flashsplit-{secrets.token_hex(8)}"
        listening = _new_socket()
        try:
            listening.bind(f"\0{name}")
            listening.listen(1)
        except BaseException:
            listening.close()
            raise
        self._wait_for(listening, self._accept)
        return name

    def close(self) -> None:
        """Wait no more. Safe to call twice."""
        while self._waiting:
            self._forget(self._waiting[-1]).close()

    def _wait_for(self, sock: socket.socket, ready: Callable[[socket.socket], None]) -> None:
        self._waiting.append(sock)
        asyncio.get_running_loop().add_reader(sock.fileno(), ready, sock)

    def _forget(self, sock: socket.socket) -> socket.socket:
        asyncio.get_running_loop().remove_reader(sock.fileno())
        self._waiting.remove(sock)
        return sock

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            caller, _ = listening.accept()
            caller.setblocking(False)
            self._wait_for(caller, self._check_secret)

    def _check_secret(self, caller: socket.socket) -> None:
        self._forget(caller)
        try:
            known = hmac.compare_digest(caller.recv(2 * len(self._expected)), self._expected)
            if known:
                caller.send(self._own)
        except OSError:
            known = False
        if not known:
            log.warning("step_socket.closed", why="another process")
            caller.close()
            return
        self.close()
        self._on_connected(caller)


async def connect_steps(
    name: str, own: bytes, expected: bytes, *, timeout_s: float = CONNECT_TIMEOUT_S
) -> socket.socket:
    """Connect to a listener. Raises FailedPrecondition where none answers in time."""
    calling, loop = _new_socket(), asyncio.get_running_loop()
    answered = asyncio.Event()
    try:
        calling.connect(f"\0{name}")
        calling.send(own)
        loop.add_reader(calling.fileno(), answered.set)
        try:
            async with asyncio.timeout(timeout_s):
                await answered.wait()
        finally:
            loop.remove_reader(calling.fileno())
        if not hmac.compare_digest(calling.recv(2 * len(expected)), expected):
            raise OSError("another process answers")
    except (OSError, TimeoutError) as error:
        calling.close()
        raise FailedPrecondition(f"no socket {name} can be reached: {error}", reason="NOT_SHARED") from error
    except BaseException:
        calling.close()
        raise
    return calling


def _new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    return sock
