"""The drafts of the sessions on a stage: beside it, or on a worker of their own; and whether they fit the target.

A session gets its draft where it is opened on the last stage. What a stage captures for a draft is known when it is
loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, Unavailable
from services.messages.description import DraftDescription, FeatureTransport, HeadPlace, Role
from services.messages.draft_session import OpenDraft
from services.messages.loading import LoadDraft, LoadTarget
from services.messages.steps import OpenSession
from services.model.config import ModelConfig
from services.model.draft_target import DraftAndTarget
from services.model.drafts import DraftConfig
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters import Draft, drafter_of
from shard_worker.drafting.engine import DraftEngine, make_engine
from shard_worker.drafting.link import DraftLink, LocalDraftLink, LostDraftLink, RemoteDraftLink
from shard_worker.roles import RoleResources
from shard_worker.roles.draft import DraftRole, LoadedDraft
from shard_worker.roles.target.loaded_stage import LoadedStage, TargetEmbedding
from shard_worker.session.sent_rows import SentRows
from shard_worker.session_record import SessionRecord
from shard_worker.stage.batch_runner import MAX_SESSIONS
from shard_worker.stage.loader import CaptureRequest
from shard_worker.stage.stage import Stage
from shard_worker.weights.opening import open_checkpoint

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import BlocksAhead


CAPTURE_MISMATCH = "CAPTURE_MISMATCH"
"""The reason of the error where a draft reads other blocks than the stage captures."""

DRAFT_ANSWER_S = 2.0
"""How long the draft's own worker may take to describe itself while a session is opened; longer only where connecting
to it takes long."""


class StageDrafts:
    """Opens the drafts of the sessions on one worker's stage."""

    def __init__(self, resources: RoleResources) -> None:
        self._resources = resources
        self._engine: tuple[Stage, Draft, DraftEngine] | None = None
        self._head: tuple[Stage, str, DraftHead] | None = None
        self._ahead: tuple[DraftEngine, BlocksAhead, BlocksAhead | None] | None = None

    def sharing(self, part: LoadTarget) -> LoadedDraft | None:
        """Return the draft beside the stage that was loaded for the head of this target, if there is one."""
        loaded = self._loaded
        return loaded if loaded is not None and _shares(loaded.part, part) else None

    def engine(self, draft: Draft, stage: Stage, embedding: TargetEmbedding) -> DraftEngine:
        """Return the draft joined with this stage's head; the same engine for the same two."""
        if self._engine is None or self._engine[0] is not stage or self._engine[1] is not draft:
            assert stage.head is not None
            # A stage is left without runners where kernels failed: those of a draft beside it cannot be relied on.
            kernels, graphs = bool(stage.runners), self._resources.graphs
            engine = make_engine(
                draft,
                embedding.rows,
                stage.head.weight,
                graphs=graphs,
                kernels=kernels,
                sessions=MAX_SESSIONS,
                cap=stage.head.cap,
            )
            self._engine = (stage, draft, engine)
        return self._engine[2]

    async def open(
        self, request: OpenSession, loaded: LoadedStage, sent: SentRows | None, kept: LocalDraftLink | None
    ) -> DraftLink:
        """Open the draft of a session that wants one; where there is none now, the session begins by losing it.

        sent: keeps what a draft elsewhere gets, and has what a session that rested has sent there; None where the
        session does not rest. kept: the draft beside the stage of a session that rested, whose context this one goes
        on from.
        Raises FailedPrecondition where the draft there reads other blocks; InvalidArgument where it was made for
        another target.
        """
        assert request.draft is not None
        address = request.draft.address
        try:
            if address is None:
                return await self._open_beside(request, loaded, kept)
            return await self._open_remote(request, address, loaded, sent)
        except FlashsplitError as error:
            if isinstance(error, InvalidArgument) or error.reason == CAPTURE_MISMATCH:
                # No other answer would have this draft either.
                raise
            lost = error
            if isinstance(error, FailedPrecondition):
                # Its worker is there without the draft, as one is that was started again.
                lost = Unavailable(error.message, reason=error.reason, **error.where)
            return LostDraftLink(lost.located(address=address))

    @property
    def _loaded(self) -> LoadedDraft | None:
        """The draft that this worker holds, if it has the role."""
        role = self._resources.roles.get(Role.DRAFT)
        return role.loaded if isinstance(role, DraftRole) else None

    async def _open_beside(
        self, request: OpenSession, target: LoadedStage, kept: LocalDraftLink | None
    ) -> LocalDraftLink:
        loaded, stage, embedding = self._loaded, target.stage, target.embedding
        if loaded is None:
            raise FailedPrecondition(
                "no draft is loaded beside the last stage: load one, or name the draft's address", reason="NOT_LOADED"
            )
        check_fit(loaded.draft.config, stage.config, DraftAndTarget(loaded.part.draft_path, target.part.model_path))
        check_captures(loaded.draft.config, stage)
        # One job: each would wait for the steps of other sessions.
        return await self._resources.thread.submit(self._link, request, loaded, stage, embedding, kept)

    def _link(
        self,
        request: OpenSession,
        loaded: LoadedDraft,
        stage: Stage,
        embedding: TargetEmbedding,
        kept: LocalDraftLink | None,
    ) -> LocalDraftLink:
        """Return the way to a session's draft beside the stage; runs on the device thread."""
        engine = self.engine(loaded.draft, stage, embedding)
        batch_invariant_rows = stage.batch_invariant_rows(request.batch_invariant_rows)
        if kept is not None and kept.engine is engine:
            state = kept.state
        else:
            state = engine.draft.allocate(request.max_length, batch_invariant_rows)
        location = self._resources.location(None)
        record = SessionRecord(request.request_id, request.trace, location, None)
        alone, together = self._blocks_ahead(request, stage, embedding, engine)
        ahead = None
        if alone is not None:
            from shard_worker.drafting.ahead import Ahead

            runner = stage.runners[-1]
            assert runner is not None
            ahead = Ahead(runner, alone, state, request.stop_token_ids)
        return LocalDraftLink(engine, state, loaded.keeper, location, record, ahead, together)

    def _blocks_ahead(
        self, request: OpenSession, stage: Stage, embedding: TargetEmbedding, engine: DraftEngine
    ) -> tuple[BlocksAhead | None, BlocksAhead | None]:
        """Return what issues blocks together with the step before them, where kernels on one device run all of both:
        for one session a step, and for several. All sessions share its memory."""
        matrix = embedding.dense
        if (
            engine.runner is None
            or not stage.runners
            or stage.runners[-1] is None
            or matrix is None
            or len(stage.segments) > 1
            or not stage.summed
            or matrix.device != engine.draft.device.torch_device
        ):
            return None, None
        # They need Triton, which is there where kernels run.
        from shard_worker.drafting.ahead import BlocksAhead
        from shard_worker.model.kernels.accept import STOPS

        if len(request.stop_token_ids) > STOPS:
            return None, None
        if self._ahead is None or self._ahead[0] is not engine:
            together = None if engine.batch_runner is None else BlocksAhead(engine.batch_runner, matrix)
            self._ahead = (engine, BlocksAhead(engine.runner, matrix), together)
        return self._ahead[1:]

    async def _open_remote(
        self, request: OpenSession, address: str, loaded: LoadedStage, sent: SentRows | None
    ) -> RemoteDraftLink:
        stage = loaded.stage
        assert stage.head is not None
        # A session without a draft is answered sooner than one that waits for a worker to come back.
        description = (await self._resources.peers.description(address, DRAFT_ANSWER_S)).draft
        if description is None:
            raise FailedPrecondition(f"no draft is loaded at {address}", reason="NOT_LOADED")
        check_fit(description, stage.config, DraftAndTarget(address, loaded.part.model_path))
        check_captures(description, stage)
        projected = description.head_place is HeadPlace.PROJECTED
        head = DraftHead(stage.head.weight)
        if projected and description.draft_vocab_size is None:
            head = await self._resources.thread.submit(self._head_of, description, loaded)
        port = await self._resources.peers.draft(address)
        session = await port.open(
            OpenDraft(request.request_id, description.fingerprint, request.max_length, request.trace, request.holder_id)
        )
        return RemoteDraftLink(
            self._resources.thread,
            session,
            stage.head.weight.device,
            projected,
            description.mask_token_id,
            loaded.embedding.rows,
            head,
            sent,
        )

    def _head_of(self, description: DraftDescription, loaded: LoadedStage) -> DraftHead:
        """Return this stage's head with the chooser of a draft elsewhere, which it loads once; on the device thread.

        Raises FailedPrecondition where the draft that the stage was loaded with is another one.
        """
        stage, capture, fingerprint = loaded.stage, loaded.part.capture, description.fingerprint
        if self._head is None or self._head[0] is not stage or self._head[1] != fingerprint:
            assert capture is not None
            assert stage.head is not None
            checkpoint = open_checkpoint(capture.draft_path, "--draft", description.quantization)
            device = self._resources.devices[-1]
            chooser = drafter_of(checkpoint).load_chooser(checkpoint, device, description.dtype)
            if chooser.nbytes and checkpoint.fingerprint != fingerprint:
                raise FailedPrecondition(
                    f"the draft there is {fingerprint}, this stage was loaded with {checkpoint.fingerprint}: load the "
                    "stages with the same draft",
                    reason=CAPTURE_MISMATCH,
                    field="draft",
                )
            self._head = (stage, fingerprint, DraftHead(stage.head.weight, chooser=chooser, cap=stage.head.cap))
        return self._head[2]


def capture_request(part: LoadTarget, target: ModelConfig) -> CaptureRequest | None:
    """Return what a stage is to capture for the draft that is loaded with it, None without a draft.

    Raises InvalidArgument where the draft was made for another target; errors as in `drafter_of`.
    """
    if part.capture is None:
        return None
    checkpoint = open_checkpoint(part.capture.draft_path, "--draft")
    config, fc = drafter_of(checkpoint).read_fc(checkpoint)
    names = DraftAndTarget(part.capture.draft_path, part.model_path)
    check_fit(config, target, names)
    if (last := max(config.capture_layers)) >= target.num_layers:
        raise names.refused(f"it captures block {last}, the target has {target.num_layers} blocks")
    summed = part.capture.transport is FeatureTransport.SUM
    return CaptureRequest(config.capture_layers, fc if summed else None)


def check_fit(draft: DraftConfig | DraftDescription, target: ModelConfig, names: DraftAndTarget) -> None:
    """Check that the draft was made for a target of this shape; raises InvalidArgument where it was not."""
    for size in ("hidden_size", "vocab_size"):
        own, expected = getattr(draft, size), getattr(target, size)
        if own != expected:
            raise names.refused(f"its {size} is {own}, the target's {expected}")


def check_captures(draft: DraftConfig | DraftDescription, stage: Stage) -> None:
    """Check that the stage captures what the draft reads.

    Raises FailedPrecondition where the stage was loaded without a draft or for another one.
    """
    if draft.capture_layers != stage.captures:
        raise FailedPrecondition(
            f"the draft reads blocks {list(draft.capture_layers)}, this stage captures {list(stage.captures)}: load "
            "the stages with the same draft",
            reason=CAPTURE_MISMATCH,
            field="draft",
        )


def _shares(draft: LoadDraft, target: LoadTarget) -> bool:
    """Return whether a draft shares the head of this target: one that was loaded before may be another target's."""
    return draft.head_place is HeadPlace.SHARED and draft.model_path == target.model_path
