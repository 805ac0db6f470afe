"""Every example of the clients' page runs against the demo pair."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import PAIR, Server, serving

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clients.md"
EXAMPLES = re.findall(r"^```(bash|python)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(folder, *PAIR, "--target-devices", "cpu", "--journal", folder / "journal") as running:
        yield running


@pytest.mark.parametrize(
    ("language", "text"), EXAMPLES, ids=[f"{index}-{kind}" for index, (kind, _) in enumerate(EXAMPLES)]
)
def test_an_example_of_the_clients_page(server: Server, language: str, text: str) -> None:
    """It ends well and prints something, with this server's addresses in place of the page's."""
    text = text.replace("http://localhost:8000", server.url).replace("localhost:50051", server.grpc)
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-ec", text]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), done.stderr
    assert not done.stdout.startswith('{"error"')


def test_there_are_examples_of_every_api() -> None:
    """OpenAI's three APIs, Anthropic's and gRPC."""
    text = "".join(example for _, example in EXAMPLES)
    for word in ("chat.completions.create", "/v1/completions", "responses.create", "messages.create", "Generate("):
        assert word in text
