"""A Unix socket between the threads that compute in two processes: steps that follow each other, past both event loops.

An event loop and a thread that sleep wake up one after the other for every frame; for small models, and for GPUs, that
takes as long as a layer or several. Packets are small and are sent whole or not at all, so that nobody waits here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Protocol

import structlog

from services.errors import FailedPrecondition, InvalidArgument

MAX_PACKET_BYTES = 128 << 10
"""Below what a socket of this kind holds by default."""

_HEADER = struct.Struct("<Q")
_CONNECT_S = 2.0
_AT_ONCE = 16
"""Packets that are read before the thread does something else: whoever sends without end must not keep it."""

log = structlog.get_logger()


class Watcher(Protocol):
    """A thread that waits for sockets when it has nothing else to do."""

    def watch(self, connection: socket.socket, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` on that thread whenever there is something to read."""

    def unwatch(self, connection: socket.socket) -> None:
        """Stop watching the socket, and close it."""


class StepSocket:
    """One end. `join` before packets may come; all but that and `close` on the watcher's thread."""

    def __init__(self, made: socket.socket, watcher: Watcher) -> None:
        """made: connected, not blocking, of type SOCK_SEQPACKET."""
        self._socket, self._watcher = made, watcher
        self._streams: dict[int, Callable[[memoryview], None]] = {}
        self._packet = memoryview(bytearray(MAX_PACKET_BYTES))
        self.closed = False
        watcher.watch(made, self._ready)

    def join(self, stream_id: int, then: Callable[[memoryview], None]) -> None:
        """then: called with each message for the stream; what it is given lasts only for the call.

        Raises InvalidArgument where another stream has that number.
        """
        if stream_id in self._streams:
            raise InvalidArgument(f"stream_id {stream_id} is in use", field="lane.stream_id")
        self._streams[stream_id] = then

    def leave(self, stream_id: int) -> None:
        self._streams.pop(stream_id, None)

    def send(self, stream_id: int, *message: bytes | memoryview) -> bool:
        """False where it was not sent: too large, no room now, or nobody there any more. message: in pieces."""
        if self.closed or _HEADER.size + sum(map(len, message)) > MAX_PACKET_BYTES:
            return False
        try:
            self._socket.sendmsg([_HEADER.pack(stream_id), *message])
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Safe to call twice."""
        if not self.closed:
            self.closed = True
            self._watcher.unwatch(self._socket)

    def _ready(self) -> None:
        for _ in range(_AT_ONCE):
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
            # A stream that is over here may still be written to by who does not know.
            if (then := self._streams.get(stream_id)) is not None:
                then(self._packet[_HEADER.size : size])


class StepListener:
    """Waits for the one caller of a link, and hands over the socket to it."""

    def __init__(self, own: bytes, expected: bytes, then: Callable[[socket.socket], None]) -> None:
        """own, expected: what this side says and what it waits for, to know the other. then: called with the socket
        when the caller has come."""
        self._own, self._expected, self._then = own, expected, then
        self._waiting: list[socket.socket] = []

    def start(self) -> str:
        """The name to call. Raises OSError where the system has no such sockets."""
        name = f"flashsplit-{secrets.token_hex(8)}"
        made = _made()
        try:
            made.bind(f"\0{name}")
            made.listen(1)
        except BaseException:
            made.close()
            raise
        self._wait(made, self._called)
        return name

    def close(self) -> None:
        """Wait no more. Safe to call twice."""
        while self._waiting:
            self._forget(self._waiting[-1]).close()

    def _wait(self, made: socket.socket, ready: Callable[[socket.socket], None]) -> None:
        self._waiting.append(made)
        asyncio.get_running_loop().add_reader(made.fileno(), ready, made)

    def _forget(self, made: socket.socket) -> socket.socket:
        asyncio.get_running_loop().remove_reader(made.fileno())
        self._waiting.remove(made)
        return made

    def _called(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            caller, _ = listening.accept()
            caller.setblocking(False)
            self._wait(caller, self._greeted)

    def _greeted(self, caller: socket.socket) -> None:
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
        self._then(caller)


async def call_steps(name: str, own: bytes, expected: bytes) -> socket.socket:
    """To a listener. Raises FailedPrecondition where none answers."""
    made, loop = _made(), asyncio.get_running_loop()
    answered = asyncio.Event()
    try:
        made.connect(f"\0{name}")
        made.send(own)
        loop.add_reader(made.fileno(), answered.set)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await answered.wait()
        finally:
            loop.remove_reader(made.fileno())
        if not hmac.compare_digest(made.recv(2 * len(expected)), expected):
            raise OSError("another process answers")
    except (OSError, TimeoutError) as error:
        made.close()
        raise FailedPrecondition(f"no socket {name} can be reached: {error}", reason="NOT_SHARED") from error
    except BaseException:
        made.close()
        raise
    return made


def _made() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made
