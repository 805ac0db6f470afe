"""One local worker as a child process: spawned, awaited, watched and stopped by one class.

It owns the process, its scratch directory (socket and log) and the lifeline that ends the child when this process is
gone, in whatever way. It knows nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.addresses import socket_path
from services.errors import FailedPrecondition, FlashsplitError, Unavailable
from services.processes.launch import DEFAULT_COMMAND, DEFAULT_LAUNCH, Launch
from services.processes.lifeline import Lifeline
from services.processes.scratch import Scratch
from services.processes.worker_log import REFUSAL, WorkerLog, parse_line
from services.same_host.process import ending_code

READY_TIMEOUT_S = 120.0
"""How long a worker may take from its start until it listens."""

STOP_GRACE_S = 2.0
"""How long a worker may take to end by itself before it is killed."""

KILL_GRACE_S = 2.0
"""How long a killed worker is waited for."""

_LOOK_S = 0.001
"""Between two looks at how a worker ends that is known to end."""


class WorkerFailed(Unavailable):
    """A local worker ended, or never listened. log_lines: the last lines of its log as it wrote them, oldest first.

    The lines are for operators, so they are no part of the message, which clients see too.
    """

    def __init__(
        self, message: str, log_lines: Sequence[str] = (), *, reason: str | None = None, **where: object
    ) -> None:
        super().__init__(message, reason=reason, **where)
        self.log_lines = tuple(log_lines)


def failure_fields(error: FlashsplitError) -> dict[str, Any]:
    """Return the fields with which a log event describes an error.

    why: its sentence. last_lines: for a worker that failed, the last lines of its log, each an event's fields or, where
    it was no event, its text.
    """
    lines = error.log_lines if isinstance(error, WorkerFailed) else ()
    return {"why": error.message, **({"last_lines": [parse_line(line) for line in lines]} if lines else {})}


class WorkerProcess:
    """A child worker on `device` offering `roles`; use `start`, then `address`, and in any case `stop`.

    It keeps to so much `memory` of each device, like "8GiB", or may use all of it. It listens at `listen`, HOST:PORT or
    a Unix socket that is not there yet (`unix:PATH`), or else at one of its own.
    """

    def __init__(
        self,
        device: str,
        roles: Sequence[str],
        launch: Launch = DEFAULT_LAUNCH,
        memory: str | None = None,
        *,
        listen: str | None = None,
    ) -> None:
        self.device, self._roles, self._launch, self._memory = device, tuple(roles), launch, memory
        self._listen = listen
        self._scratch: Scratch | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: Lifeline | None = None
        self._cut: asyncio.Task[None]
        self._log: WorkerLog
        self._following: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def address(self) -> str:
        """Where the worker listens, as HOST:PORT or `unix:PATH`."""
        return self._listen or f"unix:{self.directory / 'worker.sock'}"

    @property
    def process_id(self) -> int | None:
        """The child's process id; None before it is started."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Spawn the worker, and return when it listens.

        Raises FailedPrecondition when it refuses its command line, WorkerFailed when it ends or doesn't listen in time.
        """
        self._scratch = Scratch()
        self._log = WorkerLog(self.directory / "worker.log")
        self._lifeline = Lifeline()
        child_end = self._lifeline.child_end
        arguments = [
            *self._launch.command(self.device),
            *("--listen", self.address, "--lifeline-fd", str(child_end), "--scratch", str(self.directory)),
            *self._launch.arguments(self.device, self._roles, self._memory),
        ]
        try:
            with self._log.open() as log:
                self._process = await asyncio.create_subprocess_exec(
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._launch.environment(self.device),
                    pass_fds=(child_end,),
                    # Ctrl-C on the terminal is for the parent, which then stops its children in order.
                    start_new_session=True,
                )
        finally:
            self._lifeline.handed_over()
        self._cut = asyncio.ensure_future(self._lifeline.cut())
        self._log.worker = f"{self.device} (process {self.process_id})"
        self._following = asyncio.ensure_future(self._log.follow())
        await self._wait_until_listening()

    async def died(self) -> WorkerFailed:
        """Wait for the process to end without having been stopped, and return the error that says how it ended. Its
        memory may not be free by then."""
        code = await self._exit_code()
        while self._stopping:
            await asyncio.sleep(3600)
        return self._death(code)

    def last_exception(self) -> str | None:
        """Return the last unexpected exception in the worker's log, e.g. "ValueError: …"."""
        return self._log.last_exception()

    async def stop(self) -> None:
        """End the process and remove its scratch directory. Safe to call twice and at any moment."""
        self._stopping = True
        if self._lifeline is not None:
            if self._process is not None:
                self._cut.cancel()
                await asyncio.wait([self._cut])
            self._lifeline.close()
            self._lifeline = None
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(STOP_GRACE_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                with contextlib.suppress(TimeoutError):
                    # A process whose thread does not return from a driver ends only when that does.
                    async with asyncio.timeout(KILL_GRACE_S):
                        await process.wait()
        if self._following is not None:
            self._following.cancel()
            self._following = None
            self._log.relay()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    @property
    def directory(self) -> Path:
        """The worker's scratch directory."""
        assert self._scratch is not None, "start() comes first"
        return self._scratch.path

    async def _exit_code(self) -> int:
        """Wait for the process to end, and return its exit code, of one that is killed minus the signal."""
        process = self._process
        assert process is not None
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait([ended, self._cut], return_when=asyncio.FIRST_COMPLETED)
            while not (ended.done() or self._stopping):
                if (code := ending_code(process.pid)) is not None:
                    return code
                await asyncio.sleep(_LOOK_S)
            return await ended
        finally:
            ended.cancel()

    async def _wait_until_listening(self) -> None:
        assert self._process is not None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not await self._listens():
                    if self._process.returncode is not None:
                        self._raise_early_exit(self._process.returncode)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise WorkerFailed(
                f"the worker for {self.device} did not listen within {READY_TIMEOUT_S:g} s",
                self._log.last_lines(),
                device=self.device,
            ) from None

    async def _listens(self) -> bool:
        if (path := socket_path(self.address)) is not None:
            return Path(path).exists()
        host, _, port = self.address.rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return False
        writer.close()
        return True

    def _raise_early_exit(self, code: int) -> None:
        text = self._log.text().strip()
        if code == 2 and text.startswith(REFUSAL):
            # The worker refused its own command line and said why in one sentence.
            raise FailedPrecondition(text.removeprefix(REFUSAL), device=self.device)
        raise self._death(code)

    def _death(self, code: int) -> WorkerFailed:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return WorkerFailed(
            f"the worker for {self.device} (process {self.process_id}) {how}",
            self._log.last_lines(),
            device=self.device,
        )


def list_devices(command: Sequence[str] = DEFAULT_COMMAND) -> list[str]:
    """Return the GPUs that a local worker could use, or ["cpu"]. Raises Unavailable when the worker program fails."""
    result = subprocess.run([*command, "--list-devices"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise Unavailable(f"{' '.join(command)} --list-devices failed: {result.stderr.strip()}")
    return result.stdout.split()
