"""How long a draft's way to choose tokens takes by itself, behind the logits: on a GPU by kernels in a captured graph,
as where a draft is served, on a CPU in plain torch.

`python -m tests.reference.chooser_times qwen3.6-27b dflash2 --device cuda:0` prints milliseconds a block, of one
session and of several, beside those of the most probable tokens alone. Weights are random: times do not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from coordinator.bench.shapes import DRAFT_KINDS, TARGETS, draft_config
from services.model.drafts.dflash import read_config
from shard_worker.device.devices import Device, parse_devices
from shard_worker.drafting.choosers import GuessedRows
from shard_worker.drafting.choosers.argmax import Argmax
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.drafting.drafters.dflash import load_chooser
from shard_worker.weights.opening import open_checkpoint
from shard_worker.weights.weight import DenseWeight

REPEATS = 50


def block_ms(
    device: Device, head: DraftHead, config: dict[str, object], sessions: int, embedding: torch.Tensor
) -> float:
    """The median milliseconds in which the tokens of a whole block of each session are chosen."""
    draft, place = read_config(config), device.torch_device
    tokens = draft.block_size - 1
    taken = tokens + int(not draft.from_anchor)
    rows, width = sessions * taken, draft.hidden_size
    hidden = torch.randn(rows, width, device=place).to(head.weight.dtype)
    logits = torch.randn(rows, head.weight.rows, device=place).to(head.weight.dtype)
    if not device.is_gpu:
        guessed = [row for row in range(rows) if draft.from_anchor or row % taken]
        asked = GuessedRows(
            hidden[guessed],
            logits[guessed],
            [7] * sessions,
            [tokens] * sessions,
            head.named,
            lambda ids: embedding[list(ids)],
        )
        return _median_ms(lambda: head.chooser.choose(asked), lambda: None)
    from shard_worker.drafting.chooser_kernels import LaunchedRows, choose
    from shard_worker.model.kernels.matmul import begin
    from shard_worker.model.kernels.step_parameters import StepParameters

    parameters = StepParameters(place, 3, rows=rows, sessions=None if sessions == 1 else sessions)
    if sessions == 1:
        parameters.fill(20, taken)
    else:
        parameters.begin()
        for number in range(sessions):
            parameters.add(number, number * taken, 20, taken)
    parameters.send()
    parameters.record_launch()
    launched = LaunchedRows(
        normed=begin(hidden, torch.ones(width, device=place), 1e-6),
        logits=logits,
        known=torch.full((sessions,), 7, dtype=torch.int64, device=place),
        places=parameters.places(rows),
        from_anchor=draft.from_anchor,
        most=tokens,
        embedding=embedding,
    )
    chosen = torch.zeros(rows + 1, dtype=torch.int64, device=place)
    choose(head, launched, chosen)
    device.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(head, launched, chosen)
    return _median_ms(graph.replay, device.synchronize)


def _median_ms(work: Callable[[], object], wait: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        wait()
        started = time.perf_counter()
        work()
        wait()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=TARGETS)
    parser.add_argument("kind", choices=DRAFT_KINDS)
    parser.add_argument("--vocabulary", type=int, help="of the draft; all of the target's by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    [device] = parse_devices(arguments.device)
    config = {**draft_config(arguments.shape, arguments.kind, arguments.vocabulary), "random_weights": True}
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode(), device.current():
        (Path(directory) / "config.json").write_text(json.dumps(config))
        chooser = load_chooser(open_checkpoint(directory, "--draft"), device, "bfloat16")
        vocabulary = arguments.vocabulary or config["vocab_size"]
        made = torch.empty(
            config["vocab_size"], config["hidden_size"], dtype=torch.bfloat16, device=device.torch_device
        )
        embedding = made.normal_(0.0, 0.02)
        weight = DenseWeight(embedding[:vocabulary])
        for sessions in arguments.sessions:
            own, plain = (
                block_ms(device, DraftHead(weight, chooser=one), config, sessions, embedding)
                for one in (chooser, Argmax())
            )
            print(
                f"{arguments.kind}, blocks of {config['block_size']} rows, sessions {sessions}: {own:.3f} ms; "
                f"the most probable tokens alone: {plain:.3f} ms"
            )


if __name__ == "__main__":
    main()
