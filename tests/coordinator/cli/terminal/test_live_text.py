"""Markdown while it comes: what is whole stands still, nothing is lost, nothing is shown twice."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from coordinator.cli.terminal.live_text import LiveText, markdown_blocks

TEXT = """# Title

One line
and another with **weight**.

- first
- second

  with more

```python
def f():

    return 1
```

| a | b |
|---|---|
| 1 | 2 |

The end."""


@pytest.mark.parametrize(
    "blocks",
    [
        [""],
        ["One line"],
        ["One\ntwo\n"],
        ["One\n\n", "two"],
        ["\nOne\n\n", "two"],
        ["# Title\n", "Text"],
        ["- a\n\n- b\n"],
        ["- a\n\n", "Text"],
        ["```\na\n\nb\n"],
        ["```\na\n\nb\n```\n", "Text\n\n", "> quoted\n> more"],
        ["| a |\n|---|\n| 1 |\n"],
    ],
)
def test_blocks(blocks: list[str]) -> None:
    """What belongs together stays so, an open fence and a list's next item behind empty lines too; nothing is lost."""
    assert markdown_blocks("".join(blocks)) == blocks


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_pieces_of_any_size_look_the_same(size: int) -> None:
    """What stands on the terminal at the end doesn't depend on how the text came."""

    def shown(pieces: int) -> list[str]:
        file = io.StringIO()
        # Not a real terminal: what Live draws and takes back is left out, what stays is not.
        console = Console(file=file, width=60, force_terminal=True, color_system=None, _environ={"TERM": "dumb"})
        with LiveText.markdown(console) as live:
            for at in range(0, len(TEXT), pieces):
                live.feed(TEXT[at : at + pieces])
        return [line.rstrip() for line in file.getvalue().splitlines()]

    lines = shown(size)
    assert lines == shown(len(TEXT))
    joined = "\n".join(lines)
    for part in (
        "Title",
        "One line\nand another with weight.",
        "first",
        "with more",
        "def f():",
        "return 1",
        "The end.",
    ):
        assert joined.count(part) == 1, part
    assert "**" not in joined
    assert "```" not in joined


def test_without_a_terminal_text_goes_out_as_it_came() -> None:
    file = io.StringIO()
    with LiveText.markdown(Console(file=file)) as live:
        for piece in ("a **b", "** c\n", "\nd"):
            live.feed(piece)
        assert file.getvalue() == "a **b** c\n\nd"
    assert file.getvalue() == "a **b** c\n\nd\n"
