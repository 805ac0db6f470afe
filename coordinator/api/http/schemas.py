"""The bodies that clients may send to the HTTP APIs, as pydantic models.

Wrong types and values are refused. What the fields mean that are published and are none of a model's says
`field_decisions`; others are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema

from services.errors import InvalidArgument
from services.messages.inference_types import CompressionMode
from services.messages.sampling import PARAMETERS, SamplingParams

MAX_CHOICES = 16
"""Most answers to one prompt."""

MAX_PROMPTS = 1024
"""Most prompts of one completion."""


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        changed = {name: _failing_fast(part) for name, part in schema.items()}
        return changed | ({"fail_fast": True} if schema.get("type") == "list" else {})
    return [_failing_fast(part) for part in schema] if isinstance(schema, list) else schema


class LenientModel(BaseModel):
    """A model that accepts any further field, as clients send many (store, metadata, service_tier, user …)."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema, in which a list's check ends at its first wrong item: a million complaints help nobody."""
        return _failing_fast(handler(source))


if TYPE_CHECKING:
    _SamplingNumbers = LenientModel
else:
    _SamplingNumbers = create_model(
        "_SamplingNumbers",
        __base__=LenientModel,
        **{entry.name: (entry.kind | None, Field(None, **entry.http.bounds())) for entry in PARAMETERS},
    )


class StructuredOutputs(LenientModel):
    """What the answer must be, as vLLM has it: exactly one of these."""

    json_schema: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def given(self) -> dict[str, Any]:
        """Return the fields under the names that clients use."""
        return {
            "json": self.json_schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object,
        }


class SamplingFields(_SamplingNumbers):
    """How tokens are chosen and where an answer ends, under the names of OpenAI and of vLLM.

    The numbers among the sampling parameters are fields too, as `services.messages.sampling` defines them.
    """

    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculate: bool = True
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    prefill_compression: CompressionMode | None = None
    prefill_keep_ratio: float | None = None

    def sampling_params(self) -> SamplingParams:
        """Return what the client gave. Raises InvalidArgument for a key of logit_bias that is no token id."""
        bias = {}
        for key, value in (self.logit_bias or {}).items():
            if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= 2**31:
                raise InvalidArgument(f"logit_bias has the key {key[:80]!r}; keys are token ids", field="logit_bias")
            bias[int(key)] = value
        numbers = {entry.name: getattr(self, entry.name) for entry in PARAMETERS}
        allowed, bad_words = tuple(self.allowed_token_ids or ()), tuple(self.bad_words or ())
        return SamplingParams(bias, allowed_token_ids=allowed, bad_words=bad_words, **numbers)


class StreamOptions(LenientModel):
    """Options of a streamed reply. include_usage: whether a last chunk tells the tokens."""

    include_usage: bool = False


class ContentPart(LenientModel):
    """A part of a message; this server reads text only."""

    type: str
    text: str | None = None


class FunctionCall(LenientModel):
    """The function that was called; arguments is a JSON object or its text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(LenientModel):
    """A call that the assistant made in an earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(LenientModel):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(LenientModel):
    """A function that may be called; parameters is the JSON schema of its arguments."""

    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(LenientModel):
    """A tool that may be called."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ResponseFormat(LenientModel):
    """What the answer must be: any text, any JSON object, or an object of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatRequest(SamplingFields):
    """The body of /v1/chat/completions."""

    model: str | None = None
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields):
    """The body of /v1/completions."""

    model: str | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    add_special_tokens: bool = True
    max_tokens: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: bool = False
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)


class DrainRequest(BaseModel):
    """The body of /v1/drain. worker: the one whose place another one takes: "stage 0", "draft", or its address. to: the
    other one: a worker that stands by, by its device or address; one that runs at an address without a part; or a
    device on which one is started."""

    model_config = ConfigDict(extra="forbid")

    worker: str
    to: str


class TokenizeRequest(LenientModel):
    """The body of /tokenize: a text, or messages that go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeRequest(LenientModel):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]
