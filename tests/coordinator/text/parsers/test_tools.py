"""Finding formats by name and by chat template, and reading the schemas of tools."""

import time
from typing import Any

import pytest

from coordinator.text.parsers.events import ContentDelta
from coordinator.text.parsers.tool_schema import ANY_TYPE, OfferedTool, read_tools
from coordinator.text.parsers.tools import detect, format_of, known_formats, new_parser
from services.errors import InvalidArgument
from tests.coordinator.text.parsers.reading import ADD, TOOLS, read


def test_formats_are_found_by_name() -> None:
    """Every format has a parser, and text without calls is content to all of them."""
    assert known_formats() == ["gemma4", "glm45", "hermes", "llama3_json", "none", "openai", "pythonic", "qwen3_xml"]
    assert format_of("qwen3_coder") is format_of("qwen3_xml")
    for name in known_formats():
        assert format_of(name).Parser(TOOLS).push("Hi") == [ContentDelta("Hi")]


@pytest.mark.parametrize("name", ["", "hermes2", "__init__", "../hermes"])
def test_unknown_formats_are_refused(name: str) -> None:
    """The refusal lists the known ones."""
    listed = "known formats: gemma4, glm45, hermes, llama3_json, none, openai, pythonic, qwen3_xml"
    with pytest.raises(InvalidArgument, match=listed):
        format_of(name)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            '{{- \'Answer so:\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call>\' }}',
            "hermes",
        ),
        ('Answer so:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>', "hermes"),
        ('Answer so:\n<tool_call>{"arguments": <object>, "name": <name>}</tool_call>', "hermes"),
        (
            "Answer so:\\n<tool_call>\\n<function=example>\\n<parameter=one>\\nvalue\\n</parameter>\\n</function>",
            "qwen3_xml",
        ),
        (
            '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
            "value}.' }}",
            "llama3_json",
        ),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}", "openai"),
        ("{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>", "glm45"),
        ("Answer [func_name1(params_name1=params_value1, params_name2=params_value2), func_name2(params)]", "pythonic"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
        ("{{ '<|im_start|>' + message.role }}", "none"),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "none"),
        ("", "none"),
    ],
)
def test_a_template_tells_its_format(template: str, name: str) -> None:
    """The format is recognised by the source of the chat template that teaches it."""
    assert detect(template) == name


@pytest.mark.parametrize(
    "name", ["gemma4", "glm45", "hermes", "llama3_json", "none", "openai", "pythonic", "qwen3_xml"]
)
def test_without_tools_all_is_content(name: str) -> None:
    """Where nothing can be called, whatever looks like a call is text."""
    text = ' \n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<function=add>\n</function>\n'
    assert new_parser(name, []).push(text) == [ContentDelta(text)]
    assert read(format_of(name).Parser([]), text) == [ContentDelta(text)]


def test_tools_are_read_with_and_without_a_wrapper() -> None:
    """A function may come alone or in the object that OpenAI's API puts around it."""
    assert read_tools([ADD]) == read_tools([ADD["function"]])  # type: ignore[list-item]
    assert read_tools([{"name": "f"}]) == {"f": OfferedTool("f", {})}
    assert read_tools([{"name": "f", "parameters": None}]) == {"f": OfferedTool("f", {})}


@pytest.mark.parametrize(
    "schemas",
    [[{}], ["f"], [{"name": ""}], [{"name": 1}], [{"function": None}], [{"name": "f", "parameters": []}], [ADD, ADD]],
)
def test_bad_tools_are_refused(schemas: Any) -> None:
    """The refusal says which of the tools is at fault."""
    with pytest.raises(InvalidArgument, match=r"tools\[\d\]"):
        read_tools(schemas)


LOOP: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/loop"}] * 20}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "integer"}, {"number"}),
        ({"type": ["integer", "null"]}, {"number", "null"}),
        ({"type": "object", "anyOf": [{"type": "string"}]}, {"object"}),
        ({"enum": ["a", 1, None, True, [], {}]}, ANY_TYPE),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"const": 1.5}, {"number"}),
        (
            {"anyOf": [{"type": "string"}, {"oneOf": [{"type": "array"}, {"type": "null"}]}]},
            {"string", "array", "null"},
        ),
        ({"allOf": [{"type": ["string", "number"]}, {"type": ["number", "null"]}]}, {"number"}),
        ({"$ref": "#/$defs/a~1b"}, {"boolean"}),
        ({"$ref": "#/$defs/missing"}, ANY_TYPE),
        ({"$ref": "https://elsewhere"}, ANY_TYPE),
        ({"$ref": "#/$defs/self"}, ANY_TYPE),
        ({"$ref": "#/$defs/loop"}, ANY_TYPE),
        ({"type": "unheard-of"}, ANY_TYPE),
        ({"type": [{}], "enum": "no list"}, ANY_TYPE),
        (True, ANY_TYPE),
        (None, ANY_TYPE),
    ],
)
def test_types_of_an_argument(schema: Any, types: set[str]) -> None:
    """Types are found through references, constants and choices, and loops take no time."""
    definitions = {"a/b": {"type": "boolean"}, "self": {"$ref": "#/$defs/self"}, "loop": LOOP}
    tool = OfferedTool("f", {"properties": {"x": schema}, "$defs": definitions})
    start = time.process_time()
    assert tool.argument_types("x") == types
    assert time.process_time() - start < 0.1


def test_undeclared_arguments() -> None:
    """An argument that is not declared may be of any type, or of that of additionalProperties."""
    assert OfferedTool("f", {}).argument_types("x") == ANY_TYPE
    assert OfferedTool("f", {"additionalProperties": {"type": "string"}}).argument_types("x") == {"string"}
    assert OfferedTool("f", {"additionalProperties": False}).argument_types("x") == ANY_TYPE
    through = OfferedTool("f", {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"x": {"type": "string"}}}}})
    assert through.argument_types("x") == {"string"}
