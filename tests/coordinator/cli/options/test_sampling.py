"""The sampling parameters as options: every one of them, under its own name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from coordinator.cli.options.sampling import SamplingFlags
from services.messages.sampling import PARAMETERS, SamplingParams
from tests.coordinator.cli.command_line import help_of, parse, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """All parameters, as a worker takes them."""

    sampling: Annotated[SamplingParams, SamplingFlags()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Some:
    """Two of them, as clients of the HTTP APIs may give them."""

    sampling: Annotated[SamplingParams, SamplingFlags("temperature", "top_p", as_clients=True)]


def test_every_parameter_is_a_flag() -> None:
    """Each reaches the parameters under its name; what isn't given stays open but for its default on the line."""
    for parameter in PARAMETERS:
        value = parameter.kind(1)
        sampling = parse(Every, parameter.flag, value).sampling
        assert getattr(sampling, parameter.name) == value
    assert parse(Every).sampling == SamplingParams()


def test_the_help_is_that_of_the_definition() -> None:
    """Word for word."""
    text = " ".join(help_of(Every).split())
    assert all(" ".join(parameter.help.split()) in text for parameter in PARAMETERS)


def test_a_command_may_take_some() -> None:
    """Others are unknown to it; numbers that the APIs refuse are refused with the line."""
    assert parse(Some, "--temperature", 2, "--top-p", 0.5).sampling == SamplingParams(temperature=2.0, top_p=0.5)
    assert "No such option '--min-p'" in refusal(Some, "--min-p", 0.1)


@pytest.mark.parametrize(
    ("group", "line", "words"),
    [
        (Some, "--temperature -1", "-1.0 is not in the range 0<=x<=100"),
        (Some, "--top-p 0", "0.0 is not in the range 0<x<=1"),
        (Every, "--top-k many", "'many' is not a valid integer"),
        (Every, "--seed -1", "-1 is not in the range 0<=x<="),
    ],
)
def test_refusals(group: type[object], line: str, words: str) -> None:
    """With the flag, the value and what would be accepted."""
    text = refusal(group, *line.split())
    assert words in text
    assert line.split()[0] in text
