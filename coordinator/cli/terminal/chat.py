"""The chat itself: reads what is typed, runs commands, shows answers, keeps the conversation.

Ctrl-C stops an answer and never the chat. Where nobody types, each line of input is a question.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import termios
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from coordinator.cli.console import console as stderr, print_error
from coordinator.cli.terminal.figures_line import figures_line
from coordinator.cli.terminal.history import open_history
from coordinator.cli.terminal.live_text import LiveText
from coordinator.cli.terminal.speakers import AnswerEnd, AnswerSettings, Message, Speaker
from services.errors import FlashsplitError

_COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/system TEXT": "set the system message; alone it shows it, with - it takes it away",
    "/exit": "end the chat; so does Ctrl-D",
}


class Chat:
    """A conversation with a speaker.

    system: the system message, None without one; history: the file in which questions are remembered, None for nowhere.
    """

    def __init__(self, speaker: Speaker, settings: AnswerSettings, system: str | None, history: Path | None) -> None:
        self._speaker, self._settings, self._system, self._history = speaker, settings, system, history
        self._messages: list[Message] = []
        self._console = Console(highlight=False)

    async def run(self) -> None:
        """Talk until the person leaves. Raises the FlashsplitError after which there is nobody left to ask."""
        questions = self._typed_lines() if sys.stdin.isatty() else _piped_lines()
        async with contextlib.aclosing(questions):
            async for text in questions:
                if text.startswith("/"):
                    if not self._command(text):
                        return
                elif text:
                    await self._answer(text)

    # --- what is typed

    async def _typed_lines(self) -> AsyncGenerator[str]:
        """Yield what a person types, until Ctrl-D."""
        history, trouble = open_history(self._history)
        session: PromptSession[str] = PromptSession(
            history=history,
            completer=WordCompleter([name.split()[0] for name in _COMMANDS], sentence=True),
            complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
            key_bindings=_bindings(),
            enable_history_search=True,
        )
        self._tell(f"{self._speaker.name} ({self._speaker.place}). /help lists commands, Ctrl-C stops an answer.")
        if trouble is not None:
            self._tell(trouble)
        while True:
            try:
                yield (await session.prompt_async(HTML("<ansicyan><b>› </b></ansicyan>"))).strip()
            except KeyboardInterrupt:
                # What was being typed is given up.
                continue
            except EOFError:
                return

    def _command(self, text: str) -> bool:
        """Run a command that begins with a slash, and return whether the chat goes on."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                for command, meaning in _COMMANDS.items():
                    self._tell(f"{command:14} {meaning}")
                self._tell("Alt-Enter starts a new line, the arrows bring back earlier questions.")
            case "/clear":
                self._messages.clear()
                self._tell("The conversation is forgotten.")
            case "/system" if not rest:
                self._tell(self._system or "There is no system message.")
            case "/system":
                self._system = None if rest == "-" else rest
                self._tell("The system message is set." if self._system else "The system message is gone.")
            case _:
                self._tell(f"{name} is no command; /help lists them.")
        return True

    def _tell(self, text: str) -> None:
        """Print a line for the person that is not part of the conversation."""
        stderr.print(text, style="dim", markup=False)

    # --- an answer

    async def _answer(self, text: str) -> None:
        """Ask, show the answer and remember both. Raises FlashsplitError where nobody is left to ask."""
        self._messages.append({"role": "user", "content": text})
        texts: list[str] = []
        with _interrupting(asyncio.ensure_future(self._show(texts))) as answer:
            try:
                await answer
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is not None and current.cancelling():
                    answer.cancel()
                    raise
                self._tell("stopped")
            except FlashsplitError as error:
                if self._speaker.lost or not sys.stdin.isatty():
                    raise
                print_error(error.message.partition("\n")[0])
        # What came is what the model goes on from; a question without an answer is forgotten.
        if texts:
            self._messages.append({"role": "assistant", "content": "".join(texts)})
        else:
            self._messages.pop()

    async def _show(self, texts: list[str]) -> None:
        """Draw the answer as it comes, and append its texts to the list: they stay there when this is cancelled."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        answer = self._speaker.answer([*system, *self._messages], self._settings)
        end: AnswerEnd | None = None
        async with contextlib.aclosing(answer) as pieces:
            with contextlib.ExitStack() as drawn:
                reasoning: LiveText | None = None
                content: LiveText | None = None
                async for piece in pieces:
                    if isinstance(piece, AnswerEnd):
                        end = piece
                        continue
                    if piece.reasoning and content is None:
                        reasoning = reasoning or drawn.enter_context(LiveText.plain(self._console, "dim italic"))
                        reasoning.feed(piece.reasoning)
                    if piece.text:
                        if content is None:
                            drawn.close()
                            content = drawn.enter_context(LiveText.markdown(self._console))
                        texts.append(piece.text)
                        content.feed(piece.text)
        if end is not None and (line := figures_line(end)):
            self._tell(f"{line}\n" if self._console.is_terminal else line)


@contextlib.contextmanager
def _interrupting(answer: asyncio.Task[None]) -> Iterator[asyncio.Task[None]]:
    """Let Ctrl-C cancel the answer alone, and hide keys that are pressed meanwhile; do nothing where nobody types."""
    if not sys.stdin.isatty():
        yield answer
        return
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, answer.cancel)
    try:
        with _unseen_keys():
            yield answer
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _unseen_keys() -> Iterator[None]:
    """Keep the terminal from showing keys that are pressed."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _bindings() -> KeyBindings:
    """Return the keys beyond the usual ones: Alt-Enter begins a new line."""
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


async def _piped_lines() -> AsyncGenerator[str]:
    """Yield the lines of an input that is no terminal, be it a file or a pipe that stays silent for long."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        # Ctrl-C closes the loop while this waits for a line.
        with contextlib.suppress(RuntimeError):
            while line := sys.stdin.readline():
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, "")

    threading.Thread(target=read, daemon=True).start()
    while line := await lines.get():
        yield line.strip()
