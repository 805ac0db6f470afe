"""What the sessions of a stage exchange with the stages beside it where steps of several are computed together: one
frame a batch and neighbour.

It gathers what leaves the stage until a batch is done, and hands over what comes to the sessions. Everything here runs
on the device thread, but where it says otherwise. It must not know how steps are computed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from services.errors import FailedPrecondition, FlashsplitError
from services.messages.batch_frames import BatchAnswer, BatchStep, BatchTokens, StepBatch
from services.messages.steps import Commit, FeatureSlice, Forward, StepKind
from services.messages.tensors import WireTensor
from services.streams.batch_members import BatchMembers
from shard_worker.batches.step_batches import StepBatches
from shard_worker.batches.stepping import WaitingStep
from shard_worker.device.dtypes import Leaving, page_locked, to_wire
from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.link import slices_of
from shard_worker.model.features import joined
from shard_worker.sampling.verifier import ComputedStep
from shard_worker.session.device_events import AnswerNotSent
from shard_worker.stage.step_graph import joined_rows, side_by_side

if TYPE_CHECKING:
    from shard_worker.session.device_session import DeviceSession
    from shard_worker.session.relay import RelayDeviceSession


class BatchEdges:
    """Implements `services.streams.batch_lane.BatchListener` for the sessions of one stage."""

    def __init__(self, thread: DeviceThread, batches: StepBatches, *, page_locked: bool) -> None:
        """page_locked: whether the stage begins on a GPU, to which copies go from page-locked memory."""
        self._thread, self._batches, self._page_locked = thread, batches, page_locked
        self._steps: dict[BatchMembers[Any], list[tuple[RelayDeviceSession, ComputedStep, int]]] = {}
        self._answers: dict[BatchMembers[Any], list[tuple[DeviceSession, BatchAnswer]]] = {}
        self._tokens: dict[BatchMembers[Any], list[tuple[int, int, int]]] = {}
        self._told: dict[BatchMembers[Any], list[tuple[DeviceSession, BatchAnswer]]] = {}
        """On the first stage, those for callers, whom no stage waits for."""

    # --- what leaves the stage

    def add_step(self, session: RelayDeviceSession, step: ComputedStep, arrived_ns: int) -> None:
        """Send a step that was computed on to the next stage, with all that are added before `flush`.

        arrived_ns: when it came, by `time.monotonic_ns`.
        """
        self._steps.setdefault(session.batches_below, []).append((session, step, arrived_ns))

    def add_answer(self, session: DeviceSession, answer: BatchAnswer) -> None:
        """Send a step's answer to the stage before, with all that are added before `flush`; to a caller behind what the
        device or another stage waits for."""
        if not session.is_first:
            self._answers.setdefault(session.batches_above, []).append((session, answer))
            return
        if not self._told:
            self._thread.soon(self._tell_callers)
        self._told.setdefault(session.batches_above, []).append((session, answer))

    def add_token(self, session: DeviceSession, step: int, token: int) -> None:
        """Send the token that a step came to on to the stage before, with all that are added before `send_tokens`."""
        self._tokens.setdefault(session.batches_above, []).append((session.stream_above, step, token))

    def send_tokens(self) -> None:
        """Send the tokens that were added. Where they do not arrive the answers say the same."""
        while self._tokens:
            lane, tokens = self._tokens.popitem()
            stream_ids, steps, token_ids = zip(*tokens, strict=True)
            lane.send_tokens(BatchTokens(stream_ids, steps, token_ids))

    def flush(self) -> None:
        """Send what was added. An error ends the sessions whose steps or answers it kept from going on."""
        while self._steps:
            lane, steps = self._steps.popitem()
            for sent in (True, False):
                part = [one for one in steps if one[0].was_sent(one[1].forward) is sent]
                try:
                    self._send_steps(lane, part, sent=sent)
                except Exception as error:
                    for sending, _, _ in part:
                        sending.break_by(error)
        while self._answers:
            lane, answers = self._answers.popitem()
            if not lane.send_answers([answer for _, answer in answers]):
                for session, _ in answers:
                    session.break_by(
                        FailedPrecondition("the socket for steps to the stage above is broken", reason="LANE_BROKEN")
                    )

    def _tell_callers(self) -> None:
        while self._told:
            lane, answers = self._told.popitem()
            if not lane.send_answers([answer for _, answer in answers]):
                # It may be slow to read; the sessions' own streams wait for it.
                for session, answer in answers:
                    session.tell(AnswerNotSent(answer))

    def _send_steps(
        self, lane: BatchMembers[Any], steps: Sequence[tuple[RelayDeviceSession, ComputedStep, int]], *, sent: bool
    ) -> None:
        """Send steps on, unless they were sent ahead of all else, and have their sessions take note of it."""
        if not steps:
            return
        activation, features = _on_host([step for _, step, _ in steps])
        now_ns = time.monotonic_ns()
        batch = StepBatch(
            tuple(BatchStep(session.stream_below, step.forward) for session, step, _ in steps), activation, features
        )
        sent = sent or lane.send_steps(batch)
        # The next stage waits for it, and nobody for this: answers come to this thread.
        for (session, step, arrived_ns), one in zip(steps, batch.whole_steps(), strict=True):
            session.passed_on(one.forward, arrived_ns, now_ns - step.started_ns)
            if not sent:
                session.not_sent(one.forward.with_own_memory())

    # --- what comes

    def before_reading(self) -> None:
        """Read results that are there: what the stage beside waits for takes less time than to read what has come and
        to launch what follows."""
        self._now(self._batches.settle_first)

    def memory_for(self, size_bytes: int) -> bytearray | memoryview:
        """Return page-locked memory, from which GPUs copy tensors themselves; on CPUs any will do."""
        return page_locked(size_bytes) if self._page_locked else bytearray()

    def take_steps(
        self,
        steps: Iterable[tuple[DeviceSession, Forward]],
        bare: Sequence[tuple[DeviceSession, Forward]] = (),
        activation: WireTensor | None = None,
    ) -> None:
        """Have the steps of a batch computed together, behind the jobs that wait; those that were prepared begin before
        all that is said of them is taken up."""
        self._now(self._compute, steps, bare, activation, time.monotonic_ns())

    def take_answers(self, answers: Sequence[tuple[RelayDeviceSession, BatchAnswer]]) -> None:
        """Let the sessions go on behind steps that were answered."""
        self._now(self._go_on, answers)

    def take_tokens(self, tokens: Sequence[tuple[RelayDeviceSession, int, int]]) -> None:
        """Let the sessions go on behind steps whose answers are still to come."""
        self._now(self._go_on_ahead, tokens)

    def fail(self, members: Sequence[DeviceSession], error: FlashsplitError) -> None:
        for session in members:
            session.break_by(error.copied())

    def _now(self, job: Callable[..., None], *args: object) -> None:
        # Where no job waits there is none that this may not overtake.
        self._thread.step_now(functools.partial(job, *args), begun=not self._thread.has_jobs)

    def _compute(
        self,
        steps: Iterable[tuple[DeviceSession, Forward]],
        bare: Sequence[tuple[DeviceSession, Forward]],
        activation: WireTensor | None,
        arrived_ns: int,
    ) -> None:
        self._batches.begin_prepared(bare, activation)
        waiting: list[WaitingStep] = []
        for session, forward in steps:
            try:
                waiting.append(session.step_of_batch(forward, arrived_ns))
            except Exception as error:
                session.break_by(error)
        self._batches.add_together(waiting)
        self._batches.leave_unasked()

    def _go_on(self, answers: Sequence[tuple[RelayDeviceSession, BatchAnswer]]) -> None:
        followed = [
            (session, _behind(answer.commit))
            for session, answer in answers
            if session.is_first and not answer.proposal and not session.has_begun_ahead
        ]
        self._batches.begin_prepared(followed)
        for session, answer in answers:
            try:
                session.take_answer(answer)
            except Exception as error:
                session.break_by(error)
        self._batches.leave_unasked()
        # A stage in the middle sends them on.
        self.flush()
        for session, _ in answers[:1]:
            session.announce()

    def _go_on_ahead(self, tokens: Sequence[tuple[RelayDeviceSession, int, int]]) -> None:
        followed: list[tuple[RelayDeviceSession, Forward]] = []
        for session, step, token in tokens:
            if not session.is_first:
                # A stage in the middle sends them on.
                session.pass_token_up(step, token)
            elif (row := session.row_behind(step, token)) is not None:
                followed.append((session, row))
        self.send_tokens()
        self._batches.begin_prepared(followed)
        for session, row in followed:
            try:
                session.begin_ahead(row)
            except Exception as error:
                session.break_by(error)
        self._batches.leave_unasked()


def _on_host(steps: Sequence[ComputedStep]) -> tuple[WireTensor, tuple[FeatureSlice, ...]]:
    """Wait for the rows of steps, one step's behind the other's, and for their features."""
    outputs = [step.output for step in steps]
    whole = side_by_side(outputs)
    if whole is not None and whole.total_on_host is not None:
        [activation] = Leaving([], whole.on_host).wait()
        return activation, (FeatureSlice(0, to_wire(whole.total_on_host)),)
    rows, on_host = joined_rows(outputs)
    features = joined([step.features for step in steps])
    leaving = Leaving([*([] if on_host is not None else [rows]), *features.tensors], on_host)
    activation, *tensors = leaving.wait()
    return activation, tuple(slices_of(features.indices, tensors, 0))


def _behind(commit: Commit) -> Forward:
    """Return the row of the token that a step came to, of the step that may follow it."""
    return Forward(commit.step + 1, commit.length, commit.token_ids, StepKind.DECODE)
