"""A worker's description of itself: frozen dataclasses, and their protobuf form.

It is the first thing that two processes exchange; `check_protocol` compares their versions before all else.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from enum import StrEnum

from flashsplit.shard.v1 import model_pb2
from services.errors import FailedPrecondition, InvalidArgument
from services.layers import LayerRange
from services.messages.enums import EnumNumbers
from services.messages.quantization import quantization_from_message, quantization_to_message
from services.messages.tensors import dtype_name, dtype_number, kv_dtype_name
from services.model.quantization import Quantization

PROTOCOL_MAJOR = 3
"""The version of the contract; processes of different ones refuse each other."""

PROTOCOL_MINOR = 6
"""Counts additions that a process of an older one may ignore.

1: steps of several sessions in one frame, lists of kept prefixes, and workers that say that they were told to stop.
2: what follows by itself may be changed while it does.
3: a session's state may rest where a stage behind it is lost.
4: answers tell how many sessions of their batch asked for draft tokens.
5: descriptions tell recurrent layers from others whose state serves no shorter prefix.
6: draft tokens may be spared where few of a step's own are accepted.
"""


STEP_LIMITS_SINCE, LEAST_ACCEPTED_SINCE = 2, 6
"""The minor versions from which on a first stage takes a `StepLimit`, and stages pass on `Forward.least_accepted`."""


class Role(StrEnum):
    """A job that a worker offers to do."""

    TARGET = "target"
    DRAFT = "draft"
    COMPRESS = "compress"


ROLE_SUMMARIES = {
    Role.TARGET: "a stage of the model",
    Role.DRAFT: "the draft tokens of DFlash",
    Role.COMPRESS: "reading long prompts with a small model",
}
"""What each role does, in a few words for --help."""


class FeatureTransport(StrEnum):
    """How captured features reach the draft: as one sum after its `fc`, or as one slice for each captured block."""

    SUM = "sum"
    SLICES = "slices"


class HeadPlace(StrEnum):
    """Where the draft's hidden rows become tokens.

    SHARED: by the lm_head of the stage in the same worker. LOADED: by an lm_head of the draft's own worker. PROJECTED:
    by the caller, which gets the hidden rows.
    """

    SHARED = "shared"
    LOADED = "loaded"
    PROJECTED = "projected"


class StepEngine(StrEnum):
    """How steps of few rows run: in plain torch, by kernels one after the other, or by kernels in a captured graph.

    Kernels compute a row alike in every step; plain torch does where a session asks for it
    (`OpenSession.batch_invariant_rows`).
    """

    TORCH = "torch"
    KERNELS = "kernels"
    GRAPHS = "graphs"


_ROLES = EnumNumbers(
    {
        Role.TARGET: model_pb2.ROLE_TARGET,
        Role.DRAFT: model_pb2.ROLE_DRAFT,
        Role.COMPRESS: model_pb2.ROLE_COMPRESS,
    }
)
_TRANSPORTS = EnumNumbers(
    {
        FeatureTransport.SUM: model_pb2.FEATURE_TRANSPORT_SUM,
        FeatureTransport.SLICES: model_pb2.FEATURE_TRANSPORT_SLICES,
    }
)
HEAD_PLACES = EnumNumbers(
    {
        HeadPlace.SHARED: model_pb2.HEAD_PLACE_SHARED,
        HeadPlace.LOADED: model_pb2.HEAD_PLACE_LOADED,
        HeadPlace.PROJECTED: model_pb2.HEAD_PLACE_PROJECTED,
    }
)
_ENGINES = EnumNumbers(
    {
        StepEngine.TORCH: model_pb2.STEP_ENGINE_TORCH,
        StepEngine.KERNELS: model_pb2.STEP_ENGINE_KERNELS,
        StepEngine.GRAPHS: model_pb2.STEP_ENGINE_GRAPHS,
    }
)


@dataclass(frozen=True, slots=True)
class DeviceDescription:
    """One compute device.

    total_bytes, free_bytes: of its memory, 0 where the system doesn't say. pool_bytes: the most that pages of keys and
    values may take together, of which pool_used_bytes are in use; 0 where nothing is loaded that has any.
    """

    name: str
    product: str
    total_bytes: int
    free_bytes: int
    pool_bytes: int = 0
    pool_used_bytes: int = 0


BATCH_ROW_BOUNDS = tuple(1 << power for power in range(10))
"""The numbers of rows up to which steps are counted apart; those of more rows are counted together."""


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Steps that a stage has computed since its worker began.

    rows, sessions: of all of them together. steps_by_rows: how many had up to so many rows, and more than the number
    before, for each of BATCH_ROW_BOUNDS, and behind those how many had more.
    """

    steps: int
    rows: int
    sessions: int
    steps_by_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """The stage that a worker holds.

    layers: the stage's, of the model's num_layers. capture_layers: the 0-based blocks of the whole model whose output
    the draft reads, in the draft's order. feature_transport: None without a draft. state_trimmable: whether a snapshot
    of n tokens also serves every shorter prefix of them. is_recurrent: whether layers keep a recurrent state.
    kv_dtype: the element type of attention keys and values, None where it is dtype. quantization: how its matrices were
    packed when it was loaded, None where they are as the checkpoint has them. rope_scaling: what took the place of the
    scaling of RoPE, None where that is the checkpoint's.
    session_tokens: the most tokens of one session for which pages of keys and values have room, 0 where there is no
    bound. host_experts: the share of the routed experts that a GPU leaves to the host's memory, as it was loaded.
    weight_bytes, host_weight_bytes: of weights on the stage's devices, and of those experts there. batch_row_counts:
    the numbers of rows, rising, with which steps of several sessions are computed, of which one of another number takes
    as long as one of the next higher; empty where each has its own time. is_mixture: whether rows go through routed
    experts of some layers.
    """

    fingerprint: str
    family: str
    layers: LayerRange
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int
    dtype: str
    capture_layers: tuple[int, ...]
    feature_transport: FeatureTransport | None
    weight_bytes: int
    state_trimmable: bool = False
    is_recurrent: bool = False
    step_engine: StepEngine = StepEngine.TORCH
    kv_dtype: str | None = None
    quantization: Quantization | None = None
    rope_scaling: str | None = None
    session_tokens: int = 0
    host_experts: float = 0.0
    host_weight_bytes: int = 0
    batch_row_counts: tuple[int, ...] = ()
    is_mixture: bool = False


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """The draft that a worker holds.

    block_size: the known token and the draft tokens of one block. capture_layers: the 0-based target blocks whose
    output the draft reads. num_target_layers: the layers of the target that it was made for. state_trimmable,
    quantization: as of a stage. draft_vocab_size: how many of the target's tokens it proposes, by an lm_head of its
    own; None where it shares the target's.
    """

    fingerprint: str
    block_size: int
    mask_token_id: int
    capture_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    head_place: HeadPlace
    feature_transport: FeatureTransport
    max_position: int
    dtype: str
    weight_bytes: int
    state_trimmable: bool = False
    step_engine: StepEngine = StepEngine.TORCH
    quantization: Quantization | None = None
    draft_vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class DrafterDescription:
    """The model with which a worker compresses prompts."""

    fingerprint: str
    vocab_size: int
    num_layers: int
    max_position: int
    dtype: str
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """A worker: where it runs, what it can do, and what it holds.

    max_tensor_bytes: the largest tensor that it takes. snapshot_bytes, snapshot_budget_bytes: the host memory of kept
    prefixes, and the most that they may take. session_bytes: the memory of open sessions' caches. batches: None where
    it has no stage.
    """

    host: str
    process_id: int
    devices: tuple[DeviceDescription, ...]
    roles: tuple[Role, ...]
    flashsplit_version: str
    torch_version: str
    python_version: str
    target: TargetDescription | None = None
    draft: DraftDescription | None = None
    open_sessions: int = 0
    max_tensor_bytes: int = 0
    snapshot_bytes: int = 0
    snapshot_budget_bytes: int = 0
    drafter: DrafterDescription | None = None
    session_bytes: int = 0
    batches: BatchCounts | None = None
    busy_ns: int = 0
    counted_ns: int = 0
    protocol_major: int = PROTOCOL_MAJOR
    protocol_minor: int = PROTOCOL_MINOR

    @property
    def device(self) -> str:
        """The names of its devices, e.g. "cuda:0+cuda:1"."""
        return "+".join(device.name for device in self.devices)

    @property
    def takes_step_limits(self) -> bool:
        """Whether a first stage there takes a `StepLimit`."""
        return self.protocol_minor >= STEP_LIMITS_SINCE

    @property
    def spares_blocks(self) -> bool:
        """Whether stages there know of `Forward.least_accepted`."""
        return self.protocol_minor >= LEAST_ACCEPTED_SINCE


def check_protocol(theirs: tuple[int, int], who: str) -> None:
    """Check the other side's version. Raises FailedPrecondition when it speaks another major one."""
    if theirs[0] != PROTOCOL_MAJOR:
        raise FailedPrecondition(
            f"{who} speaks protocol {theirs[0]}.{theirs[1]} and this side "
            f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: install the same release of flashsplit on both",
            reason="PROTOCOL_MISMATCH",
        )


def range_to_message(layers: LayerRange) -> model_pb2.LayerRange:
    """Return the range's message."""
    return model_pb2.LayerRange(first=layers.first, last=layers.last)


def range_from_message(message: model_pb2.LayerRange, field: str = "layers") -> LayerRange:
    """Return the range. Raises InvalidArgument for an empty or reversed one."""
    if message.first >= message.last:
        raise InvalidArgument(
            f"{field} is [{message.first}, {message.last}): it must hold at least one layer",
            field=field,
        )
    return LayerRange(message.first, message.last)


def transport_to_number(transport: FeatureTransport | None) -> model_pb2.FeatureTransport:
    """Return the transport's number; None is unspecified."""
    unspecified = model_pb2.FEATURE_TRANSPORT_UNSPECIFIED
    return unspecified if transport is None else _TRANSPORTS.number(transport)


def transport_from_number(number: int) -> FeatureTransport | None:
    """Return the transport, None for unspecified. Raises InvalidArgument for an unknown one."""
    if number == model_pb2.FEATURE_TRANSPORT_UNSPECIFIED:
        return None
    return _TRANSPORTS.value(number, "feature_transport")


def _engine_from_number(number: int) -> StepEngine:
    """Return how steps run; a worker that doesn't say so runs them in plain torch."""
    return StepEngine.TORCH if number == model_pb2.STEP_ENGINE_UNSPECIFIED else _ENGINES.value(number, "step_engine")


def worker_to_message(worker: WorkerDescription) -> model_pb2.WorkerDescription:
    """Return the description's message."""
    message = model_pb2.WorkerDescription(
        protocol_major=worker.protocol_major,
        protocol_minor=worker.protocol_minor,
        host=worker.host,
        process_id=worker.process_id,
        roles=[_ROLES.number(role) for role in worker.roles],
        flashsplit_version=worker.flashsplit_version,
        torch_version=worker.torch_version,
        python_version=worker.python_version,
        open_sessions=worker.open_sessions,
        max_tensor_bytes=worker.max_tensor_bytes,
        snapshot_bytes=worker.snapshot_bytes,
        snapshot_budget_bytes=worker.snapshot_budget_bytes,
        session_bytes=worker.session_bytes,
        busy_ns=worker.busy_ns,
        counted_ns=worker.counted_ns,
    )
    for device in worker.devices:
        message.devices.add(
            name=device.name,
            product=device.product,
            total_bytes=device.total_bytes,
            free_bytes=device.free_bytes,
            pool_bytes=device.pool_bytes,
            pool_used_bytes=device.pool_used_bytes,
        )
    if (batches := worker.batches) is not None:
        message.batches.CopyFrom(model_pb2.BatchCounts(**asdict(batches)))
    if (target := worker.target) is not None:
        message.target.CopyFrom(
            model_pb2.TargetDescription(
                fingerprint=target.fingerprint,
                family=target.family,
                layers=range_to_message(target.layers),
                num_layers=target.num_layers,
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                max_position=target.max_position,
                dtype=dtype_number(target.dtype),
                capture_layers=target.capture_layers,
                feature_transport=transport_to_number(target.feature_transport),
                weight_bytes=target.weight_bytes,
                state_cuttable=target.state_trimmable,
                recurrent=target.is_recurrent,
                step_engine=_ENGINES.number(target.step_engine),
                kv_dtype=dtype_number(target.kv_dtype),
                quantization=quantization_to_message(target.quantization),
                rope_scaling=target.rope_scaling or "",
                session_tokens=target.session_tokens,
                host_experts=target.host_experts,
                host_weight_bytes=target.host_weight_bytes,
                batch_row_counts=target.batch_row_counts,
                mixture=target.is_mixture,
            )
        )
    if (draft := worker.draft) is not None:
        message.draft.CopyFrom(
            model_pb2.DraftDescription(
                fingerprint=draft.fingerprint,
                block_size=draft.block_size,
                mask_token_id=draft.mask_token_id,
                capture_layers=draft.capture_layers,
                hidden_size=draft.hidden_size,
                vocab_size=draft.vocab_size,
                num_target_layers=draft.num_target_layers,
                head_place=HEAD_PLACES.number(draft.head_place),
                feature_transport=transport_to_number(draft.feature_transport),
                max_position=draft.max_position,
                dtype=dtype_number(draft.dtype),
                weight_bytes=draft.weight_bytes,
                state_cuttable=draft.state_trimmable,
                step_engine=_ENGINES.number(draft.step_engine),
                quantization=quantization_to_message(draft.quantization),
                draft_vocab_size=draft.draft_vocab_size or 0,
            )
        )
    if (drafter := worker.drafter) is not None:
        fields = asdict(drafter) | {"dtype": dtype_number(drafter.dtype)}
        message.drafter.CopyFrom(model_pb2.DrafterDescription(**fields))
    return message


def worker_from_message(message: model_pb2.WorkerDescription) -> WorkerDescription:
    """Return the description. Raises InvalidArgument for values that this version of the protocol doesn't know."""
    return WorkerDescription(
        protocol_major=message.protocol_major,
        protocol_minor=message.protocol_minor,
        host=message.host,
        process_id=message.process_id,
        devices=tuple(
            DeviceDescription(
                device.name,
                device.product,
                device.total_bytes,
                device.free_bytes,
                device.pool_bytes,
                device.pool_used_bytes,
            )
            for device in message.devices
        ),
        # A newer worker may offer roles that this side has no name for, and no use.
        roles=tuple(role for role in map(_ROLES.get, message.roles) if role is not None),
        flashsplit_version=message.flashsplit_version,
        torch_version=message.torch_version,
        python_version=message.python_version,
        target=_target_from_message(message.target) if message.HasField("target") else None,
        draft=_draft_from_message(message.draft) if message.HasField("draft") else None,
        open_sessions=message.open_sessions,
        max_tensor_bytes=message.max_tensor_bytes,
        snapshot_bytes=message.snapshot_bytes,
        snapshot_budget_bytes=message.snapshot_budget_bytes,
        drafter=_drafter_from_message(message.drafter) if message.HasField("drafter") else None,
        session_bytes=message.session_bytes,
        batches=_batches_from_message(message.batches) if message.HasField("batches") else None,
        busy_ns=message.busy_ns,
        counted_ns=message.counted_ns,
    )


def _batches_from_message(message: model_pb2.BatchCounts) -> BatchCounts | None:
    """Return the counts; None where they are counted apart in another way than here."""
    by_rows = tuple(message.steps_by_rows)
    if len(by_rows) != len(BATCH_ROW_BOUNDS) + 1:
        return None
    return BatchCounts(message.steps, message.rows, message.sessions, by_rows)


def _drafter_from_message(message: model_pb2.DrafterDescription) -> DrafterDescription:
    return DrafterDescription(
        fingerprint=message.fingerprint,
        vocab_size=message.vocab_size,
        num_layers=message.num_layers,
        max_position=message.max_position,
        dtype=_required_dtype(message.dtype, "drafter.dtype"),
        weight_bytes=message.weight_bytes,
    )


def _target_from_message(message: model_pb2.TargetDescription) -> TargetDescription:
    row_counts = tuple(message.batch_row_counts)
    if any(more <= fewer for fewer, more in itertools.pairwise((0, *row_counts))):
        raise InvalidArgument(
            f"target.batch_row_counts is {[*row_counts]}; it must rise, from 1 at least",
            field="target.batch_row_counts",
        )
    return TargetDescription(
        fingerprint=message.fingerprint,
        family=message.family,
        layers=range_from_message(message.layers, "target.layers"),
        num_layers=message.num_layers,
        hidden_size=message.hidden_size,
        vocab_size=message.vocab_size,
        max_position=message.max_position,
        dtype=_required_dtype(message.dtype, "target.dtype"),
        capture_layers=tuple(message.capture_layers),
        feature_transport=transport_from_number(message.feature_transport),
        weight_bytes=message.weight_bytes,
        state_trimmable=message.state_cuttable,
        # Releases that don't say it gave back no other memory.
        is_recurrent=message.recurrent if message.HasField("recurrent") else not message.state_cuttable,
        step_engine=_engine_from_number(message.step_engine),
        kv_dtype=kv_dtype_name(message.kv_dtype, "target.kv_dtype"),
        quantization=quantization_from_message(message),
        rope_scaling=message.rope_scaling or None,
        session_tokens=message.session_tokens,
        host_experts=message.host_experts,
        host_weight_bytes=message.host_weight_bytes,
        batch_row_counts=row_counts,
        is_mixture=message.mixture,
    )


def _draft_from_message(message: model_pb2.DraftDescription) -> DraftDescription:
    transport = transport_from_number(message.feature_transport)
    if transport is None:
        raise InvalidArgument("draft.feature_transport is missing", field="draft.feature_transport")
    return DraftDescription(
        fingerprint=message.fingerprint,
        block_size=message.block_size,
        mask_token_id=message.mask_token_id,
        capture_layers=tuple(message.capture_layers),
        hidden_size=message.hidden_size,
        vocab_size=message.vocab_size,
        num_target_layers=message.num_target_layers,
        head_place=HEAD_PLACES.value(message.head_place, "head_place"),
        feature_transport=transport,
        max_position=message.max_position,
        dtype=_required_dtype(message.dtype, "draft.dtype"),
        weight_bytes=message.weight_bytes,
        state_trimmable=message.state_cuttable,
        step_engine=_engine_from_number(message.step_engine),
        quantization=quantization_from_message(message),
        draft_vocab_size=message.draft_vocab_size or None,
    )


def _required_dtype(number: int, field: str) -> str:
    name = dtype_name(number, field)
    if name is None:
        raise InvalidArgument(f"{field} is missing", field=field)
    return name
