"""Turn boundaries over the demo checkpoint's tokenizer, with its template and with others' ways of writing chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from coordinator.text import chat_template
from coordinator.text.chat_template import ChatTemplate, TemplateError
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.turns import turn_boundaries

DEMO = Path(__file__).parents[3] / "deploy" / "demo" / "target"

# Thinking stays only after the last question, and the last answer gets an empty one.
QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
    {%- for tool in tools or [] %}{{- '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages if m.role != 'system' %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- set thought = m.reasoning_content or '' %}
        {%- set answer = m.content %}
        {%- if '</think>' in answer %}
            {%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 + (messages | length - loop.length) > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer }}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
# No chat without a question: a system message alone is refused.
QWEN35 = (
    """\
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
"""
    + QWEN3
)
# Always a system part, with a date; tools go into the first question.
LLAMA3 = """\
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- bos_token + '<|im_start|>system\\nCutting Knowledge Date: December 2023\\nToday Date: ' }}
{{- strftime_now('%d %b %Y') + '\\n\\n' + system + '<|im_end|>' }}
{%- for m in messages if m.role != 'system' %}
    {{- '<|im_start|>' + m.role + '\\n\\n' }}
    {%- if loop.first and tools %}
        {{- 'Given the following functions, answer with a call.\\n\\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {{- m.content | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{% endif %}
"""
# Strict turns, no marks that are single tokens, the system message in the first question, no generation prompt.
MISTRAL = """\
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if system else messages %}
{{- bos_token }}
{%- for m in turns %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{% endif %}
    {%- if m.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + m.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# Only special marks keep the demo's tokenizer from merging over a turn's end; here there are none.
PLAIN = """\
{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '\\n\\nassistant:' }}{% endif %}
"""

SYSTEM = {"role": "system", "content": "You are a careful helper. Answer in one short sentence."}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CHAT = [
    SYSTEM,
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "<think>\nAn easy one.\n</think>\n\nThe capital of France is Paris."},
    {"role": "user", "content": "And of Italy?"},
    {"role": "assistant", "content": "<think>\nRome.\n</think>\n\nIt is Rome."},
    {"role": "user", "content": "A word about Spain?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.from_checkpoint(DEMO)
    assert loaded is not None
    return loaded


class Counting(ChatTemplate):
    """Counts renderings and keeps what was rendered last."""

    rendered = 0

    def render(self, messages: Sequence[Mapping[str, object]], **options: Any) -> str:
        self.rendered += 1
        return super().render(messages, **options)


def template(source: str) -> Counting:
    return Counting(source, special_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})


def cut_text(
    source: str,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    **variables: object,
) -> list[str]:
    """The whole prompt's text, cut at its boundaries."""
    made = template(source)
    text = made.render(messages, tools=tools, **variables)
    full = tokenizer.encode(text, add_special_tokens=False)
    found = turn_boundaries(made, tokenizer, messages, full, tools=tools, **variables)
    assert list(found) == sorted(set(found))
    assert all(0 < boundary <= len(full) for boundary in found)
    edges = [0, *found, len(full)]
    pieces = [tokenizer.decode(full[a:b], skip_special_tokens=False) for a, b in zip(edges, edges[1:], strict=False)]
    assert "".join(pieces) == text
    return pieces


def test_demo_checkpoint(tokenizer: Tokenizer) -> None:
    """Up to the first user's words, up to the last user's words, up to the generation prompt."""
    made = ChatTemplate.from_checkpoint(DEMO)
    assert made is not None
    text = made.render(CHAT)
    full = tokenizer.encode(text, add_special_tokens=False)

    found = turn_boundaries(made, tokenizer, CHAT, tuple(full))

    ends = [text.index("What is"), text.index("A word"), text.rindex("<|im_start|>assistant")]
    assert found == tuple(len(tokenizer.encode(text[:end], add_special_tokens=False)) for end in ends)
    assert [tokenizer.decode(full[:boundary], skip_special_tokens=False) for boundary in found] == [
        text[:end] for end in ends
    ]


def test_thinking_stripped_from_history(tokenizer: Tokenizer) -> None:
    """The part before the last question includes the last answer, as history writes it."""
    assert cut_text(QWEN3, tokenizer, CHAT) == [
        f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n",
        "What is the capital of France?<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris.<|im_end|>\n"
        "<|im_start|>user\nAnd of Italy?<|im_end|>\n<|im_start|>assistant\nIt is Rome.<|im_end|>\n<|im_start|>user\n",
        "A word about Spain?<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]


def test_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    """A switch that changes the generation prompt changes only what follows the last boundary."""
    thinking = cut_text(QWEN3, tokenizer, CHAT)
    without = cut_text(QWEN3, tokenizer, CHAT, enable_thinking=False)
    assert without[:3] == thinking[:3]
    assert without[3] == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    in_front = "{{- 'Effort: ' + effort + '\\n' }}" + QWEN3
    assert cut_text(in_front, tokenizer, CHAT, effort="high")[1:] == thinking[1:]


@pytest.mark.parametrize("source", [QWEN3, QWEN35], ids=["system alone", "system alone refused"])
@pytest.mark.parametrize("system", [True, False])
def test_tools_belong_to_the_system_part(tokenizer: Tokenizer, source: str, system: bool) -> None:
    """Tools are in the first part, with a system message or without one."""
    messages = CHAT[:2] if system else CHAT[1:2]
    pieces = cut_text(source, tokenizer, messages, tools=TOOLS)
    assert len(pieces) == 3
    assert "look_up" in pieces[0]
    assert pieces[0].endswith("<|im_end|>\n<|im_start|>user\n")
    assert pieces[1] == "What is the capital of France?<|im_end|>\n"


def test_template_that_refuses_a_system_message_alone(tokenizer: Tokenizer) -> None:
    """Its system part is found all the same, and equals that of the template that doesn't refuse."""
    with pytest.raises(TemplateError):
        template(QWEN35).render(CHAT[:1])
    assert cut_text(QWEN35, tokenizer, CHAT) == cut_text(QWEN3, tokenizer, CHAT)


def test_default_system_part_with_a_date(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system part that the template writes itself counts; over midnight only what is before the date agrees."""

    class Clock(datetime):
        day = 1

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 1, cls.day)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    pieces = cut_text(LLAMA3, tokenizer, CHAT[1:2])
    assert pieces[0].startswith("<|endoftext|><|im_start|>system\nCutting Knowledge Date")
    assert pieces[0].endswith("01 Jan 2026\n\n<|im_end|><|im_start|>user\n\n")
    assert pieces[1:] == ["What is the capital of France?<|im_end|>", "<|im_start|>assistant\n\n"]
    with_tools = cut_text(LLAMA3, tokenizer, CHAT[1:2], tools=TOOLS)
    assert with_tools[0].endswith("}\n\n")
    assert with_tools[1:] == pieces[1:]

    made = template(LLAMA3)
    full = tokenizer.encode(made.render(CHAT), add_special_tokens=False)
    Clock.day = 2
    (only,) = turn_boundaries(made, tokenizer, CHAT, full)
    agreed = tokenizer.decode(full[:only], skip_special_tokens=False)
    assert agreed.endswith(("Today Date:", "Today Date: ", "Today Date: 0"))


def test_system_message_in_the_first_question(tokenizer: Tokenizer) -> None:
    """The first part ends within the first user turn, between the system message and the question."""
    pieces = cut_text(MISTRAL, tokenizer, CHAT)
    assert pieces[0].startswith(f"<|endoftext|>[INST] {SYSTEM['content']}")
    assert (pieces[0] + pieces[1]).index("What is the capital") >= len(pieces[0].rstrip())
    assert "It is Rome." in pieces[1]
    assert "Spain" not in pieces[1]
    assert pieces[2].rstrip().endswith("Spain? [/INST]")
    assert pieces[3] == ""


def test_boundary_stays_before_a_token_that_spans_it(tokenizer: Tokenizer) -> None:
    """Where a turn's end and what follows are one token, the boundary is before it."""
    newline, two = (tokenizer.encode(text, add_special_tokens=False) for text in ("?\n", "?\n\n"))
    assert two[: len(newline)] != newline  # what this test is about
    made = template(PLAIN)
    full = tokenizer.encode(made.render(CHAT), add_special_tokens=False)
    alone = tokenizer.encode(made.render(CHAT, add_generation_prompt=False), add_special_tokens=False)
    assert full[: len(alone)] != alone

    boundary = turn_boundaries(made, tokenizer, CHAT, full)[-1]

    assert full[:boundary] == alone[:boundary]
    assert full[boundary] != alone[boundary]


@pytest.mark.parametrize("first", ["Apple?", "apple?", " Because", "B", "", "\n\nA list", "Ärger", "7"])
@pytest.mark.parametrize("form", ["text", "parts"])
def test_system_part_does_not_depend_on_the_question(tokenizer: Tokenizer, first: str, form: str) -> None:
    """Whatever the user's first letter is, the part ends before it."""
    source, content = QWEN3, first
    if form == "parts":
        parts = "{{- raise_exception('not in parts') if m.content is string else m.content[0].text }}"
        source, content = QWEN3.replace("{{- m.content }}", parts), [{"type": "text", "text": first}]
    pieces = cut_text(source, tokenizer, [SYSTEM, {"role": "user", "content": content}])
    # A newline may be one token with those before it.
    assert pieces[0].rstrip("\n") == f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user"
    assert pieces[0].endswith("\n") or first.startswith("\n")


@pytest.mark.parametrize("first", ["A list", "  A list", "\n\nA list"])
def test_question_that_the_template_trims(tokenizer: Tokenizer, first: str) -> None:
    """The part ends before the first letter also where the template drops what is before it."""
    pieces = cut_text(LLAMA3, tokenizer, [SYSTEM, {"role": "user", "content": first}])
    assert pieces[0].endswith("<|im_start|>user\n\n")
    assert pieces[1] == "A list<|im_end|>"


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("s", ["s"]),
        ("ss", ["ss"]),
        ("dsu", ["ds", "u"]),
        ("u", ["", "u"]),
        ("su", ["s", "u"]),
        ("ssuau", ["ss", "ua", "u"]),
        ("sau", ["s", "a", "u"]),
        ("sa", ["s", "a"]),
        ("uatat", ["", "uatat"]),
        ("suauatat", ["s", "ua", "uatat"]),
    ],
)
def test_parts_of_a_chat(tokenizer: Tokenizer, roles: str, expected: list[str]) -> None:
    """Leading system messages; all before the last question, however many tool calls it led to; all."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    messages = [{"role": names[role], "content": f"{number} words"} for number, role in enumerate(roles)]
    source = """\
{%- for m in messages %}{{- '<|im_start|>' + m.content + m.role[0] + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{% endif %}"""
    pieces = cut_text(source, tokenizer, messages)
    assert pieces.pop().endswith("assistant")
    counts = [sum(piece.count(f"words{role}") for role in names) for piece in pieces]
    assert counts == [len(part) for part in expected]


def test_work_does_not_grow_with_the_turns(tokenizer: Tokenizer) -> None:
    """A long chat is rendered three times, not once a message."""
    messages: list[dict[str, str]] = [dict(SYSTEM)]
    for number in range(200):
        messages.append({"role": "user", "content": f"Question {number}?"})
        messages.append({"role": "assistant", "content": f"Answer {number}."})
    messages.append({"role": "user", "content": "The last one?"})
    made = template(QWEN3)
    full = tokenizer.encode(made.render(messages), add_special_tokens=False)
    made.rendered = 0
    assert len(turn_boundaries(made, tokenizer, messages, full)) == 3
    assert made.rendered == 3


def test_refused_part_is_left_out(tokenizer: Tokenizer) -> None:
    """The other parts are found without it."""
    source = "{% if messages | length < 3 %}{{ raise_exception('too short') }}{% endif %}\n" + QWEN3
    system, history, last, prompt = cut_text(QWEN3, tokenizer, CHAT)
    assert cut_text(source, tokenizer, CHAT) == [system + history, last, prompt]


def test_template_that_refuses_everything(tokenizer: Tokenizer) -> None:
    """Without any part that can be rendered, or that agrees, there are no boundaries."""
    refusing = template("{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}Hello")
    assert turn_boundaries(refusing, tokenizer, CHAT, tokenizer.encode("Hello", add_special_tokens=False)) == ()
    counting = template("{{ messages | length }}{{ add_generation_prompt }} {{ messages[-1].content }}")
    assert turn_boundaries(counting, tokenizer, CHAT, tokenizer.encode("x", add_special_tokens=False)) == ()
    assert turn_boundaries(template(QWEN3), tokenizer, [], [1, 2, 3]) == ()


@pytest.mark.parametrize("source", [QWEN3, QWEN35, LLAMA3, MISTRAL], ids=["qwen3", "qwen35", "llama3", "mistral"])
@pytest.mark.parametrize("lead", [[SYSTEM], []], ids=["system", "no system"])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_next_request_begins_with_every_part_of_this_one(
    tokenizer: Tokenizer, source: str, lead: list[dict[str, str]], tools: list[dict[str, object]] | None
) -> None:
    """All boundaries of a request are places up to which the next request of the chat has the same tokens."""
    made = template(source)
    requests = []
    for asked in (2, 4, 6):
        messages = lead + CHAT[1:asked]
        ids = tokenizer.encode(made.render(messages, tools=tools), add_special_tokens=False)
        requests.append((ids, turn_boundaries(made, tokenizer, messages, ids, tools=tools)))
    for (earlier, found), (later, found_later) in zip(requests, requests[1:], strict=False):
        assert found[-1] > len(earlier) - 8  # all but the generation prompt
        assert later[: found[-1]] == earlier[: found[-1]]
        assert found_later[0] == found[0]  # so that what the system part left is found at the same place
        assert found[-1] < found_later[1] < found_later[2]
