"""Self-play and training of the draft: it learns to guess what the target itself would write."""

import random
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import data
from draft import Draft
from model import Target
from optimizer import Optimizer
from selfplay import Generator, Texts
from train_target import compile_blocks, compiled, mixed_precision

# Self-play per kind: its part of all batches, and the positions of a row.
PLAN = {data.CODE: (2, 512), data.FUNCTIONS: (2, 512), data.CHATS: (3, 256)}

# With a selector: the part of the loss that asks for the right token without it, so that this is a candidate.
UNSELECTED = 0.3


def self_play(
    generator: Generator, corpus: data.Corpus, tokenizer: Tokenizer, seconds: float, seed: int
) -> dict[str, Texts]:
    """Let the target continue as many prompts as fit into ``seconds``."""
    rng = random.Random(seed)
    prompts_of: dict[str, Callable[[int], list[list[int]]]] = {
        data.CODE: lambda count: data.code_prompts(corpus, tokenizer, count, rng),
        data.FUNCTIONS: lambda count: data.function_prompts(corpus, tokenizer, count, rng),
        data.CHATS: lambda count: data.chat_prompts(tokenizer, count, rng),
    }
    written: dict[str, list[Texts]] = {kind: [] for kind in PLAN}
    order = [kind for kind, (times, _) in PLAN.items() for _ in range(times)]
    began, batches = time.perf_counter(), 0
    while batches < len(order) or time.perf_counter() - began < seconds:
        kind = order[batches % len(order)]
        length = min(PLAN[kind][1], generator.length)
        # Half of the code first wanders off by sampling: its greedy rest is something new.
        odds = 0.0 if kind == data.CHATS else 0.5
        wander = [rng.randint(1, 60) if rng.random() < odds else 0 for _ in range(generator.rows)]
        texts = generator.run(prompts_of[kind](generator.rows), wander, length)
        written[kind].append(texts.select(texts.end - texts.start >= 2))
        batches += 1
        if batches <= len(order):
            print(f"self-play {kind}: {time.perf_counter() - began:.1f} s", flush=True)
    result = {kind: Texts.join(parts) for kind, parts in written.items()}
    for kind, texts in result.items():
        size = float((texts.end - texts.start + 1).sum()) / 1e6
        print(f"self-play {kind}: {len(texts.ids)} rows, {size:.2f} M own tokens", flush=True)
    return result


def draw_anchors(texts: Texts, count: int) -> Tensor:
    """Random places [R, count] with at least one own token behind them."""
    room = (texts.end - texts.start).float()[:, None]
    where = torch.rand(len(texts.ids), count, device=texts.ids.device) * room
    return texts.start[:, None] + where.long()


def block_targets(texts: Texts, anchors: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The tokens [R, A, size-1] behind each anchor and which of them the target wrote."""
    places = anchors[..., None] + torch.arange(1, size, device=anchors.device)
    valid = places <= texts.end[:, None, None]
    places = places.clamp(max=texts.ids.shape[1] - 1)
    return texts.ids.gather(1, places.flatten(1)).view_as(places), valid


def tokens_before(texts: Texts, anchors: Tensor, labels: Tensor) -> Tensor:
    """The token [R, A, size-1] before each of ``block_targets``'s."""
    return torch.cat((texts.ids.gather(1, anchors)[..., None], labels[..., :-1]), -1)


def block_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    valid: Tensor,
    weighing: Tensor | None,
    followers: Tensor | None,
) -> tuple[Tensor, ...]:
    """Weighted loss, and the mean number of tokens a verify would yield.

    A guess only counts if all before it were right, so later rows weigh less, and still less
    where the draft itself doubts that they will be reached. For the same reason a selector learns
    behind the right token before: ``weighing`` [R, A, size-1, rank] is what it multiplies the
    vectors ``followers`` [V, rank] by. Here it weighs all tokens, and not the candidates alone.
    """
    logits = (hidden @ head.T).float()
    losses = unselected = cross_entropy(logits, labels)
    if weighing is not None and followers is not None:
        logits = logits + (weighing @ followers.T).float()
        losses = cross_entropy(logits, labels)
    row = torch.arange(labels.shape[-1], device=labels.device)
    before = F.pad(losses.detach().cumsum(-1)[..., :-1], (1, 0))
    weight = torch.exp(-row / 7) * (0.3 + 0.7 * torch.exp(-before)) * valid
    right = (logits.argmax(-1) == labels) & valid
    accepted = right.long().cumprod(-1).sum(-1).float().mean()
    losses = UNSELECTED * unselected + (1 - UNSELECTED) * losses
    return (losses * weight).sum() / weight.sum(), accepted + 1


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)


def train(
    draft: Draft,
    target: Target,
    texts: dict[str, Texts],
    mask_id: int,
    share: dict[str, float],
    rows: int,
    anchors: int,
    seconds: float,
    rate: float,
    decay: float,
    seed: int,
    until: float,
    save: Callable[[], None],
) -> dict[str, float]:
    """Every step takes rows of one kind, chosen with the odds in ``share``.

    ``until`` is the time of `time.perf_counter` at which ``seconds`` end at the latest, however long
    the first steps took. ``save`` is called half way, in case that the run is cut.
    """
    rng = random.Random(seed)
    device = target.head.device
    head = target.head.detach()
    capture = draft.shape.target_layer_ids
    optimizer = Optimizer(draft, rate, decay)
    loss_of = compiled(block_loss, device)
    compile_blocks(target)
    if head.is_cuda:
        for layer in draft.layers:
            layer.compile(dynamic=False)
    draft.train()
    step, began, reported = 0, time.perf_counter(), 0.0
    seen: dict[str, list[float]] = {kind: [] for kind in share}
    warm = 2 * len(share)
    while True:
        if step == warm:
            print(f"draft: first steps took {time.perf_counter() - began:.0f} s", flush=True)
            began = time.perf_counter()
            seconds = max(min(seconds, until - began), 1.0)
        progress = (time.perf_counter() - began) / seconds if step >= warm else 0.0
        if progress >= 1:
            break
        kinds = list(share)
        # The first steps visit every kind, so that all shapes are compiled before the clock runs.
        kind = kinds[step % len(kinds)] if step < warm else rng.choices(kinds, list(share.values()))[0]
        pool = texts[kind]
        count = rows * PLAN[data.CODE][1] // PLAN[kind][1]
        chosen = torch.randint(len(pool.ids), (count,), device=device)
        batch = pool.select(chosen)
        places = draw_anchors(batch, anchors * PLAN[kind][1] // PLAN[data.CODE][1])
        labels, valid = block_targets(batch, places, draft.shape.block_size)
        with torch.no_grad():
            _, features = target(batch.ids, capture)
            known = F.embedding(batch.ids.gather(1, places), head).float()
        with mixed_precision(device):
            hidden = draft(features, known, head[mask_id], places)
            weighing = followers = None
            if (selector := draft.candidate_selector) is not None:
                weighing = selector(hidden, tokens_before(batch, places, labels))
                followers = selector.successor_codebook
            loss, yielded = loss_of(hidden, head, labels, valid, weighing, followers)
        loss.backward()
        optimizer.step(progress)
        step += 1
        if step % 10 == 0:
            seen[kind].append(float(yielded))
        if progress - reported >= 0.05:
            if reported < 0.5 <= progress:
                save()
            reported = progress
            recent = {kind: sum(values[-8:]) / len(values[-8:]) for kind, values in seen.items() if values}
            figures = ", ".join(f"{kind} {value:.2f}" for kind, value in recent.items())
            print(
                f"draft {progress:4.0%} step {step}: loss {loss.item():.3f}; tokens a verify at "
                f"random places: {figures}",
                flush=True,
            )
    return {"steps": step, "loss": loss.item()}
