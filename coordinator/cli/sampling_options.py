"""The sampling parameters as options of a command, derived from their definition in `services.messages.sampling`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from services.messages.sampling import PARAMETERS, Parameter, SamplingParams

Command = Callable[..., Any]


def sampling_options(*names: str, as_clients: bool = False) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the options of these parameters, or of all.

    The command gets them as one argument, `sampling`, of the type `SamplingParams`, not yet checked. as_clients:
    numbers that the HTTP APIs would refuse are refused already where the command line is read.
    """
    parameters = [parameter for parameter in PARAMETERS if not names or parameter.name in names]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_sampling(*args: Any, **options: Any) -> Any:
            values = {parameter.name: options.pop(parameter.name) for parameter in parameters}
            return command(*args, sampling=SamplingParams(**values), **options)

        decorated: Command = with_sampling
        for parameter in reversed(parameters):
            decorated = _option(parameter, as_clients=as_clients)(decorated)
        return decorated

    return decorate


def _option(parameter: Parameter, *, as_clients: bool) -> Callable[[Command], Command]:
    kind: Any = parameter.kind
    accepted, http = parameter.accepted, parameter.http
    if parameter.kind is int and accepted.le is not None:
        kind = click.IntRange(int(accepted.ge or 0), int(accepted.le))
    elif as_clients:
        kind = click.FloatRange(
            min=http.ge if http.gt is None else http.gt,
            max=http.le if http.lt is None else http.lt,
            min_open=http.gt is not None,
            max_open=http.lt is not None,
        )
    return click.option(
        parameter.flag,
        parameter.name,
        type=kind,
        default=parameter.flag_default,
        show_default=parameter.flag_default is not None,
        help=parameter.help,
    )
