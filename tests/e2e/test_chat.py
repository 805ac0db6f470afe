"""`flashsplit chat` on a real terminal: with a server, with workers of its own, and with questions from a pipe."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from click.testing import CliRunner

from coordinator.cli.commands.chat import chat
from tests.e2e.conftest import ROOT, alive, children, until
from tests.e2e.server import DEMO, PAIR, Server, serving

# A terminal needs a fork, which Python 3.12 calls risky where threads run.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

KEY = "a-key-for-the-chat"
PROMPT = "› "
SUM = "Calculate 4729 + 3485."
# The demo model comes to repeat itself: without a draft there is half a minute to stop it.
ENDLESS = "Count from 1 to 1000."
CODE = "Write a Python function that reverses a string."
STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--target-devices", "cpu,cpu", "--served-model-name", "demo", "--api-key", KEY)
    with serving(tmp_path_factory.mktemp("serve"), *PAIR, *options) as running:
        yield running


class Terminal:
    """A chat on a terminal of its own; its history stands in a directory of the test's."""

    def __init__(self, state: Path, *arguments: object, key: str | None = KEY) -> None:
        environment = {**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm-256color"}
        if key is not None:
            environment["FLASHSPLIT_API_KEY"] = key
        command = ["-m", "coordinator", "chat", *map(str, arguments)]
        self.process = pexpect.spawn(
            sys.executable, command, cwd=ROOT, env=environment, timeout=60, encoding="utf-8", dimensions=(50, 110)
        )
        self.until(PROMPT)

    def until(self, text: str) -> str:
        """What came up to a text, without colours and movements."""
        self.process.expect_exact(text)
        # Drawn lines are as wide as the terminal.
        return re.sub(" +\r\n", "\n", STYLE.sub("", str(self.process.before)))

    def ask(self, text: str) -> str:
        """The answer with its figures."""
        self.say(text)
        return self.until(" tokens/s") + self.until(PROMPT)

    def say(self, text: str) -> None:
        self.process.send(f"{text}\r")

    def end(self) -> int | None:
        """Ctrl-D; the exit code."""
        self.process.sendeof()
        self.process.expect(pexpect.EOF)
        self.process.close()
        return self.process.exitstatus


def test_talking_with_a_server(server: Server, tmp_path: Path) -> None:
    """Answers are drawn as Markdown with their figures; the conversation goes on, commands work, Ctrl-C stops an answer
    and its request alone, questions are remembered for the next chat in a file of the user's own."""
    terminal = Terminal(tmp_path, "--url", f"{server.url}/v1", "--no-speculation")
    said = terminal.ask(SUM)
    assert "4729 + 3485 = 8214." in said
    assert "write 4 and carry 1.\nAdd the tens" in said
    code = terminal.ask(CODE)
    assert "return text[::-1]" in code
    assert "```" not in code

    terminal.say("/help")
    assert "/system TEXT" in terminal.until("earlier questions")
    for typed, told in (
        ("/system Be brief.", "The system message is set."),
        ("/system", "Be brief."),
        ("/system -", "The system message is gone."),
        ("/nothing", "/nothing is no command; /help lists them."),
        ("/clear", "The conversation is forgotten."),
    ):
        terminal.until(PROMPT)
        terminal.say(typed)
        terminal.until(told)
    terminal.until(PROMPT)

    terminal.say("/exit")
    terminal.process.expect(pexpect.EOF)
    history = tmp_path / "flashsplit" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert SUM in history.read_text()

    terminal = Terminal(tmp_path, "--url", server.url, "--no-speculation", "--max-tokens", 3000)
    terminal.process.send("\x1b[A")
    terminal.until("/exit")
    terminal.process.sendintr()
    terminal.until(PROMPT)
    terminal.say(ENDLESS)
    until(lambda: running(server) == 1, 20)
    terminal.process.sendintr()
    terminal.until("stopped")
    terminal.until(PROMPT)
    until(lambda: running(server) == 0, 10)
    assert terminal.process.isalive()
    assert terminal.end() == 0


def running(server: Server) -> int:
    """Requests that run."""
    request = urllib.request.Request(f"{server.url}/v1/status", headers={"x-api-key": KEY})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return int(json.load(answer)["requests"]["running"])


@pytest.mark.slow
def test_workers_of_its_own(tmp_path: Path) -> None:
    """--model starts them as generate does; the second turn takes up the first; they end with the chat, and a chat
    whose worker has died says so and ends."""
    options = (*PAIR, "--target-devices", "cpu,cpu", "--no-history")
    terminal = Terminal(tmp_path, *options, key=None)
    pid = terminal.process.pid
    assert pid is not None
    workers = children(pid)
    assert len(workers) == 2
    said = terminal.ask(SUM)
    assert "4729 + 3485 = 8214." in said
    assert "tokens a verify" in said
    # The terminal may have broken the line.
    assert "prompt tokens from memory" in " ".join(terminal.ask(SUM).split())
    assert terminal.end() == 0
    assert not any(map(alive, workers))
    assert not (tmp_path / "flashsplit").exists()

    terminal = Terminal(tmp_path, *options, key=None)
    pid = terminal.process.pid
    assert pid is not None
    workers = children(pid)
    os.kill(workers[0], signal.SIGKILL)
    until(lambda: not alive(workers[0]), 5)
    terminal.say(SUM)
    terminal.until("was killed by SIGKILL")
    terminal.process.expect(pexpect.EOF)
    terminal.process.close()
    assert terminal.process.exitstatus == 1
    until(lambda: not any(map(alive, workers)), 10)


def test_questions_from_a_pipe(server: Server) -> None:
    """One a line; answers go to stdout as they are, figures to stderr; Ctrl-C while no line comes ends it at once."""
    command = [sys.executable, "-m", "coordinator", "chat", "--url", server.url, "--api-key", KEY]
    done = subprocess.run(
        command, cwd=ROOT, input=f"{SUM}\n\n{CODE}\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert "4729 + 3485 = 8214.\n```python\ndef " in done.stdout
    assert done.stdout.count("```") == 2
    assert done.stderr.count(" tokens/s ") == 2

    waiting = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert waiting.stdin is not None
    assert waiting.stdout is not None
    waiting.stdin.write(f"{SUM}\n".encode())
    waiting.stdin.flush()
    while "8214." not in (line := waiting.stdout.readline().decode()):
        assert line
    waiting.send_signal(signal.SIGINT)
    # Its input stays open until it has ended.
    assert waiting.wait(10) == 130
    _, err = waiting.communicate()
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9"),
        (["--url", "nowhere"], 2, "--url 'nowhere' must be like"),
        (["--url", "SERVER"], 1, "SERVER wants an API key: give it in FLASHSPLIT_API_KEY or with --api-key"),
        (["--url", "SERVER", "--api-key", "no"], 1, "SERVER does not know that API key"),
        (["--url", "SERVER", "--model", DEMO / "target"], 2, "--url has no effect with --model"),
        (["--url", "SERVER", "--target-devices", "cpu,cpu"], 2, "--target-devices has no effect without --model"),
        (["--draft", DEMO / "draft"], 2, "--draft has no effect without --model"),
        (["--model", DEMO], 1, "has no config.json"),
    ],
)
def test_refusals(server: Server, arguments: list[object], code: int, says: str) -> None:
    given = [server.url if argument == "SERVER" else str(argument) for argument in arguments]
    result = CliRunner().invoke(chat, given, env={"FLASHSPLIT_API_KEY": None, "COLUMNS": "400"})
    assert result.exit_code == code, result.output
    assert says.replace("SERVER", server.url) in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


@pytest.mark.slow
def test_a_server_that_refuses_a_question(server: Server, tmp_path: Path) -> None:
    """Its sentence is shown, and the chat goes on without that question."""
    terminal = Terminal(tmp_path, "--url", server.url, "--max-tokens", 4000)
    terminal.say("long " * 1000)
    terminal.until("flashsplit: error: ")
    terminal.until(PROMPT)
    assert "4729 + 3485 = 8214." in terminal.ask(SUM)
    assert terminal.end() == 0
    assert running(server) == 0
