"""What the published fields that are not built mean here: one table for every API, which its page in the docs repeats.

A field of the APIs of OpenAI, Anthropic or vLLM is a field of the body's model and heeded, or it stands here: accepted,
because it changes no answer of this server, or refused by name, because it would. Fields that none of them publishes
are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from services.errors import InvalidArgument


class Api(StrEnum):
    """The APIs whose fields are decided; the values are their paths."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class Accepted:
    """A field that changes no answer here. why: a sentence's end, behind "it is accepted:"."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is not built. why: what a refusal says behind the value. takes: which values are taken all the same,
    as they ask for nothing; null is taken always. taken: the same in words, empty where null is the only one."""

    why: str
    takes: Callable[[Any], bool] = lambda value: False
    taken: str = ""


def _unless(*values: object, why: str) -> Refused:
    def takes(value: Any) -> bool:
        # 1 equals true to Python, and is another value to a client.
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)

    return Refused(why, takes, " or ".join(f"`{json.dumps(value)}`" for value in values))


def _only_clears_thinking(value: Any) -> bool:
    edits = value.get("edits", []) if isinstance(value, dict) else None
    kinds = (
        [edit.get("type") if isinstance(edit, dict) else None for edit in edits] if isinstance(edits, list) else [None]
    )
    return all(str(kind).startswith("clear_thinking_") for kind in kinds)


_NO_OTHER_MEDIA = "this model reads and writes text only"
_NOTHING_STORED = "nothing is stored here: send the whole conversation as input"
_GIVE_A_BOUND = "that name is not known here: use guided_json, guided_regex, guided_choice, guided_grammar"
_NO_SUCH_SAMPLER = "that sampler is not built: leave it out"

_EVERYWHERE: Mapping[str, Accepted | Refused] = {
    "guided_decoding_backend": Accepted("there is one, llguidance"),
    "spaces_between_special_tokens": Accepted("tokenizers of today put none there anyway"),
    "request_id": Accepted("the header `x-request-id` says it"),
    "mm_processor_kwargs": Accepted("there are no media to process"),
    "media_io_kwargs": Accepted("there are no media to read"),
    "return_token_ids": _unless(False, why="token ids come over gRPC or /tokenize: leave it out"),
    "return_tokens_as_token_ids": _unless(False, why="token ids come over gRPC or /tokenize: leave it out"),
    "best_of": _unless(1, why="the best of several is not chosen here: ask for n answers"),
    "use_beam_search": _unless(False, why="there is no beam search: leave it out"),
    "length_penalty": _unless(1, why="it belongs to beam search, which there is not: leave it out"),
    "early_stopping": _unless(False, why="it belongs to beam search, which there is not: leave it out"),
    "logits_processors": _unless([], why="clients' code does not run here: use logit_bias or a grammar"),
    "prompt_embeds": Refused("prompts are text or token ids: use prompt"),
    "chat_template": Refused("the checkpoint's own template is used: leave it out, or send a finished prompt"),
    "guided_whitespace_pattern": Refused("white space of JSON is bounded already: leave it out"),
    "structural_tag": Refused("it is not built: use guided_grammar"),
    "priority": _unless(0, why="requests are answered in their order: leave it out"),
    "cache_salt": Refused("kept prefixes are shared by all clients: start the server with --no-prefix-cache"),
    "kv_transfer_params": Refused("prefixes move by the server's own stores: leave it out"),
    "vllm_xargs": _unless({}, why="nobody here reads them: leave it out"),
    "thinking_token_budget": Refused("thinking has no budget of its own: use max_tokens"),
    "include_reasoning": _unless(True, why="thinking comes apart from the text: leave it out and pass it over"),
    "regex": Refused(_GIVE_A_BOUND),
    "ebnf": Refused(_GIVE_A_BOUND),
    "grammar": Refused(_GIVE_A_BOUND),
    "json_schema": Refused(_GIVE_A_BOUND),
    "typical_p": _unless(1, why=_NO_SUCH_SAMPLER),
    "mirostat": _unless(0, why=_NO_SUCH_SAMPLER),
    "dry_multiplier": _unless(0, why=_NO_SUCH_SAMPLER),
    "xtc_probability": _unless(0, why=_NO_SUCH_SAMPLER),
    "n_predict": Refused("that name is not known here: use max_tokens"),
}

_OF_OPENAI: Mapping[str, Accepted | Refused] = {
    "metadata": Accepted("nothing is stored"),
    "store": Accepted("what is kept, and for how long, is as the server is set"),
    "user": Accepted("clients are told apart by their keys"),
    "safety_identifier": Accepted("clients are told apart by their keys"),
    "service_tier": Accepted("there is one tier"),
    "prompt_cache_key": Accepted("prefixes are found by their tokens"),
    "prompt_cache_options": Accepted("prefixes are kept as the server is set"),
    "prompt_cache_retention": Accepted("prefixes are kept as the server is set"),
    "moderation": Refused("nothing is moderated here: leave it out"),
}

DECISIONS: Mapping[Api, Mapping[str, Accepted | Refused]] = {
    Api.CHAT: {
        **_OF_OPENAI,
        "prediction": Accepted("the draft guesses by itself"),
        "audio": Refused(f"{_NO_OTHER_MEDIA}: leave it out"),
        "modalities": _unless(["text"], why=_NO_OTHER_MEDIA),
        "functions": _unless([], why="it is the old form: use tools"),
        "function_call": _unless("none", "auto", why="it is the old form: use tool_choice"),
        "web_search_options": Refused("no search is built in: offer one as a tool"),
        "echo": _unless(False, why="messages are not repeated: put them together yourself"),
        "add_special_tokens": _unless(False, why="the chat template writes the special tokens: leave it out"),
        **_EVERYWHERE,
    },
    Api.COMPLETIONS: {
        "user": _OF_OPENAI["user"],
        **{name: decision for name, decision in _EVERYWHERE.items() if name != "best_of"},
    },
    Api.RESPONSES: {
        **{name: decision for name, decision in _OF_OPENAI.items() if name != "metadata"},
        "stream_options": Accepted("it only hides the lengths of events"),
        "max_tool_calls": Accepted("it counts calls of built-in tools, and there are none"),
        "background_options": Accepted("what runs in the background runs as the rest does"),
        "include": Refused(
            "log-probabilities come by chat completions: leave message.output_text.logprobs out",
            lambda value: isinstance(value, list) and "message.output_text.logprobs" not in value,
            "a list without `message.output_text.logprobs`",
        ),
        "previous_response_id": Refused(_NOTHING_STORED),
        "conversation": Refused(_NOTHING_STORED),
        "prompt": Refused(_NOTHING_STORED),
        "context_management": _unless([], why="conversations are not shortened here: send what shall be read"),
        "truncation": Accepted("what is longer than the context is refused, not shortened"),
        "top_logprobs": _unless(0, why="log-probabilities come by chat completions: leave it out"),
        "image": Refused(f"{_NO_OTHER_MEDIA}: leave it out"),
        "access_programs": Refused("there are none here: leave it out"),
        **_EVERYWHERE,
    },
    Api.MESSAGES: {
        "metadata": Accepted("nothing is stored"),
        "service_tier": Accepted("there is one tier"),
        "speed": Accepted("every answer comes as fast as it can"),
        "cache_control": Accepted("prefixes are kept by themselves"),
        "diagnostics": Accepted("`usage` tells what came from kept prefixes"),
        "inference_geo": Accepted("the server is where it is"),
        "user_profile_id": Accepted("clients are told apart by their keys"),
        "workspace_id": Accepted("clients are told apart by their keys"),
        "container": Refused("there are none here: leave it out"),
        "context_management": Refused(
            "conversations are not shortened here: send what shall be read",
            _only_clears_thinking,
            "edits of the kind `clear_thinking_…`, as templates leave earlier thinking out",
        ),
        "mcp_servers": _unless([], why="no tools are called from here: offer them as tools"),
        **_EVERYWHERE,
    },
}


def refuse_fields(api: Api, body: BaseModel) -> None:
    """Raises InvalidArgument for a field of the body that the table refuses, with its name, value and what to do."""
    for name, value in (body.model_extra or {}).items():
        decision = DECISIONS[api].get(name)
        if isinstance(decision, Refused) and value is not None and not decision.takes(value):
            raise InvalidArgument(f"{name} is {json.dumps(value)[:80]}, and {decision.why}", field=name)
