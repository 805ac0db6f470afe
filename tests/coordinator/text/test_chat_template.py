"""Chat templates against transformers on the same sources, and a sandbox that holds."""

import inspect
import json
import threading
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from coordinator.text import chat_template
from coordinator.text.chat_template import RESERVED_VARIABLES, ChatTemplate, TemplateError
from coordinator.text.prompt import chat_prompt

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

STRICT = """\
{{ bos_token }}{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate,\nstarting with user') }}
{% endif %}
    {% if message.role == 'user' %}
[INST] {{ message.content | trim }} [/INST]{% elif message.role == 'assistant' %}
{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}
{% endif %}
{% endfor %}
"""

THINKER = """\
{#- Tools, thinking that is dropped from earlier turns, and results that share one user turn. -#}
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_question=-1) -%}
{%- for message in messages[::-1] -%}
    {%- if message.role == 'user' -%}
        {%- set ns.last_question = messages | length - 1 - loop.index0 -%}
        {%- break -%}
    {%- endif -%}
{%- endfor -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- text(messages[0].content) + '\\n\\n' -}}{%- endif -%}
    {{- '<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + text(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if message.role == 'user' -%}
        {{- '<|im_start|>user\\n' + text(message.content) + '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set thought = message.reasoning_content if message.reasoning_content is string -%}
        {%- set answer = text(message.content) -%}
        {%- if '</think>' in answer -%}
            {%- set thought = answer.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
            {%- set answer = answer.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if thought and loop.index0 > ns.last_question -%}
            {{- '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- answer -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function if call.function else call -%}
            {{- '<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' -}}
            {%- set given = call.arguments -%}
            {{- given if given is string else given | tojson(indent=1) -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""

# What leaks out of blocks and loops, odd whitespace, and each name that templates may rely on.
SCOPES = """\
  {% set x = 'outer' %}
  {% generation %}{% set x = 'inner' %}{{ x }}{% endgeneration %}
{{ x }} {{ documents is none }} {{ missing }} {{ pad_token is defined }} {{ dict(a=1)['a'] }}
\t{% for item in messages if item.role != 'system' %}
    {{ loop.index }}/{{ loop.length }} {{ item | tojson }}
    {% if loop.last %}{{ item | tojson(ensure_ascii=true, sort_keys=true, indent=2) }}{% endif %}
\t{% else %}
nothing
{% endfor %}
{{ [{'<b>&': 'é'}, none, true, 1.5] | tojson(separators=(',', ':')) }}
{%+ if true %} kept {% endif %}
{{ range(3) | list }} {{ strftime_now('%Y') }}
"""

CHAT: list[dict[str, object]] = [
    {"role": "user", "content": "  Hi there — 你好 <b>&</b> 😀\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
    {"role": "user", "content": "Weather?"},
]
TOOLS: list[dict[str, object]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Météo <now>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_CHAT: list[dict[str, object]] = [
    {
        "role": "system",
        "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
    },
    *CHAT,
    {
        "role": "assistant",
        "content": None,
        "reasoning": "look it up",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
        ],
    },
    {"role": "tool", "content": "12 °C"},
    {"role": "tool", "content": "9 °C"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "hi"}]


def reference(source: str, **special: str) -> PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=source, **special)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "bos_token": "<B>"}])
@pytest.mark.parametrize(
    ("source", "messages", "tools"),
    [
        (CHATML, CHAT, None),
        (STRICT, CHAT, []),
        *((THINKER, chat, tools) for chat in (CHAT, TOOL_CHAT) for tools in (None, [], TOOLS)),
        *((SCOPES, chat, None) for chat in (CHAT, TOOL_CHAT)),
    ],
    ids=lambda value: "",
)
def test_prompts_equal_those_of_transformers(source, messages, tools, variables, prompt) -> None:
    """Every template renders every conversation to the prompt that transformers renders."""
    ours = ChatTemplate(source, special_tokens=SPECIAL).render(
        messages, tools=tools, add_generation_prompt=prompt, **variables
    )
    theirs = reference(source, **SPECIAL).apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **variables
    )
    assert ours == theirs


def test_a_prompt_in_full() -> None:
    """The generation prompt comes behind the messages, or not."""
    template = ChatTemplate(CHATML)
    assert template.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_date_is_todays() -> None:
    """Templates may write today's date."""
    days = [f"{datetime.now():%d %b %Y}"]
    shown = ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(USER)
    days.append(f"{datetime.now():%d %b %Y}")
    assert shown in days


@pytest.mark.parametrize("form", ["file", "text", "list", "both"])
def test_a_checkpoint_reads_as_it_does_for_transformers(tmp_path: Path, form: str) -> None:
    """A template is found in each of the places where checkpoints keep one."""
    settings: dict[str, object] = {
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    named = [
        {"name": "tool_use", "template": "tools: {{ tools | tojson }}"},
        {"name": "default", "template": STRICT},
    ]
    settings |= {
        "file": {},
        "text": {"chat_template": STRICT},
        "list": {"chat_template": named},
        "both": {"chat_template": "not this one"},
    }[form]
    if form in ("file", "both"):
        (tmp_path / "chat_template.jinja").write_text(STRICT, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    ours = ChatTemplate.from_checkpoint(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path, local_files_only=True)
    assert ours is not None
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert ours.render(CHAT, tools=tools, add_generation_prompt=False) == expected


@pytest.mark.parametrize("settings", [None, {}, {"chat_template": None}, {"chat_template": ""}, {"chat_template": []}])
def test_no_template_is_no_error(tmp_path: Path, settings: object) -> None:
    """A checkpoint without a template, or with an empty one, has none."""
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert ChatTemplate.from_checkpoint(tmp_path) is None


def test_a_list_without_a_default_gives_its_first_template(tmp_path: Path) -> None:
    """Of named templates without a default the first one is used."""
    named = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    template = ChatTemplate.from_checkpoint(tmp_path)
    assert template is not None
    assert template.render(USER) == "R"
    assert template.render(USER, tools=TOOLS) == "T"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"\xff\xfe", r"chat_template\.jinja: not readable \(.+UTF-8 text$"),
        (
            "chat_template.jinja",
            b"{% if %}",
            r"^chat_template\.jinja: not valid Jinja at line 1 \(",
        ),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json is not JSON: .+$"),
        (
            "tokenizer_config.json",
            b'{"chat_template": 5}',
            r"chat_template is '5'; expected a text",
        ),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}]}', "chat_template is .+name"),
        (
            "tokenizer_config.json",
            b'{"chat_template": {"default": "x"}}',
            "chat_template is .+name",
        ),
        (
            "tokenizer_config.json",
            b'{"chat_template": "{{"}',
            r"^tokenizer_config\.json: not valid",
        ),
    ],
)
def test_a_corrupt_checkpoint_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """The refusal names the file and what is wrong with it."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TemplateError, match=message):
        ChatTemplate.from_checkpoint(tmp_path)


def test_a_refusal_carries_the_words_of_the_template() -> None:
    """What a template says to refuse messages reaches the client in one line."""
    with pytest.raises(TemplateError) as refusal:
        ChatTemplate(STRICT).render([{"role": "assistant", "content": "hi"}])
    assert str(refusal.value) == ("messages: the chat template refuses them (roles must alternate, starting with user)")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{a.__class__}'.format_map({'a': ''}) }}",
        "{{ ('{0.__class__}' | attr('format'))('') }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ dict.__init__ }}",
        "{{ lipsum.__globals__.os.popen('true').read() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ range.__code__ }}",
        "{% set f = messages.append %}{{ f(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages.pop() }}",
        "{{ dict.update(messages[0], role='system') }}",
        "{{ namespace(__class__=1).__class__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """A template cannot reach Python's insides or change what it is given."""
    template = ChatTemplate(source)
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(TemplateError, match=r"^chat template: rendering failed \(\w+: [^\n]+\)$"):
        template.render(messages)
    assert messages == USER


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ missing.field }}", "UndefinedError: 'missing' is undefined"),
        ("{{ messages[0].content.nothing() }}", "UndefinedError: .+ has no attribute 'nothing'"),
        ("{{ missing | tojson }}", "TypeError: Object of type Undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError: "),
    ],
)
def test_other_failures_are_one_sentence(source: str, message: str) -> None:
    """Whatever a template fails on is told in one line."""
    with pytest.raises(TemplateError, match=rf"^chat template: rendering failed \({message}"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless loops and macros that call themselves end in a refusal."""
    monkeypatch.setattr(chat_template, "MAX_STEPS", 5000)
    with pytest.raises(TemplateError, match=r"more than 5000 loop rounds|RecursionError"):
        ChatTemplate(source).render(USER)


def test_each_rendering_has_its_own_loop_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renderings one after another and at the same time don't use up each other's rounds."""
    monkeypatch.setattr(chat_template, "MAX_STEPS", 100)
    template = ChatTemplate("{% for i in range(80) %}{{ i % 10 }}{% endfor %}")
    expected = "0123456789" * 8
    assert [template.render(USER) for _ in range(3)] == [expected] * 3
    rendered: list[str] = []
    threads = [threading.Thread(target=lambda: rendered.append(template.render(USER))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rendered == [expected] * 8


def test_a_filter_that_does_not_exist_is_found_on_loading() -> None:
    """A template with a mistake is refused before any client uses it."""
    with pytest.raises(TemplateError, match=r"^x: not valid Jinja at line 2 \(No filter named 'nope'"):
        ChatTemplate("\n{{ messages | nope }}", origin="x")


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([], None, "^messages: the list is empty; expected at least one message$"),
        (["hi"], None, r"^messages\[0\]: 'hi' given; expected an object$"),
        (
            [{"role": "user", "content": [{"text": b"x"}]}],
            None,
            r"^messages\[0\]\.content\[0\]\.text: bytes given; expected a JSON value$",
        ),
        (USER, [{"function": print}], r"^tools\[0\]\.function: builtin_function_or_method given"),
    ],
)
def test_inputs_that_are_no_json_are_named(messages, tools, message: str) -> None:
    """Values that JSON does not have are refused with their place."""
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(CHATML).render(messages, tools=tools)


def test_nesting_without_end_is_refused() -> None:
    """A message that holds itself is refused and doesn't crash."""
    nested: dict[str, object] = {"role": "user"}
    nested["content"] = nested
    with pytest.raises(TemplateError, match="RecursionError"):
        ChatTemplate(CHATML).render([nested])


def test_the_reserved_names_are_the_parameters() -> None:
    """No variable of a client can take the place of a parameter."""
    named = {*inspect.signature(ChatTemplate.render).parameters, *inspect.signature(chat_prompt).parameters}
    # A positional parameter alone leaves its name to the client.
    assert named - {"files", "most", "variables"} == RESERVED_VARIABLES
