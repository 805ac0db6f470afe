"""What a step is to those who compute it, whatever session it is of and whatever becomes of its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from services.messages.batch_frames import PreparedFrame
from services.messages.steps import Forward
from services.messages.tensors import WireTensor
from services.records import record
from shard_worker.sampling.drawing import Draw
from shard_worker.sampling.verifier import ComputedStep
from shard_worker.stage.stage import StepInput
from shard_worker.stage.step_graph import StepPart

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import IssuedBlock
    from shard_worker.model.kernels.step_parameters import StepParameters


class SteppingSession(Protocol):
    """What a session is to those who compute its steps, on the device thread."""

    @property
    def chain_length(self) -> int:
        """Of how many stages the session's chain is made."""

    @property
    def is_first(self) -> bool:
        """Whether its stage is the first one, which makes batches."""

    @property
    def closed(self) -> bool:
        """Whether it takes no more steps."""

    @property
    def most_rows(self) -> int:
        """How many rows its stage computes together."""

    def kind(self, forward: Forward) -> Hashable:
        """Return what is equal for steps that can be computed together; None for one that is computed alone."""

    def begin(self, forward: Forward, behind: int | None = None) -> StepInput:
        """Count a step that is about to be computed, take the memory for it, and return its rows.

        behind: the session's number in the step before, where only the device knows which of its rows count there.
        Raises FailedPrecondition where the session is closed, ResourceExhausted where there is no memory.
        """

    def following(self, forward: Forward) -> Forward | None:
        """Return the step that follows this one by itself, without its tokens, whatever this one comes to but a stop
        token; None where none does. Where that depends on how many rows of this one count, it begins at the highest
        position that it may."""

    def prepare(self, forward: Forward) -> StepInput:
        """Take the memory for a step that follows, of single rows, and return these without what is not known yet.
        Raises as `begin`."""

    def is_prepared(self, forward: Forward, came: Forward, activation: WireTensor | None) -> bool:
        """Return whether a step that has come is the one that was prepared, with all that the device needs of it, so
        that it need not be checked again. forward: as of `following`. activation: has the step's row, and maybe those
        of others."""

    def begin_prepared(self, forward: Forward) -> None:
        """Count a step that was prepared and is about to be computed."""

    def complete_step(self, parameters: StepParameters) -> None:
        """Queue that the device puts into the parameters of a step, which were sent, what it alone knows yet: where the
        rows begin that follow issued blocks, and their tokens."""

    def is_copied_at_once(self, forward: Forward) -> bool:
        """Return whether all that is needed of a step's results is copied to the host right behind it, so that the
        next step may overwrite them: the rows for the next stage, or the most probable tokens where these decide."""

    def issue_together(
        self, steps: Sequence[tuple[SteppingSession, Forward]], outputs: Sequence[StepPart]
    ) -> Sequence[IssuedBlock | None]:
        """Queue, behind a step of several sessions that was launched, deciding which of its rows count and the draft's
        blocks behind them. Returns what is on its way of each session, None where that is up to the host."""

    def draws(self, forward: Forward) -> list[Draw] | None:
        """Return how the tokens behind the last rows of a step that comes next are drawn, where nothing but the logits
        of these rows counts for that."""

    def draws_with_step(self, forward: Forward) -> list[Draw] | None:
        """Return the same where the logits are not needed for anything else, so that the tokens can be drawn with the
        step; None otherwise."""

    def prepare_frame(self, rows: Sequence[BatchRow]) -> PreparedFrame | None:
        """Return what can be made of the frame for the next stage while the device computes a batch, of this stage's
        sessions; None where there is none, or not for all of them."""

    def send_ahead(self, results: BatchResults) -> None:
        """Send what the stages beside this one wait for, of a batch's results, before anything else is made of them:
        the rows to the next one, with what was prepared of their frame, or the tokens that they came to up the chain.
        """

    def take_back(self, *, computed: bool) -> None:
        """Forget the step that was begun last behind another one, and perhaps computed: it does not come, or later."""

    def compute_begun(self, forward: Forward, given: StepInput) -> ComputedStep:
        """Run the stage on a step alone that was begun, of which `given` came."""

    def announce(self) -> None:
        """Have the stages beside this one hear what came of steps."""


@record(frozen=True, slots=True)
class WaitingStep:
    """A step to be computed.

    then: what is done with its results at once. failed: called with an error instead, or with one of `then`. begins:
    asked before it is computed; where it says no, nothing more is done. dropped: called instead of all of them where
    the thread is over.
    """

    session: SteppingSession
    forward: Forward
    then: Callable[[ComputedStep], None]
    failed: Callable[[Exception], None]
    begins: Callable[[], bool] = lambda: True
    dropped: Callable[[], object] = lambda: None


@record(frozen=True, slots=True)
class BatchResults:
    """What a step of several sessions came to.

    outputs: of each row. drawn: of each the tokens that were drawn from its logits; None where none were. frame: what
    was prepared of the one that goes to the next stage.
    """

    rows: Sequence[BatchRow]
    outputs: Sequence[StepPart]
    drawn: Sequence[list[int] | None]
    frame: PreparedFrame | None


@dataclass(slots=True)
class BatchRow:
    """A step of a session in a step of several that was launched behind another one.

    forward: without its tokens, where they are not known yet. step: what is to be done with its results; None as long
    as nobody has asked for it. drawn: how many tokens were drawn with the step, behind its last rows.
    """

    session: SteppingSession
    forward: Forward
    given: StepInput
    step: WaitingStep | None
    drawn: int = 0
