"""Steps of several sessions, and their answers, from thread to thread over a real link."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from flashsplit.shard.v1 import stage_pb2, stage_service_pb2 as pb
from services.errors import FlashsplitError
from services.messages.batch_frames import BatchAnswer, BatchStep, BatchTokens, StepBatch
from services.messages.frames import TensorLimits
from services.messages.steps import (
    Commit,
    FeatureSlice,
    Forward,
    Proposal,
    StageTiming,
    StepKind,
    TokenLogprobs,
)
from services.messages.tensors import WireTensor
from services.same_host.link import PIECE_BYTES, RING_BYTES, SEGMENT_BYTES, SharedLink
from services.streams.batch_lane import INLINE_BYTES, STREAM_ID, BatchLane
from tests.services.fakes import until
from tests.services.streams.lane_chain import LaneChain
from tests.services.thread_watcher import ThreadWatcher

STEPS = (
    Forward(7, 19, (3,), StepKind.DECODE, 0, more=9),
    Forward(12, 400, (5, 6, 7), StepKind.VERIFY, 2),
    Forward(1, 30, (8,), StepKind.DECODE, 5),
)


class End:
    """One end, with three sessions on it. steps, answers, tokens: what came for them. failed: who was ended. read: how
    many frames were about to be read. bare: how many batches could be begun before their steps were taken apart.
    gives_memory: whether tensors go to memory of this end's. given: that memory."""

    def __init__(self, link: SharedLink, watcher: ThreadWatcher, *, above: bool) -> None:
        assert link.step_socket is not None
        self.lane: BatchLane[str] = BatchLane.of(link, link.step_socket, above=above)
        assert BatchLane.of(link, link.step_socket, above=above) is self.lane
        self.watcher = watcher
        self.steps: list[Sequence[tuple[str, Forward]]] = []
        self.answers: list[Sequence[tuple[str, BatchAnswer]]] = []
        self.tokens: list[Sequence[tuple[str, int, int]]] = []
        self.failed: list[tuple[Sequence[str], FlashsplitError]] = []
        self.read = self.bare = 0
        self.gives_memory, self.given = False, list[bytearray]()
        for stream_id in (1, 2, 3):
            self.lane.join(stream_id, f"session {stream_id}", self, TensorLimits(4 * PIECE_BYTES, 2))

    def before_reading(self) -> None:
        self.read += 1

    def memory_for(self, size_bytes: int) -> bytearray | memoryview:
        if not self.gives_memory:
            return bytearray()
        self.given.append(bytearray(size_bytes))
        return memoryview(self.given[-1])

    def take_steps(
        self,
        steps: Iterable[tuple[str, Forward]],
        bare: Sequence[tuple[str, Forward]] = (),
        activation: WireTensor | None = None,
    ) -> None:
        # Frames are told of before they are read, also those that bring nothing.
        assert self.read > len(self.steps) + len(self.answers) + len(self.tokens)
        whole = [*steps]
        if activation is not None:
            self.bare += 1
            assert [(member, forward.with_rows(None, ())) for member, forward in whole] == [*bare]
            pieces = [forward.activation for _, forward in whole]
            assert b"".join(bytes(piece.data) for piece in pieces if piece is not None) == bytes(activation.data)
        # The test looks for it from its own thread.
        self.steps.append(whole)

    def take_answers(self, answers: Sequence[tuple[str, BatchAnswer]]) -> None:
        self.answers.append(answers)

    def take_tokens(self, tokens: Sequence[tuple[str, int, int]]) -> None:
        self.tokens.append(tokens)

    def fail(self, members: Sequence[str], error: FlashsplitError) -> None:
        self.failed.append((members, error))

    def call(self, job: Callable[[], bool]) -> bool:
        return bool(self.watcher.call(job))


@pytest.fixture
def ends(chain: LaneChain) -> tuple[End, End]:
    return (
        End(chain.above.link, chain.above.watcher, above=True),
        End(chain.below.link, chain.below.watcher, above=False),
    )


def batch(columns: int, *, slices: int = 1) -> StepBatch:
    """Return a batch with random rows of float16, as wide as that."""
    tensors = [WireTensor("float16", (5, columns), os.urandom(10 * columns)) for _ in range(slices + 1)]
    features = tuple(FeatureSlice(0, one, index or None) for index, one in enumerate(tensors[1:]))
    return StepBatch(tuple(map(BatchStep, (1, 2, 3), STEPS)), tensors[0], features)


def answer(stream_id: int) -> BatchAnswer:
    logprobs = TokenLogprobs(-0.5, (7,), (-0.25,), 1)
    commit = Commit(7, 20, (11, 12), (StageTiming(5, 6, 7),), (logprobs, logprobs))
    return BatchAnswer(stream_id, commit, Proposal(7, (1, 2), 8) if stream_id == 2 else None)


def expected(sent: StepBatch) -> list[tuple[str, Forward]]:
    """Return what comes of a batch for each session: rows cut out by numbers, not by the code under test."""
    rows, names = [(0, 1), (1, 4), (4, 5)], ("session 1", "session 2", "session 3")

    def cut(tensor: WireTensor, first: int, end: int) -> WireTensor:
        data, row = bytes(tensor.data), 2 * tensor.shape[1]
        return WireTensor(tensor.dtype, (end - first, tensor.shape[1]), data[first * row : end * row])

    return [
        (
            name,
            replace(
                forward,
                activation=cut(sent.activation, *at),
                features=tuple(
                    FeatureSlice(forward.base_position, cut(piece.features, *at), piece.capture_index)
                    for piece in sent.features
                ),
            ),
        )
        for name, forward, at in zip(names, STEPS, rows, strict=True)
    ]


@pytest.mark.parametrize("columns", [1, 64, INLINE_BYTES // 10, PIECE_BYTES // 10, PIECE_BYTES // 8])
@pytest.mark.parametrize(("prepared", "slices"), [(False, 1), (True, 1), (True, 0)])
@pytest.mark.parametrize("gives_memory", [False, True])
async def test_a_batch_and_its_answers(
    ends: tuple[End, End], columns: int, prepared: bool, slices: int, gives_memory: bool
) -> None:
    """Within the packet, in shared memory, and in several pieces there, whether its frame was prepared or not, and
    wherever tensors are put."""
    above, below = ends
    below.gives_memory = gives_memory
    sent = batch(columns, slices=slices)
    frame = above.lane.prepare_steps(sent.steps) if prepared else None
    assert above.call(lambda: above.lane.send_steps(sent, frame))
    await until(lambda: bool(below.steps or below.failed))
    assert below.failed == []
    assert [[*one] for one in below.steps] == [expected(sent)]
    assert below.bare == (not slices)
    if gives_memory:
        tensors = [bytes(sent.activation.data), *(bytes(piece.features.data) for piece in sent.features)]
        # As many small ones as there is room for lie within the packet.
        ends_of = [*itertools.accumulate(map(len, tensors))]
        shared = [one for one, end in zip(tensors, ends_of, strict=True) if end > INLINE_BYTES]
        assert sorted(bytes(one) for one in below.given) == sorted(shared)
    assert below.call(lambda: below.lane.send_answers([answer(1), answer(2)]))
    await until(lambda: bool(above.answers))
    assert [[*one] for one in above.answers] == [[("session 1", answer(1)), ("session 2", answer(2))]]


async def test_shared_memory_is_used_again(ends: tuple[End, End]) -> None:
    """Answers say what was read; without any the room is used up, and batches have to go another way."""
    above, below = ends
    sent = batch(PIECE_BYTES // 10)
    taken = 0
    while above.call(lambda: above.lane.send_steps(sent)):
        taken += 1
        await until(lambda taken=taken: len(below.steps) == taken)
    assert 0 < taken <= (SEGMENT_BYTES - RING_BYTES) // (2 * (PIECE_BYTES // 10) * 10)
    for count in range(taken + 1, taken + 4):
        assert below.call(lambda: below.lane.send_answers([answer(1)]))
        await until(lambda count=count: len(above.answers) == count - taken)
        assert above.call(lambda: above.lane.send_steps(sent))
        await until(lambda count=count: len(below.steps) == count)
    assert [*below.steps[-1]] == expected(sent)
    # Of a batch for which there was no room nothing came.
    assert below.read == len(below.steps)
    assert below.failed == []


async def test_batches_that_find_no_room_while_others_are_unread(ends: tuple[End, End]) -> None:
    """Who reads late finds what was sent as it was, and nothing of what was not."""
    above, below = ends
    batches = [batch(PIECE_BYTES // 10) for _ in range(6)]
    with below.watcher.held():
        sent = [one for one in batches if above.call(lambda one=one: above.lane.send_steps(one))]
    await until(lambda: len(below.steps) == len(sent) or bool(below.failed))
    assert below.failed == []
    assert [[*one] for one in below.steps] == [expected(one) for one in sent]
    assert 0 < len(sent) < len(batches)


async def test_a_batch_that_was_sent_in_part(ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the socket is full the rest goes another way. Who reads the first part late finds it as it was, and then
    the next batch."""
    above, below = ends
    part, sent = (batch(PIECE_BYTES // 8, slices=0) for _ in range(2))
    send, taken = above.lane._send, itertools.count()
    with below.watcher.held():
        with monkeypatch.context() as patch:
            patch.setattr(above.lane, "_send", lambda packet: next(taken) == 0 and send(packet))
            assert not above.call(lambda: above.lane.send_steps(part))
        assert next(taken) == 2
        assert above.call(lambda: above.lane.send_steps(sent))
    await until(lambda: bool(below.steps or below.failed))
    assert below.failed == []
    assert [[*one] for one in below.steps] == [expected(sent)]


async def test_answers_that_fill_more_than_a_packet(ends: tuple[End, End]) -> None:
    """They come in as many as they need, each session's in one."""
    above, below = ends
    sent = [BatchAnswer(stream_id, Commit(7, 20, (300_000,) * 20_000, ())) for stream_id in (1, 2, 3)]
    assert below.call(lambda: below.lane.send_answers(sent))
    await until(lambda: sum(map(len, above.answers)) == 3)
    assert [one for packet in above.answers for _, one in packet] == sent
    assert len(above.answers) > 1


async def test_who_has_left_is_passed_over(ends: tuple[End, End]) -> None:
    """The others of its batch get what is theirs."""
    above, below = ends
    below.lane.leave(2)
    above.lane.leave(1)
    sent = batch(8)
    assert above.call(lambda: above.lane.send_steps(sent))
    assert below.call(lambda: below.lane.send_answers([answer(1), answer(3)]))
    await until(lambda: bool(below.steps and above.answers))
    assert [*below.steps[0]] == [expected(sent)[0], expected(sent)[2]]
    assert [*above.answers[0]] == [("session 3", answer(3))]
    for stream_id in (1, 3):
        below.lane.leave(stream_id)
    assert above.call(lambda: above.lane.send_steps(sent))
    below.lane.join(1, "session 1", below)
    assert above.call(lambda: above.lane.send_steps(sent))
    await until(lambda: [*below.steps[-1]] == [expected(sent)[0]])
    assert below.failed == []


async def test_tokens_come_before_their_answers(ends: tuple[End, End]) -> None:
    """To an end that takes such, but for those of sessions that have left; to no other."""
    above, below = ends
    tokens = BatchTokens((1, 2, 3), (7, 12, 1), (9, 8, 151935))

    def send() -> bool:
        below.lane.send_tokens(tokens)
        return below.lane.send_answers([answer(2)])

    assert below.call(send)
    below.lane.takes_tokens = True
    above.lane.leave(1)
    assert below.call(send)
    await until(lambda: len(above.answers) == 2)
    assert [[*one] for one in above.tokens] == [[("session 2", 12, 8), ("session 3", 1, 151935)]]


@pytest.mark.parametrize(
    "fields", [{"stream_ids": [1, 2]}, {"steps": [7]}, {"token_ids": [9, 8]}], ids=["stream_ids", "steps", "token_ids"]
)
async def test_tokens_that_are_nobodys(chain: LaneChain, ends: tuple[End, End], fields: dict[str, list[int]]) -> None:
    """Lists of unlike lengths end the sessions."""
    above, below = ends
    message = stage_pb2.BatchTokens(**{"stream_ids": [1, 2, 3], "steps": [7, 12, 1], "token_ids": [9, 8, 7], **fields})
    socket = chain.below.link.step_socket
    assert socket is not None
    assert below.call(lambda: socket.send(STREAM_ID, pb.RunStageResponse(batch_tokens=message).SerializeToString()))
    await until(lambda: bool(above.failed))
    assert "they have equally many" in above.failed[0][1].message
    assert above.tokens == []


@pytest.mark.parametrize("packet", [b"\xff\xff\xff", b""])
async def test_what_is_no_batch_ends_the_sessions(chain: LaneChain, ends: tuple[End, End], packet: bytes) -> None:
    """Nobody could say whose it was."""
    _, below = ends
    socket = chain.above.link.step_socket
    assert socket is not None
    assert chain.above.watcher.call(lambda: socket.send(STREAM_ID, packet))
    await until(lambda: bool(below.failed))
    [(members, error)] = below.failed
    assert (members, error.code_name) == (["session 1", "session 2", "session 3"], "INVALID_ARGUMENT")


async def test_rows_that_are_not_there_are_refused(ends: tuple[End, End]) -> None:
    """A batch whose activation has fewer rows than its steps is no step of anybody."""
    above, below = ends
    sent = batch(8)
    short = replace(sent, activation=WireTensor("float16", (4, 8), bytes(64)), features=())
    assert above.call(lambda: above.lane.send_steps(short))
    await until(lambda: bool(below.failed))
    assert "5 rows" in below.failed[0][1].message
    assert below.steps == []


async def test_a_session_has_one_step_in_a_batch(ends: tuple[End, End]) -> None:
    """Another one could not be checked against what the first will have made of the session."""
    above, below = ends
    sent = batch(8)
    first, second, *others = sent.steps
    twice = replace(sent, steps=(first, replace(second, stream_id=first.stream_id), *others))
    assert above.call(lambda: above.lane.send_steps(twice))
    await until(lambda: bool(below.failed))
    assert "names one twice" in below.failed[0][1].message
    assert below.steps == []
