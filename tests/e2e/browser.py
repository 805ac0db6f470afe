"""Debian's Chromium without a window, driven as a person would: what it logs and which addresses it asks for."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    # Should the page ask for another host, there is none.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Browser:
    """One tab."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self._home = ""

    def look(self, *, width: int = 1280, height: int = 820, scale: float = 1, dark: bool = False) -> None:
        """The window's size, and the colours that the system prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str, path: str = "/") -> None:
        """A server's page, in the window's usual size; what was before is forgotten."""
        self.driver.get("about:blank")
        for kind in ("performance", "browser"):
            self.driver.get_log(kind)
        self.look()
        self._home = f"{url}/"
        self.driver.get(f"{url}{path}")

    def check(self) -> None:
        """Fails the test where something was complained of, or anybody but the page's own server was asked for
        anything."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        requested = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        assert requested
        assert [url for url in requested if not url.startswith(self._home)] == []
        assert [entry["message"] for entry in self.driver.get_log("browser")] == []

    def run(self, script: str, *arguments: object) -> Any:
        """JavaScript in the page; its `return` value."""
        return self.driver.execute_script(script, *arguments)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, both gone at the end."""
    with tempfile.TemporaryDirectory(prefix="fs-chromium-") as profile:
        options = Options()
        options.binary_location = str(CHROMIUM)
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options, Service(str(DRIVER)))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
