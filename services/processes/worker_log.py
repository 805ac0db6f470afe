"""A child worker's log file: carried line by line into this process's own log, its end kept for an obituary.

A file and no pipe: a worker must never wait for its parent to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from pathlib import Path
from typing import IO, Any

import structlog

TAIL_LINES = 8
PERIOD_S = 0.25
MAX_BYTES = 4 << 20
"""From here on the file begins anew, once all of it has been carried over."""

REFUSAL = "flashsplit-worker: "
"""How a worker begins the sentence in which it refuses its own command line."""

_LEVELS = ("debug", "info", "warning", "error", "critical")
_OWN_FIELDS = ("timestamp", "level", "event", "exception")

log = structlog.get_logger()


class WorkerLog:
    """worker: how lines name it, e.g. "cpu (process 17)"."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._exception: str | None = None
        self.worker = ""

    def open(self) -> IO[bytes]:
        """For the child to write to; it appends, so that the file may be cut meanwhile."""
        return self._path.open("ab")

    async def follow(self) -> None:
        """Carry lines over until cancelled."""
        while True:
            self.carry()
            await asyncio.sleep(PERIOD_S)

    def carry(self) -> None:
        """Whatever is new."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
            self._offset += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                self._tell(line.decode(errors="replace"))
            if self._offset > MAX_BYTES and self._offset == self._path.stat().st_size:
                with self._path.open("r+b") as cut:
                    cut.truncate(0)
                self._offset = 0

    def text(self) -> str:
        """All that the file holds."""
        with contextlib.suppress(OSError):
            return self._path.read_text(errors="replace")
        return ""

    def tail(self) -> str:
        """The last lines, as the end of a sentence; empty without any."""
        self.carry()
        lines = [*self._lines, self._rest.decode(errors="replace")]
        shown = [line for line in lines if line.strip()][-TAIL_LINES:]
        return "; its last log lines:\n  " + "\n  ".join(shown) if shown else ""

    def last_exception(self) -> str | None:
        """The last unexpected exception that the worker logged, e.g. "ValueError: …"."""
        self.carry()
        return self._exception

    def _tell(self, line: str) -> None:
        self._lines.append(line)
        try:
            fields: dict[str, Any] = json.loads(line)
            level, event = fields["level"], fields["event"]
        except (ValueError, KeyError, TypeError):
            # Of a library, or the interpreter itself. A refusal becomes this process's own error.
            if line.strip() and not line.startswith(REFUSAL):
                # Where it matters, it is the end of an obituary as well.
                log.info("worker.said", worker=self.worker, text=line)
            return
        with contextlib.suppress(KeyError, TypeError, IndexError):
            raised = fields["exception"][-1]
            self._exception = f"{raised['exc_type']}: {raised['exc_value']}"
            fields["raised"] = self._exception
        kept = {name: value for name, value in fields.items() if name not in _OWN_FIELDS}
        getattr(log, level if level in _LEVELS else "warning")(event, **kept | {"worker": self.worker})
