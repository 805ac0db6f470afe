"""The page in a real browser: chat with streaming and stop, the chain with both stages, by mouse and by keyboard.

Skipped where there is no Chromium, but not where one was to be installed (`FLASHSPLIT_BROWSER=required`, as CI has it).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.e2e.browser import CHROMIUM, DRIVER, Browser, browser
from tests.e2e.conftest import Worker, children, until
from tests.e2e.server import PAIR, Server, serving

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and os.environ.get("FLASHSPLIT_BROWSER") != "required",
    reason="needs Debian's chromium and chromium-driver",
)

KEY = "sesame-for-the-page"
STORY = "Write a Python function that computes the factorial."
PLACED = (*PAIR, "--target-devices", "cpu,cpu", "--served-model-name", "demo")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), *PLACED) as running:
        yield running


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def page(server: Server, opened: Browser) -> Iterator[Browser]:
    """The page, open anew; at its end nothing was complained of, and nobody else was asked for anything."""
    opened.open(server.url)
    yield opened
    opened.check()


def one(page: Browser, selector: str) -> WebElement:
    return page.driver.find_element(By.CSS_SELECTOR, selector)


def texts(page: Browser, selector: str) -> list[str]:
    found: list[str] = page.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)
    return found


def shows(page: Browser, selector: str, says: str) -> Callable[[], bool]:
    return lambda: any(says in text for text in texts(page, selector))


def ask(page: Browser, text: str) -> None:
    one(page, "#question").send_keys(text, Keys.ENTER)


def answered(page: Browser) -> bool:
    return not texts(page, "article[aria-busy=true]") and one(page, "#send").is_displayed()


def grown_lengths(page: Browser) -> list[int]:
    """Watches an answer from before it begins: its lengths each time it was drawn."""
    lengths: list[int] = page.run("return window.lengths")
    return lengths


# Each piece is drawn when it comes: how many frames a browser draws meanwhile is a matter of the machine.
WATCH_LENGTHS = """
window.lengths = [];
window.requestAnimationFrame = (draw) => queueMicrotask(draw);
new MutationObserver(() => {
  const answers = document.querySelectorAll(".answer > .text");
  if (answers.length) window.lengths.push(answers[answers.length - 1].textContent.length);
}).observe(document.querySelector("#log"), {subtree: true, childList: true, characterData: true});
"""


def test_the_chain_shows_both_stages(page: Browser) -> None:
    """Each with its layers, memory and device, the draft beside the last one, and the edges between them."""
    until(lambda: texts(page, "#state") == ["ready"], 10)
    assert texts(page, "#model") == ["demo"]
    assert texts(page, ".card h3") == ["stage 0", "stage 1"]
    assert texts(page, ".layers-text") == ["layers 0 to 5 of 12", "layers 6 to 11 of 12+ draft, blocks of 16"]
    held = page.run(
        "return [...document.querySelectorAll('.layers')].map(l => [...l.children].map(c => c.className).join(' '))"
    )
    assert held == ["held held held held held held      ", "      held held held held held held"]
    assert all("MiB weights" in text for text in texts(page, ".card .memory"))
    assert [edge.get_attribute("data-to") for edge in page.driver.find_elements(By.CSS_SELECTOR, ".edge")] == [
        "stage 0",
        "stage 1",
    ]


def test_an_answer_streams(page: Browser) -> None:
    """Tokens show while they come; below stand the blocks that made them and what they took; then the chain's figures
    and the prefix cache follow. A second question goes on from the first."""
    page.run(WATCH_LENGTHS)
    ask(page, STORY)
    until(lambda: answered(page) and bool(texts(page, ".figures")[0]), 60)

    assert texts(page, ".question") == [STORY]
    assert "def " in texts(page, ".answer .code code")[0]
    lengths = grown_lengths(page)
    assert len(set(lengths)) > 3
    assert lengths == sorted(lengths)
    assert "tokens/s" in texts(page, ".figures")[0]
    assert "tokens a verify" in texts(page, ".figures")[0]
    assert texts(page, "#announcer")[0].startswith("Answer: ")

    until(lambda: one(page, ".strip").get_property("childElementCount") > 2, 5)
    steps = page.run("return [...document.querySelectorAll('#blocks i')].map(i => [i.style.cssText, i.title])")
    assert any("--rows: 16" in style for style, _ in steps)
    assert all(title.endswith("rows kept") for _, title in steps)
    assert "rows kept on average" in str(one(page, "#blocks").get_attribute("aria-label"))
    until(shows(page, "#acceptance-note", "of the draft's tokens were accepted"), 5)
    until(lambda: all("compute " in text for text in texts(page, ".card .legend .busy")), 5)
    assert any("KiB so far" in text or "MiB so far" in text for text in texts(page, ".edge p"))
    assert texts(page, "#tile-kept")[0].endswith(" of 16")

    # The end of the answer is kept behind its back.
    until(lambda: all("0 B prefixes" not in text for text in texts(page, ".card .memory")), 10)
    ask(page, "Again, please.")
    until(lambda: answered(page) and len(texts(page, ".figures")) == 2, 60)
    assert "prompt tokens from memory" in texts(page, ".figures")[1]
    until(shows(page, "#cache-legend .memory", "from memory: "), 5)


@pytest.mark.slow
def test_stop_ends_the_answer_and_its_request(page: Browser, server: Server) -> None:
    """By the button and by Esc; what came stays, and the next question is answered."""
    # The demo model comes to repeat itself: without the draft there is half a minute to stop it.
    one(page, "#settings-toggle").click()
    one(page, "#speculate").click()
    for number, stop in enumerate(
        (lambda: one(page, "#stop").click(), lambda: one(page, "#question").send_keys(Keys.ESCAPE))
    ):
        ask(page, "Count from 1 to 1000.")
        until(lambda: bool(texts(page, ".answer > .text")[-1]), 30)
        stop()
        until(lambda number=number: texts(page, ".figures")[number:] == ["stopped"], 5)
        assert answered(page)
        assert texts(page, "#announcer") == ["Stopped"]
    until(lambda: "cancelled" in server.log.read_text(), 10)
    until(lambda: texts(page, "#tile-requests") == ["0"], 10)

    one(page, "#speculate").click()
    one(page, "#new-chat").click()
    assert texts(page, "article") == []
    ask(page, "What is 17 * 4?")
    until(shows(page, ".answer > .text", "17 * 4 = 68"), 30)


def test_by_keyboard_and_on_a_phone(page: Browser) -> None:
    """Everything is reached by Tab with a name and a focus that shows; on a phone's width both views are, without
    anything beside the screen. Light and dark differ and are both legible."""
    until(lambda: texts(page, "#state") == ["ready"], 10)
    seen: dict[str, bool] = {}
    for _ in range(14):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        # The frame of what is typed shows the focus of the field within it.
        name, visible = page.run(
            "const e = document.activeElement; return [e.id || e.textContent.trim(), "
            "e === document.body || e.id === 'question' || getComputedStyle(e).outlineStyle !== 'none']"
        )
        seen[name] = visible
    assert {"log", "What is 17 * 4?", "question", "settings-toggle", "send", "panel"} <= set(seen)
    assert all(seen.values()), seen
    unnamed = page.run(
        "return [...document.querySelectorAll('button, input, textarea')].filter(e => "
        "!e.textContent.trim() && !e.labels?.length && !e.ariaLabel).map(e => e.outerHTML)"
    )
    assert unnamed == []

    grounds = []
    for dark in (False, True):
        page.look(dark=dark)
        ground, ink = page.run(
            "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color].map("
            "c => c.match(/\\d+/g).slice(0, 3).map(Number))"
        )
        grounds.append(ground)
        assert contrast(ground, ink) > 7
        for selector in (".note", ".card .where", ".keys", "#state", ".send"):
            assert contrast(*colours(page, selector)) > 4.5, (selector, dark)
    assert grounds[0] != grounds[1]

    page.look(width=360, height=700)
    assert one(page, "#question").is_displayed()
    assert not one(page, "#panel").is_displayed()
    for view in ("chat", "chain"):
        one(page, f".views button[data-view={view}]").click()
        width = page.run("return Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
        assert width <= 360
    assert one(page, "#panel").is_displayed()
    assert one(page, ".card .layers").is_displayed()


def colours(page: Browser, selector: str) -> tuple[list[int], list[int]]:
    """The colour behind an element, and its own."""
    script = """
    let element = document.querySelector(arguments[0]);
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const own = numbers(getComputedStyle(element).color).slice(0, 3);
    for (; element; element = element.parentElement) {
      const behind = numbers(getComputedStyle(element).backgroundColor);
      if (behind.length === 3 || behind[3] === 1) return [behind.slice(0, 3), own];
    }
    """
    behind, own = page.run(script, selector)
    return behind, own


def contrast(one: list[int], other: list[int]) -> float:
    """As the Web Content Accessibility Guidelines define it."""

    def light(colour: list[int]) -> float:
        linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((light(one), light(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_what_a_model_writes_cannot_become_code(page: Browser) -> None:
    """Markdown is drawn as elements; HTML in it stays text, and only web addresses become links."""
    text = (
        "# Title\n\nOne **bold** and *slanted* `code <b>`.\nNext line <img src=x onerror=alert(1)>\n\n"
        "1. one\n2. two\n   - inner\n\n> quoted\n\n```js\nlet a = '<script>';\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | **2** |\n\n"
        "[good](https://example.org/x) [bad](javascript:alert(1)) snake_case_name 2 * 3 * 4"
    )
    html = page.run(
        "const {draw} = await import('/page/markdown.js'); const e = document.createElement('div');"
        "for (let n = 1; n <= arguments[0].length; n += 1) draw(e, arguments[0].slice(0, n)); return e.innerHTML",
        text,
    )
    for part in (
        "<h3>Title</h3>",
        "<strong>bold</strong> and <em>slanted</em> <code>code &lt;b&gt;</code>",
        "Next line &lt;img src=x onerror=alert(1)&gt;",
        "<ol><li>one</li><li><p>two</p><ul><li>inner</li></ul></li></ol>",
        "<blockquote><p>quoted</p></blockquote>",
        "let a = '&lt;script&gt;';",
        "<td>1</td><td><strong>2</strong></td>",
        '<a href="https://example.org/x" rel="noopener noreferrer" target="_blank">good</a>',
        "[bad](javascript:alert(1)) snake_case_name 2 * 3 * 4",
    ):
        assert part in html, (part, html)


@pytest.mark.slow
def test_with_a_key(tmp_path: Path, opened: Browser) -> None:
    """The page asks for the key before anything else and keeps it in the tab; nothing is complained of."""
    page = opened
    with serving(tmp_path, *PLACED, "--api-key", KEY) as server:
        page.open(server.url)
        until(lambda: one(page, "#key-dialog").is_displayed(), 10)
        page.driver.switch_to.active_element.send_keys(KEY, Keys.ENTER)
        until(lambda: texts(page, "#state") == ["ready"], 10)
        assert texts(page, ".card h3") == ["stage 0", "stage 1"]
        ask(page, "What is 17 * 4?")
        until(shows(page, ".answer > .text", "17 * 4 = 68"), 30)
        until(lambda: one(page, ".strip").get_property("childElementCount") > 0, 5)

        page.driver.refresh()
        until(lambda: texts(page, "#state") == ["ready"], 10)
        assert not one(page, "#key-dialog").is_displayed()
        assert page.run("return [document.cookie, localStorage.length, sessionStorage.length]") == ["", 0, 1]
        page.check()

        one(page, "#forget-key").click()
        until(lambda: one(page, "#key-dialog").is_displayed(), 10)
        page.driver.switch_to.active_element.send_keys("wrong", Keys.ENTER)
        until(shows(page, "#key-why", "doesn't know that key"), 10)
        page.driver.switch_to.active_element.send_keys(KEY, Keys.ENTER)
        until(lambda: texts(page, "#state") == ["ready"], 10)


@pytest.mark.slow
@pytest.mark.usefixtures("own_processes")
def test_a_worker_and_a_server_that_die(tmp_path: Path, opened: Browser, start_worker: Callable[..., Worker]) -> None:
    """Both are shown as such, and said to who asks; a worker of the server's own is back soon."""
    page, remote = opened, start_worker()
    with serving(tmp_path, *PAIR, "--target-devices", f"cpu,{remote.address}") as server:
        page.open(server.url)
        until(lambda: texts(page, "#state") == ["ready"], 10)
        os.kill(children(server.process.pid)[0], signal.SIGKILL)
        until(shows(page, ".card.dead .error", "was killed by SIGKILL"), 10)
        until(lambda: texts(page, "#state") == ["ready"], 30)
        remote.process.kill()
        until(shows(page, ".card.dead .error", remote.address), 10)
        assert texts(page, "#state") == ["not ready"]
        ask(page, "Are you there?")
        until(shows(page, ".answer.failed .figures", "the connection to a local worker broke"), 10)

        server.process.terminate()
        until(shows(page, "#lost", "doesn't answer"), 20)
