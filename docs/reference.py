"""Writes docs/command-line.md: every command and option as the programs themselves know them.

    python docs/reference.py

`make docs` runs it, and a test checks that the page is current.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from coordinator.__main__ import main as flashsplit
from coordinator.cli.option_groups import OWN_SECTION, GroupOption, sections
from shard_worker.__main__ import main as flashsplit_worker

PAGE = Path(__file__).with_name("command-line.md")

INTRODUCTION = """# Command line

Two programs: `flashsplit` serves, answers, plans and measures; `flashsplit-worker` is a worker alone, for other hosts
and pods. Both tell the same with `--help`. Options that several commands take in the same form stand once, at the end.
This page is written by `docs/reference.py`."""


@dataclass(frozen=True)
class Section:
    """Options under a heading. lines: one for each option, as Markdown; about: what they are about, may be empty."""

    heading: str
    about: str
    lines: tuple[str, ...]

    @property
    def link(self) -> str:
        """A link to the section, where it stands among the shared ones."""
        return f"[{self.heading.lower()}](#{self.heading.lower().replace(' ', '-')})"


def commands(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Yield a context of a command and of those below it, in the order of the help."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    yield context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from commands(found, child, context)


def sections_of(context: click.Context) -> list[Section]:
    """Return the sections of a command's options, as its help has them, but for --help itself."""
    return [
        Section(heading, _about(options), lines)
        for heading, options in sections(context.command.params).items()
        if (lines := tuple(_lines(context, options)))
    ]


def _lines(context: click.Context, options: Sequence[click.Parameter]) -> Iterator[str]:
    for option in options:
        if (record := option.get_help_record(context)) is not None:
            names, help = record
            yield f"- `{names}`: {' '.join(help.split())}"


def _about(options: Sequence[click.Parameter]) -> str:
    about = next((option.about for option in options if isinstance(option, GroupOption)), "Options of its own:")
    return " ".join(about.split())


def prose(text: str | None) -> list[str]:
    r"""Return the paragraphs of a help text; those that begin with \b are code."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        if paragraph.startswith("\b"):
            paragraphs.append(code(inspect.cleandoc(paragraph.removeprefix("\b\n"))))
        elif paragraph.strip():
            # What looks like a flag is code.
            paragraphs.append(re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", " ".join(paragraph.split())))
    return paragraphs


def code(text: str) -> str:
    """Return a block of code."""
    return f"```\n{text}\n```"


def page() -> str:
    """Return the page."""
    contexts = [*commands(flashsplit, "flashsplit"), *commands(flashsplit_worker, "flashsplit-worker")]
    own: Mapping[click.Context, list[Section]] = {context: sections_of(context) for context in contexts}
    uses = Counter(section for found in own.values() for section in found if section.heading != OWN_SECTION)
    usual: dict[str, Section] = {}
    for section, count in uses.most_common():
        # Other options under the same heading stand with their command.
        if count > 1:
            usual.setdefault(section.heading, section)
    shared = [section for section in uses if section in usual.values()]
    parts = [INTRODUCTION]
    for context in contexts:
        command = context.command
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        parts += [f"## {context.command_path}", *prose(command.help), code(usage)]
        if isinstance(command, click.Group):
            parts.append(_children(command, context))
        if links := [section.link for section in own[context] if section in shared]:
            parts.append(f"Takes the {', '.join(links[:-1])}{' and ' if links[:-1] else ''}{links[-1]}.")
        for section in own[context]:
            if section not in shared:
                parts += [*prose(section.about), "\n".join(section.lines)]
        parts += prose(command.epilog)
    parts.append("## Shared options")
    for section in shared:
        parts += [f"### {section.heading}", *prose(section.about), "\n".join(section.lines)]
    return "\n\n".join(parts) + "\n"


def _children(group: click.Group, context: click.Context) -> str:
    """Return a list of links to the commands of a group."""
    lines = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        path = f"{context.command_path} {name}"
        lines.append(f"- [`{path}`](#{path.replace(' ', '-')}): {command.get_short_help_str(200)}")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
