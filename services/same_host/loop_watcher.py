"""An event loop that watches step sockets, in a process that computes nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable


class LoopWatcher:
    """Implements `services.same_host.step_socket.Watcher` on the event loop that runs when a socket comes."""

    def watch(self, connection: socket.socket, on_readable: Callable[[], None]) -> None:
        asyncio.get_running_loop().add_reader(connection.fileno(), on_readable)

    def unwatch(self, connection: socket.socket) -> None:
        if connection.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
