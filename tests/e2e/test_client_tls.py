"""The APIs for clients with certificates of their own, through the programs and the SDK as users run them."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx2
import openai
import pytest

from services.rpc.inference import RemoteInference
from tests.e2e.conftest import ROOT
from tests.e2e.server import PAIR, Server, serving

KEY = "a-client's-key"


def flashsplit(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "coordinator", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "certs"
    made = flashsplit("certs", "--out", folder, "--host", "localhost")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def server(certs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Clients must show a certificate, and a key."""
    with serving(
        tmp_path_factory.mktemp("serve"),
        *(*PAIR, "--target-devices", "cpu", "--api-key", KEY),
        *("--ssl-certfile", certs / "localhost.pem", "--ssl-keyfile", certs / "localhost-key.pem"),
        *("--ssl-ca-certs", certs / "ca.pem"),
    ) as running:
        yield running


def context(certs: Path, *, own: bool) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(certs / "ca.pem"))
    if own:
        made.load_cert_chain(certs / "coordinator.pem", certs / "coordinator-key.pem")
    return made


def test_http(server: Server, certs: Path) -> None:
    assert server.url.startswith("https://127.0.0.1:")
    with httpx2.Client(verify=context(certs, own=True)) as http:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, http_client=http, max_retries=0)
        assert [model.id for model in client.models.list()] == ["target"]
        assert http.get(f"{server.url}/v1/models").status_code == 401
        # Browsers are told to come by TLS only, but not for a name that all servers of a host share.
        assert http.get(f"{server.url}/health").headers["strict-transport-security"].startswith("max-age=")
        assert (
            "strict-transport-security" not in http.get(f"{server.url}/health", headers={"host": "localhost"}).headers
        )
        assert http.get(f"{server.url}/health", headers={"host": "evil.example"}).status_code == 403


def test_http_without_a_certificate_or_trust(server: Server, certs: Path) -> None:
    with httpx2.Client(verify=context(certs, own=False)) as http, pytest.raises(httpx2.TransportError):
        http.get(f"{server.url}/health")
    with httpx2.Client() as http, pytest.raises(httpx2.ConnectError, match="certificate verify failed"):
        http.get(f"{server.url}/health")


async def test_grpc(server: Server, certs: Path) -> None:
    authority = (certs / "ca.pem").read_bytes()
    pair = (certs / "coordinator-key.pem").read_bytes(), (certs / "coordinator.pem").read_bytes()
    async with grpc.aio.secure_channel(server.grpc, grpc.ssl_channel_credentials(authority, *pair)) as channel:
        client = RemoteInference(channel, server.grpc, api_key=KEY)
        assert [model.name for model in await client.models()] == ["target"]
    async with grpc.aio.secure_channel(server.grpc, grpc.ssl_channel_credentials(authority)) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], ["--ssl-certfile", "--api-key-file", "--insecure"]),
        (["--host", "0.0.0.0", "--api-key", KEY], ["--ssl-certfile", "--insecure"]),
        (["--ssl-certfile", "x.pem"], ["--ssl-keyfile is missing"]),
        (["--ssl-ca-certs", "x.pem"], ["--ssl-certfile is missing"]),
        (["--ssl-certfile", "x.pem", "--ssl-keyfile", "y.pem"], ["--ssl-certfile x.pem cannot be read"]),
    ],
)
def test_refusals(arguments: list[str], words: list[str]) -> None:
    refused = flashsplit("serve", *PAIR, "--target-devices", "cpu", *arguments)
    assert refused.returncode == 2
    assert all(word in refused.stderr for word in words), refused.stderr
