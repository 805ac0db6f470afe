"""The APIs for clients with certificates of their own, through the programs and the SDK as users run them."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx2
import openai
import pytest
from cryptography import x509

from services.errors import Unauthenticated
from services.rpc.inference import RemoteInference
from tests.e2e.conftest import ROOT, until
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
    (certs / "keys").write_text("first\n")
    (certs / "level").write_text("warning")
    with serving(
        tmp_path_factory.mktemp("serve"),
        *(*PAIR, "--target-devices", "cpu", "--api-key", KEY, "--api-key-file", certs / "keys"),
        *("--ssl-certfile", certs / "localhost.pem", "--ssl-keyfile", certs / "localhost-key.pem"),
        *("--ssl-ca-certs", certs / "ca.pem", "--ssl-crlfile", certs / "crl.pem"),
        log_level=f"@{certs / 'level'}",
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


async def models(server: Server, certs: Path, key: str, stem: str = "coordinator") -> set[object]:
    """What asking for the models comes to over HTTP and over gRPC, each on a new connection: one answer, as it should
    be, or an error's code."""
    trust = ssl.create_default_context(cafile=str(certs / "ca.pem"))
    trust.load_cert_chain(certs / f"{stem}.pem", certs / f"{stem}-key.pem")
    found: set[object] = set()
    async with httpx2.AsyncClient(verify=trust) as http:
        try:
            answer = await http.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {key}"})
            found.add(answer.status_code == 200 or answer.json()["error"]["code"])
        except httpx2.TransportError:
            found.add("cut off")
    files = [(certs / name).read_bytes() for name in ("ca.pem", f"{stem}-key.pem", f"{stem}.pem")]
    async with grpc.aio.secure_channel(server.grpc, grpc.ssl_channel_credentials(*files)) as channel:
        try:
            found.add(bool(await RemoteInference(channel, server.grpc, api_key=key).models()))
        except Unauthenticated as error:
            found.add("cut off" if error.reason == "CERTIFICATE_REVOKED" else error.reason.lower())
    return found


async def test_keys_come_and_go(server: Server, certs: Path) -> None:
    """What the file holds counts, beside the key of the command line; a file without keys changes nothing."""
    for content, good, bad in (
        ("second\n# first\n", ["second", KEY], ["first"]),
        ("# none\n", ["second"], ["first"]),
        ("first\nthird\n", ["first", "third"], ["second"]),
    ):
        (certs / "keys").write_text(content)
        for key in good:
            assert await models(server, certs, key) == {True}
        for key in bad:
            assert await models(server, certs, key) == {"invalid_api_key"}
    assert f"--api-key-file {certs / 'keys'} holds no key" in server.log.read_text()


async def test_a_new_certificate_and_a_revoked_client(server: Server, certs: Path) -> None:
    """Both servers show the new certificate to the next client; a client whose certificate is taken back is refused."""

    def shown() -> set[int]:
        found = set()
        for port in (server.url.rpartition(":")[2], server.grpc.rpartition(":")[2]):
            with (
                socket.create_connection(("127.0.0.1", int(port)), 10) as raw,
                context(certs, own=True).wrap_socket(raw, server_hostname="localhost") as tls,
            ):
                found.add(x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"").serial_number)
        return found

    def number() -> int:
        return x509.load_pem_x509_certificate((certs / "localhost.pem").read_bytes()).serial_number

    first = number()
    assert shown() == {first}
    for name in ("localhost.pem", "localhost-key.pem"):
        (certs / name).unlink()
    assert shown() == {first}
    made = flashsplit("certs", "--out", certs, "--host", "localhost", "--host", "laptop")
    assert made.returncode == 0, made.stderr
    assert shown() == {number()} != {first}

    assert await models(server, certs, KEY, "laptop") == {True}
    for ending in (".pem", "-key.pem"):
        shutil.copy(certs / f"laptop{ending}", certs / f"stolen{ending}")
    assert flashsplit("certs", "revoke", "--out", certs, "laptop").returncode == 0
    assert await models(server, certs, KEY, "stolen") == {"cut off"}
    assert await models(server, certs, KEY) == {True}


def test_a_hangup_reads_the_logs_level(server: Server, certs: Path) -> None:
    """What was too unimportant is logged from then on: that the files were read, above all; a bad level changes
    nothing."""
    (certs / "level").write_text("info")
    assert "files.read_again" not in server.log.read_text()
    server.process.send_signal(signal.SIGHUP)
    until(lambda: "files.read_again" in server.log.read_text(), 10)
    (certs / "level").write_text("loud")
    server.process.send_signal(signal.SIGHUP)
    until(lambda: f"--log-level @{certs / 'level'} must be one of debug" in server.log.read_text(), 10)
    assert server.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], ["--ssl-certfile", "--api-key-file", "--insecure"]),
        (["--host", "0.0.0.0", "--api-key", KEY], ["--ssl-certfile", "--insecure"]),
        (["--ssl-certfile", "x.pem"], ["--ssl-keyfile is missing"]),
        (["--ssl-ca-certs", "x.pem"], ["--ssl-certfile is missing"]),
        (["--ssl-certfile", "x.pem", "--ssl-keyfile", "y.pem"], ["--ssl-certfile x.pem cannot be read"]),
        (
            ["--ssl-certfile", "x.pem", "--ssl-keyfile", "y.pem", "--ssl-crlfile", "z.pem"],
            ["--ssl-crlfile z.pem has no effect", "--ssl-ca-certs"],
        ),
        (["--log-level", "loud"], ["--log-level 'loud' must be one of debug, info, warning, error, or @FILE"]),
    ],
)
def test_refusals(arguments: list[str], words: list[str]) -> None:
    refused = flashsplit("serve", *PAIR, "--target-devices", "cpu", *arguments)
    assert refused.returncode == 2
    assert all(word in refused.stderr for word in words), refused.stderr
