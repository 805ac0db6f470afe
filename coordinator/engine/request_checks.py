"""Checks whether a request fits the model that a cluster serves."""

from __future__ import annotations

from coordinator.answer import Request
from coordinator.cluster.cluster import Cluster
from coordinator.engine.context_overflow import ContextOverflow
from coordinator.text.tokenizer import Tokenizer
from services.errors import InvalidArgument
from services.messages.output_frames import check_grammar, check_logprobs


def check_request(request: Request, cluster: Cluster, tokenizer: Tokenizer | None) -> None:
    """Raises InvalidArgument naming the field, its value and what would be accepted."""
    target = cluster.target
    if not request.prompt_ids:
        raise InvalidArgument("the prompt is empty: give at least one token", field="prompt")
    if request.max_tokens < 0:
        raise InvalidArgument(f"max_tokens is {request.max_tokens}; it must be at least 0", field="max_tokens")
    foreign = [token for token in request.prompt_ids if not 0 <= token < target.vocab_size]
    if foreign:
        raise InvalidArgument(
            f"prompt token {foreign[0]} is not in the model's vocabulary of {target.vocab_size}", field="prompt"
        )
    check_length(request, target.max_position)
    if request.stop_strings and tokenizer is None:
        raise InvalidArgument("stop strings need a tokenizer and this checkpoint has none", field="stop")
    check_logprobs(request.logprobs)
    check_logprobs(request.prompt_logprobs, "prompt_logprobs")
    check_grammar(request.grammar)


def check_length(request: Request, context: int) -> None:
    """Raises ContextOverflow for a request whose prompt and longest answer are more than `context` tokens together."""
    prompt_tokens = len(request.prompt_ids)
    if prompt_tokens + request.max_tokens > context:
        raise ContextOverflow(context, prompt_tokens, request.max_tokens, chat=request.chat, field="max_tokens")
