"""What the chat APIs share: a conversation becomes a request, its answer reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.answer import Answer, Request
from coordinator.api.engine_requests import TemplateChat, render
from coordinator.api.http.body_conversion import (
    choices_of,
    compression_params,
    make_chat,
    make_request,
    most_tokens,
    truncated,
)
from coordinator.api.http.schemas import ChatMessage, ResponseFormat, SamplingFields, Tool
from coordinator.api.http.structured import AnswerBound, answer_bound
from coordinator.engine.engine import Engine
from coordinator.text import said_tools
from coordinator.text.harmony_turns import with_one_text_beside_calls
from coordinator.text.parsers.events import Event
from coordinator.text.parsers.grammar import behind_thinking, forced_call_grammar, in_final_message
from coordinator.text.parsers.pipeline import OutputParser
from coordinator.text.parsers.reasoning import OF_GEMMA, TAGGED, Opening, ReasoningParser, ThinkingTags, opening_of
from coordinator.text.parsers.tags import TAGS
from coordinator.text.parsers.tool_schema import read_tools
from coordinator.text.parsers.tools import HARMONY, NONE, WITH_SPECIAL_TOKENS, new_parser, openai
from coordinator.text.said_tools import say_tools
from services.errors import InvalidArgument
from services.messages.steps import Grammar, GrammarKind
from services.text_threads import on_text_thread


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that may be called. forced: one of them must be, or the one called `name` if that is not None.

    parallel: whether one answer may hold several calls.
    """

    tools: Sequence[Tool]
    forced: bool = False
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation as a client sends it, with the tools that may be called and the chat template's variables.

    continued: whether the answer goes on with the last message. opened: whether the prompt opens a turn of the
    assistant, where it does not.
    """

    messages: Sequence[ChatMessage]
    use: ToolUse
    variables: dict[str, Any] | None = None
    continued: bool = False
    opened: bool = True

    def in_template(self, engine: Engine) -> tuple[TemplateChat, str]:
        """Return the conversation as the model's chat template takes it, and the format in which tools are called.

        Where the template teaches no format that is known here, and none was named, the tools are said in the messages.
        Raises InvalidArgument as `make_chat` does.
        """
        chat = make_chat(self.messages, self.use.tools, self.variables, continued=self.continued, opened=self.opened)
        call_format = engine.files.answer_format
        if call_format == HARMONY:
            return replace(chat, messages=with_one_text_beside_calls(chat.messages)), HARMONY
        if not chat.tools:
            return chat, NONE
        if call_format != NONE:
            return chat, call_format
        return replace(chat, messages=say_tools(chat.messages, chat.tools), tools=None), said_tools.FORMAT


@dataclass(frozen=True, slots=True)
class ChatExchange:
    """One question and its answer: the engine's request, and how to read the text that the model answers with.

    opening: whether the prompt has opened the model's thinking. thinking: what that stands between; None where there is
    none. format: how the model writes tool calls, by the name of its parser. begun: what the prompt has of the answer's
    message, in Harmony.
    """

    request: Request
    opening: Opening
    thinking: ThinkingTags | None
    format: str
    tools: list[dict[str, Any]]
    begun: str = ""

    def parser(self) -> OutputParser:
        """Return a new parser for one answer."""
        if self.format == HARMONY:
            return OutputParser(ReasoningParser(enabled=False), openai.Parser(self.tools, self.begun))
        reasoning = ReasoningParser(
            inside=self.opening is Opening.INSIDE, enabled=self.thinking is not None, tags=self.thinking or TAGGED
        )
        return OutputParser(reasoning, new_parser(self.format, self.tools))

    def read(self, answer: Answer) -> list[Event]:
        """Return the events of a whole answer."""
        parser = self.parser()
        return [*parser.push(answer.text or ""), *parser.finish(cut=answer.cut)]


async def prepare_exchange(
    engine: Engine,
    fields: SamplingFields,
    talk: Talk,
    *,
    max_tokens: int | None,
    answer_format: ResponseFormat | None = None,
    format_field: str = "response_format",
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> ChatExchange:
    """Render and check a conversation and return it as a request.

    format_field: what the client calls answer_format. Raises InvalidArgument naming the client's field, and
    TemplateError where the chat template refuses the conversation.
    """
    use = talk.use
    tools = [tool.model_dump(exclude_none=True) for tool in use.tools]
    read_tools(tools)  # refuses names that are there twice now, not when an answer is read
    chat, call_format = await on_text_thread(len(talk.messages), talk.in_template, engine)
    bound = await answer_bound(fields, answer_format, format_field)
    # What tools are said to be must stay as it is too.
    structured = bool(tools) or bound is not None
    compression, most = compression_params(fields, prompt_logprobs), most_tokens(engine, fields)
    rendered = await render(engine, chat, compression, structured=structured, most=most)
    prompt = truncated(engine, fields, rendered, max_tokens)
    tags = engine.files.thinking_tags
    opening = opening_of(rendered.text, tags or TAGGED)
    if talk.continued and opening is Opening.UNDECIDED:
        opening = Opening.CLOSED  # the answer has begun, and thinking comes first
    thinking = None if talk.continued and opening is Opening.CLOSED else tags
    bound = _bound(engine, opening, call_format, tools, use, bound)
    request = await make_request(
        engine, fields, prompt, max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, bound=bound
    )
    if call_format in WITH_SPECIAL_TOKENS or thinking is OF_GEMMA:
        request = replace(request, skip_special_tokens=False)
    if call_format != HARMONY:
        return ChatExchange(request, opening, thinking, call_format, tools)
    return ChatExchange(request, opening, None, call_format, tools, openai.begun_by(rendered.text))


def exchange_requests(exchange: ChatExchange, count: int = 1) -> list[Request]:
    """Return the requests for `count` choices. Log-probabilities of the prompt, which is the same for all, come with
    the first one."""
    first, *others = choices_of(exchange.request, count)
    return [first, *(replace(other, prompt_logprobs=None) for other in others)]


@dataclass(frozen=True, slots=True)
class ExchangeReply:
    """What the replies of chat APIs have in common. exchange: what they answer. head: what the reply begins with."""

    exchange: ChatExchange
    head: dict[str, Any]

    @property
    def requests(self) -> list[Request]:
        """See `ReplyForm`."""
        return exchange_requests(self.exchange)

    @property
    def name(self) -> str:
        """See `ReplyForm`."""
        return str(self.head["id"])


def _bound(
    engine: Engine,
    opening: Opening,
    call_format: str,
    tools: list[dict[str, Any]],
    use: ToolUse,
    bound: AnswerBound | None,
) -> AnswerBound | None:
    """Return what the whole answer is bound by: a forced call or what the client asks for, behind the thinking."""
    tokenizer = engine.files.tokenizer
    assert tokenizer is not None
    single = frozenset(tag for tag in TAGS if tokenizer.token_id(tag) is not None)
    if use.forced:
        if bound is not None:
            raise InvalidArgument(
                f"tool_choice asks for a call, and {bound.field} for another answer: leave one of them out",
                field=bound.field,
            )
        text = forced_call_grammar(
            call_format,
            tools,
            use.name,
            opening=opening,
            parallel=use.parallel,
            single_tokens=single,
            thinking=engine.files.thinking_tags or TAGGED,
        )
        return AnswerBound("tools", Grammar(GrammarKind.LARK, text))
    if bound is not None and call_format == HARMONY and opening is Opening.UNDECIDED:
        return AnswerBound(bound.field, in_final_message(bound.grammar, single))
    if bound is None or opening is not Opening.INSIDE:
        return bound
    # The model thinks first; only what comes after is bound.
    return AnswerBound(bound.field, behind_thinking(bound.grammar, single, engine.files.thinking_tags or TAGGED))
