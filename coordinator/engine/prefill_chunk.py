"""How many tokens of a prompt go into one step, where a request doesn't say it."""

from __future__ import annotations

from collections.abc import Sequence

from services.messages.description import StepEngine, WorkerDescription
from services.messages.steps import FILLED_ROWS, LONGEST_JOINING

CPU_ROWS = 512
"""On a CPU longer chunks are no faster, and shorter ones let the stages of a chain work on several at once."""

GPU_ROWS, LEAST_ROWS = 1024, 128
"""On a GPU, steps of fewer rows wait for the host that launches them: 4096 tokens of the 8B shape take 188 ms in chunks
of 512, 119 in chunks of 1024, 114 of 2048 (H200)."""

MIXTURE_ROWS, LONE_MIXTURE_ROWS = 2048, 4096
"""A mixture's layers are more launches, and a chunk reads the weights of all experts: 4096 tokens of the 30B-A3B shape
take 175 ms in chunks of 1024, 104 to 134 of 2048, as fast as the host launches them, and 101 of 4096 (H200). The longer
ones are for a model on one worker, as several work on several chunks at once, and where no other answer waits for their
end."""

JOINING_ROWS, ROWS_APART = 64, 16
"""Rows of a prompt that join a step of other answers' single rows are at least so many, and as many as fill it up to
FILLED_ROWS, rounded down to a multiple of ROWS_APART, since others may come meanwhile. Beside 64 answers 64 rows make a
step 0.7 ms longer on a GPU, where steps of 512 rows take 1.6 ms for as many of them; beside 16 answers 64 rows cost 1.3
ms, and 112 rows 1.5 (8B shape, H200)."""

JOINING_ROWS_OF_BLOCKS = 256
"""The same where other answers verify draft tokens: they fill a step to some 128 rows, which take 5.9 ms by themselves
and 8.9 with 128 more (8B shape, H200). A chunk of 1024 rows keeps them waiting for 39 ms."""

BYTES_PER_ROW, BYTES_PER_ROW_OF_EXPERTS = 64, 128
"""Activation memory of a layer for each element of a hidden row; 30 to 50 were measured of dense ones. A mixture has a
row of float32 for each of a row's experts as well."""

SHARE = 0.05
"""The share of a GPU's memory that activations may take; a plan leaves as much free."""


def chunk_for(workers: Sequence[WorkerDescription]) -> int:
    """Return the number of rows for these stages, few enough for the memory of every GPU."""
    devices = [device for worker in workers for device in worker.devices]
    if any(device.name == "cpu" for device in devices):
        return CPU_ROWS
    targets = [worker.target for worker in workers if worker.target is not None]
    hidden = max(target.hidden_size for target in targets)
    room = min(device.total_bytes for device in devices) * SHARE
    mixture = any(target.is_mixture for target in targets)
    rows, row_bytes = GPU_ROWS, BYTES_PER_ROW
    if mixture:
        rows, row_bytes = LONE_MIXTURE_ROWS if len(workers) == 1 else MIXTURE_ROWS, BYTES_PER_ROW_OF_EXPERTS
    while rows > LEAST_ROWS and rows * hidden * row_bytes > room:
        rows //= 2
    return rows


def chunk_beside_others(workers: Sequence[WorkerDescription], prompt_tokens: int, answers: int, *, drafts: bool) -> int:
    """Return the number of rows where other answers are decoded: so many that they hardly hear of it, where prompts of
    that length join their steps. answers: how many are decoded, this one included, in as many batches as there are
    stages. drafts: whether draft tokens are verified there."""
    targets = [worker.target for worker in workers if worker.target is not None]
    rows = min(chunk_for(workers), MIXTURE_ROWS)
    if prompt_tokens > LONGEST_JOINING or any(target.step_engine is StepEngine.TORCH for target in targets):
        return rows
    if drafts:
        return min(rows, JOINING_ROWS_OF_BLOCKS)
    left = FILLED_ROWS - -(-answers // len(targets))
    return min(rows, max(JOINING_ROWS, left // ROWS_APART * ROWS_APART))
