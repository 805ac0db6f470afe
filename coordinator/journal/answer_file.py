"""The file of one reply's answers: how they were asked for, their pieces as they came, and what ended them.

It is only ever written at its end. A record that cannot be written, as on a full disk, waits for the next one: the
answers themselves are in memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from coordinator.answer import Answer, ChoicePart, Piece, Stats
from coordinator.journal import records
from coordinator.journal.plain import from_plain, to_plain
from services.errors import FlashsplitError, InternalError, error_named
from services.messages.inference_types import PromptToken
from services.messages.steps import TokenLogprobs

VERSION = 1
"""Of what the records say; files of another one are left alone."""

LEFT, CANCELLED, FAILED = "left", "cancelled", "failed"
"""How answers stop before their end: nobody reads them any more, somebody asked for it, or there was an error."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Header:
    """How a reply was asked for, and what is known of it before its answers.

    answer_id: a name that no other has, also the file's. name: the reply's own id. path: of the API. owner: a digest of
    the client's API key, empty where none was needed. key: the client's `Idempotency-Key`, empty without one. body: a
    digest of the request's path and body. model: the fingerprint of the model that answers. background: whether it was
    to go on without its client. created_at: Unix seconds. form: how the reply is told, with the engine's requests.
    """

    answer_id: str
    name: str
    path: str
    owner: str
    key: str
    body: str
    model: str
    background: bool
    created_at: float
    form: Any


@dataclass(slots=True)
class StoredAnswer:
    """What a file tells.

    parts: the pieces of the answers and the whole ones, as they came. boundaries: how many parts were known each time
    that a process took the file up. stopped: LEFT, CANCELLED or FAILED, where one of them came last; error: of the
    latter. written_at: when the last record was, in Unix seconds.
    """

    header: Header
    parts: list[ChoicePart] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    stopped: str = ""
    error: FlashsplitError | None = None
    written_at: float = 0.0


def read_answer(path: Path) -> StoredAnswer | None:
    """Return what a file tells; None where its first record is lost or another version's. Each damaged record is logged
    with its file and offset.

    Behind a lost piece nothing counts that was told of the answers: their tokens are computed again.
    """
    content = path.read_bytes()
    stored: StoredAnswer | None = None
    is_whole = True
    for record in records.read(content):
        if isinstance(record, records.DamagedRecord):
            log.warning("journal.record_damaged", file=str(path), offset=record.offset, why=record.why)
            continue
        try:
            if stored is None:
                stored = _begun(record)
                if stored is None:
                    break
            elif record["kind"] == "taken_up":
                # What follows goes on behind what that process knew.
                del stored.parts[record["parts"] :]
                stored.boundaries.append(record["parts"])
                is_whole = True
            elif is_whole:
                is_whole = _take(stored, record)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            log.warning("journal.record_unknown", file=str(path), record=str(record)[:80], why=str(error))
    if stored is None:
        log.warning("journal.answer_unreadable", file=str(path), why="its first record is missing or another version's")
    elif not is_whole:
        log.warning("journal.pieces_lost", file=str(path), parts=len(stored.parts), why="they are computed again")
    if stored is not None:
        stored.written_at = path.stat().st_mtime
    return stored


def _begun(record: dict[str, Any]) -> StoredAnswer | None:
    if record.get("kind") != "begin" or record.get("version") != VERSION:
        return None
    return StoredAnswer(from_plain(Header, record["header"]))


def _take(stored: StoredAnswer, record: dict[str, Any]) -> bool:
    """Take the next record. Returns False where a piece before it is lost."""
    kind = record["kind"]
    if kind in ("piece", "end"):
        if record["number"] != len(stored.parts):
            return False
        content = _piece(record) if kind == "piece" else _answer(record, stored.parts)
        stored.parts.append(ChoicePart(record["choice"], content, record["at"]))
        stored.stopped, stored.error = "", None
    elif kind == "stopped":
        stored.stopped = record["why"]
        if stored.stopped == FAILED:
            stored.error = error_named(record["code"], record["message"], reason=record["reason"], **record["where"])
    return True


def _piece(record: dict[str, Any]) -> Piece:
    # Most pieces have neither, and a server that is started again reads many.
    logprobs = from_plain(tuple[TokenLogprobs, ...], record["logprobs"]) if "logprobs" in record else ()
    prompt = from_plain(tuple[PromptToken, ...], record["prompt"]) if "prompt" in record else ()
    return Piece(tuple(record["tokens"]), record["text"], logprobs, prompt)


def _answer(record: dict[str, Any], parts: list[ChoicePart]) -> Answer:
    """Return a whole answer: its end, and the pieces before."""
    pieces = [part.content for part in parts if part.index == record["choice"] and isinstance(part.content, Piece)]
    return Answer(
        tuple(token for piece in pieces for token in piece.token_ids),
        "".join(piece.text for piece in pieces) if record["has_text"] else None,
        record["finish_reason"],
        from_plain(Stats, record["stats"]),
        tuple(entry for piece in pieces for entry in piece.logprobs) if record["has_logprobs"] else None,
        record["stop_string"],
        tuple(entry for piece in pieces for entry in piece.prompt) if record["has_prompt"] else None,
    )


class AnswerFile:
    """Writes one file."""

    def __init__(self, path: Path, *, is_new: bool) -> None:
        """Raises OSError where the file cannot be opened."""
        self.path = path
        flags = os.O_WRONLY | os.O_APPEND | (os.O_CREAT | os.O_EXCL if is_new else 0)
        self._descriptor = os.open(path, flags, 0o600)
        self._unwritten = b""
        self._parts = 0
        self._is_failing = False

    def begin(self, header: Header) -> None:
        """Write how the answers were asked for; in the background so that it outlives a loss of power: nobody would ask
        again. Raises OSError where that fails."""
        self._unwritten = records.written({"kind": "begin", "version": VERSION, "header": to_plain(header)})
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        if header.background:
            os.fsync(self._descriptor)

    def take_up(self, stored: StoredAnswer) -> None:
        """Go on with a file that another process has written."""
        self._parts = len(stored.parts)
        stored.boundaries.append(self._parts)
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            # Behind half a record the next one begins a line of its own.
            self._unwritten = b"" if file.read() == b"\n" else b"\n"
        self._write({"kind": "taken_up", "parts": self._parts})

    def append(self, part: ChoicePart) -> None:
        """Write a piece of an answer, or its end."""
        content = part.content
        record: dict[str, Any] = {"number": self._parts, "choice": part.index, "at": part.came_at}
        if isinstance(content, Piece):
            record |= {"kind": "piece", "tokens": content.token_ids, "text": content.text}
            record |= {"logprobs": to_plain(content.logprobs)} if content.logprobs else {}
            record |= {"prompt": to_plain(content.prompt)} if content.prompt else {}
        else:
            record |= {
                "kind": "end",
                "finish_reason": content.finish_reason,
                "stop_string": content.stop_string,
                "stats": to_plain(content.stats),
                "has_text": content.text is not None,
                "has_logprobs": content.logprobs is not None,
                "has_prompt": content.prompt is not None,
            }
        self._parts += 1
        self._write(record)

    def stop(self, why: str, error: BaseException | None = None) -> None:
        """Write that the answers stopped before their end. why: LEFT, CANCELLED or FAILED, the latter with an error."""
        record: dict[str, Any] = {"kind": "stopped", "why": why}
        if error is not None:
            known = error if isinstance(error, FlashsplitError) else InternalError("internal error")
            record |= {
                "code": known.code_name,
                "message": known.message,
                "reason": known.reason,
                "where": known.where,
            }
        self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        self._unwritten += records.written(record)
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        except OSError as error:
            if not self._is_failing:
                log.error(
                    "journal.write_failed",
                    file=str(self.path),
                    why=str(error),
                    then="the answer goes on in memory, and is written when there is room again",
                )
            self._is_failing = True
            return
        if self._is_failing:
            log.info("journal.written_again", file=str(self.path))
        self._is_failing = False

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._descriptor)
