"""Launching a session's next step on its GPU before the step is here, so that the GPU begins as soon as it comes.

A prelaunched step waits on the device for what is not known yet: its tokens or its activation. It is released as soon
as these are here, before the device thread has begun with the step. On a CPU nothing is prelaunched. Everything here
runs on the device thread. It must not know who sends steps, nor what becomes of their results.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.messages.step_template import tokens_from_bytes
from services.messages.steps import Forward, OpenSession, StepKind
from shard_worker.batches.step_batches import StepBatches
from shard_worker.device.executor import DeviceThread
from shard_worker.session.checks import check_activation, check_rows
from shard_worker.stage.stage import Stage, StageState
from shard_worker.stage.step_graph import StepRows


@dataclass(slots=True)
class Progress:
    """How far a session has come on its stage.

    state: its memory, None once it is closed. step: the number of the last step that was computed, -1 before the first.
    """

    state: StageState | None
    step: int = -1


class NextStep:
    """What is done ahead for the step that a session takes next."""

    def __init__(
        self, thread: DeviceThread, stage: Stage, batches: StepBatches, request: OpenSession, progress: Progress
    ) -> None:
        self._thread, self._stage, self._batches = thread, stage, batches
        self._request, self._progress = request, progress
        self._expected_rows = 0
        """Rows of the next step where one is known to come past the event loop, else 0."""
        self._released = False
        """Whether the device may have begun with the step that comes now, which must then run next on the thread."""

    def rows_of(self, forward: Forward) -> StepRows:
        """Return a step's rows as the stage is told of them."""
        uncommitted, featured = forward.kind is StepKind.VERIFY, self._request.draft is not None
        return StepRows(forward.base_position, forward.token_ids, uncommitted, featured)

    # --- prelaunching

    def expect(self, forward: Forward, known: StepRows | None = None) -> None:
        """Prelaunch a step like `forward` once all that is to be done for `forward` is done. known: its rows, where
        they are known."""
        if self._request.draft is None or forward.propose_tokens:
            # Where no block is asked for the draft would take in the step's features meanwhile.
            self._expected_rows = len(forward.token_ids)
            self._thread.queue_step(self._prelaunch_unless_here, self._expected_rows, known)

    def _prelaunch_unless_here(self, rows: int, known: StepRows | None) -> None:
        """Prelaunch a step that was expected, unless it has come: it may have been quicker than what was to be done
        before it."""
        state = self._progress.state
        if self._expected_rows and state is not None and (known is None or known.base == state.length):
            self.prelaunch(rows, known)

    def prelaunch(self, rows: int, known: StepRows | None = None, *, running: bool = False) -> None:
        """Launch a step of so many rows now. known: its rows, where they are known. running: the step before it may
        not be done yet."""
        state = self._progress.state
        if state is not None and self._stage.prelaunches and self._batches.expects_one:
            # In this order: whatever becomes of the launch, nothing waits behind it for ever.
            self._thread.expect_step(self._stage.cancel)
            self._stage.prelaunch(state, rows, known=known, running=running)

    def prelaunch_expected(self) -> None:
        """Prelaunch the expected step again, if one is: recurrent layers could not before the last one's commit."""
        if self._expected_rows:
            self.prelaunch(self._expected_rows)

    def forget(self) -> None:
        """Expect no step: one is being computed."""
        self._expected_rows = 0

    # --- releasing

    def take_released(self) -> bool:
        """Return whether the step that comes now was released, and forget it."""
        released, self._released = self._released, False
        return released

    def release(self, forward: Forward, whole: bool) -> None:
        """Release a step of which all is here that the device needs. whole: its features, which the host needs, are
        here too.

        Does nothing where the step is not the next one. Errors as in `check_rows` and `check_activation`.
        """
        state = self._progress.state
        if state is None or state.pending or forward.step != self._progress.step + 1 or not self._batches.expects_one:
            return
        if forward.kind not in (StepKind.DECODE, StepKind.VERIFY):
            return
        check_rows(forward, state.length, self._request, self._stage.config.vocab_size)
        check_activation(forward, self._stage)
        activation = None if forward.activation is None else memoryview(forward.activation.data)
        self._released = whole
        self._stage.release(state, self.rows_of(forward), activation, certain=whole)

    def release_known(self, rows: StepRows, activation: memoryview | None, *, certain: bool = True) -> None:
        """Release a step that was checked when it was expected. certain: nothing of it is still to come."""
        state = self._progress.state
        if state is not None and not state.pending and rows.base == state.length and self._batches.expects_one:
            self._released = certain
            self._stage.release(state, rows, activation, certain=certain)

    def release_with_tokens(self, base: int, tokens: memoryview) -> None:
        """Release a decode step from position `base` on that was expected but for its tokens, which are as
        `tokens_of` reads them."""
        rows = StepRows(base, tokens_from_bytes(tokens), uncommitted=False, featured=False)
        if max(rows.token_ids) < self._stage.config.vocab_size:
            self.release_known(rows, None)
