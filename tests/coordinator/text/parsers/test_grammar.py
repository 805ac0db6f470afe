"""Forced calls: the grammar compiles, takes what the parser reads as the call that was asked for, and nothing else."""

import functools
import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from coordinator.text.parsers.collected import collect
from coordinator.text.parsers.grammar import forced_call_grammar, in_final_message
from coordinator.text.parsers.pipeline import OutputParser
from coordinator.text.parsers.reasoning import Opening, ReasoningParser
from coordinator.text.parsers.tags import TAGS
from coordinator.text.parsers.tools import new_parser
from services.errors import InvalidArgument
from services.messages.steps import Grammar, GrammarKind
from tests.combinations import others_slow
from tests.coordinator.text.parsers.reading import ADD, NOW, TOOLS, WRITE, read

llguidance = pytest.importorskip("llguidance")

TOKENIZER = Path(__file__).parents[4] / "deploy/demo/target/tokenizer.json"
END_OF_TURN = 2


@functools.cache
def tokenizers(single: bool) -> tuple[Tokenizer, Any]:
    """The demo tokenizer, or the same with a token for each tag as Qwen's has."""
    described = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    if single:
        size = len(described["model"]["vocab"])
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
        described["added_tokens"] += [{"id": size + i, "content": tag, **flags} for i, tag in enumerate(TAGS)]
    text = json.dumps(described)
    return Tokenizer.from_str(text), llguidance.LLTokenizer(text, eos_token=END_OF_TURN)


def matches(grammar: str, text: str, single: bool) -> bool:
    plain, guided = tokenizers(single)
    matcher = llguidance.LLMatcher(guided, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    ids = plain.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def hermes(name: str, **arguments: object) -> str:
    inside = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inside}\n</tool_call>"


def xml(name: str, **arguments: object) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def llama(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def glm(name: str, **arguments: object) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inside = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()]
    return f"<tool_call>{name}\n{''.join(inside)}</tool_call>"


def python(name: str, **arguments: object) -> str:
    written = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()]
    return f"[{name}({', '.join(written)})]"


def gemma(name: str, **arguments: object) -> str:
    return f"<|tool_call>call:{name}{gemma_value(arguments)}<tool_call|>"


def gemma_value(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma_value(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_value, value))}]"
    return json.dumps(value)


WRITERS = {"gemma4": gemma, "glm45": glm, "hermes": hermes, "llama3_json": llama, "pythonic": python, "qwen3_xml": xml}
GOOD: list[tuple[str, dict[str, object]]] = [
    ("add", {"a": 1, "b": -2.5}),
    ("now", {}),
    ("write_file", {"path": "", "text": 'ü 語 🎉\n"quoted" { } </tool_ \\ \t'}),
    ("write_file", {"path": "a", "text": "b", "mode": "append", "sync": True, "tags": ["x", "y z"]}),
    ("write_file", {"path": "a", "text": "b", "meta": {"x": {"y": [1, None]}}, "owner": "Ann", "size": 3}),
]
WRONG: list[tuple[str, dict[str, object]]] = [
    ("unknown", {}),
    ("add", {}),
    ("add", {"a": 1}),
    ("add", {"a": 1.5, "b": 1}),
    ("add", {"a": "one", "b": 1}),
    ("write_file", {"path": "a", "text": "b", "mode": "other"}),
    ("write_file", {"path": "a", "text": "b", "tags": {"x": 1}}),
    ("write_file", {"path": "a", "text": "b", "sync": "maybe"}),
]
both = pytest.mark.parametrize("single", [False, True])
formats = pytest.mark.parametrize("name", sorted(WRITERS))


def grammar(name: str, tool: str | None, single: bool, tools: Sequence[Any] = TOOLS, **options: Any) -> str:
    return forced_call_grammar(name, tools, tool, single_tokens=TAGS if single else (), **options)


@both
@formats
def test_calls_that_fit(name: str, single: bool) -> None:
    """Every way to fill in a tool's arguments is allowed, alone and several times over."""
    write = WRITERS[name]
    for tool, arguments in GOOD:
        text = write(tool, **arguments)
        assert matches(grammar(name, tool, single), text, single), text
        assert matches(grammar(name, None, single), text, single), text
        assert matches(grammar(name, None, single), f"{text}\n{text}", single), text
        assert not matches(grammar(name, None, single, parallel=False), f"{text}\n{text}", single)
        assert not matches(grammar(name, tool, single), f"{text}\n{text}", single)
        (found,) = collect(read(new_parser(name, TOOLS), [text])).tool_calls
        assert (found.name, json.loads(found.arguments)) == (tool, arguments)


@both
@formats
def test_calls_that_do_not_fit(name: str, single: bool) -> None:
    """Calls of other tools, with wrong arguments or with text around them are not allowed."""
    for tool, arguments in WRONG:
        text = WRITERS[name](tool, **arguments)
        assert not matches(grammar(name, None, single), text, single), text
    good = WRITERS[name]("now")
    assert not matches(grammar(name, "add", single), good, single)
    for text in [
        "",
        "Hello.",
        good[:-1],
        good + ".",
        "Sure. " + good,
        good.replace("\n", " ")
        if "\n" in good
        else good.replace(": ", ":\n").replace("(", "(\n").replace("now{", "now {"),
        "<think>x</think>" + good,
    ]:
        assert not matches(grammar(name, None, single), text, single), text


@both
@formats
def test_thinking_comes_first_where_the_prompt_leaves_it_open(name: str, single: bool) -> None:
    """A model may think before its call as far as its prompt leaves that open, and must call something then."""
    call = WRITERS[name]("now")
    thought = "Let me see: 1 < 2,\n</thinking> <b>ü</b>.\n</think>\n\n"
    inside = grammar(name, "now", single, opening=Opening.INSIDE)
    assert matches(inside, thought + call, single)
    assert not matches(inside, call, single)
    assert not matches(inside, thought + "Hello.", single)
    undecided = grammar(name, "now", single, opening=Opening.UNDECIDED)
    assert matches(undecided, call, single)
    assert matches(undecided, "<think>\n" + thought + call, single)
    assert not matches(undecided, "Hello. " + call, single)
    found = collect(read(OutputParser(ReasoningParser(inside=True), new_parser(name, TOOLS)), [thought + call]))
    assert (found.reasoning, len(found.tool_calls)) == (thought.removesuffix("\n</think>\n\n"), 1)


@formats
def test_what_would_be_no_call_to_the_parser_is_not_generated(name: str) -> None:
    """A text that would end a value early for the parser is forbidden in the format where it would."""
    forced = grammar(name, "write_file", False)
    for text in ["a</parameter>\nb", "a\n</function>\n</tool_call>\nb", "a</function>"]:
        fits = matches(forced, WRITERS[name]("write_file", path="a", text=text), False)
        assert fits == (name != "qwen3_xml"), text


@both
@formats
def test_unusual_tools(name: str, single: bool) -> None:
    """Names with quotes and non-ASCII letters, constants and undeclared arguments can be called too."""
    write = WRITERS[name]
    tools = [
        {
            "name": 'sa"y-\\ü',
            "parameters": {"properties": {"wörd": {"const": "ü"}}, "required": ["wörd", "undeclared"]},
        },
        {"name": "open", "parameters": {"type": "object"}},
        {"name": "openly", "parameters": {"type": "object", "additionalProperties": False}},
        {"name": "s", "parameters": {"properties": {"d": {"type": "string", "format": "unheard-of", "x-unknown": 1}}}},
        {"name": "n", "parameters": {"properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}},
    ]
    forced = grammar(name, None, single, tools)
    assert matches(forced, write('sa"y-\\ü', wörd="ü", undeclared="x"), single)
    assert not matches(forced, write('sa"y-\\ü', wörd="u", undeclared="x"), single)
    assert matches(forced, write("open", x="1", y="two\nlines"), single)
    assert matches(forced, write("openly"), single)
    assert not matches(forced, write("openly", x="1"), single)
    assert matches(forced, write("s", d="any"), single)
    assert matches(forced, write("n", n=5), single)
    assert not matches(forced, write("n", n="five"), single)


@pytest.mark.parametrize(
    ("name", "single"),
    others_slow(
        product(sorted(WRITERS), (False, True)),
        ((name, number % 2 == 0 or name == "gemma4") for number, name in enumerate(sorted(WRITERS))),
    ),
)
def test_whatever_is_generated_is_read_as_calls(name: str, single: bool) -> None:
    """Random tokens under the grammar's mask always make text that the parser reads as whole calls."""
    plain, guided = tokenizers(single)
    rng = random.Random(f"{name}{single}")
    # Random tokens would hardly ever end a text.
    texts = ['"', '"}', "}", "]", "\n</", "parameter", ">"]
    if name == "gemma4":
        if not single:
            pytest.skip("random tokens never spell the mark that ends a text, which Gemma's tokenizers have as one")
        texts = ["}", "]", '<|"|>', "<tool_call|>"]
    ends = {i for text in texts for i in plain.encode(text).ids}
    whole = 0
    for _ in range(12):
        lark = llguidance.LLMatcher.grammar_from_lark(grammar(name, None, single))
        matcher = llguidance.LLMatcher(guided, lark, log_level=0)
        ids: list[int] = []
        while END_OF_TURN not in ids and len(ids) < 200:
            allowed = [token for token, bias in enumerate(matcher.compute_logit_bias()) if bias]
            likely = [END_OF_TURN] if END_OF_TURN in allowed else [token for token in allowed if token in ends]
            ids.append(rng.choice(likely if likely and rng.random() < 0.6 else allowed))
            assert matcher.consume_token(ids[-1])
        if ids.pop() == END_OF_TURN:
            found = collect(read(new_parser(name, TOOLS), [plain.decode(ids)]))
            assert found.tool_calls
            assert not found.content
            assert all(isinstance(json.loads(call.arguments), dict) for call in found.tool_calls)
            whole += 1
    assert whole > 4


def test_white_space_is_the_templates_own() -> None:
    """A forced call looks like those that the model was trained on."""
    forced = grammar("hermes", "add", False)
    compact = '<tool_call>\n{"name": "add", "arguments": {"a":1,"b":2}}\n</tool_call>'
    assert not matches(forced, compact, False)
    assert matches(forced, compact.replace(":1,", ": 1, ").replace(":2", ": 2"), False)


def test_python_words_are_allowed_where_templates_show_them() -> None:
    """A model may write True where its template shows calls that way."""
    text = xml("write_file", path="a", text="b", sync="True")
    assert matches(grammar("qwen3_xml", "write_file", False), text, False)


def test_requests_that_cannot_be_met_are_refused() -> None:
    """Unknown formats, no tools, unknown names and formats without calls are refused by name."""
    with pytest.raises(InvalidArgument, match="known formats"):
        forced_call_grammar("other", TOOLS)
    with pytest.raises(InvalidArgument, match="there are no tools"):
        forced_call_grammar("hermes", [])
    with pytest.raises(InvalidArgument, match="'sub'; tools: add, write_file"):
        forced_call_grammar("hermes", [ADD, WRITE], "sub")
    with pytest.raises(InvalidArgument, match="teaches no tool calls"):
        forced_call_grammar("none", [NOW])


HARMONY_THOUGHT = "<|channel|>analysis<|message|>Now?\n1 < 2.<|end|><|start|>assistant"


@both
def test_calls_in_harmony(single: bool) -> None:
    """One call, on its channel, maybe behind one message of reasoning; nothing else, nor another tool's."""

    def write(name: str, **arguments: object) -> str:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}"

    undecided = {"opening": Opening.UNDECIDED}
    for tool, arguments in GOOD:
        text = write(tool, **arguments)
        if "\\u" in text:
            continue  # what is not ASCII is written as it is
        for thought in ("", HARMONY_THOUGHT):
            assert matches(grammar("openai", tool, single, **undecided), thought + text, single), text
            assert matches(grammar("openai", None, single, **undecided), thought + text, single), text
        (found,) = collect(read(new_parser("openai", TOOLS), [HARMONY_THOUGHT + text])).tool_calls
        assert (found.name, json.loads(found.arguments)) == (tool, arguments)
    forced = grammar("openai", None, single, **undecided)
    for tool, arguments in WRONG:
        assert not matches(forced, write(tool, **arguments), single)
    now = write("now")
    for text in ["", "Hello.", HARMONY_THOUGHT, f"Sure. {now}", f"{now}\n{now}", HARMONY_THOUGHT * 2 + now]:
        assert not matches(forced, text, single), text
    assert not matches(grammar("openai", "add", single, **undecided), now, single)
    begun = grammar("openai", "now", single, opening=Opening.CLOSED)
    assert matches(begun, f"<|end|><|start|>assistant{now}", single)


@both
def test_what_answers_in_harmony_is_bound(single: bool) -> None:
    """The message on the channel `final`, not the reasoning before it."""
    asked = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    bound = in_final_message(asked, TAGS if single else ())
    assert bound.kind is GrammarKind.LARK
    for thought in ("", HARMONY_THOUGHT):
        assert matches(bound.text, f'{thought}<|channel|>final<|message|>{{"a": 1}}', single)
        assert not matches(bound.text, f"{thought}<|channel|>final<|message|>one", single)
        assert not matches(bound.text, f'{thought}{{"a": 1}}', single)
