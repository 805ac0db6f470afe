"""Addresses: both forms, what is neither, and paths that a URI would read differently."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.addresses import grpc_target, is_loopback, parse_address, socket_path
from services.errors import InvalidArgument
from services.rpc.peers import Peers
from services.rpc.worker import WorkerServicer
from tests.services.conftest import Serve
from tests.services.fakes import WORKER, FakeWorker


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("unix:/run/a.sock", "unix:/run/a.sock"),
        ("unix:///run/a.sock", "unix:/run/a.sock"),
        ("unix:relative.sock", "unix:relative.sock"),
        ("127.0.0.1:7001", "127.0.0.1:7001"),
        ("gpu-host.lan:0", "gpu-host.lan:0"),
        ("[fe80::1]:65535", "[fe80::1]:65535"),
    ],
)
def test_accepted(text: str, parsed: str) -> None:
    """Both forms are accepted and come back in one spelling, which is accepted again."""
    assert parse_address(text) == parsed
    assert parse_address(parsed) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cuda:0x",
        "host",
        "host:",
        ":7001",
        "host:65536",
        "host:123456",
        "host:-1",
        "host:٣",
        "host:80\n",
        "a b:80",
        "fe80::1:80",
        "http://host:80",
        "dns:///host:80",
        "ipv4:1.2.3.4:80",
        "unix:",
        "unix://",
        "unix:/a\0b",
        "unix:/" + 107 * "a",
        "unix:/" + 54 * "ä",
        "unix-abstract:x",
    ],
)
def test_refused(text: str) -> None:
    """Everything else is refused in words that name the option and the value."""
    with pytest.raises(InvalidArgument) as refused:
        parse_address(text, "--listen")
    assert refused.value.where == {"field": "--listen"}
    assert refused.value.message.startswith(f"--listen {text!r}")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/run/a.sock", True),
        ("localhost:1", True),
        ("127.0.0.1:1", True),
        ("127.3.2.1:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("10.0.0.1:1", False),
        ("127.example.com:1", False),
        ("localhost.example.com:1", False),
        ("[::]:1", False),
    ],
)
def test_loopback(address: str, local: bool) -> None:
    """Only what no other host can reach counts as local."""
    assert is_loopback(address) is local


def test_socket_path() -> None:
    """Only a Unix address has a path."""
    assert socket_path("unix:/run/a.sock") == "/run/a.sock"
    assert socket_path("host:80") is None
    assert grpc_target("host:80") == "host:80"


@pytest.mark.parametrize("name", ["plain.sock", "a b.sock", "50%41.sock", "what?.sock", "a#b.sock", "ünï.sock"])
async def test_any_file_name_can_be_listened_on(name: str, tmp_path: Path, serve: Serve) -> None:
    """A worker listens at exactly the path that its address names, and is reached there."""
    address = f"unix:{tmp_path}/{name}"
    server = await serve(WorkerServicer(FakeWorker()).register, address=address)
    assert server.address == address
    assert [path.name for path in tmp_path.iterdir()] == [name]
    peers = Peers(timeout_s=2.0)
    try:
        assert await (await peers.worker(address)).describe() == WORKER
    finally:
        await peers.close()
    await server.stop(0)
    assert list(tmp_path.iterdir()) == []
