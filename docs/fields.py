"""Writes docs/fields.md: what every field of the HTTP APIs does here, as the server itself knows it.

    python docs/fields.py

`make docs` runs it, and a test checks that the page is current.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from coordinator.api.http.anthropic import MessagesRequest
from coordinator.api.http.field_decisions import DECISIONS, Accepted, Api, Refused
from coordinator.api.http.response_input import ResponsesRequest
from coordinator.api.http.schemas import ChatRequest, CompletionRequest, LenientModel

PAGE = Path(__file__).with_name("fields.md")

INTRODUCTION = """# Fields

What the fields of the HTTP APIs do: those of OpenAI, Anthropic and vLLM are heeded, accepted because they change no
answer of this server, or refused by name because they would. Fields that none of them publishes are ignored.
This page is written by `docs/fields.py` from `coordinator/api/http/field_decisions.py`."""

BODIES: dict[Api, type[LenientModel]] = {
    Api.CHAT: ChatRequest,
    Api.COMPLETIONS: CompletionRequest,
    Api.RESPONSES: ResponsesRequest,
    Api.MESSAGES: MessagesRequest,
}
"""The body of each API; what it names is heeded."""

_NOTES = """## How some are meant

- **What the answer must be.** `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`, `structured_outputs`,
  `response_format`, `text.format` and `output_config.format` are one thing under several names: give one of them.
  Grammars are Lark as llguidance reads it, or GBNF. Where the prompt opens the model's thinking, only what comes behind
  it is bound.
- **Thinking.** `thinking` and `reasoning_effort` set the chat template's `enable_thinking` or `thinking`. With a
  template that has no such switch, `enabled`, `disabled` and `none` are refused where it would do otherwise: a client
  that says `enabled` to a model that knows no thinking hears so, and `adaptive` is taken by every model. `effort`
  and `budget_tokens` go to the template as `reasoning_effort` and `thinking_budget`; one that reads neither thinks as
  it does, and nothing stops it at a budget. `verbosity` goes to the template in the same way.
- **An answer that has begun.** With Anthropic's API a last message of the assistant is continued, with OpenAI's and
  gRPC's where `continue_final_message` is true; the reply has only what is new.
- **Tools for a template that teaches none** are described in the system message, in the format of Hermes, and earlier
  calls and results become text. Calls are read, and can be forced, as with any other model.
- **A tool call that `max_tokens` cuts** is a call with what there is of its arguments, and `length` or `max_tokens` as
  the reason; its tags are never text. Anthropic's `input` has the members that are whole.
- **`min_tokens`** forbids stop tokens and passes over stop strings; a grammar that leaves only the end goes first.
- **`bad_words`** are forbidden as the tokens that each has by itself and behind a space; other spellings are not found.
- **`truncate_prompt_tokens`** keeps the prompt's last tokens; -1 keeps as many as leave room for `max_tokens`, 0 is
  refused.
- **`suffix`** fills in a middle with models whose tokenizer has the tokens for it, and is refused for others, and
  beside `echo`."""


def page() -> str:
    """Return the page."""
    parts = [INTRODUCTION, _NOTES]
    for api, decisions in DECISIONS.items():
        names = sorted(field.alias or name for name, field in BODIES[api].model_fields.items())
        accepted = {name: found for name, found in sorted(decisions.items()) if isinstance(found, Accepted)}
        refused = {name: found for name, found in sorted(decisions.items()) if isinstance(found, Refused)}
        parts += [
            f"## {api.value}",
            f"Heeded: {', '.join(f'`{name}`' for name in names)}.",
            "Accepted, and changes nothing:",
            _table(["field", "why"], ([f"`{name}`", row.why] for name, row in accepted.items())),
            "Refused, but for null and the values named:",
            _table(
                ["field", "taken all the same", "why, and what to do"],
                ([f"`{name}`", row.taken, row.why] for name, row in refused.items()),
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
