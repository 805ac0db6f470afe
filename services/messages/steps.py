"""The words of a session as frozen dataclasses: what goes down a chain of stages and what comes back.

Positions and lengths count tokens; layer ranges and row ranges are half-open. Math and rules stand in `shard_worker`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from services.layers import LayerRange
from services.messages.sampling import SamplingParams
from services.messages.tensors import WireTensor
from services.telemetry.trace_context import Trace

TOKEN_BYTES = 4
"""Of a token's id on the wire."""


class GrammarKind(StrEnum):
    """How a grammar is written; the values are the fields of `Grammar` in `stage.proto`."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be. text: the schema, expression or grammar; empty for JSON_OBJECT, which is any object."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Hop:
    """A later stage: where it is and what it must hold."""

    address: str
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class DraftRoute:
    """Where the session's draft lives; address None: beside the last stage."""

    address: str | None = None


@dataclass(frozen=True, slots=True)
class OpenSession:
    """First frame of a session; see `stage.proto`. logprobs: how many alternatives beside each token, None for off.
    exact_rows: None for off."""

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


class StepKind(StrEnum):
    """What a stage does with the rows of a step; a resume has none and chooses after a restored prefix."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    RESUME = "resume"


@dataclass(frozen=True, slots=True)
class FeatureSlice:
    """Features of rows from `start_position` on, [rows, hidden].

    One captured block's residual stream, or, with capture_index None, the float32 sum over all after `fc`.
    """

    start_position: int
    features: WireTensor
    capture_index: int | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """One step. `activation` is None for the first stage, which embeds `token_ids` itself.

    more: so many steps may follow by themselves, as `stage.proto` says.
    """

    step: int
    base_position: int
    token_ids: tuple[int, ...]
    kind: StepKind
    propose_tokens: int = 0
    activation: WireTensor | None = None
    features: tuple[FeatureSlice, ...] = ()
    more: int = 0

    @property
    def size_bytes(self) -> int:
        """Tensors and token ids, without the frame around them."""
        tensors = [piece.features for piece in self.features]
        if self.activation is not None:
            tensors.append(self.activation)
        return TOKEN_BYTES * len(self.token_ids) + sum(tensor.size_bytes for tensor in tensors)

    def kept(self) -> Forward:
        """The same with an activation in memory of its own."""
        if self.activation is None:
            return self
        return replace(self, activation=replace(self.activation, data=bytes(self.activation.data)))


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
    """A worker: its place in the chain (None for a draft worker), host, device and address."""

    stage: int | None
    host: str
    device: str
    address: str

    def __str__(self) -> str:
        who = "draft worker" if self.stage is None else f"stage {self.stage}"
        return f"{who} ({self.device} on {self.host}, {self.address})"


@dataclass(frozen=True, slots=True)
class StageIdentity:
    """A stage as it presents itself when a session opens."""

    location: Location
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class StageTiming:
    """Time of one step on one stage: computing, and from arrival to answer with the stages below.

    passed_bytes: tensors and token ids handed on, to the next stage or from the last one to a draft's own worker.
    """

    forward_ns: int
    elapsed_ns: int
    passed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one produced token's place, of the model's own logits: before bias, penalties, grammar,
    temperature and what follows. top_*: the likeliest tokens in falling order, not always the produced one among them.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """How many tokens count after a step, and which ones it produced (none after a prefill).

    logprobs: one for each of token_ids where the session asked for them, else none. more: steps that still follow by
    themselves. followed: the next one has begun already, on its way through step lanes.
    """

    step: int
    length: int
    token_ids: tuple[int, ...]
    timings: tuple[StageTiming, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    more: int = 0
    followed: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft's guesses for the step after `step`. followed: as of `Commit`."""

    step: int
    token_ids: tuple[int, ...]
    elapsed_ns: int
    followed: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotSave:
    """Keep the state behind `length` committed tokens; parent_id: a kept prefix of it, which holds its part of them."""

    snapshot_id: str
    length: int
    parent_id: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotRestore:
    """Begin from a kept state: take up its first `length` tokens, which are `token_ids`."""

    snapshot_id: str
    length: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """What one worker did with a snapshot. refusal: why it isn't kept there, empty when it is."""

    location: Location
    size_bytes: int
    elapsed_ns: int
    evicted_ids: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotSaved:
    """Answer to SnapshotSave from all workers: the snapshot stands when none refused."""

    snapshot_id: str
    length: int
    parts: tuple[SnapshotPart, ...]


@dataclass(frozen=True, slots=True)
class SnapshotRestored:
    """Answer to SnapshotRestore from all workers."""

    snapshot_id: str
    length: int
    parts: tuple[SnapshotPart, ...]


class FailureReason(StrEnum):
    """What went wrong below the reporting worker."""

    LINK_BROKEN = "link_broken"
    STAGE_FAILED = "stage_failed"
    DRAFT_LOST = "draft_lost"


@dataclass(frozen=True, slots=True)
class Failure:
    """An error further down. After DRAFT_LOST the session goes on; after any other it is over."""

    reason: FailureReason
    message: str
    location: Location
    code: str


SessionRequest = Forward | ForwardWithoutFeatures | StepFeatures | SnapshotSave | SnapshotRestore
"""What goes down the chain in a session that is open."""

Event = Commit | Proposal | SnapshotSaved | SnapshotRestored | Failure
"""What comes back."""
