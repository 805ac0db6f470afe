"""Whether the workers of a cluster hold parts of one model, and a draft that was made for it."""

from __future__ import annotations

from collections.abc import Sequence

from services.errors import FailedPrecondition
from services.messages.description import DraftDescription, TargetDescription, WorkerDescription


def check_same_model(stages: Sequence[WorkerDescription]) -> None:
    """Raises FailedPrecondition when a loaded stage holds another model or element type than the first, naming both."""
    zero, first = stages[0], stages[0].target
    for index, worker in enumerate(stages):
        for field in ("fingerprint", "dtype", "kv_dtype"):
            mine, theirs = getattr(first, field), getattr(worker.target, field)
            if mine != theirs:
                raise FailedPrecondition(
                    f"stage {index} ({worker.device} on {worker.host}) holds {field} {theirs or 'auto'}, stage 0 "
                    f"({zero.device} on {zero.host}) {mine or 'auto'}: give both the same checkpoint",
                    reason="FINGERPRINT_MISMATCH" if field == "fingerprint" else "DTYPE_MISMATCH",
                    field=field,
                    stage=index,
                    host=worker.host,
                )


def check_fit(draft: DraftDescription, target: TargetDescription) -> None:
    """Raises FailedPrecondition when a draft was not made for a target, naming the field and both values."""
    for field in ("hidden_size", "vocab_size"):
        mine, theirs = getattr(draft, field), getattr(target, field)
        if mine != theirs:
            raise FailedPrecondition(
                f"the draft's {field} is {mine}, the target's {theirs}: name a draft made for this target",
                reason="DRAFT_MISMATCH",
                field=field,
            )
    if draft.num_target_layers not in (1, target.num_layers):
        raise FailedPrecondition(
            f"the draft was made for a target of {draft.num_target_layers} layers, this one has "
            f"{target.num_layers}: name a draft made for this target",
            reason="DRAFT_MISMATCH",
            field="num_target_layers",
        )
    if draft.capture_layers != target.capture_layers:
        raise FailedPrecondition(
            f"the draft captures blocks {list(draft.capture_layers)}, the stages {list(target.capture_layers)}: "
            "give all workers the same draft checkpoint",
            reason="DRAFT_MISMATCH",
            field="capture_layers",
        )
