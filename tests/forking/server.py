"""A fork server of the tests: imports a program's modules once, and forks processes that run it on request.

python -m tests.forking.server shard_worker|coordinator FOLDER

It listens at FOLDER/PROGRAM.sock. It ends, with all processes that it forked, when its standard input ends. One of them
is killed when the process that stands in for it (`startup/sitecustomize.py`) is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import sys
from typing import Any

MODULES = {
    "shard_worker": (
        "shard_worker.__main__",
        "shard_worker.worker",
        "shard_worker.stage.loader",
        "shard_worker.roles.target",
        "shard_worker.roles.draft",
        "shard_worker.measure.probe",
        "uvloop",
    ),
    "coordinator": (
        "coordinator.__main__",
        "coordinator.bench",
        *(f"coordinator.cli.commands.{name}" for name in ("serve", "generate", "plan", "status", "chat")),
        "uvicorn.lifespan.on",
    ),
}
_ABOVE = 256
"""Received files are moved above this number first, so that none lies where another one belongs."""


class Forked(Exception):
    """Raised in a forked process, to leave the server's code behind. Holds what was asked for."""


class ForkServer:
    """Connections to processes that stand in for others, and those others, forked for them."""

    def __init__(self, path: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._forked: dict[int, socket.socket] = {}
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (self._listener, self._wakeup, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until standard input ends. Raises Forked in every process that it forks."""
        while True:
            for key, _ in self._selector.select():
                source: Any = key.fileobj
                if source is sys.stdin:
                    for forked in self._forked:
                        os.kill(forked, signal.SIGKILL)
                    return
                if source is self._listener:
                    self._fork(self._listener.accept()[0])
                elif source is self._wakeup:
                    self._wakeup.recv(4096)
                    self._reap()
                else:
                    self._pass_on(source, key.data)

    def _fork(self, connection: socket.socket) -> None:
        try:
            header, files, _, _ = socket.recv_fds(connection, 8, 64)
            size, request = int.from_bytes(header, "little"), b""
            while len(request) < size and (piece := connection.recv(size - len(request))):
                request += piece
        except OSError:
            header, files, size, request = b"", [], 0, b""
        if not header or len(request) < size:
            # Who asked was killed meanwhile.
            for opened in files:
                os.close(opened)
            connection.close()
            return
        forked = os.fork()
        if not forked:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for end in (connection, self._listener, self._wakeup, self._waker, *self._forked.values()):
                end.close()
            raise Forked(json.loads(request), files)
        for number in files:
            os.close(number)
        self._forked[forked] = connection
        self._selector.register(connection, selectors.EVENT_READ, forked)
        with contextlib.suppress(OSError):
            connection.send(forked.to_bytes(8, "little"))

    def _pass_on(self, connection: socket.socket, forked: int) -> None:
        """Signals that came for a process; SIGKILL where whoever stands in for it is gone."""
        try:
            numbers = connection.recv(64) or [signal.SIGKILL]
        except OSError:
            if connection.fileno() < 0:
                # The process ended, which was seen a moment ago.
                return
            numbers = [signal.SIGKILL]
        with contextlib.suppress(ProcessLookupError, KeyError):
            for number in numbers:
                os.kill(forked, number)
                if number == signal.SIGKILL:
                    self._selector.unregister(connection)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self._forked.pop(ended[0])
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.send(ended[1].to_bytes(8, "little"))
                connection.close()


def become(request: dict[str, Any], files: list[int]) -> None:
    """Turn this process into the one that was asked for: its files, folder, environment, command line."""
    os.setsid()
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, _ABOVE) for number in files]
    for number in files:
        os.close(number)
    for source, number in zip(moved, request["files"], strict=True):
        os.dup2(source, number)
        os.close(source)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    # As Python opens them at a start: whether they are buffered by lines depends on what they are.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    random.seed()


def compile_kernels() -> None:
    """Compile what most workers on a CPU like this one would: that takes each some tenths of a second."""
    import torch

    from shard_worker.cpu_kernels import native, norm, products

    if not native.is_available():
        return
    norm.rms_norm(torch.zeros(1, 64, dtype=torch.bfloat16), torch.ones(64), 1.0)
    if not native.multiplies(torch.bfloat16):
        products.Product(torch.zeros(8, 64, dtype=torch.bfloat16))


def main() -> None:
    program, folder = sys.argv[1:]
    for name in MODULES[program]:
        importlib.import_module(name)
    if program == "shard_worker":
        compile_kernels()
    # What is imported stays: no collection in a forked process looks through it, or copies its pages.
    gc.freeze()
    try:
        ForkServer(f"{folder}/{program}.sock").run()
    except Forked as asked:
        become(*asked.args)
    else:
        return
    # What Python runs as `-m PROGRAM`, so that help names it.
    module = sys.modules["__main__"] = sys.modules[f"{program}.__main__"]
    sys.argv[0] = str(module.__file__)
    module.main()


if __name__ == "__main__":
    main()
