"""Checks whether a request fits the model that a cluster serves."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.answer import Request
from coordinator.cluster.cluster import Cluster
from coordinator.engine.context_overflow import ContextOverflow
from coordinator.text.tokenizer import Tokenizer
from services.errors import OUT_OF_MEMORY, InvalidArgument
from services.messages.description import WorkerDescription
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


def session_tokens(stages: Sequence[WorkerDescription]) -> int | None:
    """Return the most tokens of one session for which all stages have memory; None where there is no bound."""
    bounds = [stage.target.session_tokens for stage in stages if stage.target is not None]
    return min((bound for bound in bounds if bound), default=None)


def check_memory(request: Request, stages: Sequence[WorkerDescription]) -> None:
    """Raises InvalidArgument for a request whose prompt and longest answer would find no memory on some stage, even if
    it ran alone."""
    prompt_tokens, most = len(request.prompt_ids), session_tokens(stages)
    needed = prompt_tokens + request.max_tokens
    if most is None or needed <= most:
        return
    rooms = ", ".join(
        f"stage {index} ({stage.device} on {stage.host}) of {stage.target.session_tokens}"
        for index, stage in enumerate(stages)
        if stage.target is not None and stage.target.session_tokens
    )
    raise InvalidArgument(
        f"the prompt has {prompt_tokens} tokens and max_tokens is {request.max_tokens}, {needed} together; there is "
        f"memory for keys and values of {most} in one request: {rooms}. Shorten the prompt or lower max_tokens, or "
        "have the server give stages fewer layers or raise --gpu-memory-utilization",
        reason=OUT_OF_MEMORY,
        field="max_tokens",
    )
