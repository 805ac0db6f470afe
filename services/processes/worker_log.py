"""A local worker's log file: its lines are relayed into this process's own log, and the last of them are remembered.

The worker writes to a file and not to a pipe, because it must never wait for its parent to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from pathlib import Path
from typing import IO, Any

import structlog

LAST_LINES = 8
"""How many of a worker's last lines are remembered."""

PERIOD_S = 0.25
"""How often the file is looked at."""

MAX_BYTES = 4 << 20
"""From this size on the file is emptied, once all of it has been relayed."""

REFUSAL = "flashsplit-worker: "
"""How a worker begins the sentence in which it refuses its own command line."""

_LEVELS = ("debug", "info", "warning", "error", "critical")
_OWN_FIELDS = ("timestamp", "level", "event", "exception")

log = structlog.get_logger()


class WorkerLog:
    """The log file of one worker. The attribute `worker` is what relayed lines call it, e.g. "cpu (process 17)"."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._partial_line = path, 0, b""
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._exception: str | None = None
        self.worker = ""

    def open(self) -> IO[bytes]:
        """Open the file for the worker to write to; it appends, so that the file may be emptied meanwhile."""
        return self._path.open("ab")

    async def follow(self) -> None:
        """Relay new lines until cancelled."""
        while True:
            self.relay()
            await asyncio.sleep(PERIOD_S)

    def relay(self) -> None:
        """Relay the lines that were written since the last call."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
            self._offset += len(data)
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                self._relay_line(line.decode(errors="replace"))
            if self._offset > MAX_BYTES and self._offset == self._path.stat().st_size:
                with self._path.open("r+b") as full:
                    full.truncate(0)
                self._offset = 0

    def text(self) -> str:
        """Return all that the file holds."""
        with contextlib.suppress(OSError):
            return self._path.read_text(errors="replace")
        return ""

    def last_lines(self) -> tuple[str, ...]:
        """Return the worker's last lines as it wrote them, oldest first, without blank ones."""
        self.relay()
        lines = [*self._lines, self._partial_line.decode(errors="replace")]
        return tuple([line for line in lines if line.strip()][-LAST_LINES:])

    def last_exception(self) -> str | None:
        """Return the last unexpected exception that the worker logged, e.g. "ValueError: …"."""
        self.relay()
        return self._exception

    def _relay_line(self, line: str) -> None:
        self._lines.append(line)
        fields = parse_line(line)
        if isinstance(fields, str):
            # Written by a library or the interpreter itself. A refusal becomes this process's own error.
            if line.strip() and not line.startswith(REFUSAL):
                log.info("worker.said", worker=self.worker, text=line)
            return
        with contextlib.suppress(KeyError, TypeError, IndexError):
            raised = fields["exception"][-1]
            self._exception = f"{raised['exc_type']}: {raised['exc_value']}"
            fields["raised"] = self._exception
        level, event = fields["level"], fields["event"]
        others = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
        getattr(log, level if level in _LEVELS else "warning")(event, **others | {"worker": self.worker})


def parse_line(line: str) -> dict[str, Any] | str:
    """Return the fields of a log event, or the line itself where it is none (a library's or the interpreter's)."""
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(line)
        if isinstance(fields, dict) and isinstance(fields.get("level"), str) and isinstance(fields.get("event"), str):
            return fields
    return line
