"""Another process of this host, seen through /proc: whether it is the one that was meant, and what it does."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _USER_TICKS, _SYSTEM_TICKS, _STARTED, _EXIT_STATUS = 0, 11, 12, 19, 49
"""Places in /proc/PID/stat, counted from behind the program's name."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told apart from all others that ever ran: on other hosts, and before and after it under its number.

    boot_id: of the running kernel, "" where the system does not tell. started_ticks: when the process began, in clock
    ticks behind the boot.
    """

    boot_id: str
    process_id: int
    started_ticks: int


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a process does. letter: as in /proc/PID/stat, for its first thread; cpu_ticks: what all have computed."""

    letter: str
    cpu_ticks: int

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal or a debugger, or has ended."""
        return self.letter in "TtZXx"

    @property
    def wants_to_run(self) -> bool:
        """Whether its first thread runs, waits for a core to run on, or waits for a disk."""
        return self.letter in "RD"


def own_process() -> ProcessId:
    """Return this process."""
    with contextlib.suppress(OSError):
        return ProcessId(_boot_id(), os.getpid(), int(_stat(os.getpid())[_STARTED]))
    return ProcessId("", os.getpid(), 0)


def state_of(process: ProcessId) -> ProcessState | None:
    """Return what a process does; None where it is not to be seen here: it runs elsewhere, or has ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = _stat(process.process_id)
        if process.boot_id and process.boot_id == _boot_id() and int(fields[_STARTED]) == process.started_ticks:
            return ProcessState(fields[_STATE], int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]))
    return None


def ending_code(process_id: int) -> int | None:
    """Return the exit code of a process of the same user while the system still frees what it had, as `subprocess` has
    it: of one that is killed minus the signal. None where it cannot be told, and for 0, which those that run have too.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        return os.waitstatus_to_exitcode(int(_stat(process_id)[_EXIT_STATUS])) or None
    return None


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip()


def _stat(process_id: int) -> list[str]:
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
