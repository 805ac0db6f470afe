"""The ports of `flashsplit serve`: taken before anything is loaded, and never by two."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import flashsplit, interrupt, until
from tests.e2e.server import PAIR, get


@contextlib.contextmanager
def taken() -> Iterator[int]:
    """A port of this host on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def free() -> int:
    """A port of this host on which nobody listens."""
    with taken() as port:
        return port


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_taken_port_is_told_before_anything_is_loaded(flag: str) -> None:
    """No worker has been started by then."""
    with taken() as port:
        others = {"--port": 0, "--grpc-port": 0, flag: port}
        words = [word for pair in others.items() for word in pair]
        process = flashsplit("serve", "--log-level", "info", *PAIR, "--target-devices", "cpu", *words)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in err
    assert f"choose another {flag}" in err
    assert "worker.ready" not in err
    assert "load.started" not in err
    # Nor is there a library's own line about it.
    assert "Errno" not in err


def test_a_server_that_loads_has_its_port_and_says_so(tmp_path: Path) -> None:
    """Its worker isn't there yet: clients are told to come again, and a second server finds the ports taken."""
    ports = ("--port", free(), "--grpc-port", free())
    words = ("serve", *PAIR, "--target-devices", f"unix:{tmp_path}/later.sock", *ports)
    first = flashsplit(*words, "--wait-for-workers", 60)
    try:
        url = f"http://127.0.0.1:{ports[1]}"

        def status() -> int:
            with contextlib.suppress(OSError):
                return get(f"{url}/health?ready=true")[0]
            return 0

        until(lambda: status() == 503, 60)
        told = json.loads(get(f"{url}/v1/models")[1])["error"]
        assert told["message"] == "the model is being loaded: try again in a moment"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client, pytest.raises(openai.InternalServerError, match="is being loaded"):
            client.models.list()

        for others in (ports, ("--port", 0, *ports[2:])):
            second = flashsplit(*words[:-4], *others)
            _, err = second.communicate(timeout=60)
            assert second.returncode == 1
            assert "cannot listen on 127.0.0.1" in err
    finally:
        interrupt(first, signal.SIGTERM)
