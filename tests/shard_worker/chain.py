"""Helpers of tests: chains of stages and drafts in one process, and a small client that drives a session on them.

Everything is the engine's own but the network: addresses lead to the roles themselves, and step lanes are calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from services.errors import FlashsplitError
from services.layers import LayerRange
from services.messages.batch_frames import BatchAnswer, BatchStep, BatchTokens, PreparedFrame, StepBatch
from services.messages.description import FeatureTransport, HeadPlace, Role
from services.messages.loading import FeatureCapture, LoadDraft, LoadTarget
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import (
    Commit,
    DraftRoute,
    Event,
    Forward,
    Hop,
    Location,
    OpenSession,
    Proposal,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StepKind,
)
from services.rpc.peers import Peers
from services.rpc.stage import StageSession
from services.streams.step_lane import StepLane
from shard_worker.device.devices import Device, parse_devices
from shard_worker.device.executor import DeviceThread
from shard_worker.roles import RoleResources
from shard_worker.roles.draft import DraftRole
from shard_worker.roles.target.role import TargetRole
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.snapshots.store import SnapshotStore
from shard_worker.snapshots.transfer import SnapshotTransfer
from tests.reference.draft_checkpoints import DFLASH2, DOMINO, DSPARK
from tests.shard_worker.caller_way import CallerWay
from tests.shard_worker.tiny import AS_GPU, Tiny, ignore_progress, load_stage

BLOCK = 8
"""Rows of a block of the drafts here: the known token and 7 draft tokens."""

DRAFT_ADDRESS = "draft:1"
"""The address of a draft in a worker of its own."""

BUDGET = 64 << 20
"""Room for snapshots on each worker."""

CAPTURED = {
    "qwen3-sliding": (2, 0, 3),
    "qwen3": (2, 0, 3),
    "qwen3_5": (6, 0, 7),
    "llama": (1, 0),
    "gemma3": (2, 0, 3),
    "gemma4-experts": (2, 0, 3),
    "gemma4-sharing": (5, 0, 3),
    "qwen3_moe": (2, 0, 3),
    "gpt_oss": (2, 0, 3),
    "laguna": (2, 0, 3),
    "glm4_moe": (2, 0),
    "gpt_oss-mxfp4": (1, 0),
    "qwen3_5_moe": (2, 0, 3),
    "qwen3_next": (2, 0, 3),
}
"""The target blocks that the drafts of `MakeChain` read, by checkpoint."""

FULL, SLIDING = "full_attention", "sliding_attention"
DRAFTS: dict[str, dict[str, Any]] = {
    "session": {},
    "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 10},
    "all-sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6, "is_causal": False},
    "reduced": {"form": "speculators", "token_ids": range(1, 256, 3)},
    "dflash2": {"own": DFLASH2, "layer_types": (SLIDING, FULL), "sliding_window": 10, "is_causal": False},
    "dspark": {"own": DSPARK | {"enable_confidence_head": True}, "block_size": 7},
    "domino": {"own": DOMINO, "block_size": 7},
}
"""The shapes of drafts that `MakeChain` writes: options of `write_draft` by label."""

Script = Callable[[list[int]], Sequence[int]]
"""Returns draft tokens for the next verify, in place of a draft's, from all tokens produced so far."""


class Lane:
    """One end of a step lane between two stages of this process.

    A stage hears of a step on the thread that sends it, and so not before all of the step is there. far_end: the other
    end, None once the lane is closed; a test may put an end of its own there. carried: the steps that were sent from
    here. expected: those that were expected here. on_step, on_failure, on_begun, on_expected: what the stage at this
    end listens with.
    """

    def __init__(self, carries: Callable[[Forward], bool]) -> None:
        """carries: says of each step whether the lane takes it."""
        self._carries = carries
        self.far_end: Lane | None = self
        self.carried: list[Forward] = []
        self.expected: list[Forward] = []
        self.on_step: Callable[[Forward], None] = lambda _: None
        self.on_expected: Callable[[memoryview], None] = lambda _: None

        self.stream_id = 0
        self.batches: BatchWay | None = None

    def listen(
        self,
        on_step: Callable[[Forward], None],
        on_failure: Callable[[FlashsplitError], None],
        *,
        on_begun: Callable[[Forward, bool], None] = lambda _, __: None,
        **_: int,
    ) -> None:
        self.on_step, self.on_failure, self.on_begun = on_step, on_failure, on_begun

    def expect(
        self, forward: Forward, on_arrival: Callable[[memoryview], None], *, features_follow: bool = False
    ) -> None:
        self.expected.append(forward)
        self.on_expected = on_arrival

    def prepare(self, forward: Forward) -> None:
        raise AssertionError("on the CPU a step is there at once")

    def send(self, forward: Forward, there: Callable[[], object] | None = None) -> bool:
        assert there is None, "on the CPU a step is there at once"
        if self.far_end is None or not self._carries(forward):
            return False
        self.carried.append(forward)
        self.far_end.on_step(forward)
        return True

    def close(self) -> None:
        self.far_end = None
        if self.batches is not None:
            self.batches.leave(self.stream_id)


class BatchWay:
    """One end of the way of steps of several sessions, between two stages of this process.

    far_end: the other end. sent: the batches that were sent from here. sent_ahead: how many of
    them were sent before anything else was made of their results. told: how many tokens were sent from here ahead of
    their answers. carries: says of each batch whether it is taken.
    """

    def __init__(self, carries: Callable[[StepBatch], bool]) -> None:
        self.far_end, self._carries = self, carries
        self.sent: list[StepBatch] = []
        self.told = self.sent_ahead = 0
        self.members: dict[int, tuple[Any, Any]] = {}

    @classmethod
    def pair(cls, carries: Callable[[StepBatch], bool]) -> tuple[BatchWay, BatchWay]:
        upper, lower = cls(carries), cls(carries)
        upper.far_end, lower.far_end = lower, upper
        return upper, lower

    def join(self, stream_id: int, member: object, listener: object, *_: object) -> None:
        self.members[stream_id] = member, listener

    def leave(self, stream_id: int) -> None:
        self.members.pop(stream_id, None)

    def prepare_steps(self, steps: tuple[BatchStep, ...]) -> PreparedFrame:
        return PreparedFrame(steps, None)

    def send_steps(self, batch: StepBatch, prepared: PreparedFrame | None = None) -> bool:
        if not self._carries(batch):
            return False
        self.sent.append(batch)
        self.sent_ahead += prepared is not None
        there = self.far_end.members
        # What is sent from page-locked memory, or from a step's own, is copied on its way.
        whole = [one for one in batch.whole_steps() if one.stream_id in there]
        steps = [(there[one.stream_id], one.forward.with_own_memory()) for one in whole]
        if not steps:
            return True
        steps[0][0][1].before_reading()
        taken = [(member, forward) for (member, _), forward in steps]
        if len(steps) < len(batch.steps) or batch.features:
            steps[0][0][1].take_steps(taken)
        else:
            bare = [(member, forward.with_rows(None, ())) for member, forward in taken]
            activation = replace(batch.activation, data=bytes(batch.activation.data))
            steps[0][0][1].take_steps(taken, bare, activation)
        return True

    def send_tokens(self, tokens: BatchTokens) -> None:
        there = self.far_end.members
        arrived = [
            (there[stream_id], step, token)
            for stream_id, step, token in zip(tokens.stream_ids, tokens.steps, tokens.token_ids, strict=True)
            if stream_id in there
        ]
        self.told += len(arrived)
        if arrived:
            arrived[0][0][1].before_reading()
            arrived[0][0][1].take_tokens([(member, step, token) for (member, _), step, token in arrived])

    def send_answers(self, answers: Sequence[BatchAnswer]) -> bool:
        there = self.far_end.members
        arrived = [(there[one.stream_id], one) for one in answers if one.stream_id in there]
        if arrived:
            arrived[0][0][1].before_reading()
            arrived[0][0][1].take_answers([(member, one) for (member, _), one in arrived])
        return True


class Directory:
    """Stands for `services.rpc.peers.Peers`: it finds roles of this process by their addresses.

    stages, drafts: the roles by address. lanes: the upper and the lower end of each lane that was opened. batch_ways:
    the ends of each way of steps of several sessions, by the address that it leads to.
    """

    def __init__(
        self,
        carries: Callable[[Forward], bool] | None = None,
        carries_batch: Callable[[StepBatch], bool] | None = None,
    ) -> None:
        """carries: says of each step whether lanes down the chain take it; None for no lanes. carries_batch: says it
        of steps of several sessions; None for none together."""
        self.stages: dict[str, Any] = {}
        self.drafts: dict[str, Any] = {}
        self.lanes: list[tuple[Lane, Lane]] = []
        self.batch_ways: dict[str, tuple[BatchWay, BatchWay]] = {}
        self._carries, self._carries_batch = carries, carries_batch

    async def stage(self, address: str) -> Any:
        return SimpleNamespace(
            open=functools.partial(self._open, address),
            forget=lambda session_id: self.stages[address].forget(session_id),
        )

    async def _open(self, address: str, request: OpenSession, *, steps: bool = False) -> StageSession:
        role = self.stages[address]
        if not steps or self._carries is None:
            return await role.open(request)
        # What goes down the chain may be refused; what goes up always arrives.
        upper, lower = Lane(self._carries), Lane(lambda _: True)
        upper.far_end, lower.far_end = lower, upper
        self.lanes.append((upper, lower))
        upper.stream_id = lower.stream_id = len(self.lanes)
        if self._carries_batch is not None:
            ways = self.batch_ways.setdefault(address, BatchWay.pair(self._carries_batch))
            upper.batches, lower.batches = ways
        session: StageSession = await role.open(request, cast(StepLane, lower))
        session.step_lane = cast(StepLane, upper)
        return session

    async def draft(self, address: str) -> Any:
        return self.drafts[address]

    async def description(self, address: str, within_s: float) -> Any:
        return SimpleNamespace(draft=self.drafts[address].describe())


class WorkerSnapshots:
    """The prefixes that one worker keeps, and its side of SnapshotService."""

    def __init__(self, budget_bytes: int) -> None:
        self.store = SnapshotStore(budget_bytes)
        self.stage: TargetRole | None = None
        self.draft: DraftRole | None = None
        self.transfer = SnapshotTransfer(self.store, self.keepers)

    def keepers(self) -> dict[SnapshotOwner, SnapshotKeeper]:
        roles = {SnapshotOwner.STAGE: self.stage, SnapshotOwner.DRAFT: self.draft}
        return {owner: role.loaded.keeper for owner, role in roles.items() if role is not None and role.loaded}


def resources(
    thread: DeviceThread,
    devices: str | tuple[Device, ...] = "cpu",
    *,
    host: str = "here",
    address: str = "here:1",
    store: SnapshotStore | None = None,
    peers: object | None = None,
    roles: Mapping[Role, Any] = MappingProxyType({}),
) -> RoleResources:
    """Return what a role gets of a worker of this process.

    store: by default one of 1 MiB. peers: by default nobody else is there. roles: the worker's roles by name.
    """
    return RoleResources(
        thread=thread,
        devices=parse_devices(devices) if isinstance(devices, str) else devices,
        peers=cast(Peers, Directory() if peers is None else peers),
        location=lambda stage: Location(stage, host, "cpu", address),
        store=SnapshotStore(1 << 20) if store is None else store,
        roles=roles,
    )


class Chain:
    """Workers that hold a checkpoint cut into stages, and a draft: beside the last stage, or in a worker of its own.

    ranges: the layers of each stage. roles: the target role of each. threads: the device threads, the last stage's
    first. snapshots: the prefixes that each stage's worker keeps. draft_snapshots: those of the draft's worker, which
    is the last stage's where both share one.
    """

    def __init__(
        self,
        path: Path,
        cuts: Sequence[int] = (),
        *,
        draft: Path | None = None,
        transport: FeatureTransport = FeatureTransport.SUM,
        place: HeadPlace = HeadPlace.SHARED,
        budget: int = BUDGET,
        devices: str = "cpu",
        dtype: str | None = None,
        host_experts: float = 0.0,
        carries: Callable[[Forward], bool] | None = None,
        carries_batch: Callable[[StepBatch], bool] | None = None,
        takes_answers: Callable[[Sequence[BatchAnswer]], bool] | None = None,
    ) -> None:
        """cuts: the first layers of all stages but the first. draft: a draft's checkpoint. transport: how features
        reach it. place: where it is. budget: bytes for snapshots on each worker. host_experts: as of
        `LoadTarget`; with any the stages' device is the CPU, treated as a GPU. carries, carries_batch: as in
        `Directory`. takes_answers: says of answers to several sessions whether the coordinator's end takes them at
        once; None where it takes none so."""
        layers = load_stage(path).config.num_layers
        bounds = [0, *cuts, layers]
        self.ranges = [LayerRange(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        self.directory = Directory(carries, carries_batch)
        self._takes_answers = takes_answers
        self.caller_way: CallerWay | None = None
        self.threads: list[DeviceThread] = []
        self.draft_role: DraftRole | None = None
        self.snapshots = [WorkerSnapshots(budget) for _ in self.ranges]
        self.draft_snapshots = self.snapshots[-1] if place is HeadPlace.SHARED else WorkerSnapshots(budget)
        capture = None
        last_thread = self._thread()
        if draft is not None:
            beside = place is HeadPlace.SHARED
            thread = last_thread if beside else self._thread()
            self.draft_role = DraftRole(
                resources(
                    thread,
                    devices if beside else "cpu",
                    host="draft-host",
                    address=DRAFT_ADDRESS,
                    store=self.draft_snapshots.store,
                )
            )
            self.draft_snapshots.draft = self.draft_role
            self.draft_role.load(LoadDraft(str(draft), str(path), place, transport, dtype), ignore_progress)
            self.directory.drafts[DRAFT_ADDRESS] = self.draft_role
            capture = FeatureCapture(str(draft), transport)
        self.place = place
        self.roles: list[TargetRole] = []
        for index, held in enumerate(self.ranges):
            last = index == len(self.ranges) - 1
            beside = last and place is HeadPlace.SHARED and self.draft_role is not None
            role = TargetRole(
                resources(
                    last_thread if last else self._thread(),
                    (AS_GPU,) if host_experts else devices,
                    host=f"host-{index}",
                    address=f"stage:{index}",
                    store=self.snapshots[index].store,
                    peers=self.directory,
                    roles={Role.DRAFT: self.draft_role} if beside else {},
                )
            )
            self.snapshots[index].stage = role
            part = LoadTarget(str(path), held, dtype, capture, host_experts=host_experts)
            role.load(part, ignore_progress)
            role.prepare()
            self.directory.stages[f"stage:{index}"] = role
            self.roles.append(role)

    def _thread(self) -> DeviceThread:
        self.threads.append(DeviceThread(1))
        return self.threads[-1]

    @property
    def stores(self) -> list[SnapshotStore]:
        """The store of each worker; the draft's is the last one where it has a worker of its own."""
        return list(dict.fromkeys(worker.store for worker in (*self.snapshots, self.draft_snapshots)))

    def free_snapshots(self) -> None:
        """Free all prefixes, and check that none of their bytes stays counted."""
        for store in self.stores:
            # A snapshot on which others build can only go after them.
            while sum(store.free(snapshot.snapshot_id) for snapshot in list(store)):
                pass
            assert (store.held_bytes, len(store)) == (0, 0)

    def shutdown(self) -> None:
        """End the device threads."""
        for thread in self.threads:
            thread.shutdown()

    @property
    def fingerprint(self) -> str:
        """The checkpoint's."""
        loaded = self.roles[0].loaded
        assert loaded is not None
        return loaded.fingerprint

    def request(self, stage: int = 0, **changes: Any) -> OpenSession:
        """Return the request for a session from a stage on, with some fields changed."""
        route = tuple(Hop(f"stage:{i}", self.ranges[i]) for i in range(stage + 1, len(self.ranges)))
        route_to_draft = None
        if self.draft_role is not None:
            route_to_draft = DraftRoute(None if self.place is HeadPlace.SHARED else DRAFT_ADDRESS)
        request = OpenSession(
            request_id="test",
            fingerprint=self.fingerprint,
            stage=stage,
            layers=self.ranges[stage],
            route=route,
            max_length=400,
            max_rows=200,
            block_rows=16,
            prompt_length=0,
            draft=route_to_draft,
        )
        return replace(request, **changes)

    @contextlib.asynccontextmanager
    async def session(self, **changes: Any) -> AsyncIterator[Client]:
        if self._takes_answers is None:
            session = await self.roles[0].open(self.request(**changes))
        else:
            self.caller_way = self.caller_way or CallerWay(self._takes_answers)
            lane = self.caller_way.lane()
            session = await self.roles[0].open(self.request(**changes), lane)
            session = cast(StageSession, self.caller_way.opened(session, lane))
        try:
            yield Client(session)
        finally:
            await session.close()


class MakeChain:
    """Makes chains of tiny checkpoints, each on first use; one that was made before is returned again."""

    def __init__(self, tiny: Tiny) -> None:
        self._tiny = tiny
        self.chains: dict[Any, Chain] = {}

    def __call__(self, name: str, cuts: tuple[int, ...] = (), drafted: bool | str = False, **options: Any) -> Chain:
        """Return the chain of a checkpoint by its name.

        drafted: the label of the draft's shape in DRAFTS, True for "session", False for no draft. The other arguments
        are those of `Chain`.
        """
        key = (name, cuts, drafted, *options.items())
        if key not in self.chains:
            draft = None
            if drafted:
                shape = drafted if isinstance(drafted, str) else "session"
                draft = self._tiny.draft(name, shape, target_layer_ids=CAPTURED[name], **DRAFTS[shape])
            self.chains[key] = Chain(self._tiny.path(name), cuts, draft=draft, **options)
        return self.chains[key]


@dataclass(frozen=True)
class Answer:
    """What a run produced.

    tokens: all of them. verified: those of each verify. proposals: the draft tokens behind each step.
    """

    tokens: list[int]
    verified: list[tuple[int, ...]]
    proposals: list[tuple[int, ...]]


class Client:
    """Sends the steps of one session, one after the other, and reads their answers, as a coordinator does.

    steps: how many were sent. length: the committed tokens.
    """

    def __init__(self, session: StageSession) -> None:
        self.session = session
        self.events: AsyncIterator[Event] = session.events()
        self.steps = self.length = 0

    def frame(self, kind: StepKind, token_ids: Sequence[int], propose: int = 0, **changes: Any) -> Forward:
        """Return the next step in sequence, with some fields changed."""
        return replace(Forward(self.steps, self.length, tuple(token_ids), kind, propose), **changes)

    async def send(self, frame: Forward) -> None:
        """Send a step, without reading its answer."""
        await self.session.forward(frame)
        self.steps += 1

    async def commit(self) -> Commit:
        """Read the next event, which must be a step's answer."""
        event = await anext(self.events)
        assert isinstance(event, Commit), event
        self.length = event.length
        return event

    async def step(self, kind: StepKind, token_ids: Sequence[int], propose: int = 0) -> tuple[Commit, tuple[int, ...]]:
        """Take one step. Returns its answer, and the draft tokens where some were asked for."""
        await self.send(self.frame(kind, token_ids, propose))
        commit = await self.commit()
        if not propose:
            return commit, ()
        proposal = await anext(self.events)
        assert isinstance(proposal, Proposal), proposal
        assert proposal.step == commit.step
        return commit, proposal.token_ids

    async def prefill(self, token_ids: Sequence[int], chunk: int = 200) -> None:
        """Prefill a prompt, so many tokens a step."""
        for first in range(0, len(token_ids), chunk):
            commit, _ = await self.step(StepKind.PREFILL, token_ids[first : first + chunk])
            assert commit.token_ids == ()

    async def resume(self, propose: int = 0) -> tuple[Commit, tuple[int, ...]]:
        """Take the first step behind a prefix that was restored; arguments and result as of `step`."""
        return await self.step(StepKind.RESUME, (), propose)

    async def save(self, snapshot_id: str, parent_id: str | None = None) -> SnapshotSaved:
        """Keep the state behind all committed tokens."""
        await self.session.save_snapshot(SnapshotSave(snapshot_id, self.length, parent_id))
        event = await anext(self.events)
        assert isinstance(event, SnapshotSaved), event
        assert (event.snapshot_id, event.length) == (snapshot_id, self.length)
        return event

    async def restore(self, snapshot_id: str, token_ids: Sequence[int]) -> SnapshotRestored:
        """Begin from a kept state."""
        await self.session.restore_snapshot(SnapshotRestore(snapshot_id, len(token_ids), tuple(token_ids)))
        event = await anext(self.events)
        assert isinstance(event, SnapshotRestored), event
        assert (event.snapshot_id, event.length) == (snapshot_id, len(token_ids))
        self.length = event.length
        return event

    async def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the next `count` tokens, one a step."""
        await self.prefill(prompt[:-1])
        produced: list[int] = []
        known = prompt[-1]
        while len(produced) < count:
            commit, _ = await self.step(StepKind.DECODE, [known])
            [known] = commit.token_ids
            produced.append(known)
        return produced

    async def speculate(
        self, prompt: Sequence[int], count: int, *, script: Script | None = None, draft_tokens: int = BLOCK - 1
    ) -> Answer:
        """Return the next `count` tokens, by verifying draft tokens: those of the draft, or of a script."""
        await self.prefill(prompt[:-1])
        propose = 0 if script is not None else draft_tokens
        commit, proposal = await self.step(StepKind.DECODE, prompt[-1:], propose)
        answer = Answer(list(commit.token_ids), [], [proposal])
        while len(answer.tokens) < count:
            block = proposal if script is None else tuple(script(answer.tokens))
            before = self.length
            commit, proposal = await self.step(StepKind.VERIFY, [answer.tokens[-1], *block], propose)
            assert commit.length == before + len(commit.token_ids)
            answer.tokens.extend(commit.token_ids)
            answer.verified.append(commit.token_ids)
            answer.proposals.append(proposal)
        del answer.tokens[count:]
        return answer
