"""What people see on stderr: progress bars while weights load, and errors in one sentence. Answers go to stdout."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from coordinator.cluster.loading import LoadReporter

# Where nobody looks at a terminal, tables are not squeezed to one's width.
console = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 160)


def progress_bars(*columns: ProgressColumn) -> Progress:
    """Return progress bars that vanish when all is done, and that nobody sees where stderr is no terminal.

    columns: of each bar; none for rich's own choice.
    """
    return Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty())


class LoadBars(LoadReporter):
    """A bar for each worker that loads, shown while this is entered as a context and stderr is a terminal."""

    def __init__(self) -> None:
        self._progress = progress_bars(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn()
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LoadBars:
        self._waiting = self._progress.add_task("starting workers", total=None)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def progress(self, worker: str, loaded_bytes: int, total_bytes: int) -> None:
        """Draw a worker's bar."""
        if worker not in self._tasks:
            self._progress.update(self._waiting, visible=False)
            self._tasks[worker] = self._progress.add_task(f"loading {worker}", total=total_bytes)
        self._progress.update(self._tasks[worker], completed=loaded_bytes, total=total_bytes)


def print_error(message: str) -> None:
    """Print an error for people; its line is never wrapped, so that it can be searched for."""
    console.print(f"flashsplit: error: {message}", markup=False, soft_wrap=True)
