"""The Responses API's items: what events become, however they come, and what of a broken call is left."""

from __future__ import annotations

from typing import Any

from coordinator.api.http.response_input import Item, ResponsesRequest, make_messages
from coordinator.api.http.response_items import OutputItems, StreamedEvent
from coordinator.text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


def items_and_events(events: list[Event], status: str = "completed") -> tuple[OutputItems, list[StreamedEvent]]:
    items, streamed = OutputItems("r"), list[StreamedEvent]()
    for event in events:
        streamed += items.add(event)
    return items, streamed + items.finish(status)


def shown(streamed: list[StreamedEvent]) -> list[dict[str, Any]]:
    """The items as a client puts them together that follows the stream."""
    built: dict[int, dict[str, Any]] = {}
    for kind, fields in streamed:
        item = built.get(fields["output_index"], {})
        match kind.removeprefix("response."):
            case "output_item.added":
                assert fields["output_index"] == len(built)
                built[fields["output_index"]] = fields["item"]
            case "content_part.added":
                item["content"] = [dict(fields["part"])]
            case "output_text.delta" | "reasoning_text.delta":
                assert fields["item_id"] == item["id"]
                item["content"][0]["text"] += fields["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += fields["delta"]
            case "output_item.done":
                assert {**item, "status": fields["item"]["status"]} == fields["item"]
                item["status"] = fields["item"]["status"]
    return [built[index] for index in sorted(built)]


def test_all_kinds() -> None:
    """Reasoning, text and calls become items in their order, and a stream shows the same items."""
    items, streamed = items_and_events(
        [
            ReasoningDelta("I th"),
            ReasoningDelta("ink"),
            ContentDelta("Let me"),
            ContentDelta(" see."),
            ToolCallStart(0, "add"),
            ToolCallArguments(0, '{"a": '),
            ToolCallArguments(0, "1}"),
            ToolCallEnd(0),
            ToolCallStart(1, "add"),
            ToolCallArguments(1, "{}"),
            ToolCallEnd(1),
            ContentDelta("Done."),
        ]
    )

    assert shown(streamed) == items.done
    types = [item["type"] for item in items.done]
    assert types == ["reasoning", "message", "function_call", "function_call", "message"]
    assert items.reasoning == "I think"
    assert [item["arguments"] for item in items.done[2:4]] == ['{"a": 1}', "{}"]
    assert len({item["call_id"] for item in items.done[2:4]}) == 2
    assert {item["status"] for item in items.done} == {"completed"}


def test_a_broken_call_is_text() -> None:
    """A stream closes it as incomplete; it is no item of the reply."""
    items, streamed = items_and_events(
        [ToolCallStart(0, "add"), ToolCallArguments(0, '{"a'), ContentDelta('<tool_call>{"name": "add"')], "incomplete"
    )

    assert [item["status"] for item in shown(streamed)] == ["incomplete", "incomplete"]
    assert [item["type"] for item in items.done] == ["message"]
    assert not any(kind.endswith("arguments.done") for kind, _ in streamed)


def test_an_empty_answer_is_an_empty_message() -> None:
    """Clients get one item at least."""
    items, streamed = items_and_events([])

    assert shown(streamed) == items.done
    assert items.done[0]["content"][0]["text"] == ""


def test_one_turn_is_one_message() -> None:
    """Reasoning, text and calls are one assistant's message; a call's output is a tool's."""
    given: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 2, 3 + 4?"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Easy."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "7"}]},
    ]
    made = make_messages(ResponsesRequest(input=[Item(**item) for item in given], instructions="Add."))

    assert [message.role for message in made] == ["system", "user", "assistant", "tool", "tool"]
    turn = made[2]
    assert (turn.reasoning_content, turn.content) == ("Easy.", "I add.")
    assert [call.function.arguments for call in turn.tool_calls or []] == [{"a": 1}, {}]
    assert [(message.tool_call_id, message.content) for message in made[3:]] == [("c1", "3"), ("c2", "7")]
