"""Where what was typed is remembered: a file of the user's own."""

from __future__ import annotations

import os
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory


def history_path() -> Path:
    """In the user's state directory, as the XDG specification places it."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # Relative paths in it are to be ignored, says the specification.
    root = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return root / "flashsplit" / "chat_history"


def open_history(path: Path | None) -> tuple[History, str | None]:
    """Questions of this and earlier chats, and why they are not kept, if they cannot be. None: they shall not be."""
    if path is None:
        return InMemoryHistory(), None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Nobody else's business; an existing file keeps the mode that its owner gave it.
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except OSError as error:
        return InMemoryHistory(), f"questions are not remembered: {error}"
    return FileHistory(str(path)), None
