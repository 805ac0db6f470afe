"""What a client says its answer must be, under the names of every API: one grammar, and the field that it came from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from coordinator.api.http.schemas import ResponseFormat, SamplingFields
from coordinator.text.parsers.lark import literal
from services.errors import InvalidArgument
from services.messages.output_frames import MAX_GRAMMAR_BYTES
from services.messages.steps import Grammar, GrammarKind
from services.text_threads import on_text_thread

_ONE_OF = "json, regex, choice, grammar or json_object"


@dataclass(frozen=True, slots=True)
class AnswerBound:
    """What an answer must be. field: the client's field that says so."""

    field: str
    grammar: Grammar


async def answer_bound(
    fields: SamplingFields, answer_format: ResponseFormat | None = None, format_field: str = "response_format"
) -> AnswerBound | None:
    """Return what a request binds its answer by, None where the answer may be anything; it is read on a thread.

    format_field: what the client calls answer_format. Raises InvalidArgument for two fields that say it, and for one
    whose value says nothing or more than a grammar may have.
    """
    given: list[tuple[str, str, Any]] = []
    if answer_format is not None and answer_format.type != "text":
        given.append((format_field, *_of_format(answer_format, format_field)))
    guided = {
        "json": fields.guided_json,
        "regex": fields.guided_regex,
        "choice": fields.guided_choice,
        "grammar": fields.guided_grammar,
    }
    given += [(f"guided_{kind}", kind, value) for kind, value in guided.items() if value is not None]
    if fields.structured_outputs is not None:
        members = {kind: value for kind, value in fields.structured_outputs.given().items() if value is not None}
        if not members:
            raise InvalidArgument(
                f"structured_outputs says nothing: give it one of {_ONE_OF}", field="structured_outputs"
            )
        given += [(f"structured_outputs.{kind}", kind, value) for kind, value in members.items()]
    if len(given) > 1:
        names = " and ".join(field for field, _, _ in given)
        raise InvalidArgument(f"{names} each say what the answer must be: give one of them", field=given[1][0])
    return await on_text_thread(0, _bound, *given[0]) if given else None


def _of_format(answer_format: ResponseFormat, field: str) -> tuple[str, Any]:
    if answer_format.type == "json_object":
        return "json_object", True
    schema = (answer_format.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise InvalidArgument(
            f"{field}.json_schema.schema is missing: give the JSON schema as an object", field=f"{field}.json_schema"
        )
    return "json", schema


def _bound(field: str, kind: str, value: Any) -> AnswerBound:
    match kind:
        case "json":
            return AnswerBound(field, Grammar(GrammarKind.JSON_SCHEMA, _schema_text(field, value)))
        case "regex":
            return AnswerBound(field, Grammar(GrammarKind.REGEX, value))
        case "choice":
            _check_size(field, sum(map(len, value)) + len(value))
            if not value or "" in value:
                raise InvalidArgument(f"{field} is {value}; it must be a list of texts that are not empty", field=field)
            return AnswerBound(field, Grammar(GrammarKind.LARK, f"start: {' | '.join(map(literal, value))}\n"))
        case "grammar":
            return AnswerBound(field, Grammar(GrammarKind.LARK, value))
    if value is not True:
        raise InvalidArgument(f"{field} is {value!r}; it must be true, or left out", field=field)
    return AnswerBound(field, Grammar(GrammarKind.JSON_OBJECT))


def _schema_text(field: str, value: str | dict[str, Any]) -> str:
    if isinstance(value, dict):
        pieces, size = list[str](), 0
        for piece in json.JSONEncoder().iterencode(value):
            size += len(piece)
            _check_size(field, size)
            pieces.append(piece)
        return "".join(pieces)
    _check_size(field, len(value))
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise InvalidArgument(
            f"{field} is {value[:80]!r}; it must be a JSON schema, an object or its text", field=field
        )
    return value


def _check_size(field: str, size: int) -> None:
    """Refuse early, by as many bytes as there are at least, what would take long to read."""
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(f"{field} has more than {MAX_GRAMMAR_BYTES} bytes, the most that are taken", field=field)
