"""Answers that clients ask for again, over a scripted engine: while they come, afterwards, and of a server that was
started again with the journal of one that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from coordinator.api.http.kept_answers import KeptAnswers
from coordinator.api.http.reply_forms import new_answers
from coordinator.journal.directory import Journal
from services.errors import InvalidArgument, Unavailable
from tests.combinations import covering
from tests.coordinator.api.http.conftest import Client, Connect
from tests.coordinator.fakes import Script, ScriptedSession, engine, says

TEXT = "the quick brown fox"
HELLO = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": HELLO,
        "n": 2,
        "logprobs": True,
        "prompt_logprobs": 1,
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {"prompt": ["hi", "there"], "echo": True, "logprobs": 1, "max_tokens": 64},
    RESPONSES: {"input": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 64},
}


@dataclass(frozen=True)
class Event:
    """An event of a stream: its id and its data."""

    id: str
    data: str


class HoldingScript(Script):
    """A script that answers no step from one on, until that is let go."""

    def hold_from(self, step: int) -> asyncio.Event:
        gate = asyncio.Event()
        self.hold = _Gate(gate, step)
        return gate


class _Gate(asyncio.Event):
    """Lets so many steps pass."""

    def __init__(self, gate: asyncio.Event, steps: int) -> None:
        super().__init__()
        self._gate, self._steps = gate, steps

    async def wait(self) -> Any:
        self._steps -= 1
        if self._steps < 0:
            await self._gate.wait()
        return True


async def read(client: Client, path: str, body: dict[str, Any], most: int | None = None, **headers: str) -> list[Event]:
    """The events of a stream, all or so many; then the connection ends."""
    found: list[Event] = []
    async with client.http.stream("POST", path, json={**body, "stream": True}, headers=headers) as reply:
        assert reply.status_code == 200, await reply.aread()
        event: dict[str, str] = {}
        async for line in reply.aiter_lines():
            if line:
                name, _, value = line.partition(": ")
                event[name] = value
            elif "data" in event:
                found.append(Event(event.get("id", ""), event["data"]))
                event = {}
                if len(found) == most:
                    break
    return found


@pytest.fixture
async def journaled(connect: Connect, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Serve an engine with a journal. Another call is another process: the one before has ended."""
    async with contextlib.AsyncExitStack() as stack:
        running: list[contextlib.AsyncExitStack] = []

        async def serve(script: Script, *keys: str, keep_s: float = 60.0, **options: Any) -> Client:
            for before in running:
                await before.aclose()
            here = contextlib.AsyncExitStack()
            running[:] = [here]
            stack.push_async_callback(here.aclose)
            serving = engine(script)
            journal = here.enter_context(contextlib.closing(Journal(tmp_path / "journal")))
            answers = await here.enter_async_context(new_answers(serving, journal, keep_s=keep_s))
            return await connect(serving, *keys, network=True, answers=answers, **options)

        yield serve


@pytest.mark.parametrize("path", BODIES)
async def test_the_same_key_is_the_same_answer(connect: Connect, path: str) -> None:
    """Whole, streamed, and from each event on: nothing is computed twice, and ids and texts are the same."""
    client = await connect(engine(Script(says(TEXT))), network=True)
    status, whole = await client.post(path, BODIES[path], **{"Idempotency-Key": "a"})
    asked = len(client.engine.cluster.sessions)
    assert (status, await client.post(path, BODIES[path], **{"Idempotency-Key": "a"})) == (200, (200, whole))
    assert len(client.engine.cluster.sessions) == asked

    events = await read(client, path, BODIES[path], **{"Idempotency-Key": "b"})
    assert len({event.id for event in events}) == len(events)
    assert await read(client, path, BODIES[path], **{"Idempotency-Key": "b"}) == events
    for index in (0, 1, len(events) // 2, len(events) - 2, len(events) - 1):
        last = {"Idempotency-Key": "b", "Last-Event-ID": events[index].id}
        assert await read(client, path, BODIES[path], **last) == events[index + 1 :]
    assert len(client.engine.cluster.sessions) == 2 * asked


async def test_without_a_key_and_a_journal_nothing_is_kept(connect: Connect) -> None:
    """Events have no ids."""
    client = await connect(engine(Script(says(TEXT))), network=True)
    assert {event.id for event in await read(client, CHAT, {"messages": HELLO})} == {""}


async def test_two_at_once(connect: Connect) -> None:
    """Requests of the same key that come together wait for one answer; another key has its own."""
    client = await connect(engine(Script(says(TEXT))))
    body = {"messages": HELLO}
    replies = await asyncio.gather(*(client.post(CHAT, body, **{"Idempotency-Key": key}) for key in "aaab"))
    assert len(client.engine.cluster.sessions) == 2
    assert replies[0] == replies[1] == replies[2]
    assert replies[3][1]["id"] != replies[0][1]["id"]


async def test_an_answer_with_a_key_goes_on_without_its_client(connect: Connect) -> None:
    """It is complete when the client is back."""
    script = HoldingScript(says(TEXT))
    gate = script.hold_from(4)
    client = await connect(engine(script), network=True)
    key = {"Idempotency-Key": "a"}
    first = await read(client, CHAT, {"messages": HELLO}, 3, **key)
    gate.set()
    async with asyncio.timeout(10):
        while client.engine.load.running:
            await asyncio.sleep(0.01)
    assert client.engine.cluster.session.closed
    rest = await read(client, CHAT, {"messages": HELLO}, **key, **{"Last-Event-ID": first[-1].id})
    assert content([*first, *rest]) == TEXT
    assert len(client.engine.cluster.sessions) == 1


async def test_an_answer_without_a_key_waits_for_its_client(journaled: Any) -> None:
    """Nobody computes what nobody reads; a client that comes again with the last event's id has the rest computed."""
    script = HoldingScript(says(TEXT))
    script.hold_from(4)
    client = await journaled(script)
    first = await read(client, CHAT, {"messages": HELLO}, 3)
    async with asyncio.timeout(10):
        while client.engine.load.running:
            await asyncio.sleep(0.01)
    script.hold = None
    rest = await read(client, CHAT, {"messages": HELLO}, **{"Last-Event-ID": first[-1].id})
    assert content([*first, *rest]) == TEXT
    _, second = client.engine.cluster.sessions
    # What was told is computed as a block, and not told again.
    assert len(second.forwards[1].token_ids) > 1


@pytest.mark.parametrize(("path", "steps"), covering(product(BODIES, [5, 0, 12]), 1))
async def test_a_server_that_is_started_again(journaled: Any, path: str, steps: int) -> None:
    """What a server had told when it ended, and what the next one tells, are one answer; that one goes on by itself."""
    undisturbed = await read(await journaled(Script(says(TEXT), logprob=-0.5)), path, BODIES[path])
    script = HoldingScript(says(TEXT))
    script.hold_from(steps)
    client = await journaled(script)
    key = {"Idempotency-Key": "a"}
    reading = asyncio.create_task(read(client, path, BODIES[path], **key))
    async with asyncio.timeout(10):
        while sum(len(session.forwards) for session in client.engine.cluster.sessions) <= steps // 2:
            await asyncio.sleep(0.01)
    client = await journaled(Script(says(TEXT)))
    reading.cancel()
    async with asyncio.timeout(10):
        while client.engine.load.running:
            await asyncio.sleep(0.01)
    events = await read(client, path, BODIES[path], **key)
    assert told(events) == told(undisturbed)
    assert await read(client, path, BODIES[path], **key, **{"Last-Event-ID": events[3].id}) == events[4:]


async def test_connections_that_a_server_ends(journaled: Any) -> None:
    """Where it is shut down they have not left by themselves: the next one goes on, without being asked."""
    script = HoldingScript(says(TEXT))
    script.hold_from(8)
    client = await journaled(script)
    reading = asyncio.create_task(read(client, CHAT, {"messages": HELLO}))
    async with asyncio.timeout(10):
        while not client.engine.cluster.sessions or len(client.engine.cluster.session.forwards) < 4:
            await asyncio.sleep(0.01)
    await client.engine.drain(0)
    reading.cancel()
    async with asyncio.timeout(10):
        while client.engine.load.running:
            await asyncio.sleep(0.01)
    client = await journaled(Script(says(TEXT)))
    async with asyncio.timeout(10):
        while not client.engine.cluster.sessions or client.engine.load.running:
            await asyncio.sleep(0.01)


async def test_the_last_event_of_a_server_that_has_ended(journaled: Any) -> None:
    """The client has some events of one server, and gets the rest from the next."""
    script = HoldingScript(says(TEXT))
    script.hold_from(8)
    client = await journaled(script)
    first = await read(client, CHAT, {"messages": HELLO}, 5, **{"Idempotency-Key": "a"})
    client = await journaled(Script(says(TEXT)))
    rest = await read(client, CHAT, {"messages": HELLO}, **{"Last-Event-ID": first[-1].id})
    assert content([*first, *rest]) == TEXT
    beyond = first[-1].id.rsplit("-", 2)[0] + "-99-0"
    status, reply = await client.post(CHAT, {"messages": HELLO, "stream": True}, **{"Last-Event-ID": beyond})
    assert (status, reply["error"]["param"]) == (409, "Last-Event-ID")
    assert "has lost what came behind part" in reply["error"]["message"]


async def test_complete_answers_outlive_the_server(journaled: Any) -> None:
    client = await journaled(Script(says(TEXT)))
    body, key = BODIES[CHAT], {"Idempotency-Key": "a"}
    whole = await client.post(CHAT, body, **key)
    client = await journaled(Script(says("something else")))
    assert await client.post(CHAT, body, **key) == whole
    assert client.engine.cluster.sessions == []


async def test_answers_are_forgotten(journaled: Any, tmp_path: Path) -> None:
    """Once they have been kept for their time, their files with them."""
    client = await journaled(Script(says(TEXT)), keep_s=0.05)
    await read(client, CHAT, {"messages": HELLO})
    async with asyncio.timeout(10):
        while list((tmp_path / "journal").glob("*.journal")):
            await asyncio.sleep(0.02)


async def test_another_model_leaves_them_alone(journaled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of one mean nothing to another."""
    client = await journaled(Script(says(TEXT)))
    key = {"Idempotency-Key": "a"}
    _, first = await client.post(CHAT, {"messages": HELLO}, **key)
    monkeypatch.setattr(KeptAnswers, "_model", "another")
    client = await journaled(Script(says(TEXT)))
    _, second = await client.post(CHAT, {"messages": HELLO}, **key)
    assert second["id"] != first["id"]


@pytest.mark.parametrize(
    ("headers", "body", "status", "param", "text"),
    [
        ({"Idempotency-Key": "a"}, {"messages": HELLO, "temperature": 0}, 422, "Idempotency-Key", "another body"),
        ({"Idempotency-Key": "é" * 3}, {}, 400, "Idempotency-Key", "1 to 255 printable ASCII"),
        ({"Idempotency-Key": "a" * 256}, {}, 400, "Idempotency-Key", "has 256 characters"),
        ({"Idempotency-Key": ""}, {}, 400, "Idempotency-Key", "has 0 characters"),
        ({"Last-Event-ID": "17"}, {}, 400, "Last-Event-ID", "is '17'; it must be the id of an event"),
        ({"Last-Event-ID": "0" * 24 + "-0-1-0"}, {}, 404, "Last-Event-ID", "not kept here (any more)"),
        ({"Last-Event-ID": "{id}", "Idempotency-Key": "b"}, {}, 422, "Idempotency-Key", "of an answer to another one"),
        ({"Last-Event-ID": "{id}"}, {"messages": HELLO}, 422, "Last-Event-ID", "another body"),
    ],
)
async def test_refusals(
    connect: Connect, headers: dict[str, str], body: dict[str, Any], status: int, param: str, text: str
) -> None:
    """Each names the header and what would be accepted, and nothing is computed."""
    client = await connect(engine(Script(says(TEXT))))
    first = {"messages": HELLO, "stream": True}
    [event, *_] = await read(client, CHAT, first, **{"Idempotency-Key": "a"})
    sent = {name: value.replace("{id}", event.id).encode() for name, value in headers.items()}
    reply = await client.http.post(CHAT, json=body or first, headers=sent)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert text in error["message"]
    assert len(client.engine.cluster.sessions) == 1


async def test_another_clients_key_is_another_key(journaled: Any) -> None:
    """Neither the key of a request nor the id of an event or a response gives one client what another one asked for."""
    client = await journaled(Script(says(TEXT)), "one", "two")
    body = {"messages": HELLO}
    one, two = ({"authorization": f"Bearer {key}", "Idempotency-Key": "a"} for key in ("one", "two"))
    first = await read(client, CHAT, body, **one)
    second = await read(client, CHAT, body, **two)
    assert first[0].id.split("-")[0] != second[0].id.split("-")[0]
    status, reply = await client.post(CHAT, {**body, "stream": True}, **{**two, "Last-Event-ID": first[0].id})
    assert (status, reply["error"]["param"]) == (404, "Last-Event-ID")
    _, background = await client.post(RESPONSES, {"input": "hi", "background": True}, authorization="Bearer one")
    for key, found in (("one", 200), ("two", 404)):
        reply = await client.http.get(f"{RESPONSES}/{background['id']}", headers={"authorization": f"Bearer {key}"})
        assert reply.status_code == found


async def test_what_failed_is_tried_again(connect: Connect) -> None:
    """With the tokens that had come: the client has the answer at its second try."""
    cluster_lost: dict[int, Any] = {5: Unavailable("stage 0 is gone")}
    script = Script(says(TEXT), failures=cluster_lost)
    client = await connect(engine(script))
    key = {"Idempotency-Key": "a"}
    status, reply = await client.post(CHAT, {"messages": HELLO}, **key)
    assert (status, reply["error"]["message"]) == (503, "stage 0 is gone")
    cluster_lost.clear()
    status, reply = await client.post(CHAT, {"messages": HELLO}, **key)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, TEXT)
    assert reply["timings"]["resumed"] == 1


async def until_status(client: Client, name: str, *wanted: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            reply = (await client.http.get(f"{RESPONSES}/{name}")).json()
            if reply["status"] in wanted:
                return reply
            await asyncio.sleep(0.01)


async def test_a_response_in_the_background(journaled: Any) -> None:
    """Its states, its text, and its events from a number on."""
    script = HoldingScript(says(TEXT))
    gate = script.hold_from(5)
    client = await journaled(script)
    status, reply = await client.post(RESPONSES, {"input": "hi", "background": True})
    assert (status, reply["status"], reply["background"], reply["output"]) == (200, "queued", True, [])
    going = await until_status(client, reply["id"], "in_progress")
    assert (going["id"], going["usage"]) == (reply["id"], None)
    gate.set()
    done = await until_status(client, reply["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == TEXT
    assert done == await until_status(client, reply["id"], "completed")
    async with client.http.sse(f"{RESPONSES}/{reply['id']}?stream=true&starting_after=4", method="GET") as source:
        events = [json.loads(event.data) async for event in source]
    assert [event["sequence_number"] for event in events][:2] == [5, 6]
    assert events[-1]["response"] == done


async def test_a_response_that_is_cancelled(journaled: Any) -> None:
    """Its computing ends, what came stays, and it is cancelled for the next server too."""
    script = HoldingScript(says(TEXT))
    script.hold_from(8)
    client = await journaled(script)
    _, reply = await client.post(RESPONSES, {"input": "hi", "background": True})
    await until_status(client, reply["id"], "in_progress")
    status, cancelled = await client.post(f"{RESPONSES}/{reply['id']}/cancel", None)
    assert (status, cancelled["status"]) == (200, "cancelled")
    assert not client.engine.load.running
    assert await client.post(f"{RESPONSES}/{reply['id']}/cancel", None) == (200, cancelled)
    client = await journaled(Script(says(TEXT)))
    again = await until_status(client, reply["id"], "cancelled")
    assert again == cancelled
    assert client.engine.cluster.sessions == []


async def test_a_response_that_fails(journaled: Any) -> None:
    client = await journaled(Script(says(TEXT), failures={3: Unavailable("stage 0 is gone")}))
    _, reply = await client.post(RESPONSES, {"input": "hi", "background": True})
    failed = await until_status(client, reply["id"], "failed")
    assert failed["error"] == {"code": "server_error", "message": "stage 0 is gone"}
    client = await journaled(Script(says(TEXT)))
    assert await until_status(client, reply["id"], "failed", "completed") == failed


async def test_background_needs_a_journal_that_can_be_written(
    journaled: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one it is refused with what to set; on a full disk nothing is taken that nobody would find again."""
    body = {"input": "hi", "background": True}
    client = await connect(engine())
    status, reply = await client.post(RESPONSES, body)
    assert (status, reply["error"]["param"]) == (400, "background")
    assert "--journal DIR" in reply["error"]["message"]
    client = await journaled(Script(says(TEXT)))
    status, reply = await client.post(RESPONSES, {**body, "store": False})
    assert (status, reply["error"]["param"]) == (400, "store")
    status, reply = await client.post(f"{RESPONSES}/resp_x/cancel", None)
    assert (status, reply["error"]["param"]) == (404, "response_id")

    def full(*_: object) -> None:
        raise Unavailable("the journal cannot be written", reason="JOURNAL_FULL")

    monkeypatch.setattr(Journal, "begin", full)
    status, reply = await client.post(RESPONSES, body)
    assert (status, reply["error"]["message"]) == (503, "the journal cannot be written")
    # An answer whose client is there comes nevertheless.
    assert content(await read(client, CHAT, {"messages": HELLO})) == TEXT


async def test_only_background_responses_are_cancelled(journaled: Any) -> None:
    client = await journaled(Script(says(TEXT)))
    _, reply = await client.post(RESPONSES, {"input": "hi"}, **{"Idempotency-Key": "a"})
    status, refused = await client.post(f"{RESPONSES}/{reply['id']}/cancel", None)
    assert (status, refused["error"]["param"]) == (400, "response_id")
    # It can be fetched all the same.
    assert (await client.http.get(f"{RESPONSES}/{reply['id']}")).json() == reply


async def test_a_response_that_is_deleted(journaled: Any, tmp_path: Path) -> None:
    """While it goes on: its computing ends, and nothing is left of it."""
    script = HoldingScript(says(TEXT))
    script.hold_from(8)
    client = await journaled(script)
    _, reply = await client.post(RESPONSES, {"input": "hi", "background": True})
    await until_status(client, reply["id"], "in_progress")
    deleted = await client.http.delete(f"{RESPONSES}/{reply['id']}")
    assert (deleted.status_code, deleted.json()) == (200, {"id": reply["id"], "object": "response", "deleted": True})
    assert not client.engine.load.running
    assert (await client.http.get(f"{RESPONSES}/{reply['id']}")).status_code == 404
    assert not list((tmp_path / "journal").glob("*.journal"))


async def test_a_refused_request_takes_no_key(connect: Connect) -> None:
    """What was refused may be sent again with the same key and another body."""
    failures: dict[int, Any] = {0: InvalidArgument("grammar cannot be used: it is empty", field="grammar")}
    client = await connect(engine(Script(says(TEXT), failures=failures)))
    key = {"Idempotency-Key": "a"}
    assert (await client.post(CHAT, {"messages": HELLO, "guided_regex": "a"}, **key))[0] == 400
    failures.clear()
    assert (await client.post(CHAT, {"messages": HELLO}, **key))[0] == 200


async def test_what_is_turned_away_is_not_kept(journaled: Any, tmp_path: Path) -> None:
    """Neither where the queue is full nor where the client goes before anything came."""
    script = HoldingScript(says(TEXT))
    gate = script.hold_from(0)
    client = await journaled(script, keep_s=0.05)
    client.engine.cluster.alive, client.engine.cluster.trouble = False, Unavailable("stage 0 is gone")
    for path, body in BODIES.items():
        status, _ = await client.post(path, {**body, "stream": True})
        assert status == 503
    assert not list((tmp_path / "journal").glob("*.journal"))
    client.engine.cluster.alive = True
    reading = asyncio.create_task(read(client, CHAT, {"messages": HELLO}))
    async with asyncio.timeout(10):
        while not client.engine.load.running:
            await asyncio.sleep(0.01)
        reading.cancel()
        while client.engine.load.running or list((tmp_path / "journal").glob("*.journal")):
            await asyncio.sleep(0.01)
    gate.set()


async def test_a_client_that_is_back_at_once(journaled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the computing has ended that was stopped when it went: the rest is computed behind that."""
    ending, closing = asyncio.Event(), asyncio.Event()
    close = ScriptedSession.close

    async def slowly(session: ScriptedSession, why: str = "") -> None:
        ending.set()
        await closing.wait()
        await close(session)

    monkeypatch.setattr(ScriptedSession, "close", slowly)
    script = HoldingScript(says(TEXT))
    script.hold_from(4)
    client = await journaled(script)
    first = await read(client, CHAT, {"messages": HELLO}, 3)
    async with asyncio.timeout(10):
        await ending.wait()
    script.hold = None
    reading = asyncio.create_task(read(client, CHAT, {"messages": HELLO}, **{"Last-Event-ID": first[-1].id}))
    await asyncio.sleep(0.05)
    assert len(client.engine.cluster.sessions) == 1
    closing.set()
    assert content([*first, *await reading]) == TEXT


def content(events: list[Event]) -> str:
    """The text of a chat's stream."""
    chunks = [json.loads(event.data) for event in events if event.data.startswith("{")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


def told(events: list[Event]) -> list[Any]:
    """The events but for what is another one's in each reply, ids and times; one choice behind the other, whose events
    come as they are computed."""
    found = [_without_names(json.loads(event.data)) for event in events if event.data.startswith("{")]
    return sorted(found, key=lambda event: event["choices"][0]["index"] if event.get("choices") else 0)


def _without_names(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_names(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    names = ("id", "item_id", "created", "created_at", "completed_at", "timings", "usage")
    return {name: _without_names(entry) for name, entry in value.items() if name not in names}
