"""Steps from thread to thread over a real link: what arrives, what has to go another way, and what is refused."""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from flashsplit.shard.v1 import stage_pb2, stage_service_pb2 as pb
from services.errors import InvalidArgument
from services.messages.session_frames import request_to_messages
from services.messages.step_template import StepTemplate, tokens_from_bytes
from services.messages.steps import Forward, ForwardWithoutFeatures, StepFeatures, StepKind
from services.messages.tensors import WireTensor
from services.rpc.shared_memory import SharedMemoryServicer, open_link
from services.same_host.link import PIECE_BYTES, RING_BYTES, SEGMENT_BYTES, SharedLinks
from services.streams.step_lane import MIN_SHARED_BYTES
from tests.services.conftest import Dial, Serve
from tests.services.fakes import stays, until
from tests.services.streams.lane_chain import (
    MAX_SLICES,
    MAX_TENSOR_BYTES,
    MOST_PIECES,
    NEXT,
    LaneChain,
    set_fields,
    step,
    two_watchers,
)


@pytest.mark.parametrize(
    ("caller", "server", "both"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
async def test_both_sides_must_watch(serve: Serve, dial: Dial, caller: bool, server: bool, both: bool) -> None:
    """Where one does not, there is a link all the same, without a socket for steps."""
    with two_watchers() as (one, other):
        links = SharedLinks()
        made = await serve(SharedMemoryServicer(links, other if server else None).register)
        client = await open_link(await dial(made.address), made.address, one if caller else None)
        there = links.get(client.link.link_id)
        if both:
            await until(lambda: there.step_socket is not None)
        assert await stays(lambda: (client.link.step_socket is not None, there.step_socket is not None) == (both, both))
        assert client.link.sender().put(memoryview(bytes(PIECE_BYTES))) is not None
        await client.close()
        await until(lambda: there.closed)
        assert there.step_socket is client.link.step_socket is None


@pytest.mark.parametrize(
    "sizes",
    [
        (0,),
        (2,),
        (100, 60),
        (MIN_SHARED_BYTES - 2, MIN_SHARED_BYTES),
        (MIN_SHARED_BYTES, 8, 2 * MIN_SHARED_BYTES, 0),
        (PIECE_BYTES,) * 3,
    ],
)
async def test_steps_arrive(chain: LaneChain, sizes: tuple[int, ...]) -> None:
    """Down the chain with all their tensors, in the packet or beside it, up the chain without any."""
    sent = step(*sizes)
    assert chain.above.send(sent)
    assert await chain.below.next() == sent
    assert chain.below.send(NEXT)
    assert await chain.above.next() == NEXT
    assert chain.below.steps == chain.above.steps == {1: [], 2: []}


@pytest.mark.parametrize("size", [60, MIN_SHARED_BYTES, PIECE_BYTES])
async def test_features_follow_in_a_packet_of_their_own(chain: LaneChain, size: int) -> None:
    """Who takes the step hheard of it as soon as its activation is there, before its features are; then all of it."""
    sent, heard = step(MIN_SHARED_BYTES, size, 80), threading.Event()

    def wait() -> None:
        deadline = time.monotonic() + 5
        while not chain.below.begun and time.monotonic() < deadline:
            time.sleep(0.001)
        assert chain.below.steps[1] == []
        heard.set()

    assert chain.above.send(sent, wait_for_features=wait)
    assert await chain.below.next() == sent
    assert heard.is_set()
    assert chain.below.begun == [(replace(sent, features=()), False)]


async def test_without_features_nothing_is_waited_for(chain: LaneChain) -> None:
    """There is no second packet then, and all is there at once."""
    sent = step(100)
    assert chain.above.send(sent, wait_for_features=lambda: pytest.fail("there is nothing to wait for"))
    assert await chain.below.next() == sent
    assert chain.below.begun == [(sent, True)]


@pytest.mark.parametrize("begun", [False, True])
async def test_features_of_another_step_are_refused(chain: LaneChain, begun: bool) -> None:
    """Features that come without their step, or behind another one, are refused by their step's number."""
    if begun:
        [message] = request_to_messages(ForwardWithoutFeatures(step(100, 60, number=3)))
        assert chain.above.send_raw(message.SerializeToString())
        await until(lambda: len(chain.below.begun) == 1)
    [message] = request_to_messages(StepFeatures(4, step(100, 60).features))
    assert chain.above.send_raw(message.SerializeToString())
    assert "features of step 4 came without it" in (await chain.refusal()).message


async def test_room_comes_back(chain: LaneChain) -> None:
    """Many times the size of the part for steps goes through it, of two sessions by turns, and no step is refused."""
    sizes = itertools.cycle([(PIECE_BYTES // 2, 200_000), (900_000, MIN_SHARED_BYTES, PIECE_BYTES // 4), (10,)])
    sent_bytes = 0
    for number in range(300):
        sent, stream_id = step(*next(sizes), number=number), 1 + number % 2
        assert chain.above.send(sent, stream_id)
        assert await chain.below.next(stream_id) == sent
        sent_bytes += sent.size_bytes
    assert sent_bytes > 8 * (SEGMENT_BYTES - RING_BYTES)


async def test_payloads_of_streams_have_room_of_their_own(chain: LaneChain) -> None:
    """Neither part of the segment writes into the other's, however full it is."""
    sender, reader, streams = chain.above.link.sender(), SharedLinks(chain.below.link), []
    piece = os.urandom(PIECE_BYTES)
    while (message := sender.put(memoryview(piece))) is not None:
        streams.append(message)
    sent = step(PIECE_BYTES, PIECE_BYTES, PIECE_BYTES)
    with chain.below.watcher.held():
        assert chain.above.send(sent)
        for message in streams:
            reader.read_payload(message, into := bytearray())
            assert into == piece
    assert await chain.below.next() == sent


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((PIECE_BYTES,) * (MOST_PIECES + 1), id="more than the steps' part of the segment"),
        pytest.param((PIECE_BYTES + 2,), id="a tensor in two pieces"),
        pytest.param((MIN_SHARED_BYTES - 2,) * 5, id="small ones that are too many for a packet"),
    ],
)
async def test_a_step_without_room_goes_another_way(chain: LaneChain, sizes: tuple[int, ...]) -> None:
    """It is not half sent, and what it took in the segment is free again, for another session's steps too."""
    expected = step(*(PIECE_BYTES,) * MOST_PIECES)
    for _ in range(3):
        assert not chain.above.send(step(*sizes), 1)
        assert chain.above.send(expected, 2)
        assert await chain.below.next(2) == expected
    assert chain.below.steps[1] == chain.below.failures == []


async def test_a_closed_lane_gives_its_room_back(chain: LaneChain) -> None:
    """Who reads its last step too late notices. It heard nothing more; another session's goes on. Twice is once."""
    expected = step(PIECE_BYTES)
    with chain.below.watcher.held():
        assert chain.above.send(step(*(PIECE_BYTES,) * MOST_PIECES), 1)
        assert not chain.above.send(expected, 2)
        for _ in range(2):
            chain.above.watcher.call(chain.above.lanes[1].close)
        assert chain.above.send(expected, 2)
    await until(lambda: chain.below.steps[2] == [expected])
    assert chain.below.steps[1] == []
    assert ["lies there" in error.message for error in chain.below.failures] == [True]
    assert chain.below.send(NEXT, 1)
    assert chain.below.send(NEXT, 2)
    assert await chain.above.next(2) == NEXT
    assert chain.above.steps[1] == []


# --- steps that are known before they come


async def test_a_step_that_was_expected_is_recognised(chain: LaneChain) -> None:
    """It is so once, and its activation is heard of first; another step in its place is parsed as ever."""
    rows = [WireTensor("float16", (2, 40), os.urandom(160)) for _ in range(3)]
    sent = [Forward(7 + n, 19 + n, (3, 400), StepKind.VERIFY, 5, data, more=9) for n, data in enumerate(rows)]
    lane, arrived = chain.below.lanes[1], list[bytes]()
    for expected, other in ((sent[0], sent[0]), (sent[1], sent[2])):
        unknown = replace(expected, activation=WireTensor("float16", (2, 40), b""))
        chain.below.watcher.call(lambda unknown=unknown: lane.expect(unknown, lambda data: arrived.append(bytes(data))))
        for _ in range(2):
            assert chain.above.send(other)
            assert await chain.below.next() == other
    assert arrived == [rows[0].data]
    # Of the one that was recognised nothing is heard but that it is there.
    assert chain.below.begun == [(step, True) for step in (sent[0], sent[2], sent[2])]


async def test_a_step_that_was_expected_but_for_its_tokens(chain: LaneChain) -> None:
    """Its tokens are heard of first, once; the step comes as it was sent."""
    lane, arrived = chain.above.lanes[1], list[tuple[int, ...]]()
    chain.above.watcher.call(lambda: lane.expect(NEXT, lambda data: arrived.append(tokens_from_bytes(data))))
    sent = replace(NEXT, token_ids=(151_000, 3))
    for _ in range(2):
        chain.below.watcher.call(lambda: chain.below.lanes[1].prepare(NEXT))
        assert chain.below.send(sent)
        assert await chain.above.next() == sent
    assert arrived == [sent.token_ids]


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


@pytest.mark.parametrize("features", [(), (60,), (MIN_SHARED_BYTES,)])
@pytest.mark.parametrize("size", [160, MIN_SHARED_BYTES, 3 * MIN_SHARED_BYTES])
async def test_a_step_that_was_prepared_and_expected(chain: LaneChain, size: int, features: tuple[int, ...]) -> None:
    """Its activation, in the message or beside it, comes first of all; its features behind, and all of it is taken."""
    above, below, arrived = chain.above.lanes[1], chain.below.lanes[1], list[bytes]()
    for number in range(40):
        sent = step(size, *features, number=number)
        assert sent.activation is not None
        expected = replace(sent, features=(), activation=replace(sent.activation, data=b""))
        chain.below.watcher.call(
            lambda expected=expected: below.expect(
                expected, lambda data: arrived.append(bytes(data)), features_follow=bool(features)
            )
        )
        chain.above.watcher.call(lambda sent=sent: above.prepare(sent))
        assert chain.above.send(sent, wait_for_features=lambda number=number: time.sleep(0.001 * (number % 2)))
        assert await chain.below.next() == sent
        assert arrived == [sent.activation.data]
        arrived.clear()
    assert chain.below.begun == []


@pytest.mark.parametrize("wrong", [{"size_bytes": MIN_SHARED_BYTES + 2}, {"sequence": 9}, {"offset": 2**40}, None])
async def test_an_expected_activation_that_is_not_there(chain: LaneChain, wrong: dict[str, int] | None) -> None:
    """Under the name that the message gives it: refused, not read."""
    sent = step(MIN_SHARED_BYTES)
    lane, arrived = chain.below.lanes[1], list[bytes]()
    chain.below.watcher.call(lambda: lane.expect(sent, lambda data: arrived.append(bytes(data))))
    shared = chain.above.watcher.call(lambda: chain.above.lanes[1].put(memoryview(bytes(MIN_SHARED_BYTES))))
    template = StepTemplate.of(sent, payload=shared)
    assert template is not None
    name = b"\xff" * template.gap_bytes
    if wrong is not None:
        set_fields(shared, wrong)
        name = shared.SerializeToString()
    assert chain.above.send_raw(template.before + name + template.after)
    assert isinstance(await chain.refusal(), InvalidArgument)
    assert arrived == []


# --- what makes no sense


def packet(forward: Forward) -> pb.RunStageRequest:
    """Whole, without shared memory."""
    [frame] = request_to_messages(forward)
    return frame


SMALL = step(100, 60)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        pytest.param(b"\xff" * 20, "a step could not be parsed", id="garbage"),
        pytest.param(b"", "frame None is not expected here", id="nothing"),
        pytest.param(
            pb.RunStageRequest(open=stage_pb2.Open()).SerializeToString(),
            "frame open is not expected here",
            id="another frame",
        ),
        pytest.param(
            packet(replace(SMALL, features=SMALL.features * (MAX_SLICES + 1))).SerializeToString(),
            f"the frame has {MAX_SLICES + 1} feature slices, at most {MAX_SLICES} are expected",
            id="too many slices",
        ),
    ],
)
async def test_messages_that_are_no_steps(chain: LaneChain, message: bytes, said: str) -> None:
    """They are refused, by a sentence that says why; the lane goes on."""
    assert chain.above.send_raw(message)
    error = await chain.refusal()
    assert isinstance(error, InvalidArgument)
    assert said in error.message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"shape": [MAX_TENSOR_BYTES // 2 + 1]}, f"more than the {MAX_TENSOR_BYTES} accepted here"),
        ({"shape": [51]}, "must come whole"),
        ({"shape": [49]}, "activation.data holds 100 bytes"),
        ({"shape": [-50]}, "no extent may be negative"),
        ({"shape": [50, 1, 1, 1, 1]}, "at most 4"),
        ({"dtype": 99}, "activation.dtype is 99"),
        ({"dtype": 0}, "activation.dtype is missing"),
        ({"data": b""}, "must come whole"),
    ],
)
async def test_tensors_that_make_no_sense(chain: LaneChain, change: dict[str, Any], said: str) -> None:
    """A tensor whose size, shape or type is not acceptable is refused, with a sentence that says why."""
    message = packet(SMALL)
    set_fields(message.forward_from_activation.activation, change)
    assert chain.above.send_raw(message.SerializeToString())
    error = await chain.refusal()
    assert isinstance(error, InvalidArgument)
    assert said in error.message


async def test_up_the_chain_come_no_tensors(chain: LaneChain) -> None:
    """Who listens without limits takes steps of tokens only."""
    assert chain.below.send(SMALL)
    await until(lambda: bool(chain.above.failures))
    [error] = chain.above.failures
    assert isinstance(error, InvalidArgument)
    assert "1 feature slices, at most 0" in error.message


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 0},
        {"offset": 64},
        {"offset": 2**64 - 64},
        {"offset": SEGMENT_BYTES - 64},
        {"offset": RING_BYTES + 65},
        {"offset": RING_BYTES + 128},
        {"sequence": 0},
        {"sequence": 2**64 - 1},
        {"size_bytes": 0},
        {"size_bytes": MIN_SHARED_BYTES - 1},
        {"size_bytes": MIN_SHARED_BYTES + 1},
        {"size_bytes": PIECE_BYTES + 1},
        {"size_bytes": 2**64 - 1},
    ],
)
async def test_payloads_that_are_not_there(chain: LaneChain, change: dict[str, int]) -> None:
    """A place, number or size that is another one is noticed, not read."""
    lane, message = chain.above.lanes[1], packet(step(100))
    activation = message.forward_from_activation.activation
    shared = chain.above.watcher.call(lambda: lane.put(memoryview(os.urandom(MIN_SHARED_BYTES))))
    assert shared.offset == RING_BYTES + 64
    set_fields(shared, change)
    activation.shape[:] = [MIN_SHARED_BYTES // 2]
    activation.data = b""
    activation.shared.CopyFrom(shared)
    assert chain.above.send_raw(message.SerializeToString())
    assert isinstance(await chain.refusal(), InvalidArgument)


# --- links that end


@pytest.mark.parametrize("side", ["above", "below"])
async def test_a_closed_link_carries_nothing(chain: LaneChain, side: str) -> None:
    """On either side: sending says so, and what was announced can't be read."""
    shared = chain.above.watcher.call(lambda: chain.above.lanes[1].put(memoryview(bytes(MIN_SHARED_BYTES))))
    getattr(chain, side).link.close()
    await until(lambda: chain.above.link.step_socket is chain.below.link.step_socket is None)
    for end in (chain.above, chain.below):
        assert not end.send(SMALL)
        assert not end.send(step(2 * MIN_SHARED_BYTES))
        assert not end.send(NEXT)
    with pytest.raises(InvalidArgument, match=r"link \d+ is closed"):
        getattr(chain, side).lanes[1].read_payload(shared, bytearray())
    for end in (chain.above, chain.below):
        for lane in end.lanes.values():
            end.watcher.call(lane.close)
    assert chain.above.failures == chain.below.failures == []


async def test_a_link_that_ends_in_the_midst(serve: Serve, dial: Dial) -> None:
    """Its threads send and read while the event loop unmaps the memory: steps arrive whole or not at all."""
    sent = step(PIECE_BYTES, PIECE_BYTES // 2)
    with two_watchers() as watchers:
        links = SharedLinks()
        server = await serve(SharedMemoryServicer(links, watchers[1]).register)
        channel = await dial(server.address)
        for number in range(10):
            chain = LaneChain(await open_link(channel, server.address, watchers[0]), links, watchers)
            await chain.join()
            arrived = steps_without_end(chain, sent)
            await until(lambda arrived=arrived: len(arrived) > 2)
            (chain.above if number % 2 else chain.below).link.close()
            await chain.client.close()
            await until(lambda there=chain.below: there.link.closed)
            assert not chain.above.send(sent)
            chain.below.watcher.call(lambda: None)
            assert all(step == sent for step in arrived)
            assert all("is closed" in error.message for error in chain.below.failures)


def steps_without_end(chain: LaneChain, sent: Forward) -> list[Forward]:
    """What arrives: each is sent as soon as the one before has come, as in a session."""
    arrived: list[Forward] = []

    def go_on() -> bool:
        return chain.above.lanes[1].send(sent)

    def take(forward: Forward) -> None:
        arrived.append(forward)
        chain.above.watcher.do(go_on)

    limits = {"max_tensor_bytes": MAX_TENSOR_BYTES, "max_feature_slices": MAX_SLICES}
    chain.below.lanes[1].close()
    chain.below.lanes[1].listen(take, chain.below.failures.append, **limits)
    assert chain.above.watcher.call(go_on)
    return arrived
