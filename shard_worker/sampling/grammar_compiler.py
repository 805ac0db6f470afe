"""Compiling the grammars of requests for one loaded checkpoint, whose tokenizer is read once, with the first grammar.

Everything here takes milliseconds to a second of one CPU core, so it runs on neither the event loop nor the device
thread. llguidance limits how large a compiled grammar may become, and `check_grammar` how long its text may be.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from services.errors import DataLoss, FailedPrecondition, InvalidArgument, Unimplemented
from services.messages.output_frames import check_grammar, grammar_field
from services.messages.steps import Grammar, GrammarKind, OpenSession
from services.model.text_files import TOKENIZER, find_text_file
from shard_worker.sampling.grammar import GrammarState, GrammarTokens

MAX_REASON = 500
"""The most characters of llguidance's reason that an error quotes."""

_END = "<|flashsplit:end of grammar|>"
# Between JSON tokens stands nothing, one space, or the end of a line and the next one's indentation: a weak model would
# go on with spaces and blank lines until the answer's last token. A schema's own "x-guidance" may say otherwise.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"\x20|\x0D?\x0A[\x20\x09]{0,32}"}


class GrammarCompiler:
    """Compiles grammars for the tokens of one checkpoint; on any thread."""

    def __init__(self, model: Path, config: Mapping[str, Any], vocab_size: int) -> None:
        """model, config: the checkpoint's path and its config.json. vocab_size: columns of its logits, which may be
        more or fewer than its tokens."""
        self._model, self._vocab_size = model, vocab_size
        self._eos = frozenset(token for token in _eos_tokens(config) if 0 <= token < vocab_size)
        self._limits = LLParserLimits(verbose_errors=False)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: Grammar, request: OpenSession, device: torch.device) -> GrammarState:
        """Return a grammar's state before the first output token of a session.

        The output ends with one of the request's stop tokens, or, where it has none, with the checkpoint's
        end-of-sequence token. Raises InvalidArgument naming the field, with llguidance's reason, for a grammar that is
        wrong, unsupported or too large; FailedPrecondition for a checkpoint without a usable tokenizer.json.
        """
        check_grammar(grammar)
        stops = request.stop_token_ids or self._eos
        if not stops:
            raise InvalidArgument(
                "a grammar needs a token to end with: the request has no stop_token_ids and the checkpoint's "
                "config.json no eos_token_id",
                field="stop_token_ids",
            )
        tokenizer = self._tokenizer_of_checkpoint()
        matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        special = frozenset(token for token in stops if tokenizer.is_special_token(token))
        tokens = GrammarTokens(self._vocab_size, tokenizer.eos_token, stops, special)
        return GrammarState(matcher, tokens, request.prompt_length, device)

    def _tokenizer_of_checkpoint(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._read()
            return self._tokenizer

    def _read(self) -> LLTokenizer:
        """Read the checkpoint's tokens, and add one that only llguidance knows, which stands for the end."""
        try:
            file = find_text_file(self._model, TOKENIZER)
            if file is None:
                raise FailedPrecondition(
                    f"{self._model / TOKENIZER} does not exist, and a grammar needs it: put the model's tokenizer.json "
                    "beside its weights on the last stage's host, or ask without a grammar",
                    reason="NO_TOKENIZER",
                    field="grammar",
                )
            stored = json.loads(file.content)
            vocab = stored["model"]["vocab"]
            ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))]
            ids += [token["id"] for token in stored["added_tokens"]]
            end = max(ids) + 1
            stored["added_tokens"].append(
                {
                    "id": end,
                    "content": _END,
                    "special": True,
                    "normalized": False,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                }
            )
            # A saved tokenizer may carry the cut and the padding of its training run.
            stored |= {"truncation": None, "padding": None}
            size = max(end + 1, self._vocab_size)
            return LLTokenizer(json.dumps(stored), n_vocab=size, eos_token=end)
        except (InvalidArgument, Unimplemented, DataLoss, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FailedPrecondition(
                f"the tokenizer.json of {self._model} cannot be used for grammars: "
                f"{_one_line(f'{type(error).__name__}: {error}')}",
                reason="NO_TOKENIZER",
                field="grammar",
            ) from error


def _source(grammar: Grammar) -> str:
    """Return the grammar as llguidance takes it, not yet checked."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            try:
                lark = any_to_lark(grammar.text) if "::=" in grammar.text else grammar.text
            except Exception as error:  # the converter raises bare Exception
                raise _refusal(grammar, str(error)) from None
            return LLMatcher.grammar_from_lark(lark)
        case GrammarKind.JSON_OBJECT:
            text = '{"type": "object"}'
        case GrammarKind.JSON_SCHEMA:
            text = grammar.text
    try:
        # llguidance pastes the text into a larger one, so it must be one whole JSON value.
        schema = json.loads(text)
        # Options are told inside of the schema, so that `true` can have none.
        return LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS if isinstance(schema, dict) else None)
    except (ValueError, RecursionError) as error:
        raise _refusal(grammar, str(error)) from None


def _refusal(grammar: Grammar, reason: str) -> InvalidArgument:
    """Return the error for a grammar that llguidance refuses for this reason."""
    return InvalidArgument(
        f"{grammar_field(grammar)} cannot be used: {_one_line(reason)}", reason="GRAMMAR", field=grammar_field(grammar)
    )


def _one_line(text: str) -> str:
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}…"


def _eos_tokens(config: Mapping[str, Any]) -> list[int]:
    """Return the `eos_token_id` of a config.json, which may be one id, several or none, or in a nested text part."""
    text = config.get("text_config")
    value = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, Mapping) else None)
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if isinstance(token, int)]
