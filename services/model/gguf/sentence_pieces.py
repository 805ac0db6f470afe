"""Vocabularies of SentencePiece in GGUF files, as tokenizer.json describes their kind of BPE.

Spaces are written as ▁ in them. Files of most models have no merges but a score of each token: two neighbours become
the token that they spell together, of all in a text those with the highest score first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from services.errors import DataLoss
from services.model.gguf.metadata import Metadata

SPACE = "▁"

_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6

_SCORES = "tokenizer.ggml.scores"

_RUNS = f"{SPACE}\n\t"
"""The characters of which Gemma has tokens of up to 31 together."""

_MOST_CHARACTERS = 1024
"""The longest token, as all ways to cut it in two are looked at."""


def spelled(tokens: Sequence[str]) -> list[str]:
    """Return tokens as the model's own vocabulary spells them: files have those of nothing but spaces as they are."""
    return [SPACE * len(token) if token.strip(" ") == "" else token for token in tokens]


def description(metadata: Metadata, tokens: Sequence[str], kinds: Sequence[int], *, prefix: bool) -> dict[str, Any]:
    """Return what tokenizer.json says of the model, and of what is done to texts before and after.

    tokens, kinds: of all ids, `spelled`. prefix: whether texts begin with a space that is not theirs.

    Raises InvalidArgument and DataLoss for metadata that makes no sense.
    """
    given = metadata.has("tokenizer.ggml.merges")
    merges = merges_of_file(metadata) if given else _merges(tokens, kinds, _ranks(metadata, tokens))
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    to_spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = metadata.token("unknown")
    if unknown is None:
        unknown = next((token_id for token_id, kind in enumerate(kinds) if kind == _UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, to_marks]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": "<0x00>" in tokens,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def merges_of_file(metadata: Metadata) -> list[list[str]]:
    """Return the pairs of tokens that are joined, the first ones first. Raises DataLoss for what is no pair."""
    key = "tokenizer.ggml.merges"
    pairs = [merge.split(" ") for merge in metadata.texts(key)]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise DataLoss(
            f"{metadata.path}: {key} has {' '.join(wrong)[:40]!r}; it must be two tokens with a space between",
            field=key,
        )
    return pairs


def _ranks(metadata: Metadata, tokens: Sequence[str]) -> Sequence[float]:
    """Return a number of each token, that of tokens to be made first being the least."""
    if metadata.architecture.startswith("gemma"):
        # Scores of Gemma's tokens are no order. That of its vocabulary is, but for runs of spaces, which come first.
        return [-1 if _is_run(token) else token_id for token_id, token in enumerate(tokens)]
    scores = metadata.numbers(_SCORES)
    if len(scores) < len(tokens) or not all(map(math.isfinite, scores)):
        raise DataLoss(
            f"{metadata.path}: {_SCORES} must have a finite number for each of {len(tokens)} tokens, and has "
            f"{len(scores)} numbers",
            field=_SCORES,
        )
    return [-score for score in scores]


def _is_run(token: str) -> bool:
    """Return whether a token is one character of `_RUNS`, once or more."""
    return token[:1] in _RUNS and token == token[:1] * len(token)


def _merges(tokens: Sequence[str], kinds: Sequence[int], ranks: Sequence[float]) -> list[list[str]]:
    """Return all pairs of tokens that make a token, those first whose token is to be made first.

    Of those that are alike in that, they are sorted by the lengths of the left part and the right one, the longest
    first. Raises DataLoss for a token that is too long.
    """
    spoken = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (_UNKNOWN, _CONTROL, _BYTE)}
    pairs = []
    for token, rank in zip(tokens, ranks, strict=False):
        if token not in spoken:
            continue
        if len(token) > _MOST_CHARACTERS:
            raise DataLoss(
                f"tokenizer.ggml.tokens has a token of {len(token)} characters, {token[:40]!r}; it must be of at most "
                f"{_MOST_CHARACTERS}",
                field="tokenizer.ggml.tokens",
            )
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in spoken and right in spoken:
                pairs.append((rank, -cut, cut - len(token), left, right))
    pairs.sort(key=lambda pair: pair[:3])
    return [[left, right] for *_, left, right in pairs]
