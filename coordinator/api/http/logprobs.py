"""Log-probabilities in the form of OpenAI's APIs, and those of prompts in vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from coordinator.text.tokenizer import IncrementalDecoder, Tokenizer
from services.messages.inference_types import PromptToken
from services.messages.steps import TokenLogprobs

LEAST = -9999.0
"""What stands for the logarithm of 0, which JSON cannot write; OpenAI and vLLM write the same."""


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> Iterator[dict[str, Any]]:
    """Return the entries of `choices[].logprobs.content` of a chat."""
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        yield {
            **_token(tokenizer, token_id, entry.logprob),
            "top_logprobs": [_token(tokenizer, other, logprob) for other, logprob in top],
        }


def vllm_prompt_logprobs(
    tokenizer: Tokenizer | None, prompt: Sequence[PromptToken], alternatives: int
) -> Iterator[dict[str, Any] | None]:
    """Return `prompt_logprobs`: for each token of the prompt an object by token ids, with the token itself first, then
    so many of the most probable ones; None for the prompt's first token."""
    return (None if token.logprobs is None else _by_id(tokenizer, token, alternatives) for token in prompt)


def _by_id(tokenizer: Tokenizer | None, token: PromptToken, alternatives: int) -> dict[str, Any]:
    entry = token.logprobs
    assert entry is not None
    ranked = [(token.token_id, entry.logprob, entry.rank)]
    top = zip(entry.top_token_ids[:alternatives], entry.top_logprobs, strict=False)
    ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(top, start=1) if other != token.token_id]
    return {
        str(token_id): {
            "logprob": max(logprob, LEAST),
            "rank": rank,
            "decoded_token": None if tokenizer is None else _text(tokenizer, token_id),
        }
        for token_id, logprob, rank in ranked
    }


class CompletionLogprobs:
    """Makes `choices[].logprobs` of one choice of a completion, part by part.

    It owns the places of the prompt's and the answer's next token in the choice's text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, alternatives: int, start: int = 0, *, skip_special_tokens: bool = True
    ) -> None:
        """alternatives: how many of the most probable tokens to report beside each. start: characters of the choice's
        text in front of the answer. skip_special_tokens: whether special tokens of the answer have no text."""
        self._tokenizer, self._alternatives = tokenizer, alternatives
        self._prompt_places = _Places(tokenizer, 0, skip_special_tokens=False)
        self._answer_places = _Places(tokenizer, start, skip_special_tokens=skip_special_tokens)

    def of_prompt(self, prompt: Sequence[PromptToken]) -> dict[str, list[Any]]:
        """Return the part of the prompt's next tokens; the prompt's text begins the choice's."""
        return self._part(((token.token_id, token.logprobs) for token in prompt), self._prompt_places)

    def of_answer(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Return the part of the answer's next tokens."""
        return self._part(zip(token_ids, logprobs, strict=True), self._answer_places)

    def _part(self, tokens: Iterable[tuple[int, TokenLogprobs | None]], places: _Places) -> dict[str, list[Any]]:
        part: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in tokens:
            part["tokens"].append(_text(self._tokenizer, token_id))
            part["token_logprobs"].append(None if entry is None else max(entry.logprob, LEAST))
            part["top_logprobs"].append(None if entry is None else self._top(token_id, entry))
            part["text_offset"].append(places.place(token_id))
        return part

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """Return the token and the most probable ones at its place by their texts. Of tokens that look the same, like
        parts of a character, the most probable one stays."""
        top = zip(entry.top_token_ids[: self._alternatives], entry.top_logprobs, strict=False)
        found: dict[str, float] = {}
        for other, logprob in [(token_id, entry.logprob), *top]:
            text = _text(self._tokenizer, other)
            found[text] = max(logprob, found.get(text, LEAST))
        return found


class _Places:
    """Where the tokens of a text begin in it, in characters; tokens of one character begin at the same place."""

    def __init__(self, tokenizer: Tokenizer | None, start: int, *, skip_special_tokens: bool) -> None:
        self._next = start
        self._decoder = None
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens)

    def place(self, token_id: int) -> int:
        """Take the next token, and return where it begins."""
        place = self._next
        if self._decoder is not None:
            self._next += len(self._decoder.push([token_id]))
        return place


def _token(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    text = _text(tokenizer, token_id)
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(text.encode())}


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    if tokenizer is None:
        return f"token_id:{token_id}"
    return tokenizer.decode([token_id], skip_special_tokens=False)
