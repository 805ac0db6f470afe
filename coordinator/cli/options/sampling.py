"""The sampling parameters as options of a command, derived from their definition in `services.messages.sampling`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from coordinator.cli.option_groups import GroupOption, OptionSource
from services.messages.sampling import PARAMETERS, Parameter, SamplingParams


class SamplingFlags(OptionSource):
    """The options of some or all sampling parameters, which a command takes as `SamplingParams`, not yet checked."""

    def __init__(
        self,
        *names: str,
        as_clients: bool = False,
        absent: str = "What is not given is as the model's defaults have it.",
    ) -> None:
        """names: of the parameters; none for all of them.

        as_clients: numbers that the HTTP APIs would refuse are refused already where the command line is read. absent:
        a sentence that says what holds for parameters that are not given.
        """
        self._parameters = [parameter for parameter in PARAMETERS if not names or parameter.name in names]
        self._as_clients, self._absent = as_clients, absent

    def options(self) -> Iterator[click.Option]:
        """Yield an option for each parameter."""
        for parameter in self._parameters:
            yield GroupOption(
                "Sampling options",
                f"How the tokens of an answer are chosen. {self._absent}",
                [parameter.name, parameter.flag],
                type=self._type(parameter),
                help=parameter.help,
            )

    def take(self, values: dict[str, Any]) -> SamplingParams:
        """Return the parameters that the command line gives."""
        return SamplingParams(**{parameter.name: values.pop(parameter.name) for parameter in self._parameters})

    def _type(self, parameter: Parameter) -> Any:
        """Return what click converts the text to, and checks it by."""
        accepted, http = parameter.accepted, parameter.http
        if parameter.kind is int and accepted.le is not None:
            return click.IntRange(int(accepted.ge or 0), int(accepted.le))
        if not self._as_clients:
            return parameter.kind
        return click.FloatRange(
            min=http.ge if http.gt is None else http.gt,
            max=http.le if http.lt is None else http.lt,
            min_open=http.gt is not None,
            max_open=http.lt is not None,
        )
