"""An option of whole numbers joined by commas: the several sizes in which a bench measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def counts_option(flag: str, *, default: str | None, help: str, least: int = 1) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that adds the option, which a command gets as a tuple.

    default: what stands for a missing option; None for no numbers at all. Numbers below the least are refused before
    anything runs.
    """

    def read(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, ...]:
        """Return the numbers in a text. Raises BadParameter for another text."""
        if text is None:
            return ()
        try:
            counts = tuple(int(part) for part in text.split(","))
        except ValueError:
            counts = ()
        if not counts or min(counts) < least:
            raise click.BadParameter(f"{text!r} must be whole numbers of at least {least} joined by commas")
        return counts

    return click.option(flag, default=default, show_default=True, metavar="N[,N…]", callback=read, help=help)
