"""The usage figures of replies in the form of OpenAI's APIs, and flashsplit's own timings beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.answer import Answer


def usage_of(answers: Mapping[int, Answer], choices: int) -> dict[str, Any]:
    """Return the usage of one reply. Each of its prompts counts once, by the first of its choices.

    answers: by the index of their choice, which are those of the first prompt, then those of the second and so on.
    choices: how many there are of each prompt.
    """
    firsts = [answers[index].stats for index in range(0, len(answers), choices)]
    prompt = sum(stats.prompt_tokens for stats in firsts)
    completion = sum(answer.stats.completion_tokens for answer in answers.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(stats.cached_tokens for stats in firsts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(answer.stats.accepted_tokens for answer in answers.values()),
            "rejected_prediction_tokens": sum(
                answer.stats.draft_tokens - answer.stats.accepted_tokens for answer in answers.values()
            ),
        },
    }


def timings_of(answer: Answer) -> dict[str, Any]:
    """Return an answer's times in milliseconds, its cached tokens and what speculation did."""
    stats = answer.stats
    return {
        "prompt_n": stats.prompt_tokens - stats.cached_tokens,
        "prompt_ms": round(stats.prefill_ms, 3),
        "predicted_n": stats.completion_tokens,
        "predicted_ms": round(stats.decode_ms, 3),
        "predicted_per_second": round(stats.decode_tokens_per_s, 3),
        "cache_n": stats.cached_tokens,
        "cache_source": stats.cache_source,
        "restore_ms": round(stats.restore_ms, 3),
        "original_prompt_n": stats.original_prompt_tokens,
        "compress_ms": round(stats.compress_ms, 3),
        "draft_n": stats.draft_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        "lookup_n": stats.lookup_tokens,
        "lookup_n_accepted": stats.accepted_lookup_tokens,
        # By how many draft tokens they verified: of the model, looked up in the text, and none.
        "draft_steps": {str(count): steps for count, steps in stats.draft_steps.items()},
        "lookup_steps": {str(count): steps for count, steps in stats.lookup_steps.items()},
        "plain_steps": stats.steps - sum(stats.draft_steps.values()) - sum(stats.lookup_steps.values()),
        "acceptance_length": stats.acceptance_length,
        "steps": stats.steps,
        "resumed": stats.resumed,
        "notes": list(stats.notes),
    }
