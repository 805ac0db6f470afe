"""One local worker as a child process: spawned, awaited, watched and stopped by one class.

Owns the process, its scratch directory (socket and log) and the pipe that ends the child when this process is gone,
however it went. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from services.errors import FailedPrecondition, Unavailable
from services.processes.launch import DEFAULT_COMMAND, DEFAULT_LAUNCH, Launch
from services.processes.scratch import Scratch
from services.processes.worker_log import REFUSAL, WorkerLog

READY_TIMEOUT_S = 120.0
STOP_GRACE_S = 2.0


class WorkerProcess:
    """A child worker on `device` offering `roles`; use `start`, then `address`, and in any case `stop`."""

    def __init__(self, device: str, roles: Sequence[str], launch: Launch = DEFAULT_LAUNCH) -> None:
        self.device, self._roles, self._launch = device, tuple(roles), launch
        self._scratch: Scratch | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None
        self._log: WorkerLog
        self._following: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def address(self) -> str:
        """The worker's Unix socket."""
        return f"unix:{self._directory / 'worker.sock'}"

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Spawn, and return when the worker listens. Raises Unavailable, with its last log lines, when it doesn't."""
        self._scratch = Scratch()
        self._log = WorkerLog(self._directory / "worker.log")
        child_end, self._lifeline = os.pipe()
        arguments = [
            *self._launch.command(self.device),
            *("--listen", self.address, "--lifeline-fd", str(child_end), "--scratch", str(self._directory)),
            *self._launch.arguments(self.device, self._roles),
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
            os.close(child_end)
        self._log.worker = f"{self.device} (process {self.process_id})"
        self._following = asyncio.ensure_future(self._log.follow())
        await self._listening()

    async def died(self) -> str:
        """Wait for the process to end unasked; the sentence that says how."""
        assert self._process is not None
        code = await self._process.wait()
        while self._stopping:
            await asyncio.sleep(3600)
        return self._obituary(code)

    def last_exception(self) -> str | None:
        """The last unexpected exception in the worker's log, e.g. "ValueError: …"."""
        return self._log.last_exception()

    async def stop(self) -> None:
        """End the process and remove its scratch directory. Safe to call twice and at any moment."""
        self._stopping = True
        if self._lifeline is not None:
            os.close(self._lifeline)
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
                await process.wait()
        if self._following is not None:
            self._following.cancel()
            self._following = None
            self._log.carry()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    @property
    def _directory(self) -> Path:
        assert self._scratch is not None, "start() comes first"
        return self._scratch.path

    async def _listening(self) -> None:
        assert self._process is not None
        socket = self._directory / "worker.sock"
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not socket.exists():
                    if self._process.returncode is not None:
                        self._raise_early_exit(self._process.returncode)
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise Unavailable(
                f"the worker for {self.device} did not listen within {READY_TIMEOUT_S:g} s{self._log.tail()}",
                device=self.device,
            ) from None

    def _raise_early_exit(self, code: int) -> None:
        text = self._log.text().strip()
        if code == 2 and text.startswith(REFUSAL):
            # The worker refused its own command line and said why in one sentence.
            raise FailedPrecondition(text.removeprefix(REFUSAL), device=self.device)
        raise Unavailable(self._obituary(code), device=self.device)

    def _obituary(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"the worker for {self.device} (process {self.process_id}) {how}{self._log.tail()}"


def list_devices(command: Sequence[str] = DEFAULT_COMMAND) -> list[str]:
    """The GPUs that a local worker could use, or ["cpu"]. Raises Unavailable when the worker program fails."""
    done = subprocess.run([*command, "--list-devices"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)} --list-devices failed: {done.stderr.strip()}")
    return done.stdout.split()
