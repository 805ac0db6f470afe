"""Stages and drafts of one process joined into a chain, and a small client that drives a session on it.

Everything is the engine's own but the network: addresses lead to the roles themselves.
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
from shard_worker.device.devices import parse_devices
from shard_worker.device.executor import DeviceThread
from shard_worker.roles import RoleResources
from shard_worker.roles.draft import DraftRole
from shard_worker.roles.target import TargetRole
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.snapshots.store import SnapshotStore
from shard_worker.snapshots.transfer import SnapshotTransfer
from tests.shard_worker.tiny import Tiny, ignore_progress, load_stage

BLOCK = 8
DRAFT_ADDRESS = "draft:1"
BUDGET = 64 << 20
CAPTURED = {"qwen3-sliding": (2, 0, 3), "qwen3": (2, 0, 3), "qwen3_5": (6, 0, 7)}
"""What the drafts of the `chain` fixture read, by checkpoint."""

FULL, SLIDING = "full_attention", "sliding_attention"
DRAFTS: dict[str, dict[str, Any]] = {
    "session": {},
    "sliding": {"layer_types": (SLIDING, FULL), "sliding_window": 10},
    "all-sliding": {"layer_types": (SLIDING, SLIDING), "sliding_window": 6, "is_causal": False},
}
"""Shapes of drafts that the `chain` fixture makes."""

Script = Callable[[list[int]], Sequence[int]]
"""All tokens produced so far -> guesses for the next verify, in place of the draft's."""


class Lane:
    """One end of a step lane between two stages of this process. carries: whether it takes a step.

    Stages hear of a step from the thread that sends it, and so not before it has all come.
    """

    def __init__(self, carries: Callable[[Forward], bool]) -> None:
        self._carries = carries
        self.other: Lane | None = self
        self.carried: list[Forward] = []
        self.took: Callable[[Forward], None] = lambda _: None
        self.expected: list[Forward] = []

    def listen(
        self,
        took: Callable[[Forward], None],
        failed: Callable[[FlashsplitError], None],
        *,
        on_begun: Callable[[Forward, bool], None] = lambda _, __: None,
        **_: int,
    ) -> None:
        self.took, self.failed, self.begun = took, failed, on_begun

    def expect(self, forward: Forward, came: Callable[[memoryview], None], *, features_follow: bool = False) -> None:
        self.expected.append(forward)
        self.release_expected = came

    def prepare(self, forward: Forward) -> None:
        raise AssertionError("on the CPU a step is there at once")

    def send(self, forward: Forward, there: Callable[[], object] | None = None) -> bool:
        assert there is None, "on the CPU a step is there at once"
        if self.other is None or not self._carries(forward):
            return False
        self.carried.append(forward)
        self.other.took(forward)
        return True

    def close(self) -> None:
        self.other = None


class Directory:
    """Stands in for `services.rpc.peers.Peers`: addresses of this process."""

    def __init__(self, carries: Callable[[Forward], bool] | None = None) -> None:
        """carries: what lanes between stages take; None for no lanes."""
        self.stages: dict[str, Any] = {}
        self.drafts: dict[str, Any] = {}
        self.lanes: list[tuple[Lane, Lane]] = []
        self._carries = carries

    async def stage(self, address: str) -> Any:
        return SimpleNamespace(open=functools.partial(self._open, self.stages[address]))

    async def _open(self, role: TargetRole, request: OpenSession, *, steps: bool = False) -> StageSession:
        if not steps or self._carries is None:
            return await role.open(request)
        # What goes down may be refused; what is told up the chain always arrives.
        own, other = Lane(self._carries), Lane(lambda _: True)
        own.other, other.other = other, own
        self.lanes.append((own, other))
        session = await role.open(request, cast(StepLane, other))
        session.step_lane = cast(StepLane, own)
        return session

    async def draft(self, address: str) -> Any:
        return self.drafts[address]

    async def worker(self, address: str) -> Any:
        async def describe() -> Any:
            return SimpleNamespace(draft=self.drafts[address].describe())

        return SimpleNamespace(describe=describe)


class Kept:
    """What one worker keeps of prefixes, and its end of SnapshotService."""

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
    devices: str = "cpu",
    *,
    host: str = "here",
    address: str = "here:1",
    store: SnapshotStore | None = None,
    peers: object | None = None,
    roles: Mapping[Role, Any] = MappingProxyType({}),
) -> RoleResources:
    """What a role gets of a worker of this process. peers: by default nobody else is there."""
    return RoleResources(
        thread=thread,
        devices=parse_devices(devices),
        peers=cast(Peers, Directory() if peers is None else peers),
        location=lambda stage: Location(stage, host, "cpu", address),
        store=SnapshotStore(1 << 20) if store is None else store,
        roles=roles,
    )


class Chain:
    """Workers that hold a checkpoint cut into stages, and a draft: beside the last stage, or in a worker of its own.

    kept: what each stage's worker keeps; draft_kept: the draft's, which is the last stage's where both share a worker.
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
        carries: Callable[[Forward], bool] | None = None,
    ) -> None:
        """carries: as in `Directory`."""
        layers = load_stage(path).config.num_layers
        bounds = [0, *cuts, layers]
        self.ranges = [LayerRange(*pair) for pair in zip(bounds, bounds[1:], strict=False)]
        self.directory = Directory(carries)
        self._threads: list[DeviceThread] = []
        self.draft_role: DraftRole | None = None
        self.kept = [Kept(budget) for _ in self.ranges]
        self.draft_kept = self.kept[-1] if place is HeadPlace.SHARED else Kept(budget)
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
                    store=self.draft_kept.store,
                )
            )
            self.draft_kept.draft = self.draft_role
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
                    devices,
                    host=f"host-{index}",
                    address=f"stage:{index}",
                    store=self.kept[index].store,
                    peers=self.directory,
                    roles={Role.DRAFT: self.draft_role} if beside else {},
                )
            )
            self.kept[index].stage = role
            role.load(LoadTarget(str(path), held, dtype, capture), ignore_progress)
            role.prepare()
            self.directory.stages[f"stage:{index}"] = role
            self.roles.append(role)

    def _thread(self) -> DeviceThread:
        self._threads.append(DeviceThread(1))
        return self._threads[-1]

    @property
    def stores(self) -> list[SnapshotStore]:
        """Each worker's, the draft's last where it has a worker of its own."""
        return list(dict.fromkeys(kept.store for kept in (*self.kept, self.draft_kept)))

    def forget(self) -> None:
        """Free all prefixes; nothing may stay counted."""
        for store in self.stores:
            # Those that are built on can only go behind what builds on them.
            while sum(store.free(kept.snapshot_id) for kept in list(store)):
                pass
            assert (store.held_bytes, len(store)) == (0, 0)

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()

    @property
    def fingerprint(self) -> str:
        loaded = self.roles[0].loaded
        assert loaded is not None
        return loaded.fingerprint

    def request(self, stage: int = 0, **changes: Any) -> OpenSession:
        """A session from a stage on."""
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
        session = await self.roles[0].open(self.request(**changes))
        try:
            yield Client(session)
        finally:
            await session.close()


class MakeChain:
    """Chains by checkpoint, cuts, draft (True: of shape "session") and options; each made on first use and kept."""

    def __init__(self, tiny: Tiny) -> None:
        self._tiny = tiny
        self.made: dict[Any, Chain] = {}

    def __call__(self, name: str, cuts: tuple[int, ...] = (), drafted: bool | str = False, **options: Any) -> Chain:
        key = (name, cuts, drafted, *options.items())
        if key not in self.made:
            draft = None
            if drafted:
                shape = drafted if isinstance(drafted, str) else "session"
                draft = self._tiny.draft(name, shape, target_layer_ids=CAPTURED[name], **DRAFTS[shape])
            self.made[key] = Chain(self._tiny.path(name), cuts, draft=draft, **options)
        return self.made[key]


@dataclass(frozen=True)
class Answer:
    """What a run produced: all tokens, and those of each verify."""

    tokens: list[int]
    verified: list[tuple[int, ...]]
    proposals: list[tuple[int, ...]]


class Client:
    """Sends steps one after the other and reads their answers, as a coordinator does."""

    def __init__(self, session: StageSession) -> None:
        self.session = session
        self.events: AsyncIterator[Event] = session.events()
        self.steps = self.length = 0

    def frame(self, kind: StepKind, token_ids: Sequence[int], propose: int = 0, **changes: Any) -> Forward:
        """The next step in sequence, with some fields changed."""
        return replace(Forward(self.steps, self.length, tuple(token_ids), kind, propose), **changes)

    async def send(self, frame: Forward) -> None:
        await self.session.forward(frame)
        self.steps += 1

    async def commit(self) -> Commit:
        event = await anext(self.events)
        assert isinstance(event, Commit), event
        self.length = event.length
        return event

    async def step(self, kind: StepKind, token_ids: Sequence[int], propose: int = 0) -> tuple[Commit, tuple[int, ...]]:
        """One step: what it committed, and the guesses where some were asked for."""
        await self.send(self.frame(kind, token_ids, propose))
        commit = await self.commit()
        if not propose:
            return commit, ()
        proposal = await anext(self.events)
        assert isinstance(proposal, Proposal), proposal
        assert proposal.step == commit.step
        return commit, proposal.token_ids

    async def prefill(self, token_ids: Sequence[int], chunk: int = 200) -> None:
        for first in range(0, len(token_ids), chunk):
            commit, _ = await self.step(StepKind.PREFILL, token_ids[first : first + chunk])
            assert commit.token_ids == ()

    async def resume(self, propose: int = 0) -> tuple[Commit, tuple[int, ...]]:
        """A token straight behind what was restored."""
        return await self.step(StepKind.RESUME, (), propose)

    async def save(self, snapshot_id: str, parent_id: str | None = None) -> SnapshotSaved:
        """Keep the state behind all that is committed."""
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
        """The next tokens, one a step."""
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
        """The next tokens by verifying guesses: the draft's, or a script's."""
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
