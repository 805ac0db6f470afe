"""Whether a session's steps can be batch-invariant on this device: tried out once, before it is promised.

They rest on products that round a row alike wherever it stands among a fixed number of rows. No library promises that;
those that were seen keep it.
"""

from __future__ import annotations

import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.messages.steps import OpenSession
from shard_worker.ops.deltanet import CHUNK_ROWS
from shard_worker.stage.stage import Stage, StageState


def allocate(request: OpenSession, stage: Stage, checked: set[int]) -> StageState:
    """Return a session's memory.

    checked: numbers of rows that were tried out on the stage; this request's is added.

    Raises InvalidArgument for a number of rows that blocks don't fit in, FailedPrecondition as
    `check_batch_invariance`.
    """
    asked = request.batch_invariant_rows
    if asked is not None and not request.block_rows <= asked <= CHUNK_ROWS:
        raise InvalidArgument(
            f"exact_rows is {asked}; it must be between block_rows, {request.block_rows}, and {CHUNK_ROWS}",
            field="exact_rows",
        )
    rows = stage.batch_invariant_rows(asked)
    if rows is not None:
        try_out(stage, rows, checked)
    return stage.allocate(request.max_length, request.block_rows, rows)


def try_out(stage: Stage, rows: int, checked: set[int]) -> None:
    """Check that steps of so many rows are batch-invariant, unless that is known. checked: as of `allocate`.

    Raises InvalidArgument for a number of rows that no step has, FailedPrecondition as `check_batch_invariance`.
    """
    if not 1 <= rows <= CHUNK_ROWS:
        raise InvalidArgument(f"exact_rows is {rows}; it must be between 1 and {CHUNK_ROWS}", field="exact_rows")
    if rows not in checked:
        check_batch_invariance(stage, rows)
        checked.add(rows)


@torch.no_grad()
def check_batch_invariance(stage: Stage, rows: int) -> None:
    """Run four steps over random rows. Raises FailedPrecondition where a row came out differently in another step."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((rows, stage.config.hidden_size), generator=generator).to(stage.dtype)
    tokens = [number % stage.config.vocab_size for number in range(rows)]
    whole, parts = (stage.allocate(rows, rows, rows) for _ in range(2))
    expected = stage.run(whole, hidden, None, uncommitted=True, token_ids=tokens)
    outputs = [stage.run(parts, hidden[:1], None, uncommitted=False, token_ids=tokens[:1])]
    if rows > 1:
        # Each row one position further up, then the last one in the first position.
        outputs.append(stage.run(parts, hidden[1:], None, uncommitted=True, token_ids=tokens[1:])[:-1])
        stage.commit(parts, rows - 1)
        outputs.append(stage.run(parts, hidden[-1:], None, uncommitted=False, token_ids=tokens[-1:]))
    same = torch.equal(torch.cat(outputs), expected)
    if same and stage.head is not None:
        logits = [stage.head.logits(output, rows) for output in outputs]
        same = torch.equal(torch.cat(logits), stage.head.logits(expected, rows))
    if not same:
        raise FailedPrecondition(
            f"products of {rows} rows round a row differently from place to place on {stage.device}, so --exact cannot "
            "be kept here: leave it out",
            reason="NOT_EXACT",
            field="exact_rows",
        )
