"""The tokenizer that a GGUF file describes, as the tokenizer.json that Hugging Face's libraries read.

Vocabulary, merges and the kinds of tokens stand in the metadata. How text is split before that does not: there is a
name for it, `tokenizer.ggml.pre`, which stands for a rule that programs know.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.errors import DataLoss
from services.model.gguf import sentence_pieces
from services.model.gguf.metadata import Metadata

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_MODELS = ("gpt2", "llama", "gemma4")
"""What `tokenizer.ggml.model` may be."""

_ADDS_FIRST = "tokenizer.ggml.add_bos_token"

_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES = _GPT2 | {"use_regex": False}
_DIGITS = {"type": "Digits", "individual_digits": True}
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


@dataclass(frozen=True, slots=True)
class _Rule:
    """How text is split into words. splitters: in order. normalizer: what is done to text before. ignore_merges:
    whether a word that is a token is taken as it is."""

    splitters: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False


def _by_words(letters: str, digits: str) -> tuple[dict[str, Any], ...]:
    """Return the splitters of GPT-4's kind. letters, digits: the characters of words, and the pattern of numbers."""
    return _split_at(
        _CONTRACTIONS,
        rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+",
        digits,
        rf" ?[^\s{letters.strip('[]')}\p{{N}}]+[\r\n]*",
    )


def _by_case() -> tuple[dict[str, Any], ...]:
    """Return the splitters of GPT-4o's kind: a word ends before a capital letter behind a small one."""
    capitals, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = [
        rf"[^\r\n\p{{L}}\p{{N}}]?{word}{_CONTRACTIONS}?" for word in (f"{capitals}*{small}+", f"{capitals}+{small}*")
    ]
    return _split_at(*words, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*")


def _split_at(*patterns: str) -> tuple[dict[str, Any], ...]:
    """Return the splitters of words of these patterns, and of spaces."""
    pattern = "|".join((*patterns, r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _BYTES


_NFC = {"type": "NFC"}
_LLAMA3 = _Rule(_by_words(r"\p{L}", r"\p{N}{1,3}"), ignore_merges=True)
_RULES = {
    "gpt-2": _Rule((_GPT2,)),
    "starcoder": _Rule((_DIGITS, _GPT2)),
    "smollm": _Rule((_DIGITS, _GPT2)),
    "qwen2": _Rule(_by_words(r"\p{L}", r"\p{N}"), _NFC),
    "qwen35": _Rule(_by_words(r"[\p{L}\p{M}]", r"\p{N}"), _NFC),
    "deepseek-r1-qwen": _Rule(_by_words(r"\p{L}", r"\p{N}")),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "gpt-4o": _Rule(_by_case(), ignore_merges=True),
}


def tokenizer_json(metadata: Metadata) -> str | None:
    """Return the tokenizer as the text of a tokenizer.json; None where the file has none.

    Raises Unimplemented, saying what to do, for kinds of tokenizers and rules that are not known, InvalidArgument and
    DataLoss for metadata that makes no sense.
    """
    if metadata.has("tokenizer.huggingface.json"):
        return metadata.text("tokenizer.huggingface.json")
    model = metadata.text("tokenizer.ggml.model", "none")
    if model == "none":
        return None
    if model not in _MODELS:
        raise metadata.unsupported(
            "tokenizer.ggml.model",
            "'gpt2', byte-level BPE, and 'llama' and 'gemma4', BPE of SentencePiece, are read out of a file: put the "
            "model's tokenizer.json beside it",
        )
    rule = _rule(metadata) if model == "gpt2" else None
    tokens, kinds = _vocabulary(metadata)
    if rule is not None:
        described, first = _byte_level(metadata, rule, tokens), metadata.flag(_ADDS_FIRST, False)
    else:
        stored, tokens = tokens, sentence_pieces.spelled(tokens)
        # Runs of spaces are joined like other tokens: they are not looked for in a text, which has no marks yet.
        kinds = [_NORMAL if token != own else kind for token, own, kind in zip(stored, tokens, kinds, strict=True)]
        is_llama = model == "llama"
        prefix = metadata.flag("tokenizer.ggml.add_space_prefix", is_llama)
        described = sentence_pieces.description(metadata, tokens, kinds, prefix=prefix)
        # Gemma 4's own tokenizer leaves its first token to the chat template, whatever files say.
        first = is_llama and metadata.flag(_ADDS_FIRST, True)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                _added_token(token_id, tokens[token_id], special=kind != _USER_DEFINED)
                for token_id, kind in enumerate(kinds)
                if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
            ],
            "post_processor": _post_processor(metadata, tokens) if first else None,
            **described,
        }
    )


def _rule(metadata: Metadata) -> _Rule:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in _RULES:
        raise metadata.unsupported(
            "tokenizer.ggml.pre", f"known are {', '.join(_RULES)}: put the model's tokenizer.json beside the file"
        )
    return _RULES[name]


def _byte_level(metadata: Metadata, rule: _Rule, tokens: list[str]) -> dict[str, Any]:
    """Return what tokenizer.json says of byte-level BPE, as `sentence_pieces.description`."""
    return {
        "normalizer": rule.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": rule.splitters},
        "decoder": _GPT2,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule.ignore_merges,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": sentence_pieces.merges_of_file(metadata),
        },
    }


def named_tokens(metadata: Metadata) -> dict[str, str]:
    """Return the texts of special tokens that have a name, like "eos_token".

    Raises InvalidArgument for one that is beyond the vocabulary.
    """
    names = [name for name in ("bos", "eos", "unknown", "padding") if metadata.token(name) is not None]
    if not names or not metadata.has("tokenizer.ggml.tokens"):
        return {}
    tokens = metadata.texts("tokenizer.ggml.tokens")
    shown = {"unknown": "unk", "padding": "pad"}
    return {f"{shown.get(name, name)}_token": _token(metadata, tokens, name) for name in names}


def _vocabulary(metadata: Metadata) -> tuple[list[str], list[int]]:
    """Return all tokens by their ids and the kind of each, without those behind the last one that is in use: they fill
    the embedding up to a round number of rows."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    key = "tokenizer.ggml.token_type"
    kinds = metadata.integers(key) if metadata.has(key) else [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise DataLoss(f"{metadata.path}: {key} has {len(kinds)} entries for {len(tokens)} tokens", field=key)
    while kinds and kinds[-1] == _UNUSED:
        kinds.pop()
    return tokens[: len(kinds)], kinds


def _token(metadata: Metadata, tokens: list[str], name: str) -> str:
    token_id = metadata.token(name)
    if token_id is None or token_id >= len(tokens):
        raise DataLoss(
            f"{metadata.path}: tokenizer.ggml.{name}_token_id is {token_id}, the vocabulary has {len(tokens)} tokens",
            field=f"tokenizer.ggml.{name}_token_id",
        )
    return tokens[token_id]


def _post_processor(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    """Return what puts the first token before every text."""
    token = _token(metadata, tokens, "bos")
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [metadata.token("bos")], "tokens": [token]}},
    }


def _added_token(token_id: int, token: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
