"""Measure the published pair on held-out prompts: right answers and tokens per verify.

The target's greedy text does not depend on the draft, so it is written once in a batch; then the
draft is walked along it. Each verify yields the leading guesses that agree with the text and one
token of the target's own; tokens behind the end of the text are not counted.

    python deploy/demo/evaluate.py               # every prompt: some minutes on a CPU
    python deploy/demo/evaluate.py --limit 16    # fewer
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import chats
import tokenizer as tokens
from data import CHATS, CODE, FUNCTIONS
from draft import Draft
from export import read_draft, read_target, write_json
from model import Target
from prompts import held_out
from selfplay import Generator, Texts
from train_draft import block_targets, tokens_before

FOLDER = Path(__file__).parent


@torch.no_grad()
def tokens_per_verify(target: Target, draft: Draft, mask_id: int, texts: Texts, loops: Tensor) -> Tensor:
    """Tokens and verifies of all rows, then the same of what ends before a row's loop [4]."""
    head = target.head
    _, features = target(texts.ids, draft.shape.target_layer_ids)
    memory = draft.remember(features)
    place, counts = texts.start.clone(), torch.zeros(4)
    while bool((going := place < texts.end).any()):
        known = F.embedding(texts.ids.gather(1, place[:, None]), head)
        hidden = draft(memory, known, head[mask_id], place[:, None])[:, 0]
        labels, valid = block_targets(texts, place[:, None], draft.shape.block_size)
        # Behind a wrong guess nothing counts, so the text's own tokens come before all that do.
        before = tokens_before(texts, place[:, None], labels)[:, 0]
        right = (draft.choose(hidden, head, before) == labels[:, 0]) & valid[:, 0]
        accepted = right.long().cumprod(-1).sum(-1)
        yielded = torch.minimum(accepted + 1, texts.end - place) * going
        fresh = going & (place + yielded < loops)
        counts += torch.stack((yielded.sum(), going.sum(), (yielded * fresh).sum(), fresh.sum())).cpu()
        place = place + yielded
    return counts


def first_loops(texts: Texts, size: int = 8) -> Tensor:
    """Where each row first repeats ``size`` tokens of its own, or the place behind its end.

    Small models fall into loops, and loops are easy to guess: acceptance before them is the
    figure that says something about other texts.
    """
    places = []
    for row, start, end in zip(texts.ids.tolist(), texts.start.tolist(), texts.end.tolist(), strict=True):
        written: set[tuple[int, ...]] = set()
        place = start
        while place + size <= end + 1 and (window := tuple(row[place : place + size])) not in written:
            written.add(window)
            place += 1
        places.append(place if place + size <= end + 1 else end + 1)
    return torch.tensor(places, device=texts.ids.device)


def measure(
    target: Target,
    draft: Draft | None,
    tokenizer: Tokenizer,
    prompts: dict[str, list[Any]],
    generator_for: Callable[[int, int], Generator],
    own_tokens: dict[str, int],
    show: int = 3,
) -> dict[str, float]:
    """Print and return the figures; without a draft only the answers are judged.

    ``generator_for`` takes the rows and positions that are needed.
    """
    results: dict[str, float] = {}
    mask_id = tokens.special_id(tokenizer, tokens.MASK)
    for kind, items in prompts.items():
        plain = [item["prompt"] if kind == CHATS else item for item in items]
        rendered = plain if kind == CODE else [chats.render_request(text) for text in plain]
        encoded = tokens.encode_all(tokenizer, rendered)
        longest = max(map(len, encoded)) + own_tokens[kind]
        generator = generator_for(len(encoded), longest)
        texts = generator.run(encoded, limit=min(longest, generator.length))
        texts.end = torch.minimum(texts.end, texts.start + own_tokens[kind] - 1)
        answers = [
            tokenizer.decode(row[start : end + 1].tolist())
            for row, start, end in zip(texts.ids, texts.start.tolist(), texts.end.tolist(), strict=True)
        ]
        if kind == CHATS:
            wanted = [item["answer"] for item in items]
            wrong = [triple for triple in zip(plain, wanted, answers, strict=True) if triple[1] != triple[2]]
            results["chat_exact"] = 1 - len(wrong) / len(items)
            print(f"chat: {len(items) - len(wrong)} of {len(items)} answers exactly right")
            for prompt, right, got in wrong[:show]:
                print(f"  wrong: {prompt!r}\n    wanted {right!r}\n    got    {got!r}")
        else:
            for prompt, answer in list(zip(plain, answers, strict=True))[:show]:
                print(f"  {kind}: {prompt[-160:]!r}\n    -> {answer[:400]!r}")
        if draft is None:
            continue
        loops = first_loops(texts)
        total, verifies, fresh, fresh_verifies = tokens_per_verify(target, draft, mask_id, texts, loops).tolist()
        looping = float((loops <= texts.end).float().mean())
        results[f"tokens_per_verify_{kind}"] = total / verifies
        results[f"tokens_per_verify_{kind}_before_loops"] = fresh / max(fresh_verifies, 1)
        results[f"looping_{kind}"] = looping
        print(f"{kind}: {total / verifies:.2f} tokens per verify ({total:.0f} / {verifies:.0f})")
        print(
            f"  {looping:.0%} of the texts repeat themselves; {fresh / max(fresh_verifies, 1):.2f} before that",
            flush=True,
        )
    return {name: round(value, 4) for name, value in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="holds target/ and draft/")
    parser.add_argument("--prompts", type=Path, help="file from prompts.py (default: as it would write it here)")
    parser.add_argument("--limit", type=int, default=10_000, help="prompts per kind")
    parser.add_argument("--chat-tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--code-tokens", type=int, default=256, help="tokens of a continuation")
    parser.add_argument("--save", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("--show", type=int, default=3, help="answers to print per kind")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = read_target(arguments.folder / "target").to(device, dtype)
    draft = read_draft(arguments.folder / "draft").to(device, dtype)
    tokenizer = tokens.load(arguments.folder / "target")
    given = arguments.prompts
    prompts = held_out() if given is None else json.loads(given.read_text(encoding="utf-8"))
    prompts = {kind: items[: arguments.limit] for kind, items in prompts.items()}
    stops = (tokens.special_id(tokenizer, tokens.TURN_END), tokens.special_id(tokenizer, tokens.END_OF_TEXT))
    own = {CHATS: arguments.chat_tokens, CODE: arguments.code_tokens, FUNCTIONS: arguments.code_tokens}
    results = measure(
        target,
        draft,
        tokenizer,
        prompts,
        lambda rows, length: Generator(target, rows, length, stops),
        own,
        arguments.show,
    )
    if arguments.save:
        write_json(arguments.save, results)


if __name__ == "__main__":
    main()
