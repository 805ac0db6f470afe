"""What an answer took, as one line."""

from __future__ import annotations

from typing import Any

from coordinator.cli.terminal.speakers import AnswerEnd


def figures_line(end: AnswerEnd) -> str:
    """Return what an answer took, in words; empty where nothing is known."""
    timings = end.timings
    if not timings.get("predicted_n"):
        return ""
    parts = [f"{timings['predicted_n']} tokens"]
    if timings.get("predicted_per_second"):
        parts.append(f"{timings['predicted_per_second']:.1f} tokens/s")
    if timings.get("acceptance_length") is not None:
        parts.append(f"{timings['acceptance_length']:.2f} tokens a verify")
    parts += _prompt_figures(timings)
    if timings.get("prompt_ms") is not None:
        parts.append(f"first token after {timings['prompt_ms'] + (timings.get('restore_ms') or 0):.0f} ms")
    if end.finish_reason == "length":
        parts.append("cut: no room for more tokens")
    return " · ".join([*parts, *timings.get("notes", ())])


def _prompt_figures(timings: dict[str, Any]) -> list[str]:
    """Return what became of the prompt: shortened, or known from before."""
    parts = []
    if timings.get("original_prompt_n"):
        prompt = timings["prompt_n"] + timings["cache_n"]
        parts.append(f"prompt of {timings['original_prompt_n']} tokens made {prompt}")
    if timings.get("cache_n"):
        whole = timings["cache_n"] + timings["prompt_n"]
        parts.append(f"{timings['cache_n']} of {whole} prompt tokens from {timings['cache_source']}")
    return parts
