"""Whether a session's steps can be exact on this device: tried out once, before it is promised.

They rest on products that round a row alike wherever it stands among so many rows. No library promises that; those that
were seen keep it.
"""

from __future__ import annotations

import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.messages.steps import OpenSession
from shard_worker.ops.deltanet import CHUNK_ROWS
from shard_worker.stage.stage import Stage, StageState


def allocate(request: OpenSession, stage: Stage, known: set[int]) -> StageState:
    """A session's memory. known: numbers of rows that were tried out on the stage; this one's is added.

    Raises InvalidArgument for a number that blocks don't fit in, FailedPrecondition as `check_exact`.
    """
    asked = request.batch_invariant_rows
    if asked is not None and not request.block_rows <= asked <= CHUNK_ROWS:
        raise InvalidArgument(
            f"exact_rows is {asked}; it must be between block_rows, {request.block_rows}, and {CHUNK_ROWS}",
            field="exact_rows",
        )
    rows = stage.batch_invariant_rows(asked)
    if rows is not None and rows not in known:
        check_exact(stage, rows)
        known.add(rows)
    return stage.allocate(request.max_length, request.block_rows, rows)


@torch.no_grad()
def check_exact(stage: Stage, rows: int) -> None:
    """Four steps over random rows. Raises FailedPrecondition where a row came out differently in another step."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((rows, stage.config.hidden_size), generator=generator).to(stage.dtype)
    whole, parts = (stage.allocate(rows, rows, rows) for _ in range(2))
    expected = stage.run(whole, hidden, None, uncommitted=True)
    made = [stage.run(parts, hidden[:1], None, uncommitted=False)]
    if rows > 1:
        # Each row one place further up, then the last one in the first place.
        made.append(stage.run(parts, hidden[1:], None, uncommitted=True)[:-1])
        stage.commit(parts, rows - 1)
        made.append(stage.run(parts, hidden[-1:], None, uncommitted=False))
    same = torch.equal(torch.cat(made), expected)
    if same and stage.head is not None:
        logits = [stage.head.logits(part, rows) for part in made]
        same = torch.equal(torch.cat(logits), stage.head.logits(expected, rows))
    if not same:
        raise FailedPrecondition(
            f"products of {rows} rows round a row differently from place to place on {stage.device}, so --exact cannot "
            "be kept here: leave it out",
            reason="NOT_EXACT",
            field="exact_rows",
        )
