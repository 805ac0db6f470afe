"""A worker's parts put together: loading, describing, and what it doesn't offer."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.description import FeatureTransport, HeadPlace, Role, WorkerDescription
from services.draft import DraftOpen
from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, NotFound, Unimplemented
from services.layers import LayerRange
from services.worker import FeatureCapture, LoadDraft, LoadProgress, LoadTarget
from shard_worker.device import parse_devices
from shard_worker.worker import Worker, WorkerConfig
from tests.shard_worker.tiny import Tiny

BOTH = (Role.TARGET, Role.DRAFT)


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(WorkerConfig(parse_devices("cpu"), BOTH, threads=1))
    yield worker
    await worker.close()
    await worker.close()


async def load(worker: Worker, part: LoadTarget | LoadDraft) -> tuple[list[LoadProgress], WorkerDescription]:
    """Progress, and the description at the end."""
    *progress, last = [event async for event in worker.load(part)]
    assert isinstance(last, WorkerDescription)
    return [event for event in progress if isinstance(event, LoadProgress)], last


def draft_part(tiny: Tiny, place: HeadPlace = HeadPlace.SHARED) -> LoadDraft:
    return LoadDraft(str(tiny.draft("qwen3", "plain")), str(tiny.path("qwen3")), place, FeatureTransport.SUM)


async def test_a_worker_describes_what_it_is_and_holds(worker: Worker, tiny: Tiny) -> None:
    """Before a load there is nothing but devices and roles; afterwards target and draft are there."""
    empty = await worker.describe()
    assert (empty.target, empty.draft, empty.open_sessions, empty.roles) == (None, None, 0, BOTH)
    assert [device.name for device in empty.devices] == ["cpu"]

    progress, loaded = await load(worker, LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 2)))
    assert loaded.target is not None
    assert loaded.target.layers == LayerRange(0, 2)
    assert all(0 < step.loaded_bytes <= step.total_bytes == loaded.target.weight_bytes for step in progress)
    _, loaded = await load(worker, draft_part(tiny))
    assert loaded.target is not None
    assert loaded.draft is not None


async def test_the_same_part_is_not_loaded_twice(worker: Worker, tiny: Tiny, tmp_path: Path) -> None:
    """Asking again for what is held answers without a look at the disk; another part replaces it."""
    copy = Path(shutil.copytree(tiny.path("qwen3"), tmp_path / "copy"))
    part = LoadTarget(str(copy), LayerRange(0, 2))
    _, first = await load(worker, part)
    shutil.rmtree(copy)

    progress, again = await load(worker, part)
    _, other = await load(worker, LoadTarget(str(tiny.path("qwen3")), LayerRange(2, 4)))

    assert progress == []
    assert again.target == first.target
    assert other.target is not None
    assert other.target.layers == LayerRange(2, 4)


async def test_nothing_is_replaced_under_open_sessions(worker: Worker, tiny: Tiny) -> None:
    """While a session is open another part is refused; the same one is fine."""
    part = draft_part(tiny, HeadPlace.PROJECTED)
    _, described = await load(worker, part)
    assert described.draft is not None
    assert worker._draft is not None
    session = await worker._draft.open(DraftOpen("test", described.draft.fingerprint, 10))

    with pytest.raises(FailedPrecondition, match="1 sessions are open") as caught:
        await load(worker, draft_part(tiny, HeadPlace.LOADED))
    assert caught.value.reason == "SESSIONS_OPEN"
    _, described = await load(worker, part)
    assert described.open_sessions == 1
    await session.close()
    _, described = await load(worker, draft_part(tiny, HeadPlace.LOADED))

    assert described.draft is not None
    assert described.draft.head_place is HeadPlace.LOADED


@pytest.mark.parametrize(
    ("roles", "kind", "reason"),
    [
        ((Role.DRAFT,), Unimplemented, "ROLE_MISSING"),
        ((Role.TARGET,), Unimplemented, "ROLE_MISSING"),
        ((Role.DRAFT,), FailedPrecondition, "FAILED_PRECONDITION"),
    ],
)
async def test_a_role_that_is_not_offered_is_refused(
    tiny: Tiny, roles: tuple[Role, ...], kind: type[FlashsplitError], reason: str
) -> None:
    """A part for another role, and a draft that would share a head that isn't there, say what to do."""
    worker = Worker(WorkerConfig(parse_devices("cpu"), roles))
    part: LoadTarget | LoadDraft = draft_part(tiny)
    if roles == (Role.DRAFT,) and kind is Unimplemented:
        part = LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 2))

    with pytest.raises(kind) as caught:
        await load(worker, part)

    assert caught.value.reason == reason
    await worker.close()


async def test_the_workers_own_paths_win(tiny: Tiny) -> None:
    """--model and --draft of the command line replace what a coordinator on another host names."""
    paths = {"model_path": str(tiny.path("qwen3")), "draft_path": str(tiny.draft("qwen3", "plain"))}
    worker = Worker(WorkerConfig(parse_devices("cpu"), BOTH, **paths))
    capture = FeatureCapture("/elsewhere/draft", FeatureTransport.SUM)

    await load(worker, LoadDraft("/elsewhere/draft", "/elsewhere", HeadPlace.LOADED, FeatureTransport.SUM))
    _, described = await load(worker, LoadTarget("/elsewhere", LayerRange(0, 2), None, capture))

    assert described.target is not None
    assert described.target.capture_layers == (1, 2)
    await worker.close()


async def test_a_load_that_fails_names_the_reason_and_the_worker_goes_on(worker: Worker, tiny: Tiny) -> None:
    """A wrong path and layers out of range are refused; the next load works."""
    for part, kind in (
        (LoadTarget("/nowhere", LayerRange(0, 2)), NotFound),
        (LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 9)), InvalidArgument),
        (LoadTarget(str(Path(__file__).parent), LayerRange(0, 2)), NotFound),
    ):
        with pytest.raises(kind):
            await load(worker, part)
        assert (await worker.describe()).target is None

    _, described = await load(worker, LoadTarget(str(tiny.path("qwen3")), LayerRange(0, 2)))

    assert described.target is not None
