"""Small ports that stand where the engine would: they record what arrives and answer as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from services.description import (
    DeviceDescription,
    DraftDescription,
    FeatureTransport,
    HeadPlace,
    Role,
    TargetDescription,
    WorkerDescription,
)
from services.draft import DraftOpen, Guesses, Propose
from services.layers import LayerRange
from services.steps import (
    Commit,
    Event,
    FeatureSlice,
    Forward,
    Hop,
    Location,
    Open,
    Sampling,
    StageIdentity,
    StageTiming,
    StepKind,
)
from services.tensors import WireTensor
from services.worker import LoadDraft, LoadProgress, LoadTarget

WORKER = WorkerDescription(
    host="alpha",
    process_id=41,
    devices=(DeviceDescription("cuda:0", "H100", 80 << 30, 79 << 30), DeviceDescription("cuda:1", "H100", 1, 0)),
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
    ),
    open_sessions=2,
    max_tensor_bytes=1 << 29,
)

OPEN = Open(
    request_id="request-1",
    fingerprint="f00d",
    stage=1,
    layers=LayerRange(3, 9),
    route=(Hop("10.0.0.7:7001", LayerRange(9, 12)),),
    max_length=512,
    max_rows=128,
    block_rows=16,
    prompt_length=100,
    sampling=Sampling(
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
)

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


async def until(holds: Callable[[], bool], within_s: float = 1.0) -> None:
    """Wait for a state to come. Raises TimeoutError when it doesn't."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.005)


class FakeStage:
    """A stage that answers every forward with a commit, or as `answer` says. `fault`: what open() raises."""

    def __init__(self, answer: Callable[[FakeStageSession, Forward], Awaitable[None]] | None = None) -> None:
        self.sessions: list[FakeStageSession] = []
        self.fault: BaseException | None = None
        self.answer = answer or FakeStageSession.commit

    async def open(self, request: Open) -> FakeStageSession:
        if self.fault is not None:
            raise self.fault
        self.sessions.append(FakeStageSession(self, request))
        return self.sessions[-1]

    @property
    def session(self) -> FakeStageSession:
        """The newest."""
        return self.sessions[-1]


class FakeStageSession:
    stages = (IDENTITY,)
    max_tensor_bytes = 64 << 20
    max_feature_slices = 16

    def __init__(self, port: FakeStage, request: Open) -> None:
        self.port, self.request = port, request
        self.forwards: list[Forward] = []
        self.closed = 0
        self.out: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def forward(self, forward: Forward) -> None:
        self.forwards.append(forward)
        await self.port.answer(self, forward)

    async def commit(self, forward: Forward) -> None:
        self.out.put_nowait(commit(forward))

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self.out.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event

    async def close(self) -> None:
        self.closed += 1


class FakeDraft:
    """A draft that guesses 1, 2, 3 …, or what `guesses` holds. `fault`: what any call raises."""

    def __init__(self) -> None:
        self.sessions: list[FakeDraftSession] = []
        self.fault: BaseException | None = None
        self.guesses: Guesses | None = None

    async def open(self, request: DraftOpen) -> FakeDraftSession:
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

    def __init__(self, port: FakeDraft, request: DraftOpen) -> None:
        self.port, self.request = port, request
        self.slices: list[FeatureSlice] = []
        self.proposes: list[Propose] = []
        self.closed = 0

    async def feature_slice(self, piece: FeatureSlice) -> None:
        if self.port.fault is not None:
            raise self.port.fault
        self.slices.append(piece)

    async def propose(self, request: Propose) -> Guesses:
        if self.port.fault is not None:
            raise self.port.fault
        self.proposes.append(request)
        return self.port.guesses if self.port.guesses is not None else tuple(range(1, request.tokens + 1))

    async def close(self) -> None:
        self.closed += 1


class FakeWorker:
    """A worker that describes itself as told and loads in two steps. `fault`: what any call raises."""

    def __init__(self, description: WorkerDescription = WORKER) -> None:
        self.description = description
        self.fault: BaseException | None = None
        self.loaded: list[LoadTarget | LoadDraft] = []
        self.hold: asyncio.Event | None = None
        self.loading = 0

    async def describe(self) -> WorkerDescription:
        if self.fault is not None:
            raise self.fault
        return self.description

    async def load(self, part: LoadTarget | LoadDraft) -> AsyncIterator[LoadProgress | WorkerDescription]:
        self.loading += 1
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


def same_bytes(ours: Any, theirs: Any) -> bool:
    """Whether two tensors are equal, whatever kind of buffer holds their bytes."""
    return (ours.dtype, ours.shape, bytes(ours.data)) == (theirs.dtype, theirs.shape, bytes(theirs.data))
