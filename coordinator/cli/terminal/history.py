"""Where what was typed is remembered: a file of the user's own."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory


def history_path() -> Path:
    """Return a file in the user's state directory, as the XDG base directory specification places it."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # Relative paths in it are to be ignored, says the specification.
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "flashsplit" / "chat_history"


def open_history(path: Path | None) -> tuple[History, str | None]:
    """Return the questions of earlier chats, and why those of this one cannot be kept, None if they can.

    path: None keeps them in memory alone.
    """
    if path is None:
        return InMemoryHistory(), None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Nobody else's business; an existing file keeps the mode that its owner gave it.
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError as error:
        return InMemoryHistory(), f"questions are not remembered: {error}"
    return FileHistory(str(path)), None
