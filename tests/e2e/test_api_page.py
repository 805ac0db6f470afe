"""/docs in a real browser, which reaches no other host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from coordinator.api.http import api_page
from tests.e2e.browser import CHROMIUM, DRIVER, Browser, browser
from tests.e2e.conftest import until
from tests.e2e.server import PAIR, Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve"), *PAIR, "--target-devices", "cpu") as running:
        yield running


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and os.environ.get("FLASHSPLIT_BROWSER") != "required",
    reason="needs Debian's chromium and chromium-driver",
)
@pytest.mark.skipif(find_spec(api_page.PACKAGE) is None, reason="needs fastapi-offline")
def test_the_apis_are_shown_without_another_host(server: Server, opened: Browser) -> None:
    """Every path is on the page; nothing is asked of anybody else, and nothing is complained of."""
    opened.open(server.url, "/docs")
    shown = "return document.body.innerText"
    for text in ("/v1/chat/completions", "/v1/messages", "/detokenize"):
        until(lambda text=text: text in opened.run(shown), 60)
    opened.check()


def test_without_the_package_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal in place of an empty page."""
    monkeypatch.setattr(api_page, "PACKAGE", "package_that_is_not_there")
    app = FastAPI(docs_url=None, redoc_url=None)
    app.include_router(api_page.routes())
    for path in ("/docs", "/docs/docs.js"):
        reply = TestClient(app).get(path)
        assert reply.status_code == 404
        assert "needs the package fastapi-offline" in reply.text
