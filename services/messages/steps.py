"""A session's frames as frozen dataclasses: what goes down a chain of stages and what comes back.

Positions and lengths count tokens; layer ranges and row ranges are half-open. What the stages make of them stands in
`shard_worker`, and how they are written in `session_frames`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from services.layers import LayerRange
from services.messages.sampling import SamplingParams
from services.messages.tensors import WireTensor
from services.records import record
from services.telemetry.trace_context import Trace

TOKEN_BYTES = 4
"""The bytes of a token's id on the wire."""


class GrammarKind(StrEnum):
    """How a grammar is written; the values are the fields of `Grammar` in `stage.proto`."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match. text: the schema, expression or grammar; empty for JSON_OBJECT, any JSON object.

    A LARK grammar may be in GBNF too, whose rules begin at `root`, as vLLM's examples have it.
    """

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Hop:
    """A later stage of the chain: its address, and the layers that it must hold."""

    address: str
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class DraftRoute:
    """The worker that holds the session's draft. address: None for the last stage's own worker."""

    address: str | None = None


LONGEST_REST_MS = 3_600_000
"""The longest that a session's state rests."""


@dataclass(frozen=True, slots=True)
class SessionRest:
    """Has a session's state rest on a stage where a stage behind it is lost, for whoever opens the session anew.

    session_id: names the session, so that nobody guesses it. rest_ms: how long it rests at most. token_ids: all tokens
    of prompt and output that the caller knows, where the session may rest; none for a new one. first_position: the
    first step's base_position, or the length of the prefix that is restored before it.
    """

    session_id: str
    rest_ms: int
    token_ids: tuple[int, ...] = ()
    first_position: int = 0


@dataclass(frozen=True, slots=True)
class OpenSession:
    """The first frame of a session.

    fingerprint: of the model that the caller expects. stage, layers: this stage's place in the chain, from 0, and the
    layers that the caller expects here. route: the stages after this one, in order. max_length: the most tokens of
    prompt and output. max_rows: the most rows of one step. block_rows: the most rows of one verify. prompt_length: the
    tokens of the prompt, behind which penalties on the output begin. stop_token_ids: tokens after which a step emits no
    more. draft: None for a session without speculation. logprobs: how many alternatives to report beside each token,
    None for no log-probabilities. grammar: what the output must match, None for anything. batch_invariant_rows: the
    number of rows of which plain torch makes its products, so that a row has the same bits in every step; None for
    whatever is fastest. prompt_logprobs: as `logprobs`, of the prompt's tokens behind the first one. holder_id: of the
    process that had the stages loaded; None for a caller that does not say. rest: how its state rests; None where it
    ends with its stream.
    """

    request_id: str
    fingerprint: str
    stage: int
    layers: LayerRange
    route: tuple[Hop, ...]
    max_length: int
    max_rows: int
    block_rows: int
    prompt_length: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    draft: DraftRoute | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None
    trace: Trace | None = None
    batch_invariant_rows: int | None = None
    prompt_logprobs: int | None = None
    holder_id: str | None = None
    rest: SessionRest | None = None


LONGEST_JOINING = 4096
"""Up to this position chunks of prompts are computed by the kernels of steps, and so beside other sessions' rows: these
read a session's keys once for 16 rows; further behind, plain torch's attention is faster."""

FILLED_ROWS = 128
"""Up to so many rows a step costs hardly more than one of a few: the weights are read once in any case, and what is
multiplied with each of them is hidden by that (8B shape, H200: 4.5 ms with 16 rows, 5.2 with 64, 5.9 with 128, 8.9 with
256). Where most sessions have an answer's row in it, chunks of prompts fill it up to there, and the others wait."""


class StepKind(StrEnum):
    """What a stage does with the rows of a step.

    PREFILL: all rows count, and no token is chosen. DECODE: all rows count, and a token is chosen after the last one.
    VERIFY: the first row counts, and the last stage decides how many of the draft tokens behind it do. RESUME: there
    are no rows; a token is chosen after a restored prefix that is the whole prompt.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    RESUME = "resume"


@record(frozen=True, slots=True)
class FeatureSlice:
    """What a draft reads of some rows, [rows, hidden], from `start_position` on.

    It is the residual stream after one captured block, the one at `capture_index` in the draft's list or, with
    capture_index None, the float32 sum over all captured blocks after the draft's `fc`.
    """

    start_position: int
    features: WireTensor
    capture_index: int | None = None


@record(frozen=True, slots=True)
class Forward:
    """One step of a session.

    step: counts up by one with each step. base_position: the first row's position, which equals the committed length.
    propose_tokens: how many draft tokens are wanted for the next step. activation: the residual stream, [rows, hidden];
    None for the first stage, which embeds `token_ids` itself. more: how many steps may follow without being sent, each
    with the tokens that the one before produced, as `stage.proto` says. least_accepted: where fewer of its own draft
    tokens are accepted, those for the next step may be spared.
    """

    step: int
    base_position: int
    token_ids: tuple[int, ...]
    kind: StepKind
    propose_tokens: int = 0
    activation: WireTensor | None = None
    features: tuple[FeatureSlice, ...] = ()
    more: int = 0
    least_accepted: int = 0

    def is_like(self, other: Forward) -> bool:
        """Return whether both ask for the same of as many rows, whatever tokens these have, wherever they begin, and
        however many steps follow. Without an activation this one has that of the rows that came with it."""
        return (
            self.step == other.step
            and self.kind is other.kind
            and len(self.token_ids) == len(other.token_ids)
            and self.propose_tokens == other.propose_tokens
            and self.least_accepted == other.least_accepted
            and self.activation in (None, other.activation)
            and self.features == other.features
        )

    @property
    def size_bytes(self) -> int:
        """The bytes of tensors and token ids, without the frame around them."""
        tensors = [piece.features for piece in self.features]
        if self.activation is not None:
            tensors.append(self.activation)
        return TOKEN_BYTES * len(self.token_ids) + sum(tensor.size_bytes for tensor in tensors)

    def with_rows(self, activation: WireTensor | None, features: tuple[FeatureSlice, ...]) -> Forward:
        """Return the same step with these tensors, in a third of the time that `replace` takes."""
        return Forward(
            self.step,
            self.base_position,
            self.token_ids,
            self.kind,
            self.propose_tokens,
            activation,
            features,
            self.more,
            self.least_accepted,
        )

    def with_own_memory(self) -> Forward:
        """Return the same step with an activation in memory of its own."""
        if self.activation is None:
            return self
        return replace(self, activation=replace(self.activation, data=bytes(self.activation.data)))


@dataclass(frozen=True, slots=True)
class StepLimit:
    """Changes what follows by itself, from the next step on that begins so; that one is never taken back.

    last_step: the number of the last step that may follow. propose_tokens: how many draft tokens each of them asks for.
    """

    last_step: int
    propose_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ForwardWithoutFeatures:
    """A step whose features follow it in StepFeatures, so that the next device need not wait for them.

    Only step lanes carry it.
    """

    forward: Forward


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The features of the step that was just sent without them."""

    step: int
    features: tuple[FeatureSlice, ...]


@dataclass(frozen=True, slots=True)
class Location:
    """Where a worker is. stage: its place in the chain, None for a draft's worker."""

    stage: int | None
    host: str
    device: str
    address: str

    def __str__(self) -> str:
        who = "draft worker" if self.stage is None else f"stage {self.stage}"
        return f"{who} ({self.device} on {self.host}, {self.address})"


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """A stage as it presents itself when a session opens. held_length: how many tokens of the session, which rested,
    it need not compute again."""

    location: Location
    layers: LayerRange
    held_length: int = 0


@record(frozen=True, slots=True)
class StageTiming:
    """Where the time of a step went on one stage, in nanoseconds.

    forward_ns: computing. elapsed_ns: from the step's arrival to its answer, the stages below included. passed_bytes:
    the bytes of tensors and token ids handed on, to the next stage or from the last one to a draft's own worker.
    """

    forward_ns: int
    elapsed_ns: int
    passed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities at the place of one token, produced or of the prompt.

    They are those of the model's own logits: before bias, penalties, grammar, temperature and what follows. logprob:
    the token's own. top_token_ids, top_logprobs: the most probable tokens in falling order, among which it need not
    be. rank: how many tokens are at least as probable as it, itself included; 0 where nobody counted them.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


@record(frozen=True, slots=True)
class Commit:
    """What a step came to.

    length: the tokens that count after it. token_ids: those that it produced, none after a prefill. timings: from this
    stage to the last one. logprobs: one for each of token_ids where the session asked for them, else none. more: how
    many steps still follow by themselves. followed: whether the next one has begun already, through step lanes.
    prompt_logprobs: one for each token of the step that is part of the prompt, but for the prompt's first, where the
    session asked for them, else none. batch_sessions, batch_rows: of how many sessions and rows the last stage computed
    the step's batch; 0 where it does not say. propose_tokens: how many draft tokens the step asked for,
    0 where those were spared. batch_proposing: how many sessions of the batch asked for some.
    """

    step: int
    length: int
    token_ids: tuple[int, ...]
    timings: tuple[StageTiming, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    more: int = 0
    followed: bool = False
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    batch_sessions: int = 0
    batch_rows: int = 0
    propose_tokens: int = 0
    batch_proposing: int = 0

    def passed_up(self, timing: StageTiming, more: int, propose_tokens: int) -> Commit:
        """Return the same answer as the stage before gets it, in a third of the time that `replace` takes.

        timing: of the stage that passes it up.
        """
        return self._with((timing, *self.timings), more, self.followed, propose_tokens)

    def begun_behind(self) -> Commit:
        """Return the same answer, behind which the next step has begun."""
        return self._with(self.timings, self.more, True, self.propose_tokens)

    def _with(self, timings: tuple[StageTiming, ...], more: int, followed: bool, propose_tokens: int) -> Commit:
        return Commit(
            self.step,
            self.length,
            self.token_ids,
            timings,
            self.logprobs,
            more,
            followed,
            self.prompt_logprobs,
            self.batch_sessions,
            self.batch_rows,
            propose_tokens,
            self.batch_proposing,
        )


@record(frozen=True, slots=True)
class Proposal:
    """The draft tokens for the step after `step`; none once the draft is lost.

    elapsed_ns: from the first feature to the last draft token. followed: as in `Commit`, for a step that waits for
    draft tokens.
    """

    step: int
    token_ids: tuple[int, ...]
    elapsed_ns: int
    followed: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotSave:
    """Asks to keep the state behind `length` committed tokens.

    parent_id: a kept prefix of these tokens, whose attention rows need not be kept again; None for no such prefix.
    """

    snapshot_id: str
    length: int
    parent_id: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotRestore:
    """Asks to begin from the first `length` tokens of a kept state, which are `token_ids`."""

    snapshot_id: str
    length: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """What one worker did with a snapshot.

    size_bytes: the bytes kept or restored there. evicted_ids: the snapshots given up to make room. refusal: why it
    isn't kept there, empty when it is.
    """

    location: Location
    size_bytes: int
    elapsed_ns: int
    evicted_ids: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotSaved:
    """The answer of all workers to a SnapshotSave: the snapshot stands when none of them refused."""

    snapshot_id: str
    length: int
    parts: tuple[SnapshotPart, ...]


@dataclass(frozen=True, slots=True)
class SnapshotRestored:
    """The answer of all workers to a SnapshotRestore."""

    snapshot_id: str
    length: int
    parts: tuple[SnapshotPart, ...]


class FailureReason(StrEnum):
    """What went wrong below the worker that reports it."""

    LINK_BROKEN = "link_broken"
    STAGE_FAILED = "stage_failed"
    DRAFT_LOST = "draft_lost"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error further down the chain. After DRAFT_LOST the session goes on, and proposals are empty; after any other
    it is over.

    code: the name of the gRPC status code that the failing worker gave. cause: the reason that it gave, empty for none.
    """

    reason: FailureReason
    message: str
    location: Location
    code: str
    cause: str = ""


SessionRequest = Forward | ForwardWithoutFeatures | StepFeatures | StepLimit | SnapshotSave | SnapshotRestore
"""What goes down the chain in a session that is open."""

Event = Commit | Proposal | SnapshotSaved | SnapshotRestored | Failure
"""What comes back."""
