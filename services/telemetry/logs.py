"""Sets up the log of a process: lines for people on a terminal, JSON elsewhere, always on stderr."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import structlog

from services.errors import InvalidArgument
from services.reread import Reread

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("console", "json")


access_log: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
    None, wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
)
"""Where the line of each request goes that a server has answered: it is written whatever level the log has."""


LEVEL_FLAG = "--log-level"

_level_file: Reread[None] | None = None
"""Where the level stands, if in a file; reading it again sets up the log with what it says then."""


def configure_logs(level: str = "info", form: str | None = None) -> None:
    """Set up the log of this process, once at its start.

    level: the least important level that is logged, one of LEVELS, or @FILE for a file that holds one and is read again
    at SIGHUP. form: one of FORMATS; None chooses "json" where stderr is no terminal. Raises InvalidArgument for another
    level.
    """
    global _level_file
    _level_file = None
    if level.startswith("@"):
        file = Path(level[1:])
        _level_file = Reread([file], lambda: _configure(_read_level(file), form))
    else:
        _configure(_check_level(level, f"{LEVEL_FLAG} {level!r}"), form)


def _read_level(file: Path) -> str:
    try:
        return _check_level(file.read_text().strip(), f"{LEVEL_FLAG} @{file}")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{LEVEL_FLAG} @{file} cannot be read: {error}", field=LEVEL_FLAG) from error


def _check_level(level: str, source: str) -> str:
    if level not in LEVELS:
        raise InvalidArgument(
            f"{source} must be one of {', '.join(LEVELS)}, or @FILE for a file that holds one of them", field=LEVEL_FLAG
        )
    return level


def _configure(level: str, form: str | None) -> None:
    as_json = not sys.stderr.isatty() if form is None else form == "json"
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks leave out local variables, because those hold prompts.
    if as_json:
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        processors += [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
    else:
        processors.append(_events_as_lines)
        processors.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _events_as_lines(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Write log events within an event, such as a lost worker's last lines, as lines that people can read."""
    for name, value in event.items():
        if isinstance(value, list) and any(isinstance(line, dict) for line in value):
            event[name] = _Lines("".join(f"\n    {_line(line)}" for line in value))
    return event


class _Lines(str):
    """A text of several lines, which is shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _line(event: object) -> str:
    if not isinstance(event, dict):
        return str(event)
    head = [str(event.get(name, "")) for name in ("timestamp", "level", "event")]
    rest = [f"{name}={value}" for name, value in event.items() if name not in ("timestamp", "level", "event")]
    return " ".join([*head, *rest])
