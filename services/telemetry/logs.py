"""Sets up the log of a process: lines for people on a terminal, JSON elsewhere, always on stderr."""

from __future__ import annotations

import logging
import sys

import structlog

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("console", "json")


def configure_logs(level: str = "info", form: str | None = None) -> None:
    """Set up the log of this process, once at its start.

    level: the least important level that is logged, one of LEVELS. form: one of FORMATS; None chooses
    "json" where stderr is no terminal.
    """
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
        processors.append(structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
