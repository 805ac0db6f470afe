"""Text that is drawn while it comes: blocks that are whole stand still, the last one is drawn anew until it is.

A terminal cannot redraw what has scrolled away. So only the end of the text is live, and of that only what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment
from rich.text import Text

Split = Callable[[str], Sequence[str]]
"""Splits a text into its blocks, of which the last may still grow."""

_PARSER = MarkdownIt().enable("table").enable("strikethrough")


def markdown_blocks(text: str) -> list[str]:
    """Return the paragraphs, lists, tables … at the top of a Markdown text, each with the empty lines behind it."""
    starts = sorted({token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map is not None})
    lines = text.splitlines(keepends=True)
    bounds = [0, *starts[1:], len(lines)]
    return ["".join(lines[first:end]) for first, end in zip(bounds, bounds[1:], strict=False)]


class _Heading(Heading):
    """A heading that stands at the left, where the text begins."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    """Markdown whose line ends stay line ends: models mean them."""

    elements = {**Markdown.elements, "heading_open": _Heading}

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark")
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


class LiveText:
    """Text that grows by `feed` while it is entered as a context. Without a terminal it goes out as it comes."""

    def __init__(self, console: Console, draw: Callable[[str], RenderableType], split: Split, gap: str = "") -> None:
        """draw: what to print for a block; split: how a text falls into blocks; gap: what stands between them."""
        self._console, self._draw, self._split, self._gap = console, draw, split, gap
        self._tail, self._begun = "", False
        self._live: Live | None = None

    @classmethod
    def markdown(cls, console: Console) -> LiveText:
        """Return a text that is drawn as Markdown."""
        return cls(console, _Markdown, markdown_blocks, gap="\n")

    @classmethod
    def plain(cls, console: Console, style: str) -> LiveText:
        """Return a text whose lines are drawn as they are, in a style of rich."""
        return cls(console, lambda text: Text(text.rstrip("\n"), style=style), lambda text: text.splitlines(True))

    def __enter__(self) -> LiveText:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=12, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is None:
            self._console.file.write("\n" if self._begun else "")
            self._console.file.flush()
            return
        self._live.stop()
        self._keep(self._split(self._tail))

    def feed(self, text: str) -> None:
        """Add to the text, and draw what has changed."""
        if self._live is None:
            self._begun = True
            self._console.file.write(text)
            self._console.file.flush()
            return
        self._tail += text
        # Blocks end with lines.
        if "\n" in text and len(blocks := self._split(self._tail)) > 1:
            self._tail = blocks[-1]
            self._keep(blocks[:-1])
        self._live.update(_Fitting(self._draw(self._tail), self._gap if self._begun else ""))

    def _keep(self, blocks: Sequence[str]) -> None:
        """Print blocks that are whole, for good."""
        for block in blocks:
            if block.strip() or not self._gap:
                self._console.print(self._gap if self._begun else "", end="")
                self._console.print(self._draw(block))
                self._begun = True


class _Fitting:
    """The last lines of a drawing, as many as the terminal has room for."""

    def __init__(self, inner: RenderableType, gap: str) -> None:
        self._inner, self._gap = inner, gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._inner, options.update(height=None), pad=False)
        most = max(1, console.height - 3)
        if self._gap and len(lines) <= most:
            yield Segment.line()
        for line in lines[-most:]:
            yield from line
            yield Segment.line()
