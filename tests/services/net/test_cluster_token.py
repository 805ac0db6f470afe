"""The shared secret: asked for by every method but health, told apart from a wrong one, seen nowhere."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.errors import InvalidArgument, Unauthenticated
from services.messages.description import FeatureTransport, HeadPlace
from services.messages.draft_session import OpenDraft
from services.messages.loading import LoadDraft
from services.messages.snapshots import SnapshotOwner
from services.net.channel import connect
from services.net.cluster_token import FLAG, VARIABLE, read_token
from services.net.security import Security
from services.net.server import Server
from services.rpc.draft import DraftServicer
from services.rpc.peers import Peers
from services.rpc.snapshots import SnapshotServicer
from services.rpc.stage import StageServicer
from services.rpc.worker import WorkerServicer
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
from tests.services.net.certificates import Certificates, known

TOKEN = "correct-horse-battery-staple"
OTHER = "correct-horse-battery-stapl3"

Listen = Callable[[Security, str], Awaitable[Server]]


@pytest.fixture
async def listen() -> AsyncIterator[Listen]:
    """Start a server with all services."""
    servers: list[Server] = []

    async def start(security: Security, address: str) -> Server:
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


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
async def test_the_right_token_opens_every_service(kind: str, listen: Listen, tmp_path: Path) -> None:
    """Over sockets of every kind."""
    security = Certificates(tmp_path / "tls").security(token=TOKEN) if kind == "tls" else Security(token=known(TOKEN))
    address = (await listen(security, f"unix:{tmp_path}/a.sock" if kind == "unix" else "127.0.0.1:0")).address
    peers = Peers(timeout_s=5, security=security)
    try:
        assert await (await peers.worker(address)).describe() == WORKER
        session = await (await peers.stage(address)).open(STAGE_OPEN)
        await session.forward(prefill())
        assert await anext(session.events()) == commit(prefill())
        await session.close()
        await (await (await peers.draft(address)).open(OpenDraft("r", "f", 9))).close()
        snapshots = await peers.snapshots(address)
        frames = snapshots.export_snapshot(SnapshotOwner.STAGE, "one")
        assert await anext(frames) == HEADER
        await frames.aclose()
        assert await snapshots.free_snapshots(["x"]) == 1 << 40
    finally:
        await peers.close()


@pytest.mark.parametrize(
    ("shown", "reason", "words"),
    [(None, "TOKEN_MISSING", "carried no token"), (OTHER, "TOKEN_WRONG", "carried another token")],
)
async def test_any_other_call_is_refused(
    shown: str | None, reason: str, words: str, listen: Listen, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Methods of every shape, with the same sentence; what was shown and what is right stays out of texts and logs."""
    address = (await listen(Security(token=known(TOKEN)), f"unix:{tmp_path}/a.sock")).address
    peers = Peers(timeout_s=5, security=Security(token=known(shown) if shown else None))
    part = LoadDraft("d", "m", HeadPlace.LOADED, FeatureTransport.SUM)
    errors = []
    for call in (
        (await peers.worker(address)).describe(),
        (await peers.worker(address)).load(part),
        (await peers.stage(address)).open(STAGE_OPEN),
        (await peers.draft(address)).open(OpenDraft("r", "f", 9)),
        anext((await peers.snapshots(address)).export_snapshot(SnapshotOwner.STAGE, "one")),
        (await peers.snapshots(address)).free_snapshots(["x"]),
    ):
        with pytest.raises(Unauthenticated) as raised:
            await call
        errors.append(raised.value)
    await peers.close()
    for error in errors:
        assert (error.reason, error.where["address"]) == (reason, address)
        assert f"{words}, the worker at {address} asks for its cluster's" in error.message
        assert "--cluster-token-file" in error.message
    seen = "".join(capfd.readouterr()) + "".join(map(str, errors))
    assert TOKEN not in seen
    assert OTHER not in seen


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", f"Bearer {OTHER}"),),
        (("authorization", TOKEN),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization", f"Bearer {TOKEN} "),),
        (("authorization", ""),),
        (("authorization", "Bearer"),),
        (("authorization", f"Bearer {OTHER}"), ("authorization", f"Bearer {TOKEN}")),
        (("authorization-bin", f"Bearer {TOKEN}".encode()),),
    ],
)
async def test_reflection_and_unknown_methods_need_it_too(
    metadata: tuple[tuple[str, str | bytes], ...], listen: Listen, tmp_path: Path
) -> None:
    """Without the one right header nothing is told, not even which methods there are."""
    address = (await listen(Security(token=known(TOKEN)), f"unix:{tmp_path}/a.sock")).address
    channel = await connect(address, timeout_s=5)
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    calls = [
        reflection.ServerReflectionInfo(iter([request]), metadata=metadata),
        channel.unary_unary("/no.such.Service/Method")(b"", metadata=metadata),
        channel.unary_unary("/grpc.health.v1.HealthX/Check")(b"", metadata=metadata),
    ]
    for call in calls:
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    await channel.close()


async def test_health_needs_no_token(listen: Listen, tmp_path: Path) -> None:
    """A probe holds no secrets."""
    address = (await listen(Security(token=known(TOKEN)), f"unix:{tmp_path}/a.sock")).address
    channel = await connect(address, timeout_s=5)
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await channel.close()


async def test_a_worker_without_a_token_ignores_one(listen: Listen, tmp_path: Path) -> None:
    """Workers can be given the token one after the other."""
    address = (await listen(Security(), f"unix:{tmp_path}/a.sock")).address
    peers = Peers(timeout_s=5, security=Security(token=known(TOKEN)))
    assert await (await peers.worker(address)).describe() == WORKER
    await peers.close()


def test_where_the_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file wins over the environment; a line's end does not belong to it."""

    def sent(file: str | None) -> str:
        found = read_token(file)
        assert found is not None
        return found.sent

    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_token(None) is None
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert sent(str(file)) == TOKEN
    monkeypatch.setenv(VARIABLE, OTHER)
    assert sent(str(file)) == TOKEN
    assert sent(None) == OTHER


async def test_another_token_takes_its_place_while_all_run(listen: Listen, tmp_path: Path) -> None:
    """Worker and caller read their files again: with both tokens in the worker's, the caller's may be either."""
    ours, theirs = tmp_path / "worker", tmp_path / "caller"
    for file in (ours, theirs):
        file.write_text(TOKEN)
    server = await listen(Security(token=read_token(str(ours))), f"unix:{tmp_path}/a.sock")
    peers = Peers(timeout_s=5, security=Security(token=read_token(str(theirs))))
    worker = await peers.worker(server.address)
    assert await worker.describe() == WORKER

    ours.write_text(f"{TOKEN}\n{OTHER}\n")
    assert await worker.describe() == WORKER
    theirs.write_text(f"{OTHER}\n{TOKEN}\n")
    assert await worker.describe() == WORKER
    # What is no token changes nothing.
    ours.write_text("short")
    assert await worker.describe() == WORKER
    ours.write_text(OTHER)
    assert await worker.describe() == WORKER
    theirs.write_text(TOKEN)
    with pytest.raises(Unauthenticated, match="carried another token"):
        await worker.describe()
    await peers.close()


@pytest.mark.parametrize(
    "content", ["", "\n", "short", "two words of a token", "x" * 513, "ünïcödé-tökén-äöü", "a\0" * 16]
)
def test_what_is_no_token_is_refused_unquoted(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file or the variable is named, its content isn't."""
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(InvalidArgument, match="--cluster-token-file .* must hold one token of 16 to 512") as raised:
        read_token(str(file))
    assert len(content) < 3 or content not in raised.value.message
    if "\0" not in content:
        monkeypatch.setenv(VARIABLE, content)
        with pytest.raises(InvalidArgument, match=f"{VARIABLE} must hold one token"):
            read_token(None)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Named with the reason."""
    with pytest.raises(InvalidArgument, match="--cluster-token-file .*/token cannot be read: No such file"):
        read_token(str(tmp_path / "token"))


def test_children_get_it_by_environment_or_by_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Never as an argument; and a process that runs without one passes none on."""
    monkeypatch.setenv(VARIABLE, OTHER)
    security = Security(token=known(TOKEN))
    assert security.child_arguments() == []
    assert security.child_environment(os.environ) == {**os.environ, VARIABLE: TOKEN}
    assert VARIABLE not in Security().child_environment(os.environ)
    (tmp_path / "token").write_text(TOKEN)
    security = Security(token=read_token(str(tmp_path / "token")))
    assert security.child_arguments() == [FLAG, str(tmp_path / "token")]
    assert VARIABLE not in security.child_environment(os.environ)
