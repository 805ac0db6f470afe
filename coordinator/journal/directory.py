"""The directory of a journal, with one file for each reply. One process at a time writes it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import structlog

from coordinator.journal.answer_file import AnswerFile, Header, StoredAnswer, read_answer
from services.errors import InvalidArgument, Unavailable

SUFFIX = ".journal"
_LOCK = "lock"

log = structlog.get_logger()


class Journal:
    """An opened directory, which this process alone writes until it is closed."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidArgument for a directory that cannot be written, or that another process writes."""
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise InvalidArgument(
                f"--journal {folder} cannot be written: {error}; give a directory that this user may write",
                field="--journal",
            ) from error
        try:
            # It ends with the process, however that ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise InvalidArgument(
                f"--journal {folder} is written by another server that runs: give each its own directory",
                field="--journal",
            ) from error

    def begin(self, header: Header) -> AnswerFile:
        """Return a new file with this header in it. Raises Unavailable where it cannot be written."""
        path = self._path(header.answer_id)
        try:
            file = AnswerFile(path, is_new=True)
            try:
                file.begin(header)
            except OSError:
                file.close()
                path.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise Unavailable(
                f"the journal cannot be written: {error.strerror}: nothing is begun that could not go on; try again "
                "when its disk has room",
                reason="JOURNAL_FULL",
            ) from error
        return file

    def read(self, older_than: float) -> list[StoredAnswer]:
        """Return what all files tell; those last written before this time, in Unix seconds, are removed instead."""
        found: list[StoredAnswer] = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                if path.stat().st_mtime < older_than:
                    path.unlink()
                    continue
                stored = read_answer(path)
            except OSError as error:
                log.warning("journal.file_unreadable", file=str(path), why=str(error))
                continue
            if stored is not None and self._path(stored.header.answer_id) == path:
                found.append(stored)
        return sorted(found, key=lambda stored: stored.header.created_at)

    def take_up(self, stored: StoredAnswer) -> AnswerFile:
        """Return the file of answers that another process has begun, to be gone on with. Raises OSError where that
        fails."""
        file = AnswerFile(self._path(stored.header.answer_id), is_new=False)
        file.take_up(stored)
        return file

    def remove(self, answer_id: str) -> None:
        """Remove a reply's file, if it is there."""
        try:
            self._path(answer_id).unlink(missing_ok=True)
        except OSError as error:
            log.warning("journal.not_removed", answer=answer_id, why=str(error))

    def close(self) -> None:
        """Let other processes write the directory."""
        os.close(self._lock)

    def _path(self, answer_id: str) -> Path:
        return self.folder / f"{answer_id}{SUFFIX}"
