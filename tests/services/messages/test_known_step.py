"""A step that is known but for its activation is told from every other one, and its message made before that is."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import pytest

from services.errors import InvalidArgument
from services.messages import session_frames
from services.messages.known_step import KnownStep, token_bytes, tokens_of
from services.messages.steps import Forward, StepKind
from services.messages.tensors import WireTensor
from services.streams.step_lane import FROM_BYTES
from tests.services.streams.lane_chain import NEXT, LaneChain, set_fields, step

STEP = Forward(300, 70_000, (1, 151_000), StepKind.VERIFY, 15, more=40)


def packet(forward: Forward, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 24)) -> bytes:
    [message] = session_frames.forward_to_messages(replace(forward, activation=filled(dtype, shape)))
    return message.SerializeToString()


def filled(dtype: str, shape: tuple[int, ...]) -> WireTensor:
    tensor = WireTensor(dtype, shape, b"")
    return replace(tensor, data=bytes(range(1, 1 + tensor.size_bytes)))


def expected(forward: Forward = STEP) -> KnownStep:
    found = KnownStep.of(replace(forward, activation=WireTensor("bfloat16", (2, 24), b"")))
    assert found is not None
    return found


def test_it_is_read_with_its_activation() -> None:
    data = expected().read(memoryview(packet(STEP)))
    assert data == filled("bfloat16", (2, 24)).data
    assert expected().whole(data) == replace(STEP, activation=filled("bfloat16", (2, 24)))


@pytest.mark.parametrize("tokens", [(0,), (151_935,), (2**32 - 1,), (7, 300)])
def test_or_with_its_tokens_where_it_has_no_activation(tokens: tuple[int, ...]) -> None:
    sent = replace(STEP, token_ids=tokens)
    one = KnownStep.of(replace(STEP, token_ids=(-1,) * len(tokens)))
    assert one is not None
    [message] = session_frames.forward_to_messages(sent)
    text = message.SerializeToString()
    assert b"".join((one.before, token_bytes(tokens), one.behind)) == text
    data = one.read(memoryview(text))
    assert data is not None
    assert tokens_of(data) == tokens
    assert one.whole(data) == sent
    for other in (replace(sent, token_ids=(*tokens, 1)), replace(sent, step=301), replace(sent, more=0)):
        [message] = session_frames.forward_to_messages(other)
        assert one.read(memoryview(message.SerializeToString())) is None


@pytest.mark.parametrize(
    "change",
    [
        {"step": 301},
        {"base_position": 70_001},
        {"token_ids": (1, 151_001)},
        {"token_ids": (1,)},
        {"kind": StepKind.DECODE},
        {"propose_tokens": 14},
        {"more": 39},
        {"more": 0},
    ],
)
def test_another_step_is_not(change: dict[str, Any]) -> None:
    assert expected().read(memoryview(packet(replace(STEP, **change)))) is None


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float16", (2, 24)), ("bfloat16", (3, 16)), ("bfloat16", (1, 48)), ("bfloat16", (2, 23))]
)
def test_another_tensor_is_not(dtype: str, shape: tuple[int, ...]) -> None:
    assert expected().read(memoryview(packet(STEP, dtype, shape))) is None


@pytest.mark.parametrize("size", [0, 1, 20, 60, 110])
def test_what_is_no_step_is_not(size: int) -> None:
    """Cut short, without anything between, or any bytes."""
    one, whole = expected(), packet(STEP)
    for data in (whole[:size], one.before + one.behind, one.before[:size], os.urandom(size)):
        assert one.read(memoryview(data)) is None


def test_its_message_is_made_around_the_activation() -> None:
    one, activation = expected(), filled("bfloat16", (2, 24))
    assert b"".join((one.before, activation.data, one.behind)) == packet(STEP)


def test_none_is_expected_that_could_not_be_found() -> None:
    assert KnownStep.of(replace(STEP, activation=WireTensor("bfloat16", (0, 4), b""))) is None


# --- through a lane


async def test_a_step_that_was_expected_is_recognised(chain: LaneChain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being parsed, once, and its activation is heard of first; another one is parsed as ever."""
    parsed: list[Forward] = []
    from_activation = session_frames.from_activation

    def parse(*args: Any) -> Forward:
        parsed.append(from_activation(*args))
        return parsed[-1]

    monkeypatch.setattr(session_frames, "from_activation", parse)
    rows = [WireTensor("float16", (2, 40), os.urandom(160)) for _ in range(3)]
    sent = [Forward(7 + n, 19 + n, (3, 400), StepKind.VERIFY, 5, one, more=9) for n, one in enumerate(rows)]
    lane, came = chain.below.lanes[1], list[bytes]()
    for one, other in ((sent[0], sent[0]), (sent[1], sent[2])):
        expected = replace(one, activation=WireTensor("float16", (2, 40), b""))
        chain.below.watcher.call(lambda expected=expected: lane.expect(expected, lambda data: came.append(bytes(data))))
        for _ in range(2):
            assert chain.above.send(other)
            assert await chain.below.next() == other
    assert parsed == [sent[0], sent[2], sent[2]]
    assert came == [rows[0].data]
    assert chain.below.begun == [(one, True) for one in (sent[0], sent[2], sent[2])]


async def test_a_step_that_was_expected_but_for_its_tokens(chain: LaneChain) -> None:
    lane, came = chain.above.lanes[1], list[tuple[int, ...]]()
    chain.above.watcher.call(lambda: lane.expect(NEXT, lambda data: came.append(tokens_of(data))))
    sent = replace(NEXT, token_ids=(151_000, 3))
    for _ in range(2):
        chain.below.watcher.call(lambda: chain.below.lanes[1].prepare(NEXT))
        assert chain.below.send(sent)
        assert await chain.above.next() == sent
    assert came == [sent.token_ids]


async def test_a_step_may_be_sent_as_it_was_prepared(chain: LaneChain) -> None:
    """Before its activation's bytes were there; and another one in its place, or with features, as ever."""
    rows = bytearray(160)
    known = Forward(7, 19, (3, 400), StepKind.VERIFY, 0, WireTensor("float16", (2, 40), memoryview(rows)), more=9)
    lane = chain.above.lanes[1]
    for sent in (known, replace(known, step=8), step(160, 60)):
        rows[:] = bytes(160)
        chain.above.watcher.call(lambda sent=sent: lane.prepare(replace(sent, step=7)))
        rows[:] = os.urandom(160)
        for _ in range(2):
            assert chain.above.send(sent)
            assert await chain.below.next() == sent


@pytest.mark.parametrize("features", [(), (60,), (FROM_BYTES,)])
@pytest.mark.parametrize("size", [160, FROM_BYTES, 3 * FROM_BYTES])
async def test_a_step_that_was_prepared_and_expected(chain: LaneChain, size: int, features: tuple[int, ...]) -> None:
    """Its activation, in the message or beside it, comes first of all; its features behind, and all of it is taken."""
    above, below, came = chain.above.lanes[1], chain.below.lanes[1], list[bytes]()
    for number in range(40):
        sent = step(size, *features, number=number)
        assert sent.activation is not None
        expected = replace(sent, features=(), activation=replace(sent.activation, data=b""))
        chain.below.watcher.call(
            lambda expected=expected: below.expect(
                expected, lambda data: came.append(bytes(data)), features_follow=bool(features)
            )
        )
        chain.above.watcher.call(lambda sent=sent: above.prepare(sent))
        assert chain.above.send(sent, there=lambda number=number: time.sleep(0.001 * (number % 2)))
        assert await chain.below.next() == sent
        assert came == [sent.activation.data]
        came.clear()
    assert chain.below.begun == []


@pytest.mark.parametrize("wrong", [{"size_bytes": FROM_BYTES + 2}, {"sequence": 9}, {"offset": 2**40}, None])
async def test_an_expected_activation_that_is_not_there(chain: LaneChain, wrong: dict[str, int] | None) -> None:
    """Under the name that the message gives it: refused, not read."""
    sent = step(FROM_BYTES)
    lane, came = chain.below.lanes[1], list[bytes]()
    chain.below.watcher.call(lambda: lane.expect(sent, lambda data: came.append(bytes(data))))
    shared = chain.above.watcher.call(lambda: chain.above.lanes[1].put(memoryview(bytes(FROM_BYTES))))
    known = KnownStep.of(sent, payload=shared)
    assert known is not None
    name = b"\xff" * known.size
    if wrong is not None:
        set_fields(shared, wrong)
        name = shared.SerializeToString()
    assert chain.above.send_raw(known.before + name + known.behind)
    assert isinstance(await chain.refusal(), InvalidArgument)
    assert came == []
