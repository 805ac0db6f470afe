"""Certificates that are replaced, and taken back, while servers and their callers run."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from services.errors import InvalidArgument, Unauthenticated, Unavailable
from services.net.channel import connect
from services.net.security import Security, load_security
from services.net.server import Server
from services.net.tls import TlsFiles, load_credentials
from services.rpc.peers import Peers
from services.rpc.worker import RemoteWorker, WorkerServicer
from tests.services.fakes import WORKER, FakeWorker
from tests.services.net.certificates import Certificates


@pytest.fixture
def ours(tmp_path: Path) -> Certificates:
    """The cluster's authority."""
    return Certificates(tmp_path / "ours")


@pytest.fixture
async def worker(ours: Certificates) -> AsyncIterator[Worker]:
    """A worker with a list of revoked certificates, empty so far."""
    ours.revoke()
    made = Worker(replace(ours.files(), crl=ours.crl))
    await made.server.start()
    yield made
    await made.server.stop(0)


class Worker:
    """A server and its files."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.server = Server(
            "localhost:0", [WorkerServicer(FakeWorker()).register], security=Security(load_credentials(files))
        )

    @property
    def address(self) -> str:
        return self.server.address


def put(files: TlsFiles, new: TlsFiles) -> None:
    """Put a new pair in the place of another."""
    for source, place in ((new.cert, files.cert), (new.key, files.key)):
        draft = place.with_suffix(".new")
        shutil.copy(source, draft)
        draft.replace(place)


def number(files: TlsFiles) -> int:
    return x509.load_pem_x509_certificate(files.cert.read_bytes()).serial_number


async def shown(address: str, files: TlsFiles) -> int:
    """The number of the certificate that a new connection gets to see."""
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.cert, files.key)
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return x509.load_der_x509_certificate(certificate).serial_number


async def test_new_connections_get_the_new_certificate(ours: Certificates, worker: Worker) -> None:
    """The one that stands goes on; a caller's new one is shown by its next connection as well."""
    mine = ours.files("coordinator")
    security = Security(load_credentials(mine))
    channel = await connect(worker.address, timeout_s=5, security=security)
    first = number(worker.files)
    assert await shown(worker.address, mine) == first

    put(worker.files, ours.files())
    put(mine, ours.files("coordinator"))

    assert await shown(worker.address, mine) == number(worker.files) != first
    assert await RemoteWorker(channel, worker.address).describe() == WORKER
    await channel.close()
    channel = await connect(worker.address, timeout_s=5, security=security)
    assert await RemoteWorker(channel, worker.address).describe() == WORKER
    await channel.close()


async def test_files_that_cannot_be_used_change_nothing(
    ours: Certificates, worker: Worker, tmp_path: Path, json_events: Callable[[], list[dict[str, Any]]]
) -> None:
    """A key of another certificate, half a file, an expired one, another authority's list: each is named in the log."""
    mine, first = ours.files("coordinator"), number(worker.files)
    # The authority's own file is spoiled as well.
    mine = replace(mine, ca=shutil.copy(ours.ca, tmp_path / "ca.pem"))
    stranger = Certificates(tmp_path / "stranger")
    stranger.revoke()
    whole = {path: path.read_bytes() for path in worker.files.paths().values()}
    bad = [
        (worker.files.key, mine.key.read_bytes(), "is not the key of"),
        (worker.files.cert, whole[worker.files.cert][:200], "does not hold a PEM certificate"),
        (worker.files.ca, b"", "does not hold a PEM certificate"),
        (worker.files.crl, stranger.crl.read_bytes(), "no authority of this process has signed"),
        (worker.files.crl, b"nothing", "does not hold a PEM certificate revocation list"),
    ]
    for path, content, words in bad:
        assert path is not None
        path.write_bytes(content)
        assert await shown(worker.address, mine) == first
        last = json_events()[-1]
        assert (last["event"], last["level"]) == ("files.kept_as_before", "error")
        assert str(path) in last["why"]
        assert words in last["why"]
        path.write_bytes(whole[path])


async def test_a_revoked_caller_is_refused(ours: Certificates, worker: Worker) -> None:
    """On the connection that it has, and on a new one; others go on, and it does with a new certificate."""
    mine, other = ours.files("coordinator"), ours.files("other")
    security = Security(load_credentials(mine))
    channel = await connect(worker.address, timeout_s=5, security=security)
    assert await RemoteWorker(channel, worker.address).describe() == WORKER

    ours.revoke(mine)

    with pytest.raises(Unauthenticated, match=f"{number(mine):x}, is revoked") as raised:
        await RemoteWorker(channel, worker.address).describe()
    assert raised.value.reason == "CERTIFICATE_REVOKED"
    await channel.close()
    peers = Peers(timeout_s=5, security=security)
    with pytest.raises(Unauthenticated, match="is revoked"):
        await (await peers.worker(worker.address)).describe()
    await peers.close()
    for files in (other, put(mine, ours.files("coordinator")) or mine):
        peers = Peers(timeout_s=5, security=Security(load_credentials(files)))
        assert await (await peers.worker(worker.address)).describe() == WORKER
        await peers.close()


async def test_a_revoked_worker_is_not_called(ours: Certificates, worker: Worker) -> None:
    """Nothing is sent to it, until it shows a certificate that counts."""
    mine = replace(ours.files("coordinator"), crl=ours.crl)
    security = Security(load_credentials(mine))
    ours.revoke(worker.files)

    with pytest.raises(
        Unavailable, match=f"--tls-crl {ours.crl} has revoked, number {number(worker.files):x}"
    ) as raised:
        await connect(worker.address, timeout_s=30, security=security)
    assert raised.value.reason == "HANDSHAKE_FAILED"

    put(worker.files, ours.files())
    channel = await connect(worker.address, timeout_s=5, security=security)
    assert await RemoteWorker(channel, worker.address).describe() == WORKER
    await channel.close()


async def test_with_a_list_as_without(ours: Certificates, worker: Worker, tmp_path: Path) -> None:
    """Where something is revoked, who does not answer is waited for, and who is not trusted is refused."""
    ours.revoke(ours.files("somebody"))
    security = Security(load_credentials(replace(ours.files(), crl=ours.crl)))
    with pytest.raises(Unavailable, match="no worker answers at localhost:1 within 0.3 s"):
        await connect("localhost:1", timeout_s=0.3, security=security)
    theirs = Certificates(tmp_path / "theirs")
    server = Server("localhost:0", [], security=theirs.security())
    await server.start()
    with pytest.raises(Unavailable, match="does not vouch for"):
        await connect(server.address, timeout_s=30, security=security)
    await server.stop(0)


def test_a_list_needs_the_certificates(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="are missing beside --tls-crl"):
        load_security(tls_crl=str(tmp_path / "crl.pem"))
