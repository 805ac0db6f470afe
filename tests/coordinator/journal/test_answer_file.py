"""The file of an answer: what it tells after its process was killed, on damaged disks and on full ones."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.answer import Answer, ChoicePart, Piece
from coordinator.journal.answer_file import CANCELLED, FAILED, Header, read_answer
from coordinator.journal.directory import Journal
from services.errors import InvalidArgument, Unavailable
from services.messages.inference_types import PromptToken
from services.messages.steps import TokenLogprobs
from tests.coordinator.journal.test_plain import STATS

HEADER = Header("a" * 24, "chatcmpl-1", "/v1/chat/completions", "", "key", "body", "model", False, 5.0, {"any": [1]})
PIECES = [
    Piece((), prompt=(PromptToken(1), PromptToken(2, TokenLogprobs(-1.5, (2,), (-1.5,), 1)))),
    Piece((10, 11), "ab\n", (TokenLogprobs(-0.5), TokenLogprobs(-0.25))),
    Piece((12,), "\u2028ü", (TokenLogprobs(-0.125),)),
]
PARTS = [ChoicePart(0, piece, 7.0 + index) for index, piece in enumerate(PIECES)]
END = ChoicePart(
    0,
    Answer(
        (10, 11, 12), "ab\n\u2028ü", "stop", STATS, PIECES[1].logprobs + PIECES[2].logprobs, "end", PIECES[0].prompt
    ),
    9.0,
)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(tmp_path / "journal")
    yield opened
    opened.close()


@pytest.fixture
def written(journal: Journal) -> Path:
    """A file of three pieces."""
    file = journal.begin(HEADER)
    for part in PARTS:
        file.append(part)
    file.close()
    return file.path


def test_what_was_written_is_read(journal: Journal, written: Path) -> None:
    """Pieces with their texts, log-probabilities and those of the prompt; then the end, by which they are an answer."""
    stored = read_answer(written)
    assert stored is not None
    assert (stored.header, stored.parts, stored.boundaries, stored.stopped) == (HEADER, PARTS, [], "")
    file = journal.take_up(stored)
    file.append(END)
    file.close()
    again = read_answer(written)
    assert again is not None
    assert (again.parts, again.boundaries) == ([*PARTS, END], [3])


@pytest.mark.parametrize(("why", "error"), [(CANCELLED, None), (FAILED, Unavailable("gone", stage=1))])
def test_how_it_stopped(journal: Journal, written: Path, why: str, error: Unavailable | None) -> None:
    """It is read, with the error; what comes behind it says that it has gone on."""
    stored = read_answer(written)
    assert stored is not None
    file = journal.take_up(stored)
    file.stop(why, error)
    stopped = read_answer(written)
    assert stopped is not None
    assert stopped.stopped == why
    assert (error is None) == (stopped.error is None)
    if error is not None and stopped.error is not None:
        assert (type(stopped.error), stopped.error.message, stopped.error.where) == (
            Unavailable,
            "gone",
            {"stage": "1"},
        )
    file.append(END)
    file.close()
    gone_on = read_answer(written)
    assert gone_on is not None
    assert (gone_on.stopped, gone_on.error, gone_on.parts) == ("", None, [*PARTS, END])


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_record_that_was_being_written(journal: Journal, written: Path, kept: int) -> None:
    """Only it is lost, the log says where, and what is written next is read."""
    content = written.read_bytes()
    *_, last = content.splitlines(keepends=True)
    offset = len(content) - len(last)
    os.truncate(written, offset + (kept if kept > 0 else len(last) + kept))
    with capture_logs() as logs:
        stored = read_answer(written)
    assert stored is not None
    assert stored.parts == PARTS[:2]
    [line] = [line for line in logs if line["event"] == "journal.record_damaged"]
    assert (line["file"], line["offset"]) == (str(written), offset)
    file = journal.take_up(stored)
    file.append(PARTS[2])
    file.close()
    again = read_answer(written)
    assert again is not None
    assert (again.parts, again.boundaries) == (PARTS, [2])


def test_a_damaged_record(journal: Journal, written: Path) -> None:
    """What is told behind a damaged piece does not count; what is written in its place does, next to what stays."""
    lines = written.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"ab", b"ax")
    written.write_bytes(b"".join(lines))
    with capture_logs() as logs:
        stored = read_answer(written)
    assert stored is not None
    assert stored.parts == PARTS[:1]
    assert [line["event"] for line in logs] == ["journal.record_damaged", "journal.pieces_lost"]
    assert logs[0]["offset"] == len(lines[0]) + len(lines[1])
    file = journal.take_up(stored)
    for part in (*PARTS[1:], END):
        file.append(part)
    file.close()
    again = read_answer(written)
    assert again is not None
    assert (again.parts, again.boundaries) == ([*PARTS, END], [1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[1:],
        lambda lines: [b"0" * 40 + b"\n", *lines[1:]],
        lambda lines: [b"\0" * 300],
        lambda lines: [],
    ],
)
def test_a_file_without_its_beginning(written: Path, damage: Callable[[list[bytes]], list[bytes]]) -> None:
    """Nobody knows what was asked for: it is told, and left."""
    written.write_bytes(b"".join(damage(written.read_bytes().splitlines(keepends=True))))
    with capture_logs() as logs:
        assert read_answer(written) is None
    assert logs[-1]["event"] == "journal.answer_unreadable"
    assert logs[-1]["file"] == str(written)
    assert written.exists()


@pytest.fixture
def most_bytes() -> Iterator[Callable[[int | None], None]]:
    """Set how large files may become, None for any size: what a full disk is to one file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit(None)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(journal: Journal, most_bytes: Callable[[int | None], None]) -> None:
    """It is told once with the file; the records wait, and are written behind the others when there is room."""
    file = journal.begin(HEADER)
    size = file.path.stat().st_size
    with capture_logs() as logs:
        most_bytes(size + 10)
        for part in PARTS[:2]:
            file.append(part)
        assert file.path.stat().st_size == size + 10
        most_bytes(None)
        file.append(PARTS[2])
    file.close()
    assert [line["event"] for line in logs] == ["journal.write_failed", "journal.written_again"]
    assert logs[0]["file"] == str(file.path)
    assert "too large" in logs[0]["why"]
    stored = read_answer(file.path)
    assert stored is not None
    assert stored.parts == PARTS


def test_nothing_begins_on_a_full_disk(journal: Journal, most_bytes: Callable[[int | None], None]) -> None:
    """It is an error that says so, and no file is left."""
    most_bytes(10)
    with pytest.raises(Unavailable, match="the journal cannot be written: File too large"):
        journal.begin(HEADER)
    most_bytes(None)
    assert [path.name for path in journal.folder.iterdir()] == ["lock"]


def test_old_files_are_removed(journal: Journal, written: Path) -> None:
    """Those last written before a time, whatever they say."""
    os.utime(written, (100, 100))
    assert [stored.parts for stored in journal.read(99)] == [PARTS]
    assert journal.read(101) == []
    assert not written.exists()


def test_one_server_at_a_time(journal: Journal) -> None:
    with pytest.raises(InvalidArgument, match=r"--journal .* is written by another server that runs"):
        Journal(journal.folder)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match=r"--journal .*file cannot be written: .*give a directory"):
        Journal(tmp_path / "file")


def test_only_its_user_reads_it(written: Path) -> None:
    assert written.stat().st_mode & 0o777 == 0o600
    assert written.parent.stat().st_mode & 0o777 == 0o700
