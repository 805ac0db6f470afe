"""The draft role: holds a draft, serves sessions of other workers, and lends itself to the last stage beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from services.dtypes import WEIGHT_DTYPES
from services.errors import CLOSED, FailedPrecondition, InvalidArgument
from services.messages.description import DraftDescription, FeatureTransport, HeadPlace, Role, StepEngine
from services.messages.draft_session import DraftAnswer, OpenDraft, Propose
from services.messages.loading import LoadDraft
from services.messages.snapshots import SnapshotOwner
from services.messages.steps import FeatureSlice, Location, SnapshotPart, SnapshotRestore, SnapshotSave
from services.messages.tensors import WireTensor
from services.model.families import read_model_config
from services.net.server import Registration
from services.rpc.draft import DraftServicer
from shard_worker.cache.prefix_state import trimmable
from shard_worker.device.dtypes import dtype_to_name, from_wire, to_wire
from shard_worker.device.executor import DeviceThread, device_error
from shard_worker.drafting.drafters import Draft, DraftState, drafter_of
from shard_worker.drafting.embedding_rows import matrix_name, rows_of_checkpoint
from shard_worker.drafting.engine import DraftEngine, DraftRequest, check_start, make_engine
from shard_worker.drafting.link import restore_draft, save_draft
from shard_worker.model.features import Features
from shard_worker.roles import MAX_ROWS, RoleResources, WorkerRole
from shard_worker.session_record import SessionRecord
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.weights.checkpoint import Checkpoint
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.weight import Weight

log = structlog.get_logger()

MAX_LENGTH = 1 << 20
"""The most tokens of a session: no target's context is longer."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft.

    part: what it was loaded by. engine: the draft as sessions from other workers use it; a stage beside it makes
    another one, with its own head.
    """

    part: LoadDraft
    engine: DraftEngine
    keeper: SnapshotKeeper

    @property
    def draft(self) -> Draft:
        return self.engine.draft


class DraftRole(WorkerRole[LoadDraft]):
    """Implements `services.rpc.draft.DraftPort`."""

    description_field = "draft"
    snapshot_owner = SnapshotOwner.DRAFT

    def __init__(self, resources: RoleResources) -> None:
        super().__init__(resources)
        self._thread, self._location, self._store = resources.thread, resources.location, resources.store
        # Beside a stage the draft sits where the head is: on the last device.
        self._device = resources.devices[-1]
        self.loaded: LoadedDraft | None = None
        self.sessions = set[LocalDraftSession]()

    @property
    def part(self) -> LoadDraft | None:
        return None if self.loaded is None else self.loaded.part

    @property
    def keeper(self) -> SnapshotKeeper | None:
        return None if self.loaded is None else self.loaded.keeper

    def registrations(self) -> list[Registration]:
        return [DraftServicer(self, self.resources.links).register]

    def localize(self, part: LoadDraft) -> LoadDraft:
        if part.head_place is HeadPlace.SHARED and Role.TARGET not in self.resources.roles:
            raise FailedPrecondition(
                "this worker has no stage beside the draft: use head place loaded or projected",
                field="head_place",
            )
        return super().localize(part)

    @property
    def open_sessions(self) -> int:
        return len(self.sessions)

    @property
    def session_bytes(self) -> int:
        return sum(session.held_bytes for session in self.sessions)

    def load(self, part: LoadDraft, on_progress: Callable[[int, int], None]) -> None:
        """Load a draft, and for HeadPlace.LOADED the target's lm_head.

        Raises what `DraftKind.load` raises, and InvalidArgument for a head of another shape.
        """
        if self.loaded is not None:
            self.loaded = None
            # Before anything is loaded: sessions that have ended refer to themselves, and to the draft that was here.
            gc.collect()
        checkpoint = open_checkpoint(part.draft_path, "--draft", part.quantization)
        pool = self.resources.pools.get(self._device)
        projected = part.head_place is HeadPlace.PROJECTED
        drafter = drafter_of(checkpoint)
        draft = drafter.load(checkpoint, self._device, part.dtype, on_progress, pool, projected=projected)
        engine = DraftEngine(draft)
        if part.head_place is HeadPlace.LOADED:
            target = open_checkpoint(part.model_path, quantization=part.target_quantization)
            head = None if draft.own_head is not None else self._load_head(target, draft)
            cap = read_model_config(target.config).logit_cap
            engine = make_engine(draft, rows_of_checkpoint(target), head, graphs=self.resources.graphs, cap=cap)
            try:
                engine.prepare()
            except Exception as error:
                if device_error(error) is not error:
                    # Plain torch cannot do without memory, nor on a GPU that is broken.
                    raise
                # Whatever a compiler may lack on this host, plain torch has what it needs.
                log.warning("kernels.failed", error=f"{type(error).__name__}: {error}"[:500])
                engine = replace(engine, runner=None)
        keeper = SnapshotKeeper(
            self._store,
            self._thread,
            SnapshotOwner.DRAFT,
            draft.fingerprint,
            None,
            MAX_LENGTH,
            draft.state_groups(),
            (self._device,),
            self._store.generation(SnapshotOwner.DRAFT),
        )
        self.loaded = LoadedDraft(part, engine, keeper)

    def unload(self) -> None:
        self.loaded = None

    def prepare(self) -> None:
        # Beside a stage, whose head it shares, the stage prepares both.
        if (target := self.resources.roles.get(Role.TARGET)) is not None:
            target.prepare()

    def describe(self) -> DraftDescription | None:
        if self.loaded is None:
            return None
        draft, part = self.loaded.draft, self.loaded.part
        return DraftDescription(
            fingerprint=draft.fingerprint,
            block_size=draft.config.block_size,
            mask_token_id=draft.config.mask_token_id,
            capture_layers=draft.config.capture_layers,
            hidden_size=draft.config.hidden_size,
            vocab_size=draft.config.vocab_size,
            num_target_layers=draft.config.num_target_layers,
            head_place=part.head_place,
            feature_transport=part.feature_transport,
            max_position=draft.config.max_position,
            dtype=dtype_to_name(draft.dtype),
            weight_bytes=draft.weight_bytes,
            state_trimmable=trimmable(self.loaded.keeper.groups),
            step_engine=self._step_engine(self.loaded),
            quantization=part.quantization,
            draft_vocab_size=draft.config.draft_vocab_size,
        )

    async def open(self, request: OpenDraft) -> LocalDraftSession:
        self.resources.lease.check(request.holder_id)
        loaded = self.loaded
        if loaded is None:
            raise FailedPrecondition("no draft is loaded on this worker", reason="NOT_LOADED")
        if loaded.draft.fingerprint != request.fingerprint:
            raise FailedPrecondition(
                f"this worker holds draft {loaded.draft.fingerprint}, the session is for {request.fingerprint}",
                reason="FINGERPRINT_MISMATCH",
                field="fingerprint",
            )
        if not 1 <= request.max_length <= MAX_LENGTH:
            raise InvalidArgument(
                f"max_length is {request.max_length}; it must be between 1 and {MAX_LENGTH}", field="max_length"
            )
        state = await self._thread.submit(loaded.draft.allocate, request.max_length)
        return LocalDraftSession(self, self._thread, loaded, state, request, self._location(None))

    def _step_engine(self, loaded: LoadedDraft) -> StepEngine:
        # Beside a stage it is another engine that computes, by kernels where the draft has any.
        shared = loaded.part.head_place is HeadPlace.SHARED
        if not (loaded.draft.has_kernels if shared else loaded.engine.runner is not None):
            return StepEngine.TORCH
        return StepEngine.GRAPHS if self.resources.graphs else StepEngine.KERNELS

    def _load_head(self, target: Checkpoint, draft: Draft) -> Weight:
        """Return the target's lm_head [vocab, hidden] on the draft's device and in its dtype."""
        tied = "lm_head.weight" not in target.headers
        name = matrix_name(target, "embed_tokens.weight") if tied else "lm_head.weight"
        if target.shape(name) != (draft.config.vocab_size, draft.config.hidden_size):
            raise InvalidArgument(
                f"the target's {name} has shape {list(target.shape(name))}, the draft needs "
                f"[{draft.config.vocab_size}, {draft.config.hidden_size}]",
                field=name,
            )
        return target.weight(name, self._device.torch_device, draft.dtype).prepared()


class LocalDraftSession:
    """Implements `services.rpc.draft.DraftSession` on this worker's device.

    state: the session's context in the draft.
    """

    def __init__(
        self,
        role: DraftRole,
        thread: DeviceThread,
        loaded: LoadedDraft,
        state: DraftState,
        request: OpenDraft,
        location: Location,
    ) -> None:
        self._role, self._thread, self._loaded, self.state = role, thread, loaded, state
        self._max_length, self._location = request.max_length, location
        self._record = SessionRecord(request.request_id, request.trace, location, None)
        # The slices of one set of rows arrive one after the other, and count once all are there.
        self._gathered = Features()
        self.host, self.device = location.host, loaded.draft.device.name
        self.max_tensor_bytes = MAX_ROWS * loaded.draft.config.hidden_size * 4
        self._closed = False
        role.sessions.add(self)

    async def feature_slice(self, piece: FeatureSlice) -> None:
        rows = self._check_shape("features", piece.features)
        check_start(self.state, piece.start_position)
        if self.state.length + rows > self._max_length:
            raise InvalidArgument(f"features reach beyond the session's {self._max_length} tokens", field="features")
        device = self._loaded.draft.device.torch_device
        if self._loaded.part.feature_transport is FeatureTransport.SUM:
            if piece.capture_index is not None:
                raise InvalidArgument("capture_index is present, but this draft takes the sum", field="capture_index")
            features = Features(total=from_wire(piece.features, device))
        else:
            slices = self._gathered.slices
            if piece.capture_index != len(slices):
                raise InvalidArgument(
                    f"capture_index is {piece.capture_index}, expected {len(slices)}",
                    field="capture_index",
                )
            if slices and len(slices[0]) != rows:
                raise InvalidArgument(
                    f"slices of one step differ in their rows: {len(slices[0])} and {rows}",
                    field="features",
                )
            slices[len(slices)] = from_wire(piece.features, device)
            if len(slices) < len(self._loaded.draft.config.capture_layers):
                return
            features, self._gathered = self._gathered, Features()
        await self._thread.submit(self._record.timed, self._append, features, piece.start_position)

    async def propose(self, request: Propose) -> DraftAnswer:
        draft = self._loaded.draft
        self._record.steps += 1
        if request.position + request.tokens + 1 > self._max_length + draft.config.block_size:
            raise InvalidArgument("position lies beyond the session's max_length", field="position")
        if not request.token_id < draft.config.vocab_size:
            raise InvalidArgument(
                f"token_id {request.token_id} is not below {draft.config.vocab_size}",
                field="token_id",
            )
        if self._loaded.part.head_place is HeadPlace.LOADED:
            return await self._thread.submit(self._record.timed, self._draft_tokens, request)
        if request.embed is None or self._check_shape("embed.rows", request.embed) != 2:
            raise InvalidArgument(
                "embed.rows must hold the known and the mask token's rows, [2, hidden]",
                field="embed.rows",
            )
        return await self._thread.submit(self._record.timed, self._hidden, request)

    async def save_snapshot(self, save: SnapshotSave) -> SnapshotPart:
        return await save_draft(self._loaded.keeper, self.state, save, self._location)

    async def restore_snapshot(self, restore: SnapshotRestore) -> SnapshotPart:
        if restore.length > self._max_length:
            raise InvalidArgument(
                f"length is {restore.length}, the session holds {self._max_length} tokens", field="length"
            )
        return await restore_draft(self._loaded.keeper, self.state, restore, self._location)

    @property
    def held_bytes(self) -> int:
        """Memory that the session's state takes by now."""
        return self.state.size_bytes

    async def close(self, why: str = CLOSED) -> None:
        if not self._closed:
            self._closed = True
            self._role.sessions.discard(self)
            self._record.end(why, self.state.length)

    def _append(self, features: Features, start: int) -> None:
        self._thread.computes("features", features.count)
        self._loaded.engine.append(self.state, features, start)

    def _draft_tokens(self, request: Propose) -> tuple[int, ...]:
        self._thread.computes("draft", request.tokens)
        draft_request = DraftRequest(request.step, request.position, request.token_id, request.tokens)
        return self._loaded.engine.propose(self.state, draft_request)

    def _hidden(self, request: Propose) -> DraftAnswer:
        assert request.embed is not None
        self._thread.computes("draft", request.tokens)
        engine = self._loaded.engine
        rows = from_wire(request.embed, engine.draft.device.torch_device)
        hidden = engine.hidden(self.state, request.position, rows, request.tokens)
        own_head = engine.draft.own_head
        if own_head is None:
            return to_wire(hidden)
        [draft_tokens] = own_head.choose(hidden, [request.token_id], [request.tokens])
        return draft_tokens

    def _check_shape(self, field: str, tensor: WireTensor) -> int:
        """Return the number of rows. Raises InvalidArgument for what is not floats [rows, hidden]."""
        hidden = self._loaded.draft.config.hidden_size
        if len(tensor.shape) != 2 or tensor.shape[1] != hidden or tensor.dtype not in WEIGHT_DTYPES:
            raise InvalidArgument(
                f"{field} has shape {list(tensor.shape)} of {tensor.dtype}; expected floats [rows, {hidden}]",
                field=field,
            )
        if not 1 <= tensor.shape[0] <= MAX_ROWS:
            raise InvalidArgument(
                f"{field} has {tensor.shape[0]} rows; expected 1 to {MAX_ROWS}",
                field=field,
            )
        return tensor.shape[0]


def make_role(resources: RoleResources) -> DraftRole:
    """Make the role; the worker finds this function by the module's name."""
    return DraftRole(resources)
