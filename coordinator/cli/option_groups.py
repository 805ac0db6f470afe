"""Groups of command-line options: a dataclass whose fields are flags, which a command takes as one argument.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class ListenOptions:
        host: Annotated[str, Flag("Where HTTP listens.")] = "127.0.0.1"
        port: Annotated[int, Flag("0 takes a free one.", type=click.IntRange(0, 65535))] = 8000

    @click.command()
    @with_options
    async def serve(listen: ListenOptions) -> None: ...

It knows click and dataclasses, nothing of what the options mean.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click

from coordinator.cli.running import run

OWN_SECTION = "Options"
"""The heading of the options that belong to no group."""


class Flag:
    """What a field's annotation adds so that the field becomes a flag.

    The flag is named after the field: `--kv-dtype` for `kv_dtype`. Its type, and whether it may be given several times,
    follow from the field's type; a field without a default must be given. The default is shown in the help unless it
    is None, False or empty.
    """

    def __init__(self, help: str, *names: str, **attributes: Any) -> None:
        """names: other names than the field's, as click takes them, like "--grpc/--no-grpc".

        attributes: what else `click.option` takes, like metavar or type.
        """
        self.help, self.names, self.attributes = help, names, attributes


class GroupOption(click.Option):
    """An option of a group, which the help shows in a section of its own.

    section: the section's heading; about: what its options are about, one sentence or a few.
    """

    def __init__(self, section: str, about: str, names: Sequence[str], **attributes: Any) -> None:
        super().__init__(names, **attributes)
        self.section, self.about = section, about


def sections(parameters: Iterable[click.Parameter]) -> dict[str, list[click.Parameter]]:
    """Return options by the headings of their sections, in their order; those of no group come last."""
    by_heading: dict[str, list[click.Parameter]] = {}
    for parameter in parameters:
        heading = parameter.section if isinstance(parameter, GroupOption) else OWN_SECTION
        by_heading.setdefault(heading, []).append(parameter)
    own = by_heading.pop(OWN_SECTION, [])
    return {**by_heading, OWN_SECTION: own}


class OptionSource(ABC):
    """Some options of a command, and the one value that it is given for them.

    A parameter or field of any type gets its options from a source that stands in its annotation.
    """

    @abstractmethod
    def options(self) -> Iterator[click.Option]:
        """Yield the options in the order of the help."""

    @abstractmethod
    def take(self, values: dict[str, Any]) -> Any:
        """Take the values of these options out of all that a command is given, and return what is made of them."""


def with_options(command: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a coroutine function the callback of a click command, which fills its parameters that are groups.

    The options of these groups come in the order of the parameters, before those that decorators beneath this one
    declare. Errors of the coroutine become one sentence and an exit code, see `run`.
    """
    sources = dict(_sources(command))

    @functools.wraps(command)
    def call(**values: Any) -> None:
        async def main() -> None:
            # Groups check their values when they are made: within `run`, which tells people what is wrong.
            groups = {name: source.take(values) for name, source in sources.items()}
            await command(**values, **groups)

        run(main())

    options = [option for source in sources.values() for option in source.options()]
    # Where click's own decorators collect them, the last one first.
    call.__click_params__ = [*getattr(call, "__click_params__", ()), *reversed(options)]  # type: ignore[attr-defined]
    return call


def group_options(group: type) -> Iterator[click.Option]:
    """Yield the options of a group and of the groups within it, in the order of the fields."""
    return _Group(group).options()


class _Group(OptionSource):
    """A dataclass whose fields are flags or groups."""

    def __init__(self, kind: type) -> None:
        self._kind, self._sources = kind, dict(_sources(kind))

    def options(self) -> Iterator[click.Option]:
        for source in self._sources.values():
            yield from source.options()

    def take(self, values: dict[str, Any]) -> Any:
        return self._kind(**{name: source.take(values) for name, source in self._sources.items()})


class _Single(OptionSource):
    """A field that is one flag."""

    def __init__(self, group: type, name: str, kind: Any, default: Any, flag: Flag) -> None:
        self._group, self._name, self._default, self._flag = group, name, default, flag
        self._is_tuple = get_origin(kind) is tuple
        # Of `int | None` or `tuple[int, ...]` the int.
        (self._kind,) = (part for part in get_args(kind) or (kind,) if part not in (NoneType, Ellipsis))

    def options(self) -> Iterator[click.Option]:
        names = self._flag.names or (f"--{self._name.replace('_', '-')}",)
        attributes: dict[str, Any] = {"help": self._flag.help, "multiple": self._is_tuple}
        if self._kind is bool:
            attributes["is_flag"] = True
        else:
            attributes["type"] = click.Path(path_type=Path) if self._kind is Path else self._kind
        if self._default is MISSING:
            attributes["required"] = True
        else:
            attributes["default"] = self._default
            attributes["show_default"] = self._default not in ((), None) and self._default is not False
        about = (self._group.__doc__ or "").partition("\n\n")[0].strip()
        yield GroupOption(_heading(self._group), about, [self._name, *names], **attributes | self._flag.attributes)

    def take(self, values: dict[str, Any]) -> Any:
        return values.pop(self._name)


def _sources(owner: Any) -> Iterator[tuple[str, OptionSource]]:
    """Yield the fields of a dataclass, or the parameters of a function, that have options, with their sources."""
    defaults = {field.name: field.default for field in fields(owner)} if isinstance(owner, type) else {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        mark = hint.__metadata__[0] if get_origin(hint) is Annotated else None
        if isinstance(mark, Flag):
            yield name, _Single(owner, name, hint.__origin__, defaults.get(name, MISSING), mark)
        elif isinstance(mark, OptionSource):
            yield name, mark
        elif isinstance(hint, type) and is_dataclass(hint) and any(_sources(hint)):
            yield name, _Group(hint)


def _heading(group: type) -> str:
    """Return the section of a group's options: what it says as `section`, else its name as words."""
    return str(getattr(group, "section", re.sub(r"(?<!^)(?=[A-Z])", " ", group.__name__).capitalize()))
