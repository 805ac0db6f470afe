"""The half of a session that runs on the device thread: what every stage of a chain does there.

It owns the caches and computes. Where step lanes lead to the neighbouring stages, steps go from device thread to device
thread, and the event loop only hears of them, by `DeviceEvent`s. What the last stage does stands in `last_stage`, what
all others do in `relay`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument
from services.messages.batch_frames import BatchAnswer, PreparedFrame
from services.messages.frames import TensorLimits
from services.messages.steps import Commit, Forward, OpenSession, Proposal, StepKind
from services.messages.tensors import WireTensor
from services.model.config import LayerKind
from services.streams.batch_members import BatchMembers
from services.streams.step_lane import StepLane
from shard_worker.batches.stepping import BatchResults, BatchRow, SteppingSession, WaitingStep
from shard_worker.cache.prefix_state import StateView
from shard_worker.device.dtypes import dtype_to_name, over_wire
from shard_worker.model.features import Features
from shard_worker.sampling.drawing import Draw
from shard_worker.sampling.verifier import ComputedStep
from shard_worker.session.checks import check_rows, check_tensors
from shard_worker.session.device_events import DeviceEvent, SessionBroken
from shard_worker.session.following import StepLimits, probable_following_step
from shard_worker.session.prelaunch import NextStep, Progress
from shard_worker.session.sent_rows import SentRows
from shard_worker.session.session_errors import reported
from shard_worker.session.session_host import SessionHost
from shard_worker.stage.stage import Stage, StageState, StepInput
from shard_worker.stage.step_graph import StepOutput, StepPart, StepRows

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import IssuedBlock
    from shard_worker.model.kernels.step_parameters import StepParameters


@dataclass(frozen=True, slots=True)
class Lanes:
    """The ways to the neighbouring stages past the event loop, where there are such.

    above: to the stage before this one, or None. below: to the stage behind this one, or None. caller: on the first
    stage, to the coordinator, which takes answers of several sessions at once; or None.
    """

    above: StepLane | None = None
    below: StepLane | None = None
    caller: StepLane | None = None


def incoming_captures(request: OpenSession, stage: Stage) -> list[int | None]:
    """Return what comes with a step of what the stages before this one captured for the session's draft, in order: the
    capture index of each slice, or None for the sum of all."""
    if request.draft is None:
        return []
    indices = [index for index, layer in enumerate(stage.captures) if layer < stage.layers.first]
    return [None] if indices and stage.summed else [*indices]


class DeviceSession(ABC):
    """The half of a session that runs on the device thread. It owns the session's caches until `close`.

    It is created on the event loop. Methods run on the device thread, unless they say otherwise.
    """

    def __init__(
        self,
        host: SessionHost,
        request: OpenSession,
        state: StageState,
        lanes: Lanes,
        handle: Callable[[DeviceEvent], None],
        sent: SentRows | None = None,
    ) -> None:
        """handle: takes the session's events, on the event loop. sent: as of `TargetSession`."""
        self._sent: Callable[[], SentRows | None] = (lambda: None) if sent is None else weakref.ref(sent)
        """Where rows and tokens of steps are kept as long as somebody may ask for them: the session, or who takes up
        what rests of it."""
        self._thread, self._stage, self._request = host.thread, host.stage, request
        self._batches, self._events, self._handle = host.batches, host.events, handle
        self._lanes, self._edges = lanes, host.edges
        self._progress = Progress(state)
        self._next = NextStep(host.thread, host.stage, host.batches, request, self._progress)
        self.captures: Sequence[int | None] = incoming_captures(request, host.stage)
        self._released = False
        """Whether the device may have begun with the step that a lane has just brought."""
        self._together = False
        """Whether the last step came together with others, and is answered with them."""
        self._came_together = -1
        """The last step that came so, whether it was computed or not."""
        recurrent = LayerKind.LINEAR in host.stage.config.layer_kinds
        self._told_in_stream = request.rest is not None and recurrent
        """Whether the coordinator has to hear of each token before it can hear of a stage that is lost: what rests of
        recurrent layers cannot be cut back to the tokens that it knows."""
        self._sent_ahead = -1
        """The last step that was sent on before anything else was made of its results."""
        self.limits = StepLimits()
        """Of the steps that follow by themselves, on a first stage."""

    # --- on the event loop

    def listen(self, max_tensor_bytes: int, max_feature_slices: int) -> None:
        """Take steps from the lane above from now on; to be called on the event loop, before the first step."""
        above = self._lanes.above
        if above is not None:
            above.listen(
                lambda step: self._take_from_lane(self._take_step, step),
                self._break,
                on_begun=functools.partial(self._guarded, self._next.release),
                max_tensor_bytes=max_tensor_bytes,
                max_feature_slices=max_feature_slices,
            )
            if above.batches is not None:
                above.batches.join(
                    above.stream_id, self, self._edges, TensorLimits(max_tensor_bytes, max_feature_slices)
                )

    @property
    def held_bytes(self) -> int:
        """Memory that the caches take by now; 0 once the session is closed. On either thread."""
        state = self._progress.state
        return 0 if state is None else state.size_bytes

    def state(self) -> StageState:
        """Return the session's memory, on either thread. Raises FailedPrecondition once the session is closed."""
        if self._progress.state is None:
            raise FailedPrecondition("the session is closed", reason="CLOSED")
        return self._progress.state

    def views(self) -> list[StateView]:
        """Return all that a prefix consists of on this stage, on either thread. Errors as in `state`."""
        return [view for caches in self.state().caches for view in caches.views()]

    def close(self) -> None:
        """Forget the caches; to be called on the event loop. Safe to call twice."""
        self._progress.state = None
        lanes = [lane for lane in (self._lanes.above, self._lanes.below, self._lanes.caller) if lane is not None]
        # The thread may be over.
        with contextlib.suppress(RuntimeError):
            if self.chain_length > 1:
                self._thread.queue(self._batches.forget, self)
            for lane in lanes:
                self._thread.queue(lane.close)

    def skip(self, step: int) -> None:
        """Count a step whose rows are computed already; on the event loop, before any other step."""
        self._progress.step = step

    # --- steps

    @abstractmethod
    def _take_step(self, forward: Forward, arrived_ns: int) -> None:
        """Take a step that came through the lane above."""

    @abstractmethod
    def _take_together(self, arrived_ns: int, step: ComputedStep) -> None:
        """Take what was computed for a step that came together with those of other sessions."""

    def prepare_frame(self, rows: Sequence[BatchRow]) -> PreparedFrame | None:
        """Return what can be made of the frame for the next stage while the device computes a batch, of this stage's
        sessions; None where there is none, or not for all of them."""
        return None

    @abstractmethod
    def send_ahead(self, results: BatchResults) -> None:
        """Send what the stages beside this one wait for, as `SteppingSession` says."""

    def step_of_batch(self, forward: Forward, arrived_ns: int) -> WaitingStep:
        """Return what is to be done with a step that came together with others.

        Errors as in `_commit_to` and `_check_next`.
        """
        if not self._batches.expects(self):
            # The commit may be among the jobs behind this step.
            self._commit_to(self.state(), forward.base_position)
            self._check_next(forward)
        self._came_together = forward.step
        return WaitingStep(self, forward, functools.partial(self._take_together, arrived_ns), self.break_by)

    @property
    def batches_above(self) -> BatchMembers[Any]:
        """The way on which steps came together with those of others, or are answered with them."""
        lane = self._lanes.above or self._lanes.caller
        assert lane is not None
        assert lane.batches is not None
        return lane.batches

    @property
    def stream_above(self) -> int:
        """The session's number on that way."""
        lane = self._lanes.above or self._lanes.caller
        assert lane is not None
        return lane.stream_id

    def _answer_together(self, commit: Commit, proposal: Proposal | None) -> None:
        """Answer a step together with those that it came with, or on the first stage was computed with."""
        self._edges.add_answer(self, BatchAnswer(self.stream_above, commit, proposal))

    @property
    def _tells_caller(self) -> bool:
        """Whether the coordinator takes answers from the device thread. Those behind which no step follows by itself
        are the event loop's in any case, which counts how many are unread."""
        caller = self._lanes.caller
        return caller is not None and caller.batches is not None and not self._told_in_stream

    @property
    def chain_length(self) -> int:
        """Of how many stages the session's chain is made."""
        return self._request.stage + 1 + len(self._request.route)

    @property
    def is_first(self) -> bool:
        """Whether the stage is the chain's first one."""
        return self._stage.embedding is not None

    @property
    def closed(self) -> bool:
        """Whether it takes no more steps."""
        return self._progress.state is None

    @property
    def most_rows(self) -> int:
        """How many rows the stage computes together."""
        return self._stage.most_rows_together

    def kind(self, forward: Forward) -> Hashable:
        """Return what is equal for steps that can be computed together; None for one that is computed alone."""
        stage, rows = self._stage, len(forward.token_ids)
        if not stage.joins(rows, forward.base_position + rows, uncommitted=forward.kind is StepKind.VERIFY):
            return None
        state = self._progress.state
        invariant_rows = None if state is None else state.batch_invariant_rows
        return (id(stage), self._request.draft is None, invariant_rows)

    def following(self, forward: Forward) -> Forward | None:
        """Return the step that follows this one by itself, without its tokens, whatever this one comes to but a stop
        token; None where none does. Where that depends on how many rows of this one count, it begins at the highest
        position that it may."""
        if forward.kind is not StepKind.DECODE or self._request.draft is not None or not self._goes_together():
            return None
        return probable_following_step(forward, self._request)

    def _goes_together(self) -> bool:
        """Return whether a step that was computed goes on, or is answered, together with those beside it."""
        return self._together

    def complete_step(self, parameters: StepParameters) -> None:
        """Queue that the device puts into the parameters of a step, which were sent, what it alone knows yet: where the
        rows begin that follow issued blocks, and their tokens."""
        raise AssertionError("no blocks are issued here")

    def is_copied_at_once(self, forward: Forward) -> bool:
        """Return whether all that is needed of a step's results is copied to the host right behind it, so that the
        next step may overwrite them: the rows for the next stage, or the most probable tokens where these decide."""
        return self._request.draft is None

    def draws(self, forward: Forward) -> list[Draw] | None:
        """Return how the tokens behind the last rows of a step that comes next are drawn, where nothing but the logits
        of these rows counts for that."""
        return None

    def draws_with_step(self, forward: Forward) -> list[Draw] | None:
        """Return the same where the logits are not needed for anything else, so that the tokens can be drawn with the
        step; None otherwise."""
        return None

    def issue_together(
        self, steps: Sequence[tuple[SteppingSession, Forward]], outputs: Sequence[StepPart]
    ) -> Sequence[IssuedBlock | None]:
        """Queue, behind a step of several sessions that was launched, deciding which of its rows count and the draft's
        blocks behind them. Returns what is on its way of each session, None where that is up to the host."""
        return [None] * len(steps)

    def take_back(self, *, computed: bool) -> None:
        """Forget the step that was begun last behind another one, and perhaps computed: it does not come, or later."""
        self._progress.step -= 1
        if computed and self._progress.state is not None:
            self._stage.take_back(self._progress.state)

    def compute(self, forward: Forward) -> ComputedStep:
        """Run the stage on a step alone, on a GPU without waiting for it. Errors as in `begin`."""
        return self.compute_begun(forward, self.begin(forward))

    def compute_begun(self, forward: Forward, given: StepInput) -> ComputedStep:
        """Run the stage on a step alone that was begun, of which `given` came."""
        started_ns = time.monotonic_ns()
        self._thread.computes("step", len(forward.token_ids))
        features, proposing = given.features or Features(), int(forward.propose_tokens > 0)
        if forward.kind is StepKind.RESUME:
            # Nothing to compute: the state is there, and the last stage has the logits.
            output = StepOutput(torch.empty(0, self._stage.config.hidden_size, dtype=self._stage.dtype))
            return ComputedStep(forward, output, features, started_ns, 1, 0, proposing)
        computed = self._stage.step(
            given.state,
            given.token_ids,
            given.features,
            uncommitted=given.uncommitted,
            hidden=given.hidden,
        )
        return ComputedStep(forward, computed, features, started_ns, 1, len(given.token_ids), proposing)

    def begin(self, forward: Forward, behind: int | None = None) -> StepInput:
        """Count a step that is about to be computed, take the memory for it, and return its rows.

        behind: the session's number in the step before, where only the device knows which of its rows count there.
        Raises FailedPrecondition where the session is closed, ResourceExhausted where there is no memory.
        """
        state = self.state()
        if state.pending and behind is None:
            # The commit may be among the jobs behind this step.
            self._stage.commit(state, forward.base_position)
        self._stage.reserve(state, len(forward.token_ids))
        self.begin_prepared(forward)
        features = self._features()
        if forward.activation is not None:
            # They stay on the host until the step is launched, which may have been prelaunched on the device.
            for piece in forward.features:
                assert features is not None
                tensor = over_wire(piece.features)
                if piece.capture_index is None:
                    features.total = tensor
                else:
                    features.slices[piece.capture_index] = tensor
        uncommitted = forward.kind is StepKind.VERIFY
        return StepInput(self._stage, state, forward.token_ids, features, uncommitted, forward.activation, behind)

    def prepare(self, forward: Forward) -> StepInput:
        """Take the memory for a step of a session without a draft that comes next, and return its rows.

        Raises as `begin`, and FailedPrecondition where rows of the last step are undecided.
        """
        state = self.state()
        if state.pending or forward.kind not in (StepKind.DECODE, StepKind.PREFILL) or self._request.draft is not None:
            raise FailedPrecondition("the session's next step depends on the last one", reason="OUT_OF_STEP")
        self._stage.reserve(state, len(forward.token_ids))
        return StepInput(self._stage, state, forward.token_ids, None, False, forward.activation)

    def is_prepared(self, forward: Forward, came: Forward, activation: WireTensor | None) -> bool:
        """Return whether a step that has come is the one that was prepared, with all that the device needs of it, so
        that it need not be checked again. forward: as of `following`. activation: has the step's row, and maybe those
        of others."""
        state = self._progress.state
        if state is None or state.pending or not forward.step == came.step == self._progress.step + 1:
            return False
        if not state.length == forward.base_position == came.base_position or len(came.token_ids) != 1:
            return False
        if came.kind is not forward.kind or came.features:
            return False
        expected = None if self.is_first else (dtype_to_name(self._stage.dtype), (self._stage.config.hidden_size,))
        found = None if activation is None else (activation.dtype, activation.shape[1:])
        return found == expected and came.token_ids[0] < self._stage.config.vocab_size

    def begin_prepared(self, forward: Forward) -> None:
        """Count a step that is about to be computed."""
        self._progress.step = forward.step
        self._next.forget()

    def _features(self) -> Features | None:
        """Return what a step's captured rows are added to, None where no draft wants any."""
        return None if self._request.draft is None else Features()

    def commit(self, step: int, length: int) -> None:
        """Let the rows of a verify count up to `length` tokens, unless that has been done already."""
        state = self._progress.state
        if state is not None and state.pending and step == self._progress.step:
            self._stage.commit(state, length)

    def _commit_to(self, state: StageState, length: int) -> None:
        """Commit the rows of a verify, where there are such, up to the position at which the next step begins.

        Raises InvalidArgument where that is none of theirs.
        """
        if state.pending:
            if not state.length < length <= state.length + state.pending:
                raise InvalidArgument(
                    f"base_position is {length} behind {state.pending} rows from {state.length}", field="base_position"
                )
            self.commit(self._progress.step, length)

    def _check_next(self, forward: Forward) -> None:
        """Raise FailedPrecondition or InvalidArgument where a step that came through a lane does not come next."""
        state = self.state()
        if forward.step != self._progress.step + 1 or state.pending:
            raise FailedPrecondition(
                f"step is {forward.step} behind step {self._progress.step}, "
                f"of which {state.pending} rows are undecided",
                reason="OUT_OF_STEP",
                field="step",
            )
        check_rows(forward, state.length, self._request, self._stage.config.vocab_size)
        check_tensors(forward, self._stage, self.captures)

    def tell(self, event: DeviceEvent, *, pressing: bool = True) -> None:
        """Tell the session on the event loop of an event, with the next `announce`, or when the thread waits; of one
        that is not pressing later."""
        # Behind those that are told soon.
        self._thread.do_put_off()
        self._events.put(self._handle, event, pressing=pressing)

    def tell_soon(self, event: DeviceEvent, *, pressing: bool = True) -> None:
        """Tell of an event as `tell` does, but behind what the device or another stage waits for."""
        self._thread.soon(functools.partial(self._events.put, self._handle, event, pressing=pressing))

    def announce(self) -> None:
        """Have the stages beside this one and the event loop hear what is for them, of all sessions here."""
        self._edges.flush()
        # Where the next step is on its way from another stage, and not from the event loop, that one hears of it when
        # this thread waits: it would take Python's lock from it. Who chooses how many draft tokens come next has to
        # know of the last ones in time.
        if self.chain_length == 1 or self._request.draft is not None:
            self._events.announce()

    # --- lanes

    def _take_from_lane(self, job: Callable[[Forward, int], None], forward: Forward) -> None:
        """Run `job` on a step that a lane brought, after what was submitted to the thread before."""
        self._released = self._next.take_released()
        self._thread.step_now(self._guarded, job, forward, time.monotonic_ns(), begun=self._released)

    def _compute_from_lane(self, forward: Forward, then: Callable[[ComputedStep], None]) -> None:
        """Have a step computed that a lane brought: at once where it is a lone session's. An error ends the session."""
        if not self._batches.expects(self) and (self._released or self._batches.lone):
            then(self.compute(forward))
        else:
            self._batches.add(self, forward, then, self.break_by)

    def break_by(self, error: Exception) -> None:
        """End the session by an error of one of its steps."""
        self._break(reported(error, self._request.request_id))

    def _expect_activation(self, following: Forward, rows: StepRows) -> None:
        """Tell the lane above that a step which was sent up will come down again with an activation, and behind that
        with features where the session has a draft."""
        if self._lanes.above is not None:
            shape = (len(rows.token_ids), self._stage.config.hidden_size)
            expected = replace(following, activation=WireTensor(dtype_to_name(self._stage.dtype), shape, b""))
            follow = bool(self.captures)
            release = functools.partial(self._guarded, self._next.release_known, rows, certain=not follow)
            self._lanes.above.expect(expected, release, features_follow=follow)

    def _guarded(self, job: Callable[..., None], *args: object, **options: object) -> None:
        """Run a job; an error ends the session and is raised."""
        try:
            job(*args, **options)
        except Exception as error:
            self.break_by(error)
            raise

    def _break(self, error: FlashsplitError) -> None:
        self.tell(SessionBroken(error))
        self._events.announce()
