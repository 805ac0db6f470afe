"""Rows of a prefill step, by the devices that stages sit on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.engine.prefill_chunk import chunk_beside_others, chunk_for
from services.messages.description import DeviceDescription, StepEngine, WorkerDescription
from tests.services.fakes import WORKER

GB = 10**9


def worker(hidden: int, *devices: tuple[str, int]) -> WorkerDescription:
    found = tuple(DeviceDescription(name, "", total, 0) for name, total in devices)
    assert WORKER.target is not None
    return replace(WORKER, devices=found, target=replace(WORKER.target, hidden_size=hidden))


@pytest.mark.parametrize(
    ("workers", "rows"),
    [
        ([worker(4096, ("cpu", 64 * GB))], 512),
        ([worker(4096, ("cuda:0", 141 * GB))], 1024),
        ([worker(4096, ("cuda:0", 141 * GB)), worker(4096, ("cpu", 64 * GB))], 512),
        ([worker(4096, ("cuda:0", 141 * GB)), worker(4096, ("hip:0", 4 * GB))], 512),
        ([worker(5120, ("cuda:0", 24 * GB), ("cuda:1", 2 * GB))], 256),
        ([worker(8192, ("cuda:0", 10**8))], 128),
    ],
)
def test_more_rows_where_every_gpu_has_room(workers: list[WorkerDescription], rows: int) -> None:
    """The smallest GPU decides; with a CPU among them it is as many as a CPU likes."""
    assert chunk_for(workers) == rows


def test_mixtures_take_more_rows_where_a_gpu_has_room() -> None:
    """And no more than others where it has little, or where a CPU has layers too."""

    def mixture(*devices: tuple[str, int]) -> WorkerDescription:
        one = worker(2048, *devices)
        assert one.target is not None
        return replace(one, target=replace(one.target, is_mixture=True))

    assert chunk_for([mixture(("cuda:0", 141 * GB))]) == 4096
    assert chunk_for([mixture(("cuda:0", 141 * GB))] * 2) == 2048
    assert chunk_for([mixture(("cuda:0", 8 * GB))]) == 1024
    assert chunk_beside_others([mixture(("cuda:0", 141 * GB))], 9000, 4, drafts=False) == 2048
    assert chunk_for([mixture(("cuda:0", 141 * GB)), mixture(("cpu", 64 * GB))]) == 512


@pytest.mark.parametrize(
    ("engine", "tokens", "answers", "drafts", "rows"),
    [
        (StepEngine.GRAPHS, 4096, 2, False, 112),
        (StepEngine.GRAPHS, 4096, 32, False, 112),
        (StepEngine.GRAPHS, 4096, 33, False, 96),
        (StepEngine.GRAPHS, 4096, 64, False, 96),
        (StepEngine.GRAPHS, 4096, 300, False, 64),
        (StepEngine.GRAPHS, 4096, 300, True, 256),
        (StepEngine.GRAPHS, 4097, 2, True, 1024),
        (StepEngine.TORCH, 100, 2, False, 1024),
    ],
)
def test_few_rows_beside_others_where_they_join_their_steps(
    engine: StepEngine, tokens: int, answers: int, drafts: bool, rows: int
) -> None:
    """By kernels; elsewhere a prompt has steps of its own. Each of two stages has half of the answers in its steps.
    Blocks of others have made the steps longer already."""
    one = worker(4096, ("cuda:0", 141 * GB))
    assert one.target is not None
    target = replace(one.target, step_engine=engine)
    assert chunk_beside_others([replace(one, target=target)] * 2, tokens, answers, drafts=drafts) == rows
