"""Vocabularies of SentencePiece out of a GGUF file, against transformers' reading of the file and the rule itself."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import models, normalizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from services.errors import DataLoss, FlashsplitError, InvalidArgument
from services.model.text_files import GENERATION_CONFIG, TOKENIZER, find_text_file

SPACE = "▁"
TYPES = gguf.TokenType
TEXTS = (
    *("", " ", "  ", "Hello world", " Hello  world ", "a\n\nb\n\n\nc", "tab\tand\t\ttabs", "größe ǅ", "e\u0301 é"),
    *("नमस्ते", "你好，世界", "🙂👩\u200d👩\u200d👧", "\x00\x7f", "\u200b", "don't WE'LL", "1234567", "x = 1;", "</s>"),
    *("<turn>hi<end>", "<unk>", "<0x41>", "▁▁ ▁", "<tool>  </tool>", "line\r\nline", "ﷺ", " " * 40, "the\u00a0end"),
)
PIECES = st.one_of(st.text(), st.lists(st.sampled_from(TEXTS), max_size=4).map("".join))


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by their ids, with the kind and the score of each. merges: None where they follow from the scores."""

    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[str] | None = None


@functools.cache
def vocabulary(*, with_merges: bool = False, spaced: bool = False) -> Vocabulary:
    """A vocabulary of control tokens, bytes, one that a user defined, and pieces learnt from a little text.

    spaced: whether the user defined runs of spaces too, which files have as such.
    """
    learner = tokenizers.Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", SPACE)
    alphabet = list("abcdefghijklmnopqrstuvwxyzHW0123456789.,=;\n\tößé你好🙂" + SPACE)
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, limit_alphabet=90, show_progress=False)
    learner.train_from_iterator(
        [Path(__file__).read_text(encoding="utf-8"), "Hello world größe 你好 tab\t\tend\n\n\n"] * 3, trainer
    )
    learnt = json.loads(learner.to_str())["model"]
    special = {"<pad>": TYPES.CONTROL, "</s>": TYPES.CONTROL, "<s>": TYPES.CONTROL, "<unk>": TYPES.UNKNOWN}
    special |= {f"<0x{number:02X}>": TYPES.BYTE for number in range(256)}
    special |= {"<turn>": TYPES.CONTROL, "<end>": TYPES.CONTROL, "<tool>": TYPES.USER_DEFINED}
    if spaced:
        special |= {" " * 2: TYPES.USER_DEFINED, " " * 4: TYPES.USER_DEFINED}
    pieces = [piece for piece in learnt["vocab"] if piece.replace(SPACE, " ") not in special]
    tokens = [*special, *pieces]
    merges = [" ".join(pair) for pair in learnt["merges"]] if with_merges else None
    kinds = [int(kind) for kind in special.values()] + [int(TYPES.NORMAL)] * len(pieces)
    scores = [0.0] * len(special) + [-float(number) for number in range(1, len(pieces) + 1)]
    # Behind the last one that is in use, ids fill a round number of rows.
    return Vocabulary([*tokens, "[PAD9]"], [*kinds, int(TYPES.UNUSED)], [*scores, -1e4], merges)


Change = Callable[[Any], object]


def write(path: Path, architecture: str, kind: str, held: Vocabulary, change: Change | None = None) -> Path:
    """Write a GGUF file that has nothing but a vocabulary. change: adds what else the file is to say."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(held.tokens)
    writer.add_token_scores(held.scores)
    writer.add_token_types(held.kinds)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    if held.merges is not None:
        writer.add_token_merges(held.merges)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> tokenizers.Tokenizer:
    file = find_text_file(path, TOKENIZER)
    assert file is not None
    return tokenizers.Tokenizer.from_buffer(file.content)


def by_transformers(architecture: str, kind: str, held: Vocabulary) -> tokenizers.Tokenizer:
    used = len(held.tokens) - 1
    described: dict[str, Any] = {
        "tokenizer_type": kind,
        "tokens": held.tokens[:used],
        "scores": held.scores[:used],
        "token_type": held.kinds[:used],
    }
    if held.merges is not None:
        described["merges"] = held.merges
    made: tokenizers.Tokenizer = convert_gguf_tokenizer(architecture, described)[0]
    return made


CASES = {
    # Of what transformers makes of such vocabularies, that of phi3 adds the space as Llama's own tokenizer.json does.
    "llama": ("llama", "llama", "phi3", False),
    "gemma3": ("gemma3", "llama", "gemma3", False),
    "gemma4": ("gemma4", "gemma4", "gemma4", True),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]]:
    """What is read out of a file, and what transformers makes of it."""
    folder = tmp_path_factory.mktemp("pieces")
    found = {}
    for name, (architecture, kind, like, with_merges) in CASES.items():
        held = vocabulary(with_merges=with_merges, spaced=name == "gemma3")
        path = write(folder / f"{name}.gguf", architecture, kind, held, without_prefix if name == "gemma3" else None)
        found[name] = read(path), by_transformers(like, kind, held)
    return found


def without_prefix(writer: Any) -> None:
    writer.add_add_space_prefix(False)


@pytest.mark.parametrize("case", CASES)
@given(text=PIECES)
def test_text_is_cut_as_by_transformers(
    pairs: dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]], case: str, text: str
) -> None:
    made, expected = pairs[case]
    ids = expected.encode(text, add_special_tokens=False).ids
    assert made.encode(text, add_special_tokens=False).ids == ids
    for skip in (True, False):
        decoded = expected.decode(ids, skip_special_tokens=skip)
        assert made.decode(ids, skip_special_tokens=skip) == decoded


@pytest.mark.parametrize("case", CASES)
def test_texts_come_back(pairs: dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]], case: str) -> None:
    """Bytes of characters that the vocabulary lacks are put together again."""
    made, _ = pairs[case]
    for text in TEXTS:
        if SPACE not in text and "<" not in text:
            assert made.decode(made.encode(text, add_special_tokens=False).ids) == text


def by_the_rule(text: str, held: Vocabulary) -> list[str]:
    """Join neighbours, those first that make the token of the highest score, and of these the leftmost ones."""
    scores = {
        token: score for token, score, kind in zip(held.tokens, held.scores, held.kinds, strict=True) if kind in (1, 4)
    }
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        made = ["".join(pair) for pair in zip(symbols, symbols[1:], strict=False)]
        best = max(range(len(made)), key=lambda at: scores.get(made[at], -math.inf), default=0)
        if not made or made[best] not in scores:
            break
        symbols[best : best + 2] = [made[best]]
    whole = [[symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()] for symbol in symbols]
    return [token for tokens in whole for token in tokens]


@pytest.mark.parametrize("text", [text for text in TEXTS if text and "<" not in text and SPACE not in text])
def test_neighbours_are_joined_by_their_scores(
    pairs: dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]], text: str
) -> None:
    assert pairs["llama"][0].encode(text, add_special_tokens=False).tokens == by_the_rule(text, vocabulary())


@pytest.mark.parametrize("case", CASES)
def test_the_vocabulary_is_the_files(
    pairs: dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]], case: str
) -> None:
    made, _ = pairs[case]
    held = vocabulary(with_merges=case == "gemma4", spaced=case == "gemma3")
    assert [made.id_to_token(number) for number in range(len(held.tokens) - 1)] == [
        token.replace(" ", SPACE) for token in held.tokens[:-1]
    ]
    assert made.id_to_token(len(held.tokens) - 1) is None
    special = {token.content for token in made.get_added_tokens_decoder().values() if token.special}
    assert special == {"<pad>", "</s>", "<s>", "<unk>", "<turn>", "<end>"}


def test_the_first_token_is_added_but_for_gemma_4(tmp_path: Path) -> None:
    """Files of Llama need not ask for it; the chat template has Gemma 4's, whatever its files say."""

    def flag(added: bool) -> Change:
        return lambda writer: writer.add_add_bos_token(added)

    held = vocabulary()
    for number, (kind, change, first) in enumerate(
        [("llama", None, ["<s>"]), ("llama", flag(False), []), ("gemma4", flag(True), [])]
    ):
        made = read(write(tmp_path / f"{number}.gguf", "gemma4" if kind == "gemma4" else "llama", kind, held, change))
        tokens = made.encode("a").tokens
        assert tokens[: len(first)] == first
        assert "<s>" not in tokens[len(first) :]


def test_turns_of_gemma_4_end_answers(tmp_path: Path) -> None:
    held = vocabulary(with_merges=True)
    held = Vocabulary(
        ["<turn|>" if token == "<end>" else token for token in held.tokens], held.kinds, held.scores, held.merges
    )
    file = find_text_file(write(tmp_path / "a.gguf", "gemma4", "gemma4", held), GENERATION_CONFIG)
    assert file is not None
    assert file.json_object()["eos_token_id"] == [1, held.tokens.index("<turn|>")]


def changed(**changes: Any) -> Vocabulary:
    return Vocabulary(**{**vocabulary().__dict__, **changes})


@pytest.mark.parametrize(
    ("held", "error", "reason"),
    [
        (changed(scores=[0.0, 1.0]), DataLoss, "scores must have a finite number for each of .* tokens, and has 2"),
        (changed(scores=[math.nan] * 900), DataLoss, "scores must have a finite number"),
        (changed(kinds=[1]), DataLoss, "token_type has 1 entries"),
        (changed(tokens=[*vocabulary().tokens[:-2], "x" * 1025, "y"]), DataLoss, "a token of 1025 characters, 'xxx"),
        (changed(merges=["abc"]), DataLoss, "merges has 'abc'; it must be two tokens"),
    ],
)
def test_what_makes_no_sense_is_said(
    tmp_path: Path, held: Vocabulary, error: type[FlashsplitError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        read(write(tmp_path / "a.gguf", "llama", "llama", held))


def test_scores_are_needed(tmp_path: Path) -> None:
    path, writer = tmp_path / "a.gguf", gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidArgument, match=r"tokenizer.ggml.scores is missing; it must be a list"):
        read(path)
