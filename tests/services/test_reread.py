"""Files that are read again: when they change, when they are told to, and what stays where they cannot be used."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.errors import InvalidArgument
from services.reread import Reread, constant, read_again_on_hangup


def number_in(file: Path) -> Callable[[], int]:
    def read() -> int:
        try:
            return int(file.read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{file} holds no number") from error

    return read


def test_a_written_and_a_replaced_file(tmp_path: Path) -> None:
    """The file itself, another one in its place, and links that lead elsewhere, as Kubernetes mounts secrets."""
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("3")
    file = tmp_path / "file"
    file.symlink_to("a")
    held = Reread([file], number_in(file))
    assert held.content == 1

    (tmp_path / "a").write_text("22")
    assert held.content == 22
    (tmp_path / "link").symlink_to("b")
    (tmp_path / "link").replace(file)
    assert held.content == 3
    (tmp_path / "new").write_text("4")
    (tmp_path / "new").replace(tmp_path / "b")
    assert held.content == 4


def test_what_cannot_be_used_is_logged_once_and_the_old_stays(
    tmp_path: Path, json_events: Callable[[], list[dict[str, Any]]]
) -> None:
    """A bad file and none; with the next good one it goes on."""
    file = tmp_path / "file"
    file.write_text("1")
    held = Reread([file], number_in(file))

    file.write_text("nothing")
    assert [held.content, held.content] == [1, 1]
    file.unlink()
    assert held.content == 1
    kept = [event for event in json_events() if event["event"] == "files.kept_as_before"]
    assert [(event["level"], event["why"]) for event in kept] == [("error", f"{file} holds no number")] * 2
    file.write_text("2")
    assert held.content == 2
    assert json_events()[-1]["files"] == [str(file)]


def test_the_first_reading_must_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no number"):
        Reread([tmp_path / "file"], number_in(tmp_path / "file"))


def test_without_files_nothing_changes() -> None:
    assert constant("a").content == "a"


async def test_a_hangup_reads_all_again(tmp_path: Path) -> None:
    """Also what nobody asks for, and what looks as it was."""
    file = tmp_path / "file"
    file.write_text("1")
    read: list[int] = []
    held = Reread([file], lambda: read.append(number_in(file)()))
    read_again_on_hangup()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(10):
            while len(read) < 2:
                await asyncio.sleep(0.01)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    assert read == [1, 1]
    assert held.content is None
