"""Training of the target: next-token prediction for a given number of seconds."""

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from data import IGNORED, Rows
from model import Target
from optimizer import Optimizer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def mixed_precision(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the labelled tokens, 0 * sum where there are none."""
    logits = (hidden @ head.T).float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return losses / (labels != IGNORED).sum().clamp(min=1)


def compiled(function: Callable[Arguments, Result], device: torch.device) -> Callable[Arguments, Result]:
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def compile_blocks(target: Target) -> None:
    """Compile block by block: the blocks of one kind share their code, so it takes seconds."""
    if target.head.is_cuda:
        for block in target.model.layers:
            block.compile(dynamic=False)


@torch.no_grad()
def heldout_loss(target: Target, rows: Rows, limit: int, batch: int) -> float:
    target.eval()
    total, count = 0.0, 0
    device = target.head.device
    for first in range(0, min(limit, len(rows.ids)) // batch * batch, batch):
        ids, labels = rows.ids[first : first + batch], rows.labels[first : first + batch]
        with mixed_precision(device):
            hidden, _ = target(ids.long())
            total += float(token_loss(hidden, target.head, labels.long()))
        count += 1
    target.train()
    return total / max(count, 1)


def train(
    target: Target,
    training: dict[str, Rows],
    heldout: dict[str, Rows],
    share: dict[str, int],
    seconds: float,
    rate: float,
    decay: float,
    seed: int,
) -> dict[str, float]:
    """``share`` says how many rows of each kind make up one step."""
    rng = random.Random(seed)
    device = target.head.device
    optimizer = Optimizer(target, rate, decay)
    loss_of = compiled(token_loss, device)
    compile_blocks(target)
    target.train()
    batch = sum(share.values())
    step, began, reported, seen = 0, time.perf_counter(), 0.0, 0
    while True:
        # The first steps compile; the clock of the schedule starts behind them.
        if step == 3:
            heldout_loss(target, next(iter(heldout.values())), batch, batch)
            print(f"target: first steps took {time.perf_counter() - began:.0f} s", flush=True)
            began = time.perf_counter()
        progress = (time.perf_counter() - began) / seconds if step >= 3 else 0.0
        if progress >= 1:
            break
        parts = [training[kind].draw(count, rng) for kind, count in share.items()]
        ids, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        with mixed_precision(device):
            hidden, _ = target(ids)
            loss = loss_of(hidden, target.head, labels)
        loss.backward()
        optimizer.step(progress)
        step += 1
        seen += ids.numel()
        if step % 20 == 0 and progress - reported >= 0.1:
            reported = progress
            report(
                f"target {progress:4.0%} step {step} {seen / 1e6:.1f} M tokens",
                loss,
                {kind: heldout_loss(target, rows, 2 * batch, batch) for kind, rows in heldout.items()},
            )
    spent = time.perf_counter() - began
    losses = {kind: heldout_loss(target, rows, 4 * batch, batch) for kind, rows in heldout.items()}
    passes = {f"passes_{kind}": rows.passes for kind, rows in training.items()}
    result = {"seconds": spent, "steps": step, "tokens": seen, "train_loss": loss.item()}
    return result | {f"heldout_{kind}": value for kind, value in losses.items()} | passes


def report(what: str, loss: Tensor, heldout: dict[str, float]) -> None:
    others = ", ".join(f"held-out {kind} {value:.3f}" for kind, value in heldout.items())
    print(f"{what}: loss {loss.item():.3f}; {others}", flush=True)
