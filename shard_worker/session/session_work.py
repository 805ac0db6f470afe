"""What one request needs done on the device thread of one stage: its steps, which of their rows count, and the steps
that follow by themselves.

Where step lanes lead to the neighbours, steps go on from here, past the event loop, which only hears of them.
Everything runs on the device thread but what says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import structlog
import torch

from services.errors import FailedPrecondition, FlashsplitError, InternalError, InvalidArgument
from services.messages.known_step import tokens_of
from services.messages.steps import Forward, OpenSession, StepKind
from services.messages.tensors import WireTensor
from services.streams.step_lane import StepLane
from shard_worker.cache.prefix_state import StateView
from shard_worker.device.dtypes import Leaving, dtype_to_name, over_wire
from shard_worker.device.executor import DeviceThread, device_error
from shard_worker.model.features import Features
from shard_worker.sampling.verifier import Produced, Verifier
from shard_worker.session.follower import follower, likely_follower
from shard_worker.session.ledger import Ledger
from shard_worker.session.passing import Passing
from shard_worker.session.step_checks import check_activation, check_rows, check_tensors
from shard_worker.stage.stage import Stage, StageState
from shard_worker.stage.step_graph import StepOutput, StepRows

log = structlog.get_logger()


class SessionWork:
    """Owns the session's caches, until `close`. Made on the event loop."""

    def __init__(
        self,
        thread: DeviceThread,
        stage: Stage,
        state: StageState,
        request: OpenSession,
        verifier: Verifier | None,
        captures: Sequence[int | None],
        above: StepLane | None,
        below: StepLane | None,
    ) -> None:
        """captures: of the stages before this one, as they come with a step. above, below: to the neighbours."""
        self._thread, self._stage, self._request, self._verifier = thread, stage, request, verifier
        self._state: StageState | None = state
        self._captures, self._above, self._below = captures, above, below
        self._loop = asyncio.get_running_loop()
        self._ledger: Ledger | None = None
        self._step = -1
        """The last one that was computed."""
        self._expected_rows = 0
        """Of the step behind it, where one will come past the event loop."""
        self._let_go_first = False
        """Whether the device may have begun with the step that comes now, which must be the next one there."""
        self._followed = -1
        """The last one whose follower was sent up the chain."""
        self._begun: deque[tuple[Forward, Future[Produced]]] = deque()
        self._told: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()

    def listen(self, ledger: Ledger, max_tensor_bytes: int, max_feature_slices: int) -> None:
        """Take steps from the neighbours from now on. On the event loop, before the first step."""
        self._ledger = ledger
        limits = {"max_tensor_bytes": max_tensor_bytes, "max_feature_slices": max_feature_slices}
        if self._above is not None:
            begun = functools.partial(self._guarded, self._let_go)
            self._above.listen(lambda step: self._came(self._begin, step), self._break, begun=begun, **limits)
        if self._below is not None:
            begun = functools.partial(self._guarded, self._let_go_behind)
            self._below.listen(lambda step: self._came(self._follow, step), self._break, begun=begun)

    # --- on the event loop

    @property
    def held_bytes(self) -> int:
        return 0 if self._state is None else self._state.size_bytes

    @property
    def ahead(self) -> bool:
        """Whether steps were begun that have not been asked for."""
        return bool(self._begun)

    @property
    def _alone(self) -> bool:
        """Whether this is the only stage; asked where it is the last."""
        return self._stage.embedding is not None

    def state(self) -> StageState:
        """On either. Raises FailedPrecondition once the session is closed."""
        if self._state is None:
            raise FailedPrecondition("the session is closed", reason="CLOSED")
        return self._state

    def views(self) -> list[StateView]:
        """All that a prefix consists of here."""
        views: list[StateView] = [view for caches in self.state().caches for view in caches.views()]
        return views if self._verifier is None else [*views, self._verifier.last]

    def followed(self, step: int) -> bool:
        """Whether the step behind this one was sent up the chain already."""
        return self._followed >= step

    def produced(self, forward: Forward) -> asyncio.Future[Produced]:
        """What comes of a step on the last stage. Raises FailedPrecondition for another one than was begun already."""
        if not self._begun:
            return self._thread.submit(self.decide, forward)
        begun, future = self._begun.popleft()
        if begun != forward:
            raise FailedPrecondition(
                f"step {forward.step} runs already, with other rows", reason="OUT_OF_STEP", field="step"
            )
        return asyncio.wrap_future(future)

    def tell(self) -> None:
        """Tell the ledger what it has not heard yet."""
        with contextlib.suppress(IndexError):
            while True:
                entry, args = self._told.popleft()
                entry(*args)

    def close(self) -> None:
        """Forget the caches. Safe to call twice."""
        self._state = None
        for lane in (self._above, self._below):
            if lane is not None:
                with contextlib.suppress(RuntimeError):
                    self._thread.queue(lane.close)

    # --- steps

    def pass_on(self, forward: Forward) -> tuple[Forward, int]:
        """Compute a step: what the next stage gets, and nanoseconds."""
        return self.launch(forward).wait()

    def launch(self, forward: Forward) -> Passing:
        """Compute a step, on a GPU without waiting for it."""
        started_ns = time.monotonic_ns()
        output, features = self._compute(forward)
        hidden = [output.hidden] if output.on_host is None else []
        leaving = Leaving([*hidden, *features.tensors], output.on_host)
        return Passing(forward, features.indices, leaving, started_ns)

    def decide(self, forward: Forward) -> Produced:
        """Compute a step on the last stage, and decide."""
        started_ns = time.monotonic_ns()
        output, features = self._compute(forward)
        assert self._verifier is not None

        def meanwhile() -> None:
            if not forward.more or self._request.draft is not None:
                return
            if self._alone:
                # With stages above that is done when the step's outcome is on its way to them.
                self._stand_by(1, running=True)
            elif self._above is not None and (following := likely_follower(forward, self._request)) is not None:
                self._above.prepare(following)

        def then(token_ids: tuple[int, ...]) -> None:
            if not forward.propose_tokens:
                self.go_on(forward, token_ids, ())

        return self._verifier.decide(forward, self.state(), output, features, started_ns, meanwhile, then)

    def answer(self, forward: Forward, arrived_ns: int) -> None:
        """As `decide`, and tell the ledger."""
        produced = self.decide(forward)
        self._put_down("decided", forward, arrived_ns, produced)
        self._call_ledger()

    def count(self, step: int, length: int) -> None:
        """Let the rows of a verify count up to `length`, where they do not yet."""
        state = self._state
        if state is not None and state.pending and step == self._step:
            self._stage.commit(state, length)

    def counted(self, step: int, length: int) -> None:
        """The same, ahead of the step behind it: recurrent layers could not stand by for that before."""
        self.count(step, length)
        if step == self._step and self._expected_rows:
            self._stand_by(self._expected_rows)

    def go_on(self, forward: Forward, token_ids: tuple[int, ...], draft_tokens: tuple[int, ...]) -> None:
        """Begin what follows by itself, where that can be done from here: on an only stage, which will be asked for it
        when the event loop has heard of this one, or through the lane to the stages above."""
        state = self._state
        if not forward.more or state is None or not (self._alone or self._above is not None):
            return
        verify = forward.kind is StepKind.VERIFY
        length = forward.base_position + len(token_ids if verify else forward.token_ids)
        following = follower(forward, length, token_ids, draft_tokens, self._request)
        if following is None:
            return
        sent = self._above is not None and self._above.send(following)
        # Before the follower's rows come, and not before those above can begin with them.
        self.count(forward.step, length)
        if sent:
            rows = self._rows_of(following)
            self._followed = forward.step
            self._expect_activation(following, rows)
            self._expect(following, rows)
        elif self._alone:
            self._stage.release(state, self._rows_of(following), None, certain=False)
            self._begun.append((following, self._thread.queue_step(self.decide, following)))

    def _compute(self, forward: Forward) -> tuple[StepOutput, Features]:
        state, features = self.state(), Features()
        self._step, self._expected_rows = forward.step, 0
        if forward.kind is StepKind.RESUME:
            # Nothing to compute: the state is there, and the last stage has the logits.
            return StepOutput(torch.empty(0, self._stage.config.hidden_size, dtype=self._stage.dtype)), features
        hidden = None
        if forward.activation is not None:
            hidden = over_wire(forward.activation)
            # Not to the device before the step is launched, which may stand by there.
            for piece in forward.features:
                tensor = over_wire(piece.features)
                if piece.capture_index is None:
                    features.total = tensor
                else:
                    features.slices[piece.capture_index] = tensor
        wanted = features if self._request.draft is not None else None
        uncommitted = forward.kind is StepKind.VERIFY
        output = self._stage.step(state, forward.token_ids, wanted, uncommitted=uncommitted, hidden=hidden)
        if self._verifier is not None:
            features.to(self._stage.device)
        return output, features

    # --- past the event loop

    def _came(self, job: Callable[[Forward, int], None], forward: Forward) -> None:
        """Behind what was asked for before."""
        begun, self._let_go_first = self._let_go_first, False
        self._thread.step_now(self._guarded, job, forward, time.monotonic_ns(), begun=begun)

    def _guarded(self, job: Callable[..., None], *args: object, **options: object) -> None:
        try:
            job(*args, **options)
        except Exception as error:
            meant = device_error(error)
            if not isinstance(meant, FlashsplitError):
                log.exception("session.step_failed", request_id=self._request.request_id)
                meant = InternalError("internal error: the log has the details")
            self._break(meant)
            raise

    def _let_go(self, forward: Forward, whole: bool) -> None:
        """All that the device needs of a step is here: it need not wait for the rest, nor for what the host does."""
        state = self._state
        if state is None or state.pending or forward.step != self._step + 1 or self._thread.busy:
            return
        if forward.kind not in (StepKind.DECODE, StepKind.VERIFY):
            return
        check_rows(forward, state.length, self._request, self._stage.config.vocab_size)
        check_activation(forward, self._stage)
        activation = None if forward.activation is None else memoryview(forward.activation.data)
        self._let_go_first = whole
        self._stage.release(state, self._rows_of(forward), activation, certain=whole)

    def _let_go_known(self, rows: StepRows, activation: memoryview | None, *, certain: bool = True) -> None:
        """The same of a step that was checked when it was expected."""
        state = self._state
        if state is not None and not state.pending and rows.base == state.length and not self._thread.busy:
            self._let_go_first = certain
            self._stage.release(state, rows, activation, certain=certain)

    def _let_go_with(self, base: int, tokens: memoryview) -> None:
        """The same of a step that was known but for its token."""
        rows = StepRows(base, tokens_of(tokens), uncommitted=False, featured=False)
        if max(rows.token_ids) < self._stage.config.vocab_size:
            self._let_go_known(rows, None)

    def _let_go_behind(self, following: Forward, whole: bool) -> None:
        """The same of a step that the stages below have begun."""
        if self._above is None and not self._thread.busy:
            self._count_to(self.state(), following.base_position)
            self._let_go(following, whole)

    def _count_to(self, state: StageState, length: int) -> None:
        """Where rows are undecided, and the step that begins at `length` decides them."""
        if state.pending:
            if not state.length < length <= state.length + state.pending:
                raise InvalidArgument(
                    f"base_position is {length} behind {state.pending} rows from {state.length}", field="base_position"
                )
            self.count(self._step, length)

    def _follow(self, following: Forward, arrived_ns: int) -> None:
        """The stages below have done with a step, and this one comes next."""
        state = self.state()
        self._count_to(state, following.base_position)
        if self._above is None:
            self._begin(following, arrived_ns)
        elif not self._above.send(following):
            raise FailedPrecondition("the socket for steps to the stage above is broken", reason="LANE_BROKEN")
        else:
            check_rows(following, state.length, self._request, self._stage.config.vocab_size)
            self._expect_activation(following, self._rows_of(following))

    def _begin(self, forward: Forward, arrived_ns: int) -> None:
        state = self.state()
        if forward.step != self._step + 1 or state.pending:
            raise FailedPrecondition(
                f"step is {forward.step} behind step {self._step}, of which {state.pending} rows are undecided",
                reason="OUT_OF_STEP",
                field="step",
            )
        check_rows(forward, state.length, self._request, self._stage.config.vocab_size)
        check_tensors(forward, self._stage, self._captures)
        if self._verifier is not None:
            self.answer(forward, arrived_ns)
            return
        passing = self.launch(forward)
        passed, leaving = passing.announced(), passing.leaving
        if self._below is not None and leaving.lent:
            self._below.prepare(passed)
        leaving.wait_first()
        # Before its answer can come; the event loop wakes up behind it.
        self._put_down("passed_on", passed, arrived_ns, passing.elapsed_ns)
        if self._below is None or not self._below.send(passed, leaving.wait if leaving.lent else None):
            leaving.wait()
            self._put_down("unsent", passing.kept(passed))
        elif passed.more:
            self._expect_token(passed)
            self._expect(passed)
        self._call_ledger()

    def _expect(self, forward: Forward, known: StepRows | None = None) -> None:
        """A step like this one will come, past the event loop; known: its rows. Behind what is still to be done for
        this one."""
        if self._request.draft is None or forward.propose_tokens:
            # Without a block to guess a draft would take the step's features meanwhile.
            self._expected_rows = len(forward.token_ids)
            self._thread.queue_step(self._stand_by, self._expected_rows, known)

    def _expect_activation(self, following: Forward, rows: StepRows) -> None:
        """A step that was sent up the chain comes down again, with an activation; for a draft with features behind."""
        if self._above is not None:
            shape = (len(rows.token_ids), self._stage.config.hidden_size)
            expected = replace(following, activation=WireTensor(dtype_to_name(self._stage.dtype), shape, b""))
            follow = bool(self._captures)
            came = functools.partial(self._guarded, self._let_go_known, rows, certain=not follow)
            self._above.expect(expected, came, features_follow=follow)

    def _expect_token(self, passed: Forward) -> None:
        """The first stage's next step comes up the chain, with the token that this one will produce."""
        if self._above is not None or self._below is None or self._request.draft is not None:
            return
        if passed.kind is StepKind.DECODE and (following := likely_follower(passed, self._request)) is not None:
            came = functools.partial(self._guarded, self._let_go_with, following.base_position)
            self._below.expect(following, came)

    @property
    def _expects(self) -> bool:
        """Whether there is something to gain: a CPU is there for others meanwhile."""
        return self._stage.device.type != "cpu"

    def _stand_by(self, rows: int, known: StepRows | None = None, *, running: bool = False) -> None:
        state = self._state
        if state is not None and self._expects and not self._thread.busy:
            # In this order: whatever becomes of the launch, nothing waits behind it for ever.
            self._thread.expect_step(self._stage.cancel)
            self._stage.prelaunch(state, rows, known=known, running=running)

    def _rows_of(self, forward: Forward) -> StepRows:
        uncommitted, featured = forward.kind is StepKind.VERIFY, self._request.draft is not None
        return StepRows(forward.base_position, forward.token_ids, uncommitted, featured)

    def _break(self, error: FlashsplitError) -> None:
        self._put_down("broke", error)
        self._call_ledger()

    def _put_down(self, what: str, *args: object) -> None:
        """A call of the ledger's method, for whoever calls `tell` first."""
        self._told.append((getattr(self._ledger, what), args))

    def _call_ledger(self) -> None:
        # The loop may be over, and with it who would want to know.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.tell)
