"""Takes the pictures of the pages: the page in light, dark and on a phone, the chat and the status in a terminal.

    pip install -e '.[worker,test]' pyte && PYTHONPATH=. python docs/take_pictures.py

Needs Debian's chromium and chromium-driver. Starts the demo pair over two workers and asks it what the pictures show.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pyte
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.e2e.browser import Browser, browser
from tests.e2e.conftest import ROOT, until
from tests.e2e.server import PAIR, serving

FOLDER = Path(__file__).parent / "pictures"
QUESTIONS = ("What is 17 * 4?", "Write a Python function that reverses a string.", "Calculate 4729 + 3485.")
COLOURS = {
    "default": "#d7dbea", "black": "#5b6078", "red": "#ff8f8f", "green": "#5eead4", "brown": "#fbbf24",
    "blue": "#818cf8", "magenta": "#e0aaff", "cyan": "#7dd3fc", "white": "#ffffff", "brightblack": "#7d84a0",
}  # fmt: skip
FRAME = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; background: transparent; }
main { display: inline-block; border-radius: 12px; background: #12141f; color: #d7dbea; overflow: hidden; }
header { display: flex; gap: 7px; padding: 11px 14px; background: #1b1e2d; }
header i { width: 11px; height: 11px; border-radius: 50%; background: #3a3f57; }
pre { margin: 0; padding: 14px 18px 18px; font: 13px/1.45 "DejaVu Sans Mono", monospace; }
</style><main><header><i></i><i></i><i></i></header><pre>PRE</pre></main>"""


class Screen(pyte.Screen):
    """A terminal that shows dim text as grey."""

    def select_graphic_rendition(self, *attributes: int, **options: object) -> None:
        plain = attributes if 38 in attributes or 48 in attributes else [90 if one == 2 else one for one in attributes]
        super().select_graphic_rendition(*plain)


class Terminal:
    """A command on a terminal, and what stands on it."""

    def __init__(self, columns: int, *arguments: str) -> None:
        self.screen = Screen(columns, 44)
        self._stream = pyte.Stream(self.screen)
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "coordinator", *arguments],
            cwd=ROOT,
            encoding="utf-8",
            timeout=60,
            dimensions=(44, columns),
        )
        self.process.logfile_read = self

    def write(self, text: str) -> None:
        self._stream.feed(text)

    def flush(self) -> None:
        """As files have it."""

    def settle(self) -> None:
        """Read what comes within half a second."""
        self.process.expect([pexpect.TIMEOUT, pexpect.EOF], timeout=0.5)

    def page(self) -> str:
        """As HTML, without empty lines at the end."""
        lines = []
        for row in range(self.screen.lines):
            cells = [self.screen.buffer[row][column] for column in range(self.screen.columns)]
            line = "".join(
                f'<span style="color:{COLOURS.get(cell.fg, "#" + cell.fg)};font-weight:{600 if cell.bold else 400};'
                f'font-style:{"italic" if cell.italics else "normal"}">{html.escape(cell.data)}</span>'
                for cell in cells
            )
            lines.append((line, "".join(cell.data for cell in cells).strip()))
        while lines and not lines[-1][1]:
            lines.pop()
        return FRAME.replace("PRE", "\n".join(line for line, _ in lines))


@contextlib.contextmanager
def busy(url: str) -> Iterator[None]:
    """Somebody else asks too, one sum after the other."""
    over = threading.Event()

    def ask() -> None:
        for number in itertools.count(4711, 7):
            if over.is_set():
                return
            question = {"role": "user", "content": f"Calculate {number} + {number // 3}."}
            system = {"role": "system", "content": "You do sums, and show how. " * 12}
            body = json.dumps({"messages": [system, question], "temperature": 0}).encode()
            asked = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
            urllib.request.urlopen(asked, timeout=60).close()
            time.sleep(0.3)

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
    finally:
        over.set()
        client.join()


def take_page(page: Browser, url: str) -> None:
    """Light, dark, and a phone's two views."""
    driver = page.driver
    page.open(url)
    page.look(scale=1.25)
    time.sleep(12)
    question = driver.find_element(By.ID, "question")
    for text in QUESTIONS:
        question.send_keys(text, Keys.ENTER)
        time.sleep(0.3)
        until(lambda: driver.find_element(By.ID, "send").is_displayed(), 60)
    time.sleep(1.2)

    def shoot(name: str) -> None:
        save(driver.get_screenshot_as_png(), name)

    shoot("page-light.png")
    page.look(scale=1.25, dark=True)
    time.sleep(0.5)
    shoot("page-dark.png")
    page.look(width=390, height=760, scale=1.5)
    time.sleep(0.5)
    page.run("document.querySelector('#log').scrollTop = 1e6")
    shoot("phone-chat.png")
    driver.find_element(By.CSS_SELECTOR, ".views button[data-view=chain]").click()
    page.run("document.activeElement.blur()")
    time.sleep(0.7)
    shoot("phone-chain.png")


def take_terminal(page: Browser, terminal: Terminal, name: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
        file.write(terminal.page())
        file.flush()
        page.look(width=1600, height=1000, scale=1.5)
        nothing = {"color": {"r": 0, "g": 0, "b": 0, "a": 0}}
        page.driver.execute_cdp_cmd("Emulation.setDefaultBackgroundColorOverride", nothing)
        page.driver.get(f"file://{file.name}")
        save(page.driver.find_element(By.TAG_NAME, "main").screenshot_as_png, name)


def save(picture: bytes, name: str) -> None:
    (FOLDER / name).write_bytes(picture)
    print(f"{name}: {len(picture) // 1024} KiB")


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), *PAIR, "--target-devices", "cpu,cpu", "--served-model-name", "demo") as server,
        browser() as page,
    ):
        with busy(server.url):
            take_page(page, server.url)
            status = Terminal(150, "status", "--url", server.url)
            status.settle()
            status.process.expect(pexpect.EOF)
        chat = Terminal(96, "chat", "--url", server.url, "--no-history")
        chat.process.expect("› ")
        for text in ("Calculate 4729 + 3485.", "Write a Python function that reverses a string."):
            chat.process.send(f"{text}\r")
            chat.process.expect(" tokens/s ")
            chat.process.expect("› ")
            chat.settle()
        take_terminal(page, chat, "chat.png")
        take_terminal(page, status, "status.png")
        chat.process.sendeof()
        chat.process.expect(pexpect.EOF)


if __name__ == "__main__":
    main()
