"""The compress role over a real socket: what is kept, who may ask, and what a client that goes leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.errors import FailedPrecondition, InvalidArgument, Unimplemented
from services.messages.compression import Compressed, CompressProgress, CompressRequest
from services.messages.description import DrafterDescription, Role
from services.messages.loading import LoadDrafter
from services.rpc.compress import RemoteCompressor
from shard_worker.device.devices import parse_devices
from shard_worker.pflash.drafter import load_drafter
from shard_worker.pflash.selection import CHUNK_TOKENS, kept_ranges, select_chunks
from shard_worker.weights.opening import open_checkpoint
from shard_worker.worker import Worker, WorkerConfig
from tests.reference import checkpoints
from tests.services.conftest import Dial, Serve, dial, serve  # noqa: F401  (fixtures)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_qwen3(tmp_path_factory.mktemp("drafter") / "qwen3", layers=3, tied=True)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(WorkerConfig(parse_devices("cpu"), (Role.COMPRESS,), threads=1))
    yield worker
    await worker.close()


@pytest.fixture
async def remote(worker: Worker, serve: Serve, dial: Dial) -> RemoteCompressor:  # noqa: F811
    server = await serve(*worker.registrations())
    return RemoteCompressor(await dial(server.address), server.address)


async def loaded(worker: Worker, folder: Path) -> DrafterDescription:
    *_, last = [event async for event in worker.load(LoadDrafter(str(folder), "float32"))]
    drafter = last.drafter  # type: ignore[union-attr]
    assert drafter is not None
    return drafter


@pytest.mark.parametrize(
    ("length", "ratio"), [(1, 0.5), (8, 0.0), (9, 0.0), (700, 0.3), (700, 1.0), (700, 7.0), (4200, 0.1)]
)
async def test_what_is_kept(length: int, ratio: float, worker: Worker, remote: RemoteCompressor, folder: Path) -> None:
    """As scoring and selection say by themselves; short prompts whole; progress layer by layer."""
    drafter = await loaded(worker, folder)
    assert (drafter.num_layers, drafter.vocab_size, drafter.dtype) == (3, 256, "float32")
    token_ids = tuple(checkpoints.random_prompts(256, 1, 1, [length])[0])
    progress: list[CompressProgress] = []

    found = await remote.compress(CompressRequest("r", drafter.fingerprint, token_ids, ratio), progress.append)

    if length < 9:
        assert found == Compressed(((0, length),), 0)
        return
    [device] = parse_devices("cpu")
    own = load_drafter(open_checkpoint(str(folder)), device, "float32", lambda *_: None)
    *_, scores = own.score(token_ids)
    assert isinstance(scores, list)
    assert list(found.kept) == kept_ranges(select_chunks(scores, token_ids, ratio), length)
    assert sum(last - first for first, last in found.kept) <= max(CHUNK_TOKENS, min(1.0, ratio) * length + CHUNK_TOKENS)
    assert progress == [CompressProgress(layer, 3) for layer in (1, 2, 3)]
    assert found.forward_ns > 0


async def test_refusals(worker: Worker, remote: RemoteCompressor, folder: Path) -> None:
    """Another drafter than the loaded one, prompts that are not its tokens, and a missing role are refused."""
    with pytest.raises(FailedPrecondition, match="no drafter is loaded"):
        await remote.compress(CompressRequest("r", "", (1,) * 20, 0.5))
    drafter = await loaded(worker, folder)
    with pytest.raises(FailedPrecondition, match="holds drafter"):
        await remote.compress(CompressRequest("r", "other", (1,) * 20, 0.5))
    for token_ids in ((), (256,) * 20):
        with pytest.raises(InvalidArgument, match="token_ids"):
            await remote.compress(CompressRequest("r", drafter.fingerprint, token_ids, 0.5))
    bare = Worker(WorkerConfig(parse_devices("cpu"), (Role.DRAFT,), threads=1))
    with pytest.raises(Unimplemented, match="--roles compress"):
        [event async for event in bare.load(LoadDrafter(str(folder)))]
    await bare.close()


async def test_a_client_that_goes_ends_the_work(worker: Worker, remote: RemoteCompressor, folder: Path) -> None:
    """Also: nothing else is loaded meanwhile, and the next client is served."""
    drafter = await loaded(worker, folder)
    request = CompressRequest("r", drafter.fingerprint, tuple(range(256)) * 40, 0.5)
    started = asyncio.Event()
    task = asyncio.ensure_future(remote.compress(request, lambda _: started.set()))
    await started.wait()
    assert (await worker.describe()).open_sessions == 1
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(10):
        while (await worker.describe()).open_sessions:
            await asyncio.sleep(0.01)
    await remote.compress(CompressRequest("r", drafter.fingerprint, (1,) * 40, 0.5))
