"""Small ports that stand where the engine would: they record what arrives and answer as the test says."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from services.errors import CLOSED, DataLoss, InvalidArgument, NotFound
from services.layers import LayerRange
from services.messages.description import (
    BatchCounts,
    DeviceDescription,
    DraftDescription,
    FeatureTransport,
    HeadPlace,
    Role,
    TargetDescription,
    WorkerDescription,
)
from services.messages.draft_session import DraftAnswer, OpenDraft, Propose
from services.messages.holder import Holder
from services.messages.loading import LoadDraft, LoadProgress, LoadTarget
from services.messages.measure import DeviceSpeed, HostSpeed, MeasureRequest
from services.messages.sampling import SamplingParams
from services.messages.snapshots import (
    KeptSnapshot,
    SnapshotChunk,
    SnapshotFrame,
    SnapshotHeader,
    SnapshotImported,
    SnapshotOwner,
    SnapshotTensor,
    SnapshotTrailer,
)
from services.messages.steps import (
    Commit,
    Event,
    FeatureSlice,
    Forward,
    Hop,
    Location,
    OpenSession,
    SnapshotPart,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StageIdentity,
    StageTiming,
    StepKind,
    StepLimit,
)
from services.messages.tensors import WireTensor
from services.streams.step_lane import StepLane

WORKER = WorkerDescription(
    host="alpha",
    process_id=41,
    devices=(
        DeviceDescription("cuda:0", "H100", 80 << 30, 79 << 30, 60 << 30, 5 << 30),
        DeviceDescription("cuda:1", "H100", 1, 0),
    ),
    roles=(Role.TARGET, Role.DRAFT),
    flashsplit_version="0.1.0",
    torch_version="2.13.0",
    python_version="3.11.9",
    target=TargetDescription(
        fingerprint="f00d",
        family="qwen3",
        layers=LayerRange(3, 9),
        num_layers=12,
        hidden_size=64,
        vocab_size=256,
        max_position=4096,
        dtype="bfloat16",
        capture_layers=(1, 4, 10),
        feature_transport=FeatureTransport.SLICES,
        weight_bytes=1 << 40,
        state_trimmable=True,
        host_experts=0.6,
        host_weight_bytes=3 << 40,
    ),
    draft=DraftDescription(
        fingerprint="beef",
        block_size=16,
        mask_token_id=255,
        capture_layers=(1, 4, 10),
        hidden_size=64,
        vocab_size=256,
        num_target_layers=12,
        head_place=HeadPlace.PROJECTED,
        feature_transport=FeatureTransport.SUM,
        max_position=2048,
        dtype="float32",
        weight_bytes=77,
        draft_vocab_size=128,
        state_trimmable=True,
    ),
    open_sessions=2,
    max_tensor_bytes=1 << 29,
    snapshot_bytes=3 << 40,
    snapshot_budget_bytes=1 << 62,
    session_bytes=5 << 40,
    busy_ns=6 << 40,
    counted_ns=7 << 40,
    batches=BatchCounts(5, 40, 9, (1, 0, 2, 0, 0, 0, 0, 0, 0, 1, 1)),
)

SPEEDS = (
    DeviceSpeed(
        "cuda:0",
        80 << 30,
        79 << 30,
        3.35e12,
        6.5e14,
        {"full_attention": 2e-5},
        1e-6,
        0.0,
        4.1e12,
        limited=True,
        host=HostSpeed(512 << 30, 500 << 30, 1.5e11, {"full_attention": 2e-4}, 2e11),
    ),
    DeviceSpeed("cuda:1", 1, 0, 0.5, 0.25, {"full_attention": 3e-5, "linear_attention": 4e-5}, 0.0, 5e-6),
)

OPEN = OpenSession(
    request_id="request-1",
    fingerprint="f00d",
    stage=1,
    layers=LayerRange(3, 9),
    route=(Hop("10.0.0.7:7001", LayerRange(9, 12)),),
    max_length=512,
    max_rows=128,
    block_rows=16,
    prompt_length=100,
    sampling=SamplingParams(
        logit_bias={7: -1.5, 200: 2.0},
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        temperature=0.75,
        top_k=40,
        top_p=0.5,
        min_p=0.125,
        seed=2**64 - 1,
    ),
    stop_token_ids=frozenset({1, 255}),
    batch_invariant_rows=32,
)

PARTS = (
    SnapshotPart(Location(0, "alpha", "cuda:0", "unix:/run/a.sock"), 1 << 40, 77, ("old", "older")),
    SnapshotPart(Location(None, "beta", "hip:0", "beta:7001"), 0, 0, (), "no room"),
)
"""What two workers say that they did with a snapshot."""

IDENTITY = StageIdentity(Location(1, "alpha", "cuda:0", "unix:/run/a.sock"), LayerRange(3, 9))


def tensor(*shape: int, dtype: str = "bfloat16", fill: int = 1) -> WireTensor:
    """A tensor whose bytes count up, so that a misplaced piece shows."""
    empty = WireTensor(dtype, shape, b"")
    size = empty.size_bytes
    pattern = bytes((index * 7 + fill) % 251 for index in range(251))
    return replace(empty, data=(pattern * (size // 251 + 1))[:size])


def prefill(step: int = 0, base: int = 0, tokens: tuple[int, ...] = (1, 2, 3)) -> Forward:
    return Forward(step, base, tokens, StepKind.PREFILL)


def commit(forward: Forward) -> Commit:
    """The answer to a prefill."""
    length = forward.base_position + len(forward.token_ids)
    return Commit(forward.step, length, (), (StageTiming(10, 20),))


async def until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait for a state to come. Raises TimeoutError when it doesn't."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.005)


async def stays(holds: Callable[[], bool], for_s: float = 0.1) -> bool:
    """Return whether a state lasts for some time; False as soon as it does not hold."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: not holds(), for_s)
        return False
    return True


async def settled(value: Callable[[], int], for_s: float = 0.3) -> int:
    """Wait until a number has stayed the same for some time, and return it."""
    while True:
        seen = value()
        if await stays(lambda seen=seen: value() == seen, for_s):
            return seen


class FakeStage:
    """A stage that answers every forward with a commit, or as `answer` says. `fault`: what open() raises."""

    def __init__(self, answer: Callable[[FakeStageSession, Forward], Awaitable[None]] | None = None) -> None:
        self.sessions: list[FakeStageSession] = []
        self.fault: BaseException | None = None
        self.answer = answer or FakeStageSession.commit
        self.forgotten: list[str] = []

    async def open(self, request: OpenSession, above: StepLane | None = None) -> FakeStageSession:
        if self.fault is not None:
            raise self.fault
        self.sessions.append(FakeStageSession(self, request, above))
        return self.sessions[-1]

    async def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    @property
    def session(self) -> FakeStageSession:
        """The newest."""
        return self.sessions[-1]


class FakeStageSession:
    stages = (IDENTITY,)
    max_tensor_bytes = 64 << 20
    max_feature_slices = 16
    step_lane = None

    def __init__(self, port: FakeStage, request: OpenSession, above: StepLane | None = None) -> None:
        self.port, self.request, self.above = port, request, above
        self.forwards: list[Forward] = []
        self.limits: list[StepLimit] = []
        self.saves: list[SnapshotSave] = []
        self.restores: list[SnapshotRestore] = []
        self.closed = 0
        self.out: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def forward(self, forward: Forward) -> None:
        self.forwards.append(forward)
        await self.port.answer(self, forward)

    async def limit_steps(self, limit: StepLimit) -> None:
        self.limits.append(limit)

    async def save_snapshot(self, save: SnapshotSave) -> None:
        self.saves.append(save)
        self.out.put_nowait(SnapshotSaved(save.snapshot_id, save.length, PARTS))

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        self.restores.append(restore)
        self.out.put_nowait(SnapshotRestored(restore.snapshot_id, restore.length, PARTS))

    async def commit(self, forward: Forward) -> None:
        self.out.put_nowait(commit(forward))

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self.out.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event

    def answer_at_once(self, _: Callable[[Event], bool]) -> None:
        """Events are read."""

    async def close(self, why: str = CLOSED) -> None:
        self.closed += 1
        self.why = why


class FakeDraft:
    """A draft that proposes 1, 2, 3 …, or what `draft_tokens` holds. `fault`: what any call raises."""

    def __init__(self) -> None:
        self.sessions: list[FakeDraftSession] = []
        self.fault: BaseException | None = None
        self.draft_tokens: DraftAnswer | None = None

    async def open(self, request: OpenDraft) -> FakeDraftSession:
        if self.fault is not None:
            raise self.fault
        self.sessions.append(FakeDraftSession(self, request))
        return self.sessions[-1]

    @property
    def session(self) -> FakeDraftSession:
        return self.sessions[-1]


class FakeDraftSession:
    host, device = "beta", "hip:0"
    max_tensor_bytes = 64 << 20

    def __init__(self, port: FakeDraft, request: OpenDraft) -> None:
        self.port, self.request = port, request
        self.slices: list[FeatureSlice] = []
        self.proposes: list[Propose] = []
        self.snapshots: list[SnapshotSave | SnapshotRestore] = []
        self.closed = 0

    async def feature_slice(self, piece: FeatureSlice) -> None:
        if self.port.fault is not None:
            raise self.port.fault
        self.slices.append(piece)

    async def propose(self, request: Propose) -> DraftAnswer:
        if self.port.fault is not None:
            raise self.port.fault
        self.proposes.append(request)
        return self.port.draft_tokens if self.port.draft_tokens is not None else tuple(range(1, request.tokens + 1))

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        return self._snapshot(save)

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        return self._snapshot(restore)

    def _snapshot(self, asked: SnapshotSave | SnapshotRestore) -> SnapshotPart:
        if self.port.fault is not None:
            raise self.port.fault
        self.snapshots.append(asked)
        return PARTS[len(self.snapshots) % 2]

    async def close(self, why: str = CLOSED) -> None:
        self.closed += 1
        self.why = why


class FakeWorker:
    """A worker that describes itself as told and loads in two steps. `fault`: what any call raises."""

    def __init__(self, description: WorkerDescription = WORKER) -> None:
        self.description = description
        self.fault: BaseException | None = None
        self.loaded: list[LoadTarget | LoadDraft] = []
        self.ends_sessions: list[bool] = []
        self.measured: list[MeasureRequest] = []
        self.echoed: list[int] = []
        self.hold: asyncio.Event | None = None
        self.loading = 0

    async def describe(self) -> WorkerDescription:
        if self.fault is not None:
            raise self.fault
        return self.description

    async def measure(self, wanted: MeasureRequest) -> tuple[DeviceSpeed, ...]:
        if self.fault is not None:
            raise self.fault
        self.measured.append(wanted)
        return SPEEDS

    async def echo(self, payload: bytes) -> int:
        if self.fault is not None:
            raise self.fault
        self.echoed.append(len(payload))
        return len(payload)

    async def load(
        self, part: LoadTarget | LoadDraft, holder: Holder | None, *, ends_sessions: bool
    ) -> AsyncIterator[LoadProgress | WorkerDescription]:
        self.loading += 1
        self.ends_sessions.append(ends_sessions)
        try:
            yield LoadProgress(1, 4)
            if self.hold is not None:
                await self.hold.wait()
            if self.fault is not None:
                raise self.fault
            self.loaded.append(part)
            yield LoadProgress(4, 4)
            yield self.description
        finally:
            self.loading -= 1


HEADER = SnapshotHeader(
    snapshot_id="one",
    owner=SnapshotOwner.STAGE,
    fingerprint="f00d",
    layers=LayerRange(3, 9),
    first_token=0,
    token_count=40,
    parent_id=None,
    tensors=(
        SnapshotTensor("layers.3.k", "float32", (2, 40, 8)),
        SnapshotTensor("layers.4.recurrent", "float32", ()),
        SnapshotTensor("layers.4.conv", "bfloat16", (0, 7)),
        SnapshotTensor("logits", "bfloat16", (3,)),
    ),
)


def frames_of(header: SnapshotHeader, chunk_bytes: int = 1 << 20) -> list[SnapshotFrame]:
    """A whole snapshot whose bytes count up, its digests right."""
    contents = [bytes(tensor(*one.shape, dtype=one.dtype, fill=i).data) for i, one in enumerate(header.tensors)]
    data = b"".join(contents)
    chunks = [SnapshotChunk(at, data[at : at + chunk_bytes]) for at in range(0, len(data), chunk_bytes)]
    trailer = SnapshotTrailer(len(data), tuple(hashlib.sha256(content).digest() for content in contents))
    return [header, *chunks, trailer]


class FakeSnapshots:
    """Keeps the frames that come and gives them back. Faults: what the named call raises.

    hold: exports wait for it before their trailer. hold_free, hold_import: frees and imports wait for
    it before they are done.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[SnapshotOwner, str], list[SnapshotFrame]] = {}
        self.asked: list[tuple[SnapshotOwner, str, int, str | None]] = []
        self.freed: list[list[str]] = []
        self.imports: list[FakeImport] = []
        self.import_fault: BaseException | None = None
        self.write_fault: BaseException | None = None
        self.export_fault: BaseException | None = None
        self.hold: asyncio.Event | None = None
        self.hold_free: asyncio.Event | None = None
        self.hold_import: asyncio.Event | None = None
        self.exporting = 0

    async def export_snapshot(
        self, owner: SnapshotOwner, snapshot_id: str, first_token: int, parent_id: str | None
    ) -> AsyncIterator[SnapshotFrame]:
        self.asked.append((owner, snapshot_id, first_token, parent_id))
        if (owner, snapshot_id) not in self.kept:
            raise NotFound(f"no prefix {snapshot_id} is kept", reason="SNAPSHOT_MISSING")
        self.exporting += 1
        try:
            for frame in self.kept[owner, snapshot_id]:
                if isinstance(frame, SnapshotTrailer):
                    if self.hold is not None:
                        await self.hold.wait()
                    if self.export_fault is not None:
                        raise self.export_fault
                yield frame
        finally:
            self.exporting -= 1

    async def import_snapshot(self, header: SnapshotHeader) -> FakeImport | None:
        if self.import_fault is not None:
            raise self.import_fault
        if (header.owner, header.snapshot_id) in self.kept:
            return None
        self.imports.append(FakeImport(self, header))
        return self.imports[-1]

    def list_snapshots(self) -> list[KeptSnapshot]:
        headers = [frames[0] for frames in self.kept.values()]
        return [
            KeptSnapshot(header.snapshot_id, header.owner, header.token_count, header.parent_id)
            for header in headers
            if isinstance(header, SnapshotHeader)
        ]

    async def free_snapshots(self, snapshot_ids: Sequence[str]) -> int:
        self.freed.append(list(snapshot_ids))
        if self.hold_free is not None:
            await self.hold_free.wait()
        return len(snapshot_ids) << 40


class FakeImport:
    def __init__(self, port: FakeSnapshots, header: SnapshotHeader) -> None:
        self.port, self.frames = port, [header]
        self.received = self.aborted = 0
        self.committed = False

    async def write(self, chunk: SnapshotChunk) -> None:
        if self.port.write_fault is not None:
            raise self.port.write_fault
        if chunk.offset != self.received:
            raise InvalidArgument(f"chunk at {chunk.offset}, expected {self.received}", field="chunk.offset")
        self.received += len(chunk.data)
        self.frames.append(chunk)

    async def commit(self, trailer: SnapshotTrailer) -> SnapshotImported:
        header = self.frames[0]
        if not self.received == trailer.total_bytes == header.size_bytes:
            raise DataLoss("bytes are missing")
        if self.port.hold_import is not None:
            await self.port.hold_import.wait()
        self.port.kept[header.owner, header.snapshot_id] = [*self.frames, trailer]
        self.committed = True
        return SnapshotImported(self.received, ("old", "older"))

    def abort(self) -> None:
        self.aborted += 1


def same_bytes(ours: Any, theirs: Any) -> bool:
    """Whether two tensors are equal, whatever kind of buffer holds their bytes."""
    return (ours.dtype, ours.shape, bytes(ours.data)) == (theirs.dtype, theirs.shape, bytes(theirs.data))
