"""The target role: holds a stage, opens sessions on it and on the stages behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog
import torch

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument
from services.messages.description import DraftDescription, FeatureTransport, HeadPlace, Role, TargetDescription
from services.messages.draft_session import OpenDraft
from services.messages.loading import LoadDraft, LoadTarget
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import OpenSession, StageIdentity
from services.model.config import ModelConfig
from services.model.drafts import DraftConfig
from services.net.server import Registration
from services.rpc.stage import StageServicer, StageSession
from services.streams.step_lane import StepLane
from shard_worker.cache.prefix_state import trimmable
from shard_worker.device.devices import Device
from shard_worker.device.dtypes import dtype_to_name
from shard_worker.drafting.drafters import Draft, DraftState, drafter_of
from shard_worker.drafting.embedding_rows import EmbeddingRows, copied_embedding, resident_embedding, rows_of_stage
from shard_worker.drafting.engine import DraftEngine, make_engine
from shard_worker.drafting.link import DraftLink, LocalDraftLink, RemoteDraftLink
from shard_worker.measure.random_checkpoint import open_checkpoint
from shard_worker.ops.deltanet import CHUNK_ROWS
from shard_worker.roles import MAX_ROWS, RoleResources, WorkerRole
from shard_worker.roles.draft import DraftRole, LoadedDraft
from shard_worker.sampling.grammar_compiler import GrammarCompiler
from shard_worker.sampling.sampler import Sampler
from shard_worker.sampling.verifier import Verifier
from shard_worker.session.following import FollowingSession
from shard_worker.session.last_stage import LastStageSession
from shard_worker.session.relay import RelaySession
from shard_worker.session.session import SessionHost, TargetSession
from shard_worker.session_record import SessionRecord
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.stage.exactness import allocate
from shard_worker.stage.loader import CaptureRequest, StageLoader
from shard_worker.stage.stage import Stage

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import Ahead

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage and where it came from."""

    part: LoadTarget
    stage: Stage
    family: str
    fingerprint: str
    matrix: torch.Tensor | None
    """The target's embedding where all of it is on the last device."""

    embedding: EmbeddingRows
    keeper: SnapshotKeeper
    grammars: GrammarCompiler
    exact: set[int]
    """Numbers of rows that exact steps were tried out with."""


class TargetRole(WorkerRole[LoadTarget]):
    """Implements `services.rpc.stage.StagePort`."""

    description_field = "target"
    snapshot_owner = SnapshotOwner.STAGE

    def __init__(self, resources: RoleResources) -> None:
        super().__init__(resources)
        self._thread, self._devices, self._peers = resources.thread, resources.devices, resources.peers
        self._location, self._store, self._graphs = resources.location, resources.store, resources.graphs
        self.loaded: LoadedStage | None = None
        self._engine: tuple[Stage, Draft, DraftEngine] | None = None
        self.sessions = set[TargetSession]()

    @property
    def part(self) -> LoadTarget | None:
        return None if self.loaded is None else self.loaded.part

    @property
    def keeper(self) -> SnapshotKeeper | None:
        return None if self.loaded is None else self.loaded.keeper

    @property
    def _draft_role(self) -> DraftRole | None:
        """The draft beside this stage."""
        role = self.resources.roles.get(Role.DRAFT)
        return role if isinstance(role, DraftRole) else None

    def registrations(self) -> list[Registration]:
        return [StageServicer(self, self.resources.links).register]

    def localize(self, part: LoadTarget) -> LoadTarget:
        capture = part.capture
        if capture is not None:
            capture = replace(capture, draft_path=self.resources.paths.get("draft_path", capture.draft_path))
            if capture.transport is FeatureTransport.SUM and not capture.draft_path:
                raise InvalidArgument("draft_path is missing: give this worker --draft", field="--draft")
        return super().localize(replace(part, capture=capture))

    @property
    def open_sessions(self) -> int:
        return len(self.sessions)

    @property
    def session_bytes(self) -> int:
        """What open sessions take by now, drafts beside the stage included."""
        return sum(session.held_bytes for session in self.sessions)

    def load(self, part: LoadTarget, on_progress: Callable[[int, int], None]) -> None:
        """Load a stage; runs on the device thread. Errors as in `StageLoader`."""
        self.loaded = None
        checkpoint = open_checkpoint(part.model_path)
        loader = StageLoader(checkpoint, part.layers, part.dtype, part.kv_dtype)
        stage = loader.load(self._devices, self._capture_request(part, loader), on_progress, graphs=self._graphs)
        self.loaded = LoadedStage(
            part,
            stage,
            stage.config.family,
            checkpoint.fingerprint,
            resident_embedding(stage),
            rows_of_stage(resident_embedding(stage), checkpoint),
            SnapshotKeeper(
                self._store,
                self._thread,
                SnapshotOwner.STAGE,
                checkpoint.fingerprint,
                stage.layers,
                stage.config.max_position,
                stage.state_groups(),
                self._devices,
                self._store.generation(SnapshotOwner.STAGE),
            ),
            GrammarCompiler(checkpoint.directory, checkpoint.config, stage.config.vocab_size),
            set(),
        )

    def prepare(self) -> None:
        """Compile and capture what steps will need, for what is loaded by now; runs on the device thread."""
        if self.loaded is None or not any(self.loaded.stage.runners):
            return
        stage, held = self.loaded.stage, None if self._draft_role is None else self._draft_role.loaded
        try:
            stage.prepare()
            if held is not None and stage.head is not None and _shares(held.part, self.loaded.part):
                self.loaded = self._with_embedding(self.loaded, held.draft.device)
                self._draft_engine(held, self.loaded).prepare()
        except Exception as error:
            # Whatever a compiler may lack on this host, plain torch has what it needs.
            log.warning("kernels.failed", error=f"{type(error).__name__}: {error}"[:500])
            self.loaded = replace(self.loaded, stage=stage.without_kernels())

    @staticmethod
    def _with_embedding(loaded: LoadedStage, device: Device) -> LoadedStage:
        """With the embedding beside the draft, where there is room for it."""
        if loaded.matrix is not None:
            return loaded
        checkpoint = open_checkpoint(loaded.part.model_path)
        matrix = copied_embedding(checkpoint, device, loaded.stage.dtype)
        return replace(loaded, matrix=matrix, embedding=rows_of_stage(matrix, checkpoint))

    def describe(self) -> TargetDescription | None:
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
            step_engine=stage.engine,
            kv_dtype=loaded.part.kv_dtype,
        )

    async def open(self, request: OpenSession, above: StepLane | None = None) -> StageSession:
        location = self._location(request.stage)
        try:
            loaded = self._expected(request)
            stage = loaded.stage
            self._check_limits(request, stage)
            sampler = None if request.route else await self._sampler(request, loaded)
            state = await self._thread.submit(allocate, request, stage, loaded.exact)
        except FlashsplitError as error:
            raise error.located(stage=request.stage, host=location.host, device=location.device) from None
        host = SessionHost(self._thread, stage, loaded.keeper, StageIdentity(location, stage.layers), self.sessions)
        session: TargetSession
        if sampler is None:
            downstream = await self._open_next(request, steps=above is not None or stage.embedding is not None)
            session = RelaySession(host, request, state, above, downstream)
        else:
            draft = None if request.draft is None else await self._open_draft(request, loaded)
            ahead = draft.ahead if isinstance(draft, LocalDraftLink) else None
            verifier = Verifier(stage, sampler, request, ahead)
            session = LastStageSession(host, request, state, above, verifier, draft)
        return session if stage.embedding is None else FollowingSession(session, request)

    @staticmethod
    async def _sampler(request: OpenSession, loaded: LoadedStage) -> Sampler:
        stage, grammar = loaded.stage, None
        assert stage.head is not None
        device = stage.head.weight.device
        if request.grammar is not None:
            grammar = await asyncio.to_thread(loaded.grammars.compile, request.grammar, request, device)
        return Sampler(request.sampling, request.prompt_length, stage.config.vocab_size, device, grammar)

    def _expected(self, request: OpenSession) -> LoadedStage:
        loaded = self.loaded
        if loaded is None:
            raise FailedPrecondition("no stage is loaded on this worker", reason="NOT_LOADED")
        if loaded.fingerprint != request.fingerprint:
            raise FailedPrecondition(
                f"this worker holds model {loaded.fingerprint}, the session is for {request.fingerprint}",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )
        stage = loaded.stage
        if stage.layers != request.layers:
            raise FailedPrecondition(
                f"this worker holds layers {stage.layers}, the session expects {request.layers}",
                reason="LAYER_MISMATCH",
                field="layers",
            )
        expected = stage.layers.last
        for hop in request.route:
            if hop.layers.first != expected:
                raise InvalidArgument(
                    f"route has layers {hop.layers} behind layer {expected}: gapped or overlapping",
                    field="route",
                )
            expected = hop.layers.last
        if expected != stage.config.num_layers:
            raise InvalidArgument(
                f"the route ends at layer {expected}, the model has {stage.config.num_layers}",
                field="route",
            )
        return loaded

    @staticmethod
    def _check_limits(request: OpenSession, stage: Stage) -> None:
        limits = {
            "max_length": stage.config.max_position,
            "max_rows": MAX_ROWS,
            "block_rows": CHUNK_ROWS,
        }
        for field, most in limits.items():
            value = getattr(request, field)
            if not 1 <= value <= most:
                raise InvalidArgument(f"{field} is {value}; it must be between 1 and {most}", field=field)
        vocabulary = stage.config.vocab_size
        for field, tokens in (
            ("logit_bias", request.sampling.logit_bias),
            ("stop_token_ids", request.stop_token_ids),
        ):
            if any(token >= vocabulary for token in tokens):
                raise InvalidArgument(f"{field} has token {max(tokens)}; they must be below {vocabulary}", field=field)

    async def _open_next(self, request: OpenSession, *, steps: bool) -> StageSession:
        hop = request.route[0]
        port = await self._peers.stage(hop.address)
        return await port.open(
            replace(request, stage=request.stage + 1, layers=hop.layers, route=request.route[1:]), steps=steps
        )

    async def _open_draft(self, request: OpenSession, loaded: LoadedStage) -> DraftLink:
        assert request.draft is not None
        assert loaded.stage.head is not None
        project, device = loaded.stage.head.project, loaded.stage.head.weight.device
        if request.draft.address is None:
            held = self._draft_role.loaded if self._draft_role is not None else None
            if held is None:
                raise FailedPrecondition(
                    "no draft is loaded beside the last stage: load one, or name the draft's address",
                    reason="NOT_LOADED",
                )
            _check_fit(held.draft.config, loaded.stage.config)
            _check_captures(held.draft.config, loaded.stage)
            return await self._open_local_draft(request, loaded, held)
        description = (await (await self._peers.worker(request.draft.address)).describe()).draft
        if description is None:
            raise FailedPrecondition(f"no draft is loaded at {request.draft.address}", reason="NOT_LOADED")
        _check_fit(description, loaded.stage.config)
        _check_captures(description, loaded.stage)
        port = await self._peers.draft(request.draft.address)
        session = await port.open(
            OpenDraft(request.request_id, description.fingerprint, request.max_length, request.trace)
        )
        return RemoteDraftLink(
            self._thread,
            session,
            device,
            description.head_place is HeadPlace.PROJECTED,
            description.mask_token_id,
            loaded.embedding,
            project,
        )

    async def _open_local_draft(self, request: OpenSession, loaded: LoadedStage, held: LoadedDraft) -> LocalDraftLink:
        engine = self._draft_engine(held, loaded)
        state = await self._thread.submit(engine.draft.allocate, request.max_length)
        location = self._location(None)
        return LocalDraftLink(
            self._thread,
            engine,
            state,
            held.keeper,
            location,
            SessionRecord(request.request_id, request.trace, location, None),
            await self._thread.submit(self._ahead, request, loaded, engine, state),
        )

    def _draft_engine(self, held: LoadedDraft, loaded: LoadedStage) -> DraftEngine:
        """The draft with this stage's head: made once for the two."""
        stage, draft = loaded.stage, held.draft
        if self._engine is None or self._engine[0] is not stage or self._engine[1] is not draft:
            assert stage.head is not None
            engine = make_engine(draft, loaded.embedding, stage.head.weight, graphs=self._graphs)
            self._engine = (stage, draft, engine)
        return self._engine[2]

    @staticmethod
    def _ahead(request: OpenSession, loaded: LoadedStage, engine: DraftEngine, state: DraftState) -> Ahead | None:
        """Where a block can be issued together with the step before it: all of it by kernels on one device."""
        stage = loaded.stage
        embedding, runner = loaded.matrix, stage.runners[-1] if stage.runners else None
        if (
            engine.runner is None
            or runner is None
            or embedding is None
            or len(stage.segments) > 1
            or not stage.summed
            or embedding.device != engine.draft.device.torch_device
        ):
            return None
        from shard_worker.drafting.ahead import Ahead
        from shard_worker.model.kernels.accept import STOPS

        if len(request.stop_token_ids) > STOPS:
            return None
        return Ahead(runner, engine.runner, state, embedding, request.stop_token_ids)

    @staticmethod
    def _capture_request(part: LoadTarget, loader: StageLoader) -> CaptureRequest | None:
        if part.capture is None:
            return None
        checkpoint = open_checkpoint(part.capture.draft_path, "--draft")
        config, fc = drafter_of(checkpoint).read_fc(checkpoint)
        _check_fit(config, loader.config)
        if max(config.capture_layers) >= loader.config.num_layers:
            raise InvalidArgument(
                f"the draft captures block {max(config.capture_layers)}, the target has "
                f"{loader.config.num_layers} blocks: name a draft made for this target",
                field="--draft",
            )
        summed = part.capture.transport is FeatureTransport.SUM
        return CaptureRequest(config.capture_layers, fc if summed else None)


def _check_fit(draft: DraftConfig | DraftDescription, target: ModelConfig) -> None:
    """Raises InvalidArgument when the draft was made for a target of another shape."""
    for size in ("hidden_size", "vocab_size"):
        own, wanted = getattr(draft, size), getattr(target, size)
        if own != wanted:
            raise InvalidArgument(
                f"the draft's {size} is {own}, the target's {wanted}: name a draft made for this target",
                field="--draft",
            )


def _check_captures(draft: DraftConfig | DraftDescription, stage: Stage) -> None:
    """Raises FailedPrecondition when the stage was loaded without a draft or for another one."""
    if draft.capture_layers != stage.captures:
        raise FailedPrecondition(
            f"the draft reads blocks {list(draft.capture_layers)}, this stage captures {list(stage.captures)}: load "
            "the stages with the same draft",
            reason="CAPTURE_MISMATCH",
            field="draft",
        )


def _shares(draft: LoadDraft, target: LoadTarget) -> bool:
    """Whether a draft shares the head of this target: one held from before may be another target's."""
    return draft.head_place is HeadPlace.SHARED and draft.model_path == target.model_path


def make_role(resources: RoleResources) -> TargetRole:
    """As `shard_worker.roles` says."""
    return TargetRole(resources)
