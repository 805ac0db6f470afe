"""Certificates on both sides of every edge: which are taken, and what is said about the others."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from services.errors import InvalidArgument, Unavailable
from services.messages.draft_session import OpenDraft
from services.messages.snapshots import SnapshotOwner
from services.net.channel import CLIENT_OPTIONS, connect
from services.net.security import OPEN, Security, load_security
from services.net.server import Server
from services.net.tls import TlsFiles, load_credentials
from services.rpc.draft import DraftServicer
from services.rpc.peers import Peers
from services.rpc.snapshots import SnapshotServicer
from services.rpc.stage import StageServicer
from services.rpc.worker import RemoteWorker, WorkerServicer
from tests.services.fakes import (
    HEADER,
    OPEN as STAGE_OPEN,
    WORKER,
    FakeDraft,
    FakeSnapshots,
    FakeStage,
    FakeWorker,
    commit,
    frames_of,
    prefill,
)
from tests.services.net.certificates import LONG_AGO, Certificates, unchecked

Listen = Callable[..., Awaitable[Server]]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The cluster's authority."""
    return Certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Somebody else's."""
    return Certificates(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture
async def listen() -> AsyncIterator[Listen]:
    """Start a server with all services, by default on a free port of localhost."""
    servers: list[Server] = []

    async def start(security: Security, address: str = "localhost:0") -> Server:
        snapshots = FakeSnapshots()
        snapshots.kept[SnapshotOwner.STAGE, "one"] = frames_of(HEADER, 7)
        registrations = [
            WorkerServicer(FakeWorker()).register,
            StageServicer(FakeStage()).register,
            DraftServicer(FakeDraft()).register,
            SnapshotServicer(snapshots).register,
        ]
        servers.append(Server(address, registrations, security=security))
        await servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        await server.stop(0)


async def refusal(address: str, security: Security) -> str:
    """Why a connection is refused: within seconds, though there would be half a minute."""
    began = time.monotonic()
    with pytest.raises(Unavailable) as raised:
        await connect(address, timeout_s=30, security=security)
    assert time.monotonic() - began < 4
    assert raised.value.reason == "HANDSHAKE_FAILED"
    assert raised.value.where == {"address": address}
    return raised.value.message


async def describe(address: str, security: Security) -> object:
    channel = await connect(address, timeout_s=5, security=security)
    try:
        return await RemoteWorker(channel, address).describe()
    finally:
        await channel.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
async def test_every_service_runs_between_certificates_of_one_authority(
    host: str, ours: Certificates, listen: Listen
) -> None:
    """Calls of every service, on both connections, by name and by address."""
    address = (await listen(ours.security(), f"{host}:0")).address
    peers = Peers(timeout_s=5, security=ours.security("coordinator"))
    try:
        assert await (await peers.worker(address)).describe() == WORKER
        session = await (await peers.stage(address)).open(STAGE_OPEN)
        await session.forward(prefill())
        assert await anext(session.events()) == commit(prefill())
        await session.close()
        drafting = await (await peers.draft(address)).open(OpenDraft("r", "f", 9))
        await drafting.close()
        frames = (await peers.snapshots(address)).export_snapshot(SnapshotOwner.STAGE, "one")
        assert await anext(frames) == HEADER
        await frames.aclose()
    finally:
        await peers.close()


async def test_certificates_of_two_authorities(ours: Certificates, theirs: Certificates, listen: Listen) -> None:
    """Either side's mistrust is told with the authority and the file."""
    address = (await listen(ours.security())).address

    stranger = await refusal(address, theirs.security())
    assert "shows a certificate of 'flashsplit development CA" in stranger
    assert f"--tls-ca {theirs.ca} does not vouch for" in stranger

    half = theirs.security(ca=ours.ca)
    unwelcome = await refusal(address, half)
    assert half.tls is not None
    assert f"refuses --tls-cert {half.tls.files.cert}, a certificate of 'flashsplit development CA" in unwelcome


async def test_no_client_gets_in_without_a_certificate(ours: Certificates, listen: Listen) -> None:
    """One that trusts the server and shows nothing is cut off before any call."""
    server = await listen(ours.security())
    credentials = grpc.ssl_channel_credentials(ours.ca.read_bytes())
    async with grpc.aio.secure_channel(server.address, credentials, options=CLIENT_OPTIONS) as channel:
        with pytest.raises(Unavailable):
            await RemoteWorker(channel, server.address).describe()


async def test_expired_on_either_side(ours: Certificates, listen: Listen) -> None:
    """Certificates that expire while their process runs."""
    old = unchecked(ours.files(days=30, now=LONG_AGO))
    current = ours.security()
    day = LONG_AGO + datetime.timedelta(days=30)

    shown = await refusal((await listen(old)).address, current)
    assert f"shows a certificate that expired on {day:%Y-%m-%d}" in shown

    refused = await refusal((await listen(current)).address, old)
    assert f"it expired on {day:%Y-%m-%d}" in refused


async def test_certificate_of_another_host(ours: Certificates, listen: Listen) -> None:
    """The names that it has are told; one of them can be expected by --tls-server-name."""
    address = (await listen(ours.security("gpu-a", "10.0.0.7"), "127.0.0.1:0")).address

    message = await refusal(address, ours.security())
    assert "shows a certificate for gpu-a, 10.0.0.7, not for 127.0.0.1" in message
    named = Security(load_credentials(ours.files(server_name="gpu-a")))
    assert await describe(address, named) == WORKER
    elsewhere = Security(load_credentials(ours.files(server_name="gpu-b")))
    assert "not for gpu-b" in await refusal(address, elsewhere)


async def test_tls_on_one_side_only(ours: Certificates, listen: Listen) -> None:
    """Both ways round the sentence says which side lacks it."""
    encrypted, plain = await listen(ours.security()), await listen(OPEN)

    assert "expects TLS: give --tls-cert, --tls-key and --tls-ca" in await refusal(encrypted.address, OPEN)
    assert "answers without TLS: start it with --tls-cert" in await refusal(plain.address, ours.security())
    # Read by a coordinator, the sentence must say which worker was the one that called.
    peers = Peers(caller=lambda: "the worker at unix:/a.sock")
    with pytest.raises(Unavailable) as raised:
        await peers.stage(encrypted.address)
    assert raised.value.message.startswith(f"the worker at unix:/a.sock: the worker at {encrypted.address} expects TLS")
    await peers.close()


async def test_unix_sockets_stay_plain(ours: Certificates, listen: Listen, tmp_path: Path) -> None:
    """Who has certificates still talks plainly over a private socket, and so does who has none."""
    address = (await listen(ours.security(), f"unix:{tmp_path}/a.sock")).address

    assert await describe(address, OPEN) == WORKER
    assert await describe(address, ours.security()) == WORKER


async def test_noise_on_the_port(ours: Certificates, listen: Listen) -> None:
    """Bytes that are no handshake, half a handshake and silence harm nobody else."""
    server = await listen(ours.security())
    port = int(server.address.rpartition(":")[2])
    writers = []
    for noise in (b"\x00" * 4000, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\xff", b""):
        _, writer = await asyncio.open_connection("localhost", port)
        writer.write(noise)
        writers.append(writer)

    assert await describe(server.address, ours.security()) == WORKER
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_old_protocol_versions_are_refused(ours: Certificates, listen: Listen) -> None:
    """Nothing below TLS 1.2."""
    server = await listen(ours.security())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("localhost", int(server.address.rpartition(":")[2]), ssl=context)


async def test_silence_is_given_up_in_time(ours: Certificates) -> None:
    """A port that takes connections and says nothing: as for one where nobody is."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="no worker answers"):
            await connect(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5, security=ours.security())
        assert time.monotonic() - began < 2


# --- files


def resigned(ours: Certificates, usage: x509.ObjectIdentifier) -> TlsFiles:
    """A certificate for one side only."""
    files = ours.files()
    old = x509.load_pem_x509_certificate(files.cert.read_bytes())
    builder = (
        x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(old.not_valid_after_utc)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    )
    certificate = builder.sign(ours.authority.key, hashes.SHA256())
    files.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
    return files


def test_certificates_for_one_side_only(ours: Certificates) -> None:
    """A client's cannot listen; a server's alone cannot call."""
    calls = load_credentials(resigned(ours, ExtendedKeyUsageOID.CLIENT_AUTH))
    with pytest.raises(InvalidArgument, match="is not for servers: make one with the extended key usages"):
        Server("127.0.0.1:0", [], security=Security(calls))
    with pytest.raises(InvalidArgument, match="is not for clients"):
        load_credentials(resigned(ours, ExtendedKeyUsageOID.SERVER_AUTH))


def encrypted_key(files: TlsFiles) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


SPOILED: dict[str, tuple[Callable[[TlsFiles, Certificates], object], str]] = {
    "no certificate": (lambda files, _: files.cert.unlink(), "--tls-cert {cert} cannot be read: No such file"),
    "key is a directory": (
        lambda files, _: (files.key.unlink(), files.key.mkdir()),
        "--tls-key {key} cannot be read: Is a directory",
    ),
    "no authority": (lambda files, _: files.ca.unlink(), "--tls-ca {ca} cannot be read"),
    "garbage": (lambda files, _: files.cert.write_bytes(b"\xff\x00"), "--tls-cert {cert} does not hold a PEM cert"),
    "empty": (lambda files, _: files.ca.write_bytes(b""), "--tls-ca {ca} does not hold a PEM certificate"),
    "damaged": (
        lambda files, _: files.cert.write_bytes(files.cert.read_bytes().replace(b"A", b"B")),
        "--tls-cert {cert}",
    ),
    "key for certificate": (
        lambda files, _: files.cert.write_bytes(files.key.read_bytes()),
        "--tls-cert {cert} does not hold a PEM certificate",
    ),
    "certificate for key": (
        lambda files, _: files.key.write_bytes(files.cert.read_bytes()),
        "--tls-key {key} does not hold a PEM private key",
    ),
    "swapped key": (
        lambda files, other: files.key.write_bytes(other.files().key.read_bytes()),
        "--tls-key {key} is not the key of --tls-cert {cert}",
    ),
    "encrypted key": (lambda files, _: encrypted_key(files), "--tls-key {key} is encrypted"),
}


@pytest.mark.parametrize("what", SPOILED)
def test_spoiled_files_are_named(what: str, theirs: Certificates, tmp_path: Path) -> None:
    """One sentence with the flag, the file and what is wrong."""
    files = Certificates(tmp_path / "own").files()
    spoil, words = SPOILED[what]
    spoil(files, theirs)

    with pytest.raises(InvalidArgument) as raised:
        load_security(tls_cert=str(files.cert), tls_key=str(files.key), tls_ca=str(files.ca))

    assert words.format(cert=files.cert, key=files.key, ca=files.ca) in raised.value.message


def test_dates_are_checked(ours: Certificates) -> None:
    """Expired, and not valid yet."""
    with pytest.raises(InvalidArgument, match=r"--tls-cert .* expired on \d{4}-\d\d-\d\d"):
        load_credentials(ours.files(days=30, now=LONG_AGO))
    tomorrow = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
    with pytest.raises(InvalidArgument, match="--tls-cert .* is valid from .* correct this host's clock"):
        load_credentials(ours.files(now=tomorrow))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tls_cert": "a"}, "--tls-key and --tls-ca are missing beside --tls-cert"),
        ({"tls_cert": "a", "tls_key": "b"}, "--tls-ca is missing beside --tls-cert and --tls-key"),
        ({"tls_ca": "c", "tls_key": "b"}, "--tls-cert is missing beside"),
        ({"tls_server_name": "n"}, "--tls-cert and --tls-key and --tls-ca are missing beside --tls-server-name"),
    ],
)
def test_all_three_or_none(given: dict[str, str], words: str) -> None:
    """The missing flag is named."""
    with pytest.raises(InvalidArgument, match=words):
        load_security(**given)
    assert load_security().tls is None


def test_keys_stay_out_of_reprs(ours: Certificates) -> None:
    """A traceback or log line with the object shows no key."""
    security = ours.security(token="0123456789abcdef")
    assert "PRIVATE" not in repr(security)
    assert "0123456789abcdef" not in repr(security)
