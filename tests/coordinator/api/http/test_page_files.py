"""The page's files: part of the package, sent to anybody with a policy that keeps everything else out."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from fastapi import FastAPI
from hatchling.builders.wheel import WheelBuilder
from starlette.testclient import TestClient

from coordinator.api.http import page_files

ROOT = Path(__file__).parents[4]
FILES = sorted(path.name for path in page_files.FOLDER.iterdir())


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page_files.routes(key_needed=False))
    return TestClient(app)


def test_a_wheel_has_all_of_them(tmp_path: Path) -> None:
    """An installed package has every file of the page."""
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    assert {"index.html", "app.js", "style.css"} <= set(FILES)
    assert {f"coordinator/api/http/page/{name}" for name in FILES} <= found


def test_all_are_sent_under_the_same_policy(client: TestClient) -> None:
    """Scripts and styles of this server alone, no frames, no forms; whatever is not a file of the page is not there."""
    for path in ("/", *(f"/page/{name}" for name in FILES)):
        reply = client.get(path)
        assert reply.status_code == 200, path
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert client.head(path).status_code == 200
    for path in ("/page/", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/nothing.js", "/page/__pycache__"):
        assert client.get(path).status_code == 404, path


def test_nothing_comes_from_elsewhere() -> None:
    """No file names another host, but for the namespace of SVG; all that a file names is there."""
    for name in FILES:
        text = (page_files.FOLDER / name).read_text()
        hosts = set(re.findall(r"""https?://[\w.-]+""", text)) - {"http://www.w3.org"}
        assert hosts == set(), name
        for named in re.findall(r"""(?:src|href)="page/([^"]+)"|from "\./([^"]+)\"""", text):
            assert "".join(named) in FILES, (name, named)


def test_the_page_knows_whether_a_key_is_needed() -> None:
    """The page asks for an API key only where the server wants one."""
    for needed, says in ((False, b'content="none"'), (True, b'content="needed"')):
        app = FastAPI()
        app.include_router(page_files.routes(key_needed=needed))
        assert b'<meta name="api-key" ' + says in TestClient(app).get("/").content
