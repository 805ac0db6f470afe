"""Checks that the workers of a cluster hold parts of one model, and a draft that was made for it."""

from __future__ import annotations

from collections.abc import Sequence

from services.errors import FailedPrecondition
from services.messages.description import DraftDescription, TargetDescription, WorkerDescription
from services.model.draft_target import DraftAndTarget

_ALIKE = {
    "quantization": ("PACKING_MISMATCH", "none"),
    "rope_scaling": ("ROPE_MISMATCH", "none"),
    "fingerprint": ("FINGERPRINT_MISMATCH", "none"),
    "dtype": ("DTYPE_MISMATCH", "auto"),
    "kv_dtype": ("DTYPE_MISMATCH", "auto"),
}
"""What all stages must have alike, with the reason of the error and what is said where it is not set."""


def check_same_model(stages: Sequence[WorkerDescription]) -> None:
    """Check that all stages are loaded with the model and the element types of the first.

    Raises FailedPrecondition naming both workers when one is not.
    """
    first = stages[0]
    for index, worker in enumerate(stages):
        for field, (reason, unset) in _ALIKE.items():
            expected, value = getattr(first.target, field), getattr(worker.target, field)
            if value != expected:
                raise FailedPrecondition(
                    f"stage {index} ({worker.device} on {worker.host}) holds {field} {value or unset}, stage 0 "
                    f"({first.device} on {first.host}) {expected or unset}: give both the same checkpoint",
                    reason=reason,
                    field=field,
                    stage=index,
                    host=worker.host,
                )


def check_fit(draft: DraftDescription, target: TargetDescription, names: DraftAndTarget) -> None:
    """Check that a draft was made for a target. names: what both are called.

    Raises FailedPrecondition naming the field and both values when it was not.
    """
    for field in ("hidden_size", "vocab_size"):
        of_draft, of_target = getattr(draft, field), getattr(target, field)
        if of_draft != of_target:
            raise FailedPrecondition(
                names.refusal(f"its {field} is {of_draft}, the target's {of_target}"),
                reason="DRAFT_MISMATCH",
                field=field,
            )
    if draft.num_target_layers not in (1, target.num_layers):
        raise FailedPrecondition(
            names.refusal(f"it is for a target of {draft.num_target_layers} layers, this one has {target.num_layers}"),
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
