"""The target role: loads a stage, and opens sessions on it and on the stages behind it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from services.errors import LEFT, FailedPrecondition, FlashsplitError, InvalidArgument
from services.messages.description import BatchCounts, FeatureTransport, TargetDescription
from services.messages.loading import LoadTarget
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import Location, OpenSession, StageIdentity
from services.net.server import Registration
from services.rpc.stage import StageServicer, StageSession
from services.streams.step_lane import StepLane
from shard_worker.batches.step_batches import StepBatches
from shard_worker.cache.prefix_state import trimmable
from shard_worker.device.dtypes import dtype_to_name
from shard_worker.drafting.draft_batches import DraftBatches
from shard_worker.drafting.link import DraftLink, LocalDraftLink
from shard_worker.roles import MAX_ROWS, RoleResources, WorkerRole
from shard_worker.roles.target.drafts import StageDrafts, capture_request
from shard_worker.roles.target.loaded_stage import LoadedStage, TargetEmbedding
from shard_worker.sampling.grammar_compiler import GrammarCompiler
from shard_worker.sampling.sampler import Sampler
from shard_worker.sampling.verifier import Verifier
from shard_worker.session.batch_edges import BatchEdges
from shard_worker.session.checks import check_limits, check_route
from shard_worker.session.device_events import DeviceEvents
from shard_worker.session.device_session import Lanes
from shard_worker.session.following import FollowingSession
from shard_worker.session.last_stage import LastStageSession
from shard_worker.session.relay import RelaySession
from shard_worker.session.resting import RestingSession, RestingSessions, held_length
from shard_worker.session.sent_rows import SentRows
from shard_worker.session.session import TargetSession
from shard_worker.session.session_host import SessionHost
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.stage.batch_invariance import allocate, try_out
from shard_worker.stage.loader import NOTHING_HELD, HeldWeights, StageLoader
from shard_worker.stage.stage import StageState
from shard_worker.weights.opening import open_checkpoint

Opened = TypeVar("Opened", bound=StageSession | DraftLink | None)

log = structlog.get_logger()


class TargetRole(WorkerRole[LoadTarget]):
    """Implements `services.rpc.stage.StagePort`.

    loaded: the stage, None before the first load and after one that failed. sessions: those that are open. batches:
    their steps that wait. resting: what is left of sessions that lost a stage behind this one.
    """

    description_field = "target"
    snapshot_owner = SnapshotOwner.STAGE

    def __init__(self, resources: RoleResources) -> None:
        super().__init__(resources)
        self._drafts = StageDrafts(resources)
        self.loaded: LoadedStage | None = None
        self.sessions = set[TargetSession]()
        self._events: DeviceEvents | None = None
        self._servicer = StageServicer(self, resources.links)
        # Drafts first: sessions wait for them with their next steps.
        self._drafting = DraftBatches(resources.thread, self._announce)
        resources.thread.before_waiting(self._announce_events)
        self.batches = StepBatches(resources.thread, self.sessions, self._drafting)
        self._edges = BatchEdges(
            resources.thread, self.batches, page_locked=resources.devices[0].torch_device.type != "cpu"
        )
        self.resting = RestingSessions(resources.kept_rows_bytes)
        for pool in resources.pools.values():
            pool.spare = self.resting.drop_one

    @property
    def part(self) -> LoadTarget | None:
        return None if self.loaded is None else self.loaded.part

    @property
    def keeper(self) -> SnapshotKeeper | None:
        return None if self.loaded is None else self.loaded.keeper

    @property
    def open_sessions(self) -> int:
        return len(self.sessions)

    @property
    def session_bytes(self) -> int:
        """Memory that open sessions take by now, that of drafts beside the stage included."""
        return sum(session.held_bytes for session in self.sessions)

    @property
    def batch_counts(self) -> BatchCounts:
        return self.batches.counts

    def registrations(self) -> list[Registration]:
        return [self._servicer.register]

    def end_links(self) -> None:
        self._servicer.end_batches()

    def fail_sessions(self, error: FlashsplitError) -> None:
        for session in [*self.sessions]:
            session.fail(error.copied())

    # --- loading

    def localize(self, part: LoadTarget) -> LoadTarget:
        capture = part.capture
        if capture is not None:
            capture = replace(capture, draft_path=self.resources.paths.get("draft_path", capture.draft_path))
            if capture.transport is FeatureTransport.SUM and not capture.draft_path:
                raise InvalidArgument("draft_path is missing: give this worker --draft", field="--draft")
        return super().localize(replace(part, capture=capture))

    def load(self, part: LoadTarget, on_progress: Callable[[int, int], None]) -> None:
        """Load a stage; runs on the device thread.

        on_progress: called with the bytes loaded so far and in all. Errors as in `StageLoader` and `capture_request`.
        """
        loaded, self.loaded = self.loaded, None
        self.resting.clear()
        resources = self.resources
        checkpoint = open_checkpoint(part.model_path, quantization=part.quantization, rope_scaling=part.rope_scaling)
        held, known = NOTHING_HELD, set[int]()
        if loaded is not None and _alike(loaded.part, part) and loaded.fingerprint == checkpoint.fingerprint:
            held, known = HeldWeights.of(loaded.stage, part.layers), loaded.invariant_rows
        # What the new stage does not take leaves the memory before anything is loaded: sessions that have ended refer
        # to themselves, and to the stage.
        was_loaded = loaded is not None
        del loaded
        if was_loaded:
            gc.collect()
        loader = StageLoader(checkpoint, part.layers, part.dtype, part.kv_dtype, part.host_experts)
        capture = capture_request(part, loader.config)
        stage = loader.load(
            resources.devices, capture, on_progress, graphs=resources.graphs, pools=resources.pools, held=held
        )
        if not held.has_products_of(stage):
            known = set()
        del held
        keeper = SnapshotKeeper(
            resources.store,
            resources.thread,
            SnapshotOwner.STAGE,
            checkpoint.fingerprint,
            stage.layers,
            stage.config.max_position,
            stage.state_groups(),
            resources.devices,
            resources.store.generation(SnapshotOwner.STAGE),
        )
        self.loaded = LoadedStage(
            part=part,
            stage=stage,
            family=stage.config.family,
            fingerprint=checkpoint.fingerprint,
            embedding=TargetEmbedding.of(stage, checkpoint),
            keeper=keeper,
            grammars=GrammarCompiler(checkpoint.directory, checkpoint.config, stage.config.vocab_size),
            invariant_rows=known,
        )

    def unload(self) -> None:
        self.loaded = None
        self.resting.clear()
        # They hold the engine of a draft, the head and what was captured with them.
        self._drafts = StageDrafts(self.resources)

    def prepare(self) -> None:
        """Compile and capture what steps will need, for what is loaded by now, and try out what sessions will ask for;
        runs on the device thread.

        Nothing is loaded any more where that raises FailedPrecondition or InvalidArgument, as `try_out` does.
        """
        if self.loaded is None:
            return
        if any(self.loaded.stage.runners):
            self._prepare_kernels(self.loaded)
        loaded = self.loaded
        asked = loaded.part.batch_invariant_rows
        if asked is None or loaded.stage.batch_invariant_rows(asked) is None:
            return
        try:
            try_out(loaded.stage, asked, loaded.invariant_rows)
        except FlashsplitError:
            self.unload()
            raise

    def _prepare_kernels(self, loaded: LoadedStage) -> None:
        stage, beside = loaded.stage, self._drafts.sharing(loaded.part)
        try:
            stage.prepare()
            if beside is not None and stage.head is not None:
                self.loaded = replace(loaded, embedding=loaded.embedding.beside(beside.draft, stage, loaded.part))
                self._drafts.engine(beside.draft, stage, self.loaded.embedding).prepare(self.loaded.embedding.dense)
        except Exception as error:
            # Whatever a compiler may lack on this host, plain torch has what it needs.
            log.warning("kernels.failed", error=f"{type(error).__name__}: {error}"[:500])
            self.loaded = replace(self.loaded or loaded, stage=stage.without_kernels())

    def describe(self) -> TargetDescription | None:
        """Return what the worker tells of the stage, None where none is loaded."""
        loaded = self.loaded
        if loaded is None:
            return None
        stage, capture = loaded.stage, loaded.part.capture
        return TargetDescription(
            fingerprint=loaded.fingerprint,
            family=loaded.family,
            layers=stage.layers,
            num_layers=stage.config.num_layers,
            hidden_size=stage.config.hidden_size,
            vocab_size=stage.config.vocab_size,
            max_position=stage.config.max_position,
            dtype=dtype_to_name(stage.dtype),
            capture_layers=stage.captures,
            feature_transport=None if capture is None else capture.transport,
            weight_bytes=stage.weight_bytes,
            state_trimmable=trimmable(loaded.keeper.groups),
            is_recurrent=stage.is_recurrent,
            step_engine=stage.engine,
            kv_dtype=loaded.part.kv_dtype,
            quantization=loaded.part.quantization,
            rope_scaling=loaded.part.rope_scaling,
            session_tokens=stage.session_tokens or 0,
            host_experts=loaded.part.host_experts,
            host_weight_bytes=stage.host_weight_bytes,
            batch_row_counts=stage.batch_row_counts,
            is_mixture=stage.is_mixture,
        )

    # --- opening a session

    async def open(self, request: OpenSession, above: StepLane | None = None) -> StageSession:
        """Begin a session, here and on the stages of its route, as the port says.

        Raises FailedPrecondition where another stage, or none, is loaded than the caller expects, and InvalidArgument
        for a request that no stage of this shape can serve; errors further as in `allocate`, `GrammarCompiler.compile`
        and `StageDrafts.open`.
        """
        location = self.resources.location(request.stage)
        allocating: asyncio.Future[StageState] | None = None
        with _located(location):
            loaded = self._loaded_for(request)
            stage = loaded.stage
            sampler = None if request.route else await self._sampler(request, loaded)
            resting = await self._resting(request)
            held, state = 0, None
            if resting is not None and sampler is not None:
                held, state = await self._taken_up(resting, request, loaded, None)
            elif resting is None:
                # Behind a step that others have begun; what else is opened need not wait for the next one too.
                allocating = self.resources.thread.submit(self._allocated, request, loaded)
        host = SessionHost(
            self.resources.thread,
            stage,
            loaded.keeper,
            StageIdentity(location, stage.layers, held),
            self.sessions,
            self.batches,
            self._drafting,
            self._edges,
            self._device_events(),
            self.resting,
        )
        # What is before the first stage is the coordinator.
        lanes = Lanes(above) if stage.embedding is None else Lanes(caller=above)
        session: TargetSession
        if sampler is None:
            steps = above is not None or stage.embedding is not None
            downstream: StageSession
            if allocating is not None:
                state, downstream = await _with_memory(allocating, self._open_next(request, steps=steps), location)
                sent = self._sent_rows(request)
            else:
                assert resting is not None
                try:
                    downstream = await self._open_next(request, steps=steps)
                except BaseException:
                    # The chain may not be whole yet.
                    self.resting.add(resting)
                    raise
                try:
                    held, state = await self._taken_up(resting, request, loaded, downstream)
                except BaseException:
                    await downstream.close()
                    raise
                sent = resting.sent if held else self._sent_rows(request)
                host = replace(host, identity=replace(host.identity, held_length=held))
            session = RelaySession(host, request, state, replace(lanes, below=downstream.step_lane), downstream, sent)
        else:
            taken = resting if held else None
            sent = self._sent_rows(request) if taken is None else taken.sent
            opening = self._open_draft(request, loaded, sent, None if taken is None else taken.draft)
            if allocating is not None:
                state, draft = await _with_memory(allocating, opening, location)
            else:
                draft = await opening
            assert state is not None
            verifier = Verifier(stage, sampler, request, draft.ahead if isinstance(draft, LocalDraftLink) else None)
            if taken is not None:
                verifier.last = taken.last or verifier.last
            session = LastStageSession(host, request, state, lanes, verifier, draft, sent)
        if not isinstance(session, RelaySession) or stage.embedding is None:
            return session
        following = FollowingSession(session, request, session.limits)
        session.on_answer = following.take
        return following

    async def forget(self, session_id: str) -> None:
        for session in self.sessions:
            if session.session_id == session_id:
                session.forget()
        resting = self.resting.take(session_id)
        if resting is not None and resting.request.route:
            port = await self.resources.peers.stage(resting.request.route[0].address)
            await port.forget(session_id)

    def _sent_rows(self, request: OpenSession) -> SentRows | None:
        """Return where a session notes what it may be asked for again; None where it does not rest."""
        return SentRows(self.resting.rows) if request.rest is not None and self.resources.kept_rows_bytes else None

    async def _resting(self, request: OpenSession) -> RestingSession | None:
        """Return what is left here of the session that is opened anew, if anything is."""
        if request.rest is None or not request.rest.token_ids:
            return None
        for session in [*self.sessions]:
            if session.session_id == request.rest.session_id:
                # A stage that stands by is there sooner than the news of the lost one.
                await session.close(LEFT)
        return self.resting.take(request.rest.session_id)

    async def _taken_up(
        self, resting: RestingSession, request: OpenSession, loaded: LoadedStage, downstream: StageSession | None
    ) -> tuple[int, StageState]:
        """Return how many tokens of a session that rested need not be computed again, and its memory from there on; 0
        and new memory where that is of no use. downstream: the session on the next stage, None on the last one. Errors
        as in `allocate`."""
        assert request.rest is not None
        needed = None
        if downstream is not None:
            needed = max(request.rest.first_position, min(stage.held_length for stage in downstream.stages))
        elif request.draft is not None and request.draft.address is not None:
            # The draft's session there is a new one.
            needed = request.rest.first_position

        def take_up() -> tuple[int, StageState]:
            self.batches.settle()
            if resting.draft is not None:
                self._drafting.forget(resting.draft)
            held = held_length(resting, request, loaded.stage, needed)
            if held:
                return held, resting.state
            resting.sent.forget()
            return 0, allocate(request, loaded.stage, loaded.invariant_rows)

        return await self.resources.thread.submit(take_up)

    def _allocated(self, request: OpenSession, loaded: LoadedStage) -> StageState:
        """Return the memory of a new session, whose first step is to come soon; on the device thread. Errors as in
        `allocate`."""
        state = allocate(request, loaded.stage, loaded.invariant_rows)
        self.batches.expect_first_step()
        return state

    def _device_events(self) -> DeviceEvents:
        """Return what the device thread tells this event loop."""
        if self._events is None or self._events.loop is not asyncio.get_running_loop():
            self._events = DeviceEvents()
        return self._events

    def _announce(self) -> None:
        self._edges.flush()
        self._announce_events()

    def _announce_events(self) -> None:
        if self._events is not None:
            self._events.announce()

    def _loaded_for(self, request: OpenSession) -> LoadedStage:
        """Return the loaded stage, once it is sure that the request is for it and that it can serve it."""
        self.resources.lease.check(request.holder_id)
        loaded = self.loaded
        if loaded is None:
            raise FailedPrecondition("no stage is loaded on this worker", reason="NOT_LOADED")
        if loaded.fingerprint != request.fingerprint:
            raise FailedPrecondition(
                f"this worker holds model {loaded.fingerprint}, the session is for {request.fingerprint}",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )
        check_route(request, loaded.stage)
        check_limits(request, loaded.stage, MAX_ROWS)
        return loaded

    @staticmethod
    async def _sampler(request: OpenSession, loaded: LoadedStage) -> Sampler:
        stage, grammar = loaded.stage, None
        assert stage.head is not None
        device = stage.head.weight.device
        if request.grammar is not None:
            grammar = await asyncio.to_thread(loaded.grammars.compile, request.grammar, request, device)
        return Sampler(
            request.sampling, request.prompt_length, stage.config.vocab_size, device, grammar, request.stop_token_ids
        )

    async def _open_draft(
        self, request: OpenSession, loaded: LoadedStage, sent: SentRows | None, kept: LocalDraftLink | None
    ) -> DraftLink | None:
        """Open the session's draft, where it has one; arguments and errors as of `StageDrafts.open`."""
        return None if request.draft is None else await self._drafts.open(request, loaded, sent, kept)

    async def _open_next(self, request: OpenSession, *, steps: bool) -> StageSession:
        """Open the session on the next stage of the route. steps: steps may go there by a lane."""
        hop = request.route[0]
        port = await self.resources.peers.stage(hop.address)
        return await port.open(
            replace(request, stage=request.stage + 1, layers=hop.layers, route=request.route[1:]), steps=steps
        )


@contextlib.contextmanager
def _located(location: Location) -> Iterator[None]:
    """Have an error say on which stage, host and device it came up."""
    try:
        yield
    except FlashsplitError as error:
        raise error.located(stage=location.stage, host=location.host, device=location.device) from None


async def _with_memory(
    allocating: asyncio.Future[StageState], opening: Coroutine[Any, Any, Opened], location: Location
) -> tuple[StageState, Opened]:
    """Return a session's memory here, and what was opened for it meanwhile: its next stage or its draft, which is
    closed where there is no memory, of which the error says that it came up at `location`."""
    opened = asyncio.ensure_future(opening)
    try:
        with _located(location):
            state = await allocating
    except BaseException:
        opened.cancel()
        # Its own error, or that it was cancelled, is of no interest any more.
        with contextlib.suppress(asyncio.CancelledError, FlashsplitError):
            if (other := await opened) is not None:
                await other.close()
        raise
    return state, await opened


def _alike(part: LoadTarget, other: LoadTarget) -> bool:
    """Return whether two stages are of one checkpoint and its weights are loaded the same way."""
    own = replace(part, layers=other.layers, capture=other.capture, kv_dtype=other.kv_dtype)
    return replace(own, batch_invariant_rows=other.batch_invariant_rows) == other
