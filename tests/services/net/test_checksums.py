"""Bytes that a network damages end a call by name; they are never taken for a message."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool

from flashsplit.shard.v1 import worker_service_pb2 as pb, worker_service_pb2_grpc as pb_grpc
from services.errors import DataLoss, FailedPrecondition, FlashsplitError, rpc_failures_as_errors
from services.messages.description import PROTOCOL_MAJOR
from services.messages.steps import Commit, Event, Forward, StepKind
from services.net.channel import connect
from services.net.checksums import FIELD, HEADER, Checksums, Damaged
from services.net.server import Server
from services.rpc.stage import RemoteStage, StageServicer
from services.rpc.worker import RemoteWorker, WorkerServicer
from tests.links import Fault, Link
from tests.services.conftest import Serve
from tests.services.fakes import OPEN, FakeStage, FakeStageSession, FakeWorker, tensor

ROUNDS = 30
"""Sessions of the fuzz, each with one flipped bit."""

MESSAGE = pb.DescribeRequest(protocol_major=PROTOCOL_MAJOR, protocol_minor=1)


def ends(call: int = 7) -> tuple[Checksums, Checksums]:
    """Both ends of a call: the caller's and the worker's."""
    return Checksums(call, "a call", server=False), Checksums(call, "a call", server=True)


def serialized(checksums: Checksums) -> bytes:
    return checksums.adding(pb.DescribeRequest.SerializeToString)(MESSAGE)


def test_messages_arrive_as_they_were_sent() -> None:
    """In both directions, one after the other; protobuf parses them with their checksum."""
    caller, worker = ends()
    for sender, receiver in ((caller, worker), (worker, caller)) * 3:
        message = pb.DescribeRequest.FromString(receiver.check(serialized(sender)))
        assert (message.protocol_major, message.protocol_minor) == (PROTOCOL_MAJOR, 1)


def test_every_flipped_bit_is_found() -> None:
    """Wherever it is, in the message or its checksum; and so is what was cut, or never had a checksum."""
    raw = serialized(ends()[0])
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataLoss, match="message 1 of a call"):
            ends()[1].check(bytes(damaged))
    for cut in (b"", raw[:-1], MESSAGE.SerializeToString()):
        with pytest.raises(DataLoss):
            ends()[1].check(cut)


@pytest.mark.parametrize("what", ["lost", "repeated", "another call's", "the other way's"])
def test_messages_out_of_place_are_found(what: str) -> None:
    """Each is whole, but was sent as another one than it came as."""
    (caller, worker), (other, _) = ends(), ends(8)
    first, second = serialized(caller), serialized(caller)
    came = {
        "lost": [second],
        "repeated": [first, first],
        "another call's": [serialized(other)],
        "the other way's": [serialized(worker)],
    }[what]
    for raw in came[:-1]:
        worker.check(raw)
    with pytest.raises(DataLoss, match=f"message {len(came)} of"):
        worker.check(came[-1])


def test_no_message_declares_the_field() -> None:
    """Of all that the workers' services take and give, as far as they are known here."""
    import services.rpc.peers  # noqa: F401

    pool = descriptor_pool.Default()
    names = [path.stem for path in (Path(__file__).parents[3] / "proto/flashsplit/shard/v1").glob("*_service.proto")]
    assert len(names) > 4
    for name in names:
        for service in pool.FindFileByName(f"flashsplit/shard/v1/{name}.proto").services_by_name.values():
            for method in service.methods:
                assert FIELD not in method.input_type.fields_by_number
                assert FIELD not in method.output_type.fields_by_number


# --- real servers


def raw_channel(server: Server) -> grpc.aio.Channel:
    """As another program's."""
    return grpc.aio.insecure_channel(server.address)


async def test_a_caller_of_another_release_is_refused(serve: Serve) -> None:
    """Without checksums it gets a description, which tells the protocol, and nothing else."""
    server = await serve(WorkerServicer(FakeWorker()).register, address="127.0.0.1:0")
    async with raw_channel(server) as channel:
        stub = pb_grpc.WorkerServiceStub(channel)
        assert (await stub.Describe(MESSAGE)).worker.protocol_major == PROTOCOL_MAJOR
        with pytest.raises(FailedPrecondition, match=f"carried no {HEADER}.*another release"), rpc_failures_as_errors():
            async for _ in stub.Load(pb.LoadRequest()):
                pass


async def test_a_worker_of_another_release_is_refused() -> None:
    """It answers without checksums: its version is told where it is another one, else the missing checksum."""
    port = FakeWorker()
    server = grpc.aio.server()
    WorkerServicer(port).register(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = await connect(address, timeout_s=5)
    try:
        with pytest.raises(DataLoss, match=f"the answer to Describe from the worker at {address}"):
            await RemoteWorker(channel, address).describe()
        object.__setattr__(port.description, "protocol_major", PROTOCOL_MAJOR - 1)
        with pytest.raises(FailedPrecondition, match=f"speaks protocol {PROTOCOL_MAJOR - 1}"):
            await RemoteWorker(channel, address).describe()
    finally:
        object.__setattr__(port.description, "protocol_major", PROTOCOL_MAJOR)
        await channel.close()
        await server.stop(0)


def test_whatever_is_asked_of_a_damaged_message_raises_why() -> None:
    """So nobody can take it for one, as they could take gRPC's None."""
    damaged = Damaged(DataLoss("it was damaged"), None)
    with pytest.raises(DataLoss, match="it was damaged"):
        damaged.WhichOneof("frame")


class Flip:
    """Flips one bit of what passes, `after` bytes from when it is armed."""

    def __init__(self, chosen: random.Random, within: int) -> None:
        self._after, self._bit = chosen.randrange(within), chosen.randrange(8)
        self.done = False

    def __call__(self, piece: bytes) -> bytes:
        if self.done or len(piece) <= self._after:
            self._after -= len(piece)
            return piece
        damaged = bytearray(piece)
        damaged[self._after] ^= 1 << self._bit
        self.done = True
        return bytes(damaged)


@pytest.fixture(scope="module")
def flips() -> Iterator[dict[str, int]]:
    """What came of the flipped bits, counted over all tests."""
    counts: dict[str, int] = {}
    yield counts
    print(counts)
    assert counts.get("CHECKSUM_MISMATCH", 0) > ROUNDS // 4, counts


@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_a_flipped_bit_gives_the_right_answer_or_an_error(serve: Serve, seed: int, flips: dict[str, int]) -> None:
    """Anywhere in the bytes of a session, in frames, their lengths or what HTTP/2 says of them, in either direction."""
    chosen = random.Random(seed)

    async def digest(session: FakeStageSession, forward: Forward) -> None:
        """Answer with tokens that tell every byte of the activation."""
        assert forward.activation is not None
        data = bytes(forward.activation.data)
        tokens = tuple(data[index] for index in range(0, len(data), 16))
        session.out.put_nowait(Commit(forward.step, forward.base_position + 2, tokens, ()))

    server = await serve(StageServicer(FakeStage(digest)).register, address="127.0.0.1:0")
    async with Link(server.address) as link:
        channel = await connect(link.address, timeout_s=5)
        try:
            session = await RemoteStage(channel, link.address).open(OPEN)
            link.fault = Fault(damage=Flip(chosen, 3000))
            outcome = "right"
            answers: list[Event] = []
            try:
                async with asyncio.timeout(5):
                    events = session.events()
                    for step in range(6):
                        activation = tensor(2, 128, fill=step)
                        await session.forward(Forward(step, 2 * step, (1, 2), StepKind.PREFILL, activation=activation))
                        answers.append(await anext(events))
            except FlashsplitError as error:
                outcome = error.reason
            except StopAsyncIteration:
                outcome = "ended"
            except TimeoutError:
                # A length that grew makes the receiver wait for bytes that do not come: what finds that is a deadline.
                outcome = "silence"
            flips[outcome] = flips.get(outcome, 0) + 1
            for step, answer in enumerate(answers):
                data = bytes(tensor(2, 128, fill=step).data)
                tokens = tuple(data[index] for index in range(0, len(data), 16))
                assert answer == Commit(step, 2 * step + 2, tokens, ())
            await session.close()
        finally:
            await channel.close()
