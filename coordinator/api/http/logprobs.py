"""Log-probabilities in the form of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.text.tokenizer import Tokenizer
from services.messages.steps import TokenLogprobs


def chat_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any] | None:
    """Return `choices[].logprobs` of a chat, None where none were asked for."""
    if not logprobs:
        return None
    content = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        content.append(
            {
                **_token(tokenizer, token_id, entry.logprob),
                "top_logprobs": [_token(tokenizer, other, logprob) for other, logprob in top],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], offset: int = 0
) -> dict[str, Any] | None:
    """Return `choices[].logprobs` of a completion. offset: characters of the choice's text before the first token."""
    if not logprobs:
        return None
    tokens = [_text(tokenizer, token_id) for token_id in token_ids]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": [
            {
                _text(tokenizer, other): logprob
                for other, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            }
            for entry in logprobs
        ],
        "text_offset": offsets,
    }


def _token(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> dict[str, Any]:
    text = _text(tokenizer, token_id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    if tokenizer is None:
        return f"token_id:{token_id}"
    return tokenizer.decode([token_id], skip_special_tokens=False)
