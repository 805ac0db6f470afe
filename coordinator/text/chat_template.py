"""Turns chat messages into a prompt of the form that a checkpoint was trained on.

Owns a checkpoint's compiled chat templates and the sandbox that they run in. A template is code
that came with the weights: it may read its inputs and nothing else, and its loops are counted.
The memory that its strings take is not bounded. Knows nothing of token ids, requests or workers.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.text.tokenizer import read_settings, special_tokens
from services.errors import InvalidArgument
from services.model.text_files import TEMPLATE, TOKENIZER_CONFIG, find_text_file

# Loop rounds and macro calls that one rendering may take; a long chat takes some thousands.
MAX_STEPS = 1_000_000
# What `render` fills in itself, so what a request's own variables must not be called.
RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})
# Stands for a moment behind the text of a message that the answer goes on with; Unicode keeps it for such uses.
_MARK = "\ufdd0"
# Names under which clients send a model's reasoning; templates read the first two.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class TemplateError(InvalidArgument):
    """A chat template that cannot be used, or messages that it cannot render."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="messages")


class ChatTemplate:
    """A checkpoint's chat template; safe to share between threads.

    `tool_use` replaces `source` where a conversation has tools, `special_tokens` are variables of
    both, and `origin` names the template in errors.

    Raises TemplateError when a template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_use: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "chat template",
    ) -> None:
        self._origin = origin
        self.source = source if tool_use is None else f"{source}\n{tool_use}"
        self._special_tokens = dict(special_tokens or {})
        self._environment = _Environment()
        self._default = self._compile(source)
        self.variables = frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)))
        """The names that the template reads."""
        self._tool_use = self._default if tool_use is None else self._compile(tool_use)

    @classmethod
    def from_checkpoint(cls, model: Path) -> Self | None:
        """Load the checkpoint's chat template, or return None when it has none.

        `chat_template.jinja` wins over the `chat_template` of `tokenizer_config.json`.

        Raises TemplateError when one of the files is corrupt or a template is not valid Jinja.
        """
        name = TEMPLATE
        try:
            file = find_text_file(model, TEMPLATE)
            if file is not None:
                templates = {"default": file.content.decode()}
            else:
                name = TOKENIZER_CONFIG
                templates = _named_templates(read_settings(model, name).get("chat_template"), model / name)
            tokens = special_tokens(model)
        except InvalidArgument as error:
            raise TemplateError(str(error)) from error
        except UnicodeError as error:
            raise TemplateError(f"{model / name}: not readable ({error}); expected UTF-8 text") from error
        source = templates.get("default", next(iter(templates.values()), ""))
        if not source.strip():
            return None
        tool_use = templates.get("tool_use")
        return cls(source, tool_use=tool_use, special_tokens=tokens, origin=name)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Return the prompt for a conversation; `variables` are the template's own switches.

        Raises TemplateError when the messages, tools or variables are not JSON values, or the template refuses
        them, fails on them, reaches for something forbidden or does not end.
        """
        if not messages:
            raise TemplateError("messages: the list is empty; expected at least one message")
        template = self._default if tools is None else self._tool_use
        try:
            inputs = {
                **self._special_tokens,
                "documents": None,
                **{name: _plain(value, name) for name, value in variables.items()},
                "messages": [_message(message, i) for i, message in enumerate(messages)],
                "tools": _plain(tools, "tools"),
                "add_generation_prompt": add_generation_prompt,
            }
            self._environment.thread.steps = MAX_STEPS
            return template.render(inputs)
        except TemplateError:
            raise
        except Exception as error:  # a template can provoke any error its operations can raise
            raise TemplateError(f"{self._origin}: rendering failed ({type(error).__name__}: {_line(error)})") from error

    def render_continued(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Return the prompt for a conversation whose last message is unfinished: it ends with that message's text.

        Raises TemplateError as `render`, and for a last message without text, with tool calls, or whose text the
        template does not show as it is.
        """
        *before, last = messages or [{}]
        text = last.get("content")
        if not isinstance(text, str) or not text or last.get("tool_calls"):
            raise TemplateError("messages: the last one cannot be continued: it must have text and no tool calls")
        marked = {**last, "content": f"{text}{_MARK}"}
        prompt, mark, _ = self.render(
            [*before, marked], add_generation_prompt=False, tools=tools, **variables
        ).partition(_MARK)
        if not mark:
            raise TemplateError("messages: the chat template does not show the last one's text: it cannot be continued")
        return prompt

    def _compile(self, source: str) -> jinja2.Template:
        try:
            tree = self._environment.count_steps(self._environment.parse(source))
            return self._environment.from_string(tree)
        except Exception as error:  # a syntax error, or nesting too deep for the compiler
            at = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise TemplateError(f"{self._origin}: not valid Jinja{at} ({_line(error)})") from error


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks what a training run learns from."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The names, filters and whitespace rules that chat templates are written for."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self.thread = threading.local()  # renders one template at a time
        self.filters["tojson"] = _to_json
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: datetime.now().strftime(form),
            # The type itself would offer `dict.update`, which changes what it is given.
            dict=lambda *args, **kwargs: dict(*args, **kwargs),
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse a forbidden attribute. Raises SecurityError for a private one."""
        # By default a forbidden attribute is only an error once it is used, so a template that
        # probes for one would render as if nothing had happened.
        if attribute.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"{attribute!r} is private")
        return super().unsafe_undefined(obj, attribute)

    def step(self) -> bool:
        """Called by templates in each loop round and macro call."""
        self.thread.steps -= 1
        if self.thread.steps < 0:
            raise OverflowError(f"more than {MAX_STEPS} loop rounds")
        return True

    def count_steps(self, tree: nodes.Template) -> nodes.Template:
        """Make each loop and macro of a parsed template call `step`."""
        counted: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For)]
        counted += tree.find_all(nodes.Macro)
        for node in counted:
            call = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            if isinstance(node, nodes.For) and node.test is not None:
                # A loop with a condition also spends time on the items that it passes over.
                node.test = nodes.And(call, node.test)
            else:
                node.body.insert(0, nodes.ExprStmt(call))
            node.set_lineno(node.lineno)
        tree.set_environment(self)
        return tree


def _raise_exception(message: object) -> None:
    text = " ".join(str(message).split())
    raise TemplateError(f"messages: the chat template refuses them ({text})")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML and sorts the keys; models were trained on neither.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _message(message: object, index: int) -> dict[str, object]:
    """Copy a message the way chat templates expect one."""
    plain = _plain(message, f"messages[{index}]")
    if not isinstance(plain, dict):
        raise TemplateError(f"messages[{index}]: {plain!r} given; expected an object")
    # Clients write null for what is absent, such as the content beside tool calls; many
    # templates would print it as "None".
    present = {name: value for name, value in plain.items() if value is not None}
    reasoning = next((present[name] for name in REASONING_NAMES if name in present), None)
    if reasoning is None:
        return present
    return {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _plain(value: object, where: str) -> Any:
    """Copy a JSON value, so that a template meets no object with methods of its own."""
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise TemplateError(f"{where}: {type(value).__name__} given; expected a JSON value")


def _named_templates(value: object, path: Path) -> dict[str, str]:
    """Read `chat_template` in any of its forms: absent, one text, or a list with names."""
    if value is None or isinstance(value, str):
        return {"default": value or ""}
    entries = value if isinstance(value, list) else [value]
    pairs = [(e.get("name"), e.get("template")) for e in entries if isinstance(e, dict)]
    named = {n: text for n, text in pairs if isinstance(n, str) and isinstance(text, str)}
    if len(named) == len(entries):
        return named
    raise TemplateError(
        f"{path}: chat_template is {str(value)[:40]!r}; expected a text or a list of objects with name and template"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
