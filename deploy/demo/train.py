"""Train the demo pair from nothing: tokenizer, target, self-play, draft, figures.

    python deploy/demo/train.py                       # everything, on one GPU
    python deploy/demo/train.py --stage target        # only the target
    python deploy/demo/train.py --stage draft         # only the draft of the target that is there
    python deploy/demo/train.py --stage draft --dflash2 --from-draft deploy/demo/draft    # a DFlash2 draft
    python deploy/demo/train.py --quick --out /tmp/demo     # a toy run on a CPU, to try the script

Every stage is given seconds rather than steps, writes its result as soon as it has one, and
prints what it does. Reading the library and compiling come on top: about two minutes in all.
"""

import argparse
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

import chats
import data
import evaluate
import export
import tokenizer as tokens
import train_draft
import train_target
from corpus import function_chat
from draft import Draft
from model import Target
from selfplay import Generator
from shapes import DraftShape, TargetShape

BEGAN = time.perf_counter()


@dataclass(frozen=True)
class Scale:
    """How much of everything: the published pair, or a toy that a CPU manages in a minute."""

    target: TargetShape = TargetShape()
    draft: DraftShape = DraftShape()
    # No more parameters than the other one: a narrower MLP pays for the convolutions and the selector.
    dflash2: DraftShape = DraftShape(intermediate_size=704, conv_kernel_size=2, selector_rank=48)
    files: int | None = None
    conversations: int = 400_000
    row_length: int = 1024
    # Rows of each kind in one step: few of the source, or the target learns it by heart.
    code: int = 8
    functions: int = 2
    chats: int = 22
    generator_rows: int = 2048
    generator_length: int = 512
    draft_rows: int = 32
    anchors: int = 64
    heldout_chats: int = 256
    heldout_others: int = 56


QUICK = Scale(
    target=TargetShape(1024, 64, 96, 4, 2, 1, 32, 8, 1e5, 1, 2, 32),
    draft=DraftShape(64, 96, 2, 2, 1, 32, target_layer_ids=(0, 2), sliding_layers=1, vocab_size=1024),
    dflash2=DraftShape(
        64,
        48,
        2,
        2,
        1,
        32,
        target_layer_ids=(0, 2),
        sliding_layers=1,
        vocab_size=1024,
        conv_kernel_size=2,
        selector_rank=8,
    ),
    files=300,
    conversations=2000,
    row_length=256,
    code=2,
    functions=1,
    chats=4,
    generator_rows=24,
    generator_length=320,
    draft_rows=4,
    anchors=8,
    heldout_chats=12,
    heldout_others=4,
)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:5.0f} s] {text}", flush=True)


def stop_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    return (
        tokens.special_id(tokenizer, tokens.TURN_END),
        tokens.special_id(tokenizer, tokens.END_OF_TEXT),
    )


def make_target(scale: Scale, corpus: data.Corpus, options: argparse.Namespace) -> None:
    """Tokenizer, rows, training; leaves the target's folder complete."""
    rng = random.Random(options.seed)
    spoken = [chats.render(chats.conversation(rng)) for _ in range(scale.conversations)]
    say(f"{len(spoken)} conversations drawn")
    source = corpus.texts("train")
    tokenizer = tokens.train(source + spoken[: len(spoken) // 10], scale.target.vocab_size)
    turn_end, end_of_text = stop_tokens(tokenizer)
    say(f"tokenizer of {tokenizer.get_vocab_size()} tokens trained")

    def code(splits: tuple[str, ...]) -> data.Rows:
        encoded = tokens.encode_all(tokenizer, corpus.texts(*splits))
        documents = [[*document, end_of_text] for document in encoded]
        return data.stream_rows(documents, scale.row_length, device)

    def talk(texts: list[str]) -> data.Rows:
        header = tokenizer.encode("assistant\n").ids
        marks = (tokens.special_id(tokenizer, tokens.TURN_START), turn_end)
        encoded = tokens.encode_all(tokenizer, texts)
        return data.chat_rows(encoded, scale.row_length, header, marks, device)

    def asked(splits: tuple[str, ...], times: int) -> list[str]:
        pairs = [function_chat(f, rng) for f in corpus.documented(*splits) for _ in range(times)]
        rng.shuffle(pairs)
        return [chats.render_request(ask) + f"{answer}<|im_end|>\n" for ask, answer in pairs]

    device = options.device
    training = {
        data.CODE: code(("train",)),
        data.FUNCTIONS: talk(asked(("train",), 3)),
        data.CHATS: talk(spoken),
    }
    fresh = chats.distinct(rng, scale.heldout_chats * 2, heldout=True)
    heldout = {
        data.CODE: code(("heldout",)),
        data.FUNCTIONS: talk(asked(("heldout",), 1)),
        data.CHATS: talk([chats.render_request(q) + f"{a}<|im_end|>\n" for q, a in fresh] * 4),
    }
    for kind, rows in training.items():
        say(f"{kind}: {rows.ids.numel() / 1e6:.2f} M training tokens in rows")

    torch.manual_seed(options.seed)
    target = Target(replace(scale.target, dropout=options.dropout)).to(device)
    say(f"target of {sum(p.numel() for p in target.parameters()) / 1e6:.1f} M parameters")
    share = {data.CODE: scale.code, data.FUNCTIONS: scale.functions, data.CHATS: scale.chats}
    result = train_target.train(
        target,
        training,
        heldout,
        share,
        options.target_seconds,
        options.target_rate,
        0.1,
        options.seed,
    )
    folder = options.out / "target"
    tokens.save(tokenizer, folder, export.LONGEST)
    export.write_target(target, folder, turn_end, end_of_text)
    # Only what was generated: the other kinds are the library's text, which each interpreter has itself.
    prompts = data.heldout_prompts(corpus, scale.heldout_chats, scale.heldout_others)
    export.write_json(options.out / "prompts.json", {data.CHATS: prompts[data.CHATS]})
    log(options.out, "target", result)
    say(f"target written: {result}")


def make_draft(scale: Scale, corpus: data.Corpus, options: argparse.Namespace) -> None:
    """Self-play, training, figures; always on the rounded weights that are published."""
    device, out = options.device, options.out
    folder = options.target or out / "target"
    name = "draft2" if options.dflash2 else "draft"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = export.read_target(folder).to(device, dtype).requires_grad_(False)
    tokenizer = tokens.load(folder)
    stops = stop_tokens(tokenizer)
    generator = Generator(target, scale.generator_rows, scale.generator_length, stops)
    prompts = data.heldout_prompts(corpus, scale.heldout_chats, scale.heldout_others)
    own = {data.CHATS: 256, data.CODE: 256, data.FUNCTIONS: 256}
    if options.from_draft is None:
        answers = evaluate.measure(target, None, tokenizer, prompts, lambda *_: generator, own)
        say(f"target judged: {answers}")
    texts = train_draft.self_play(generator, corpus, tokenizer, options.selfplay_seconds, options.seed)
    say("self-play done")
    torch.manual_seed(options.seed)
    draft = Draft(scale.dflash2 if options.dflash2 else scale.draft).to(device)
    if options.from_draft is not None:
        draft.start_from(export.read_draft(options.from_draft).to(device), target.head)
    mask = tokens.special_id(tokenizer, tokens.MASK)
    share = {data.CODE: 0.4, data.FUNCTIONS: 0.3, data.CHATS: 0.3}
    result = train_draft.train(
        draft,
        target,
        texts,
        mask,
        share,
        scale.draft_rows,
        scale.anchors,
        options.draft_seconds,
        options.draft_rate,
        0.1,
        options.seed,
        BEGAN + options.total_seconds,
        lambda: export.write_draft(draft, target.shape, out / name, mask),
    )
    export.write_draft(draft, target.shape, out / name, mask)
    own_tokens = {kind: float((t.end - t.start + 1).sum()) for kind, t in texts.items()}
    log(out, name, result | {f"selfplay_{kind}": size for kind, size in own_tokens.items()})
    say(f"draft of {sum(p.numel() for p in draft.parameters()) / 1e6:.1f} M parameters written")
    # Read again: what is judged is what lies on the disk, and nothing of it is compiled.
    target = export.read_target(folder).to(device, dtype)
    published = export.read_draft(out / name).to(device, dtype)
    figures = evaluate.measure(target, published, tokenizer, prompts, lambda *_: generator, own)
    log(out, "figures2" if options.dflash2 else "figures", figures)
    say(f"figures: {figures}")
    if options.from_draft is not None:
        start = export.read_draft(options.from_draft).to(device, dtype)
        figures = evaluate.measure(target, start, tokenizer, prompts, lambda *_: generator, own, show=0)
        say(f"figures of the draft that it started from: {figures}")


def log(out: Path, name: str, content: dict[str, float]) -> None:
    export.write_json(out / "log" / f"{name}.json", content)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("all", "target", "draft"), default="all")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent,
        help="where target/, draft/ and prompts.json go (default: this folder)",
    )
    parser.add_argument(
        "--library",
        type=Path,
        help="a Lib folder of CPython (default: the running interpreter's own; "
        "some distributions leave its tests out, which are two thirds of it)",
    )
    parser.add_argument(
        "--target-seconds",
        type=float,
        default=270,
        help="training of the target; an H200 reads 100 M tokens in 210 s",
    )
    parser.add_argument(
        "--selfplay-seconds",
        type=float,
        default=70,
        help="the target writes what the draft learns from",
    )
    parser.add_argument("--draft-seconds", type=float, default=250, help="training of the draft")
    parser.add_argument(
        "--total-seconds",
        type=float,
        default=float("inf"),
        help="training of the draft ends by then, counted from the start, to be written and measured "
        "(default: no limit)",
    )
    parser.add_argument(
        "--dflash2",
        action="store_true",
        help="train a DFlash2 draft, with convolutions and a candidate selector, and write it to draft2/",
    )
    parser.add_argument(
        "--from-draft",
        type=Path,
        help="a trained draft of the same width and layers to start from (default: from nothing)",
    )
    parser.add_argument("--target", type=Path, help="the target to train a draft for (default: target/ in --out)")
    parser.add_argument("--target-rate", type=float, default=6e-3, help="peak learning rate")
    parser.add_argument("--draft-rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.05,
        help="in the target, against learning the library by heart",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a toy pair in seconds; combine with --out and small --*-seconds",
    )
    options = parser.parse_args()
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return options


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    # Blocks, kinds of rows, training and judging: each needs its own compiled version.
    torch._dynamo.config.cache_size_limit = 64
    scale = QUICK if options.quick else Scale()
    corpus = data.Corpus.read(options.library, scale.files)
    say(f"{len(corpus.files)} files, {len(corpus.functions)} documented functions read")
    if options.stage in ("all", "target"):
        make_target(scale, corpus, options)
    if options.stage in ("all", "draft"):
        make_draft(scale, corpus, options)


if __name__ == "__main__":
    main()
