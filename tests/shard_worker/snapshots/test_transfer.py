"""Prefixes out of one split and into another, byte by byte, and everything that an import refuses."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from services.errors import DataLoss, FailedPrecondition, FlashsplitError, InvalidArgument, NotFound, ResourceExhausted
from services.layers import LayerRange
from services.messages.snapshots import (
    SnapshotChunk,
    SnapshotFrame,
    SnapshotHeader,
    SnapshotImported,
    SnapshotOwner,
    SnapshotTensor,
    SnapshotTrailer,
)
from services.messages.steps import StepKind
from services.messages.tensors import CHUNK_BYTES
from services.net.channel import connect
from services.net.server import Server
from services.rpc.snapshots import RemoteSnapshots, SnapshotServicer
from shard_worker.cache.prefix_state import TensorGroup
from shard_worker.snapshots.transfer import IncomingSnapshot, SnapshotTransfer
from tests.shard_worker.chain import BLOCK, BUDGET, Chain, MakeChain
from tests.shard_worker.session.session_memory import Memory, differing, memory_of
from tests.shard_worker.tiny import Tiny, ids

STAGE, DRAFT = SnapshotOwner.STAGE, SnapshotOwner.DRAFT
PREFILL, DECODE = StepKind.PREFILL, StepKind.DECODE
LENGTHS = (7, 18, 30)


@pytest.fixture(autouse=True)
def forgotten(make_chain: MakeChain) -> Iterator[None]:
    """No test sees what another one kept, nor another budget than usual."""
    yield
    for chain in make_chain.chains.values():
        chain.free_snapshots()
        for store in chain.stores:
            store.budget_bytes = BUDGET


async def saved(chain: Chain, prompt: Sequence[int], lengths: Sequence[int] = LENGTHS) -> Memory:
    """Keep prefixes of these lengths, each upon the one before; what the session remembers at the end."""
    async with chain.session() as client:
        for first, last in pairwise((0, *lengths)):
            await client.step(PREFILL, prompt[first:last])
            kept = await client.save(f"at {last}", f"at {first}" if first else None)
            assert not any(part.refusal for part in kept.parts)
        return await memory_of(client)


class Parts:
    """A prefix taken apart: its tensors by name, of all stages together, and those of the draft."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[SnapshotTensor, bytes]] = {}
        self.headers: list[SnapshotHeader] = []

    async def read(self, frames: AsyncIterator[SnapshotFrame]) -> None:
        """Read one worker's export to its end, checking that it is what a reader expects."""
        header = await anext(frames)
        assert isinstance(header, SnapshotHeader)
        self.headers.append(header)
        data = bytearray()
        async for frame in frames:
            if isinstance(frame, SnapshotTrailer):
                break
            assert isinstance(frame, SnapshotChunk)
            assert frame.offset == len(data)
            assert 0 < len(frame.data) <= CHUNK_BYTES
            data += frame.data
        assert [frame async for frame in frames] == []
        assert isinstance(frame, SnapshotTrailer)
        assert frame.total_bytes == len(data) == header.size_bytes
        offset = 0
        for tensor, digest in zip(header.tensors, frame.tensor_sha256, strict=True):
            content = bytes(data[offset : offset + tensor.size_bytes])
            offset += tensor.size_bytes
            assert hashlib.sha256(content).digest() == digest
            assert tensor.name not in self.tensors
            self.tensors[tensor.name] = tensor, content

    def frames(self, chain: Chain, index: int | None, **changes: Any) -> list[SnapshotFrame]:
        """The part of a stage of another chain, or of the draft, as it is imported."""
        if index is None:
            [header] = [header for header in self.headers if header.owner is DRAFT]
            names = [tensor.name for tensor in header.tensors]
        else:
            layers = chain.ranges[index]
            header = replace(self.headers[0], layers=layers)
            last = index == len(chain.ranges) - 1
            names = [
                name
                for name in self.tensors
                if (name == "logits" and last)
                or (name.startswith("layers.") and layers.first <= int(name.split(".")[1]) < layers.last)
            ]
        return framed(header, {name: self.tensors[name] for name in names}, **changes)


def framed(
    header: SnapshotHeader, tensors: dict[str, tuple[SnapshotTensor, bytes]], chunk: int = CHUNK_BYTES, **changes: Any
) -> list[SnapshotFrame]:
    """Header, chunks and trailer of these tensors."""
    data = b"".join(content for _, content in tensors.values())
    header = replace(header, tensors=tuple(tensor for tensor, _ in tensors.values()), **changes)
    chunks = [SnapshotChunk(at, data[at : at + chunk]) for at in range(0, len(data), chunk)]
    digests = tuple(hashlib.sha256(content).digest() for _, content in tensors.values())
    return [header, *chunks, SnapshotTrailer(len(data), digests)]


async def exported(chain: Chain, name: str, first_token: int = 0, parent_id: str | None = None) -> Parts:
    parts = Parts()
    for kept in chain.snapshots:
        await parts.read(kept.transfer.export_snapshot(STAGE, name, first_token, parent_id))
    if chain.draft_role is not None:
        await parts.read(chain.draft_snapshots.transfer.export_snapshot(DRAFT, name, first_token, parent_id))
    return parts


async def into(transfer: SnapshotTransfer, frames: Sequence[SnapshotFrame]) -> SnapshotImported | None:
    """Import as the servicer does."""
    [header, *chunks, trailer] = frames
    assert isinstance(header, SnapshotHeader)
    incoming = await transfer.import_snapshot(header)
    if incoming is None:
        return None
    try:
        for chunk in chunks:
            assert isinstance(chunk, SnapshotChunk)
            await incoming.write(chunk)
        assert isinstance(trailer, SnapshotTrailer)
        return await incoming.commit(trailer)
    finally:
        incoming.abort()


async def imported(parts: Parts, chain: Chain, **changes: Any) -> None:
    """Into all workers of another chain."""
    places: list[tuple[SnapshotTransfer, int | None]] = [(kept.transfer, i) for i, kept in enumerate(chain.snapshots)]
    if chain.draft_role is not None:
        places.append((chain.draft_snapshots.transfer, None))
    for transfer, index in places:
        frames = parts.frames(chain, index, **changes)
        assert await into(transfer, frames) == SnapshotImported(frames[0].size_bytes)


# --- from one split into another


@pytest.mark.parametrize(
    ("name", "source", "destination"),
    [
        ("qwen3_5", (3,), ()),
        ("qwen3_5", (), (2, 5)),
        ("qwen3_5", (2, 5), (4,)),
        ("qwen3", (2,), (1, 3)),
        ("qwen3", (1, 2), ()),
        ("llama", (1,), ()),
        ("gemma3", (1,), (3,)),
        ("gemma4-experts", (1,), (3,)),
        ("gemma4-sharing", (1,), (2,)),
        ("qwen3_moe", (1,), (2,)),
        ("qwen3_next", (1,), (3,)),
        ("gpt_oss", (1,), (3,)),
        ("laguna", (1,), (3,)),
        ("glm4_moe", (1,), (2,)),
    ],
)
async def test_another_split_takes_a_prefix_up(
    tiny: Tiny, make_chain: MakeChain, name: str, source: tuple[int, ...], destination: tuple[int, ...]
) -> None:
    """Tensors chosen by layer from any split are, in any other one, what the first one remembered; answers go on."""
    prompt, truth = tiny.clear_prompt(name, 30, 12)
    here, there = make_chain(name, source, True), make_chain(name, destination, True, budget=BUDGET)
    memory = await saved(here, prompt)

    await imported(await exported(here, "at 30"), there)

    async with there.session() as client:
        await client.restore("at 30", prompt)
        assert differing(await memory_of(client), memory) == []
        commit, draft_tokens = await client.resume(BLOCK - 1)
        assert list(commit.token_ids) == truth[:1]
        again = await client.step(StepKind.VERIFY, [truth[0], *draft_tokens], BLOCK - 1)
        assert list(again[0].token_ids) == truth[1 : 1 + len(again[0].token_ids)]
        assert await client.plain(again[0].token_ids[-1:], 3) == truth[client.length - 32 : client.length - 29]
    async with here.session() as client:
        await client.restore("at 30", prompt)
        assert (await client.resume(BLOCK - 1))[1] == draft_tokens


@pytest.mark.parametrize("draft", ["session", "sliding", "all-sliding"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
async def test_parts_of_a_prefix_travel_one_by_one(make_chain: MakeChain, name: str, draft: str) -> None:
    """Only rows behind a parent travel with a later part; together with the first one they are the whole."""
    prompt = ids(30)
    here, there = make_chain(name, (2,), draft), make_chain(name, (3,), draft)
    memory = await saved(here, prompt)

    first = await exported(here, "at 18")
    # From where no snapshot of this chain ends.
    rest = await exported(here, "at 30", 18, "at 18")
    await imported(first, there)
    await imported(rest, there)
    sizes = [sum(header.size_bytes for header in parts.headers) for parts in (first, rest)]
    whole = sum(header.size_bytes for header in (await exported(here, "at 30")).headers)
    assert sizes[1] < whole

    async with there.session() as client:
        await client.restore("at 30", prompt)
        assert differing(await memory_of(client), memory) == []
    assert [store.free("at 18") for store in there.stores] == [0, 0]


@pytest.mark.parametrize("cut", [1, 5, 7, 12, 18, 29])
async def test_a_part_may_begin_anywhere(make_chain: MakeChain, cut: int) -> None:
    """A worker that has its own beginning of the prefix takes just the rows behind it."""
    prompt = ids(30)
    here, there = make_chain("qwen3_5", (3,), "sliding"), make_chain("qwen3_5", (), "sliding")
    memory = await saved(here, prompt)
    own = await saved(there, prompt, (cut,))

    rest = await exported(here, "at 30", cut, f"at {cut}")
    assert {header.first_token for header in rest.headers} == {cut}
    await imported(rest, there)

    async with there.session() as client:
        await client.restore("at 30", prompt)
        now = await memory_of(client)
    for name, tensor in memory.items():
        if name.endswith(("recurrent", "conv")):
            assert torch.equal(now[name], tensor)
        elif name.startswith("draft.0"):
            begin = max(cut - 20, 0)
            assert torch.equal(now[name][:, begin:], tensor[:, begin:])
        else:
            assert torch.equal(now[name][:, cut:], tensor[:, cut:])
            assert torch.equal(now[name][:, :cut], own[name][:, :cut])


async def test_exported_bytes_are_what_the_session_remembered(make_chain: MakeChain) -> None:
    """Every tensor is named by its layer and holds, contiguous and in order, the session's rows and states."""
    here = make_chain("qwen3_5", (3,), True)
    memory = await saved(here, ids(30))

    parts = await exported(here, "at 30")

    assert [header.layers for header in parts.headers] == [LayerRange(0, 3), LayerRange(3, 8), None]
    assert [header.owner for header in parts.headers] == [STAGE, STAGE, DRAFT]
    assert {header.token_count for header in parts.headers} == {30}
    logits = parts.tensors.pop("logits")
    assert logits[0] == SnapshotTensor("logits", "float32", (256,))
    theirs = {}
    for name, (tensor, content) in parts.tensors.items():
        plain = name.removeprefix("draft.layers.") if name.startswith("draft") else name.removeprefix("layers.")
        key = f"draft.{plain}" if name.startswith("draft") else plain
        theirs[key] = torch.frombuffer(bytearray(content), dtype=torch.float32).view(tensor.shape)
    assert differing(theirs, memory) == []


async def test_half_precision_travels(make_chain: MakeChain) -> None:
    """In bfloat16 rows and logits take two bytes a number, recurrent state four, and all of it comes back."""
    prompt = ids(30)
    here, there = (
        make_chain("qwen3_5", (3,), True, dtype="bfloat16"),
        make_chain("qwen3_5", (5,), True, dtype="bfloat16"),
    )
    memory = await saved(here, prompt)
    parts = await exported(here, "at 30")
    types = {name.rpartition(".")[2]: tensor.dtype for name, (tensor, _) in parts.tensors.items()}
    assert types == dict.fromkeys(("k", "v", "conv", "logits"), "bfloat16") | {"recurrent": "float32"}

    await imported(parts, there)

    async with there.session() as client:
        await client.restore("at 30", prompt)
        assert differing(await memory_of(client), memory) == []
        resumed = await client.resume(BLOCK - 1)
    async with here.session() as client:
        await client.restore("at 30", prompt)
        expected = await client.resume(BLOCK - 1)
    assert (resumed[0].token_ids, resumed[1]) == (expected[0].token_ids, expected[1])


async def test_from_worker_to_worker_over_sockets(make_chain: MakeChain, tmp_path: Path) -> None:
    """An export piped into an import through two real servers, and a second time, which takes no bytes."""
    prompt = ids(30)
    here, there = make_chain("qwen3_5", ()), make_chain("qwen3_5", (), budget=BUDGET)
    assert here is not there
    memory = await saved(here, prompt)
    servers = [
        Server(f"unix:{tmp_path}/{name}.sock", [SnapshotServicer(chain.snapshots[0].transfer).register])
        for name, chain in (("here", here), ("there", there))
    ]
    channels = []
    for server in servers:
        await server.start()
        channels.append(await connect(server.address, timeout_s=2.0))
    source, destination = (RemoteSnapshots(channel, "x") for channel in channels)

    for stored in (True, False):
        got = await destination.import_snapshot(source.export_snapshot(STAGE, "at 18"))
        assert bool(got.stored_bytes) is stored
    assert (await destination.import_snapshot(source.export_snapshot(STAGE, "at 30", 18, "at 18"))).stored_bytes

    async with there.session() as client:
        await client.restore("at 30", prompt)
        assert differing(await memory_of(client), memory) == []
    assert await destination.free_snapshots(["at 30", "at 18"]) > 0
    assert there.snapshots[0].store.held_bytes == 0
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop(0)


# --- exports


async def test_what_cannot_be_exported_is_refused(make_chain: MakeChain) -> None:
    """Unknown names, models that aren't loaded and parts beyond the prefix are refused before the first frame."""
    here = make_chain("qwen3_5", (3,))
    await saved(here, ids(30))
    cases: list[tuple[tuple[SnapshotOwner, str, int, str | None], type[FlashsplitError], str]] = [
        ((STAGE, "nothing", 0, None), NotFound, "SNAPSHOT_MISSING"),
        ((DRAFT, "at 30", 0, None), FailedPrecondition, "NOT_LOADED"),
        ((STAGE, "at 30", 30, "p"), InvalidArgument, "INVALID_ARGUMENT"),
        ((STAGE, "at 30", 2**32 - 1, "p"), InvalidArgument, "INVALID_ARGUMENT"),
        ((STAGE, "at 30", 7, None), InvalidArgument, "INVALID_ARGUMENT"),
        ((STAGE, "at 30", 0, "p"), InvalidArgument, "INVALID_ARGUMENT"),
    ]
    for arguments, kind, reason in cases:
        with pytest.raises(kind) as caught:
            await anext(here.snapshots[0].transfer.export_snapshot(*arguments))
        assert caught.value.reason == reason


async def test_an_export_goes_on_when_the_prefix_leaves(make_chain: MakeChain) -> None:
    """What is freed or evicted while it is read stays readable to its end."""
    here = make_chain("qwen3_5", (), True)
    await saved(here, ids(30))
    truth = await exported(here, "at 30")
    frames = here.snapshots[0].transfer.export_snapshot(STAGE, "at 30", 0, None)
    header = await anext(frames)
    assert isinstance(header, SnapshotHeader)
    here.free_snapshots()
    for _ in range(3):
        await saved(here, ids(30, seed=9))
        here.free_snapshots()

    async def whole() -> AsyncIterator[SnapshotFrame]:
        yield header
        async for frame in frames:
            yield frame

    late = Parts()
    await late.read(whole())
    assert late.tensors == {name: truth.tensors[name] for name in late.tensors}


# --- what an import refuses


@pytest.fixture
async def given(make_chain: MakeChain) -> tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]]:
    """A worker that keeps "at 7" and the parts of a prefix that it could import: all of it, and what follows "at 7"."""
    here, there = make_chain("qwen3_5", (3,)), make_chain("qwen3_5", (3,), budget=BUDGET)
    assert here is not there
    await saved(here, ids(30))
    await saved(there, ids(30), (7,))
    whole = (await exported(here, "at 30")).frames(there, 1)
    rest = (await exported(here, "at 30", 7, "at 7")).frames(there, 1)
    here.free_snapshots()
    return there, whole, rest


def changed(header: SnapshotHeader, index: int, **fields: Any) -> tuple[SnapshotTensor, ...]:
    tensors = list(header.tensors)
    tensors[index] = replace(tensors[index], **fields)
    return tuple(tensors)


def spoiled_headers(header: SnapshotHeader) -> list[tuple[SnapshotHeader, type[FlashsplitError], str, str, str]]:
    """What is wrong, and with which kind, reason, field and words it is refused."""
    tensors, invalid = header.tensors, ("INVALID_ARGUMENT", "tensors")
    shape = tensors[0].shape
    return [
        (replace(header, fingerprint="0" * 32), FailedPrecondition, "FINGERPRINT_MISMATCH", "fingerprint", "holds"),
        (replace(header, fingerprint=""), FailedPrecondition, "FINGERPRINT_MISMATCH", "fingerprint", "holds"),
        (replace(header, layers=LayerRange(2, 8)), FailedPrecondition, "LAYER_MISMATCH", "layers", "[3, 8)"),
        (replace(header, layers=None), FailedPrecondition, "LAYER_MISMATCH", "layers", "None"),
        (replace(header, owner=DRAFT), FailedPrecondition, "NOT_LOADED", "owner", "no draft is loaded"),
        (replace(header, token_count=4097), InvalidArgument, "INVALID_ARGUMENT", "token_count", "at most 4096"),
        (replace(header, token_count=29), InvalidArgument, *invalid, "is announced as"),
        (replace(header, tensors=tensors[1:]), InvalidArgument, *invalid, f"tensor {tensors[0].name} is missing"),
        (
            replace(header, tensors=(*tensors, replace(tensors[0], name="layers.2.k"))),
            InvalidArgument,
            *invalid,
            "tensor layers.2.k is not part of these layers",
        ),
        (
            replace(header, tensors=(*tensors, replace(tensors[0], name="layers.4.k"))),
            InvalidArgument,
            *invalid,
            "tensor layers.4.k is not part of these layers",
        ),
        (replace(header, tensors=(*tensors, tensors[0])), InvalidArgument, *invalid, "a tensor is named twice"),
        (
            replace(header, tensors=(*tensors[1:], tensors[1])),
            InvalidArgument,
            *invalid,
            "a tensor is named twice",
        ),
        (
            replace(header, tensors=changed(header, 0, shape=(*shape[:-1], shape[-1] + 1))),
            InvalidArgument,
            *invalid,
            f"tensor {tensors[0].name} is announced as",
        ),
        (
            replace(header, tensors=changed(header, 0, shape=shape[::-1])),
            InvalidArgument,
            *invalid,
            f"tensor {tensors[0].name} is announced as",
        ),
        (replace(header, tensors=changed(header, 0, dtype="bfloat16")), InvalidArgument, *invalid, "bfloat16"),
        (replace(header, tensors=changed(header, 0, dtype="int32")), InvalidArgument, *invalid, "int32"),
        (
            replace(header, parent_id="nothing", first_token=7),
            FailedPrecondition,
            "SNAPSHOT_MISSING",
            "parent_id",
            "builds on nothing with 7 tokens",
        ),
        (
            replace(header, parent_id="at 7", first_token=6),
            FailedPrecondition,
            "SNAPSHOT_MISSING",
            "parent_id",
            "builds on at 7 with 6 tokens",
        ),
        (replace(header, parent_id="at 7", first_token=7), InvalidArgument, *invalid, "is announced as"),
    ]


async def test_headers_that_do_not_fit_are_refused(
    given: tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]],
) -> None:
    """Another model, layers, tensors, shapes or parent: refused by name before any room is taken or anyone leaves."""
    there, whole, _ = given
    kept = there.snapshots[1]
    # Not even room for one more: had any been asked for, somebody would have had to go.
    kept.store.budget_bytes = held = kept.store.held_bytes
    for header, kind, reason, field, words in spoiled_headers(whole[0]):
        with pytest.raises(kind) as caught:
            await kept.transfer.import_snapshot(header)
        assert (caught.value.reason, caught.value.where.get("field")) == (reason, field)
        assert words in caught.value.message
        assert (kept.store.held_bytes, len(kept.store)) == (held, 1)
    kept.store.budget_bytes = BUDGET
    assert await into(kept.transfer, whole) == SnapshotImported(whole[0].size_bytes)


@pytest.mark.parametrize("building", [False, True])
async def test_an_import_beyond_the_budget_is_refused(
    given: tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]], building: bool
) -> None:
    """More than the whole budget, or than is left beside what it builds on, changes nothing; a byte more is enough."""
    there, whole, rest = given
    kept, frames = there.snapshots[1], rest if building else whole
    held = kept.store.held_bytes
    kept.store.budget_bytes = frames[0].size_bytes - 1 + held * building

    with pytest.raises(ResourceExhausted) as caught:
        await kept.transfer.import_snapshot(frames[0])

    assert caught.value.reason == "SNAPSHOT_BUDGET"
    assert (kept.store.held_bytes, len(kept.store)) == (held, 1)
    kept.store.budget_bytes += 1
    assert await into(kept.transfer, frames) == SnapshotImported(frames[0].size_bytes, () if building else ("at 7",))


def spoiled_streams(frames: list[SnapshotFrame]) -> list[tuple[list[SnapshotFrame], type[FlashsplitError], str, str]]:
    """What is wrong with the bytes or the trailer, with which kind, reason and words it is refused."""
    header, chunk, trailer = frames[0], frames[1], frames[-1]
    assert isinstance(header, SnapshotHeader)
    assert isinstance(chunk, SnapshotChunk)
    assert isinstance(trailer, SnapshotTrailer)
    assert len(frames) == 3
    data, invalid, lost = bytes(chunk.data), "INVALID_ARGUMENT", "DATA_LOSS"
    streams: list[tuple[list[SnapshotFrame], type[FlashsplitError], str, str]] = [
        ([header, trailer], DataLoss, lost, "0 came"),
        ([header, SnapshotChunk(0, data[:-1]), trailer], DataLoss, lost, f"{len(data) - 1} came"),
        ([header, SnapshotChunk(0, data + b"x"), trailer], InvalidArgument, invalid, "is out of order"),
        ([header, chunk, SnapshotChunk(len(data), b"x"), trailer], InvalidArgument, invalid, "is out of order"),
        ([header, SnapshotChunk(1, data[1:]), trailer], InvalidArgument, invalid, "expected to go on at 0"),
        ([header, SnapshotChunk(0, data[:9]), SnapshotChunk(10, data[10:])], InvalidArgument, invalid, "go on at 9"),
        ([header, SnapshotChunk(0, data[:9]), SnapshotChunk(8, data[8:])], InvalidArgument, invalid, "go on at 9"),
        ([header, SnapshotChunk(0, data[:9]), SnapshotChunk(0, data[:9])], InvalidArgument, invalid, "go on at 9"),
        ([header, SnapshotChunk(2**64 - 1, b"x"), trailer], InvalidArgument, invalid, "is out of order"),
        ([header, chunk, replace(trailer, total_bytes=len(data) - 1)], DataLoss, lost, "the trailer says"),
        ([header, chunk, replace(trailer, total_bytes=0)], DataLoss, lost, "the trailer says 0"),
        ([header, chunk, replace(trailer, tensor_sha256=trailer.tensor_sha256[1:])], DataLoss, lost, "digests for"),
        ([header, chunk, replace(trailer, tensor_sha256=())], DataLoss, lost, "has 0 digests"),
        (
            [header, chunk, replace(trailer, tensor_sha256=(*trailer.tensor_sha256, bytes(32)))],
            DataLoss,
            lost,
            "digests for",
        ),
        (
            [header, chunk, replace(trailer, tensor_sha256=trailer.tensor_sha256[::-1])],
            DataLoss,
            "DIGEST_MISMATCH",
            "don't match",
        ),
    ]
    # One bit anywhere: the refusal names the tensor it is in.
    offset = 0
    for tensor in header.tensors:
        for at in (offset, offset + tensor.size_bytes - 1):
            flipped = bytearray(data)
            flipped[at] ^= 1
            streams.append(
                (
                    [header, SnapshotChunk(0, bytes(flipped)), trailer],
                    DataLoss,
                    "DIGEST_MISMATCH",
                    f"the bytes of {tensor.name} don't match",
                )
            )
        offset += tensor.size_bytes
    return streams


async def test_bytes_that_do_not_match_are_refused(
    given: tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]],
) -> None:
    """Missing, surplus, doubled or damaged bytes: nothing is kept, the room comes back, what was kept stays."""
    there, _, rest = given
    kept = there.snapshots[1]
    held, before = kept.store.held_bytes, kept.store.find(STAGE, "at 7")
    streams = spoiled_streams(rest)
    assert len(streams) > 15 + 2 * 3
    for frames, kind, reason, words in streams:
        trailer = frames[-1] if isinstance(frames[-1], SnapshotTrailer) else rest[-1]
        chunks = [frame for frame in frames[1:] if isinstance(frame, SnapshotChunk)]
        with pytest.raises(kind) as caught:
            await into(kept.transfer, [frames[0], *chunks, trailer])
        assert caught.value.reason == reason
        assert words in caught.value.message
        assert (kept.store.held_bytes, len(kept.store)) == (held, 1)
        assert kept.store.find(STAGE, "at 7") is before
    assert await into(kept.transfer, rest) == SnapshotImported(rest[0].size_bytes)


@pytest.mark.parametrize("seed", range(6))
async def test_chunks_and_tensors_of_any_cut_and_order(make_chain: MakeChain, seed: int) -> None:
    """Where chunks end and in which order tensors come doesn't matter, as long as header and bytes agree."""
    rng = random.Random(seed)
    prompt = ids(30)
    here, there = make_chain("qwen3_5", (3,)), make_chain("qwen3_5", (3,), budget=BUDGET)
    memory = await saved(here, prompt)
    parts = await exported(here, "at 30")
    for index, kept in enumerate(there.snapshots):
        [header, *_] = parts.frames(there, index)
        assert isinstance(header, SnapshotHeader)
        names = [tensor.name for tensor in header.tensors]
        rng.shuffle(names)
        whole = framed(header, {name: parts.tensors[name] for name in names})
        data = b"".join(bytes(frame.data) for frame in whole if isinstance(frame, SnapshotChunk))
        cuts = sorted(rng.sample(range(1, len(data)), rng.choice([0, 1, 3, 50])))
        chunks = [SnapshotChunk(first, data[first:last]) for first, last in pairwise((0, *cuts, len(data)))]
        assert await into(kept.transfer, [whole[0], *chunks, whole[-1]]) == SnapshotImported(len(data))
    async with there.session() as client:
        await client.restore("at 30", prompt)
        assert differing(await memory_of(client), memory) == []


# --- imports that meet


async def begun(transfer: SnapshotTransfer, frames: Sequence[SnapshotFrame]) -> IncomingSnapshot:
    """An import whose bytes are all there."""
    header = frames[0]
    assert isinstance(header, SnapshotHeader)
    incoming = await transfer.import_snapshot(header)
    assert incoming is not None
    for chunk in frames[1:-1]:
        assert isinstance(chunk, SnapshotChunk)
        await incoming.write(chunk)
    return incoming


async def test_one_name_imported_by_two_at_once(
    given: tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]],
) -> None:
    """Both succeed, one of them having added nothing; the bytes are counted once, the parent is held by one."""
    there, _, rest = given
    kept, trailer = there.snapshots[1], rest[-1]
    assert isinstance(trailer, SnapshotTrailer)
    held, size = kept.store.held_bytes, rest[0].size_bytes
    first, second = [await begun(kept.transfer, rest) for _ in range(2)]
    assert kept.store.held_bytes == held + 2 * size

    assert await second.commit(trailer) == SnapshotImported(size)
    assert await first.commit(trailer) == SnapshotImported(0)
    for incoming in (first, second):
        incoming.abort()
        incoming.abort()

    assert kept.store.held_bytes == held + size
    header = rest[0]
    assert isinstance(header, SnapshotHeader)
    assert await kept.transfer.import_snapshot(header) is None
    assert await kept.transfer.free_snapshots(["at 7", "at 30", "at 7", "nothing"]) == held + size
    assert kept.store.held_bytes == 0


async def test_an_import_that_is_given_up(
    given: tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]],
) -> None:
    """Until it is committed an import takes room and holds its parent; aborted, at any point, it leaves nothing."""
    there, _, rest = given
    kept = there.snapshots[1]
    held = kept.store.held_bytes
    for frames in (rest[:1] + rest[-1:], rest):
        incoming = await begun(kept.transfer, frames)
        assert kept.store.held_bytes == held + rest[0].size_bytes
        assert kept.store.free("at 7") == 0
        incoming.abort()
        incoming.abort()
        assert (kept.store.held_bytes, len(kept.store)) == (held, 1)
    assert kept.store.free("at 7") == held


async def test_an_import_that_its_model_did_not_outlive(
    given: tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]],
) -> None:
    """When another model has been loaded before the last byte came, it is refused and its room comes back."""
    there, whole, rest = given
    role, kept = there.roles[1], there.snapshots[1]
    assert role.loaded is not None
    part = role.loaded.part
    for frames in (whole, rest):
        incoming = await begun(kept.transfer, frames)
        trailer = frames[-1]
        assert isinstance(trailer, SnapshotTrailer)
        # As `Worker.load` does it.
        kept.store.clear(STAGE)
        role.load(part, lambda loaded, total: None)
        with pytest.raises(FailedPrecondition, match="the model or the prefix that it builds on is gone"):
            await incoming.commit(trailer)
        incoming.abort()
        assert (kept.store.held_bytes, len(kept.store)) == (0, 0)
        await saved(there, ids(30), (7,))
    assert await into(kept.transfer, rest) == SnapshotImported(rest[0].size_bytes)


async def test_memory_that_cannot_be_had_gives_the_room_back(
    given: tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]],
) -> None:
    """Where the host has no memory left, the import is refused as such and takes no room."""
    there, whole, _ = given
    kept, header = there.snapshots[1], whole[0]
    held = kept.store.held_bytes
    [keeper] = kept.keepers().values()

    class TooLarge(TensorGroup):
        def empty(self, first_token: int, length: int, *, pinned: bool) -> torch.Tensor:
            raise RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory")

    groups = tuple(
        TooLarge(group.kind, group.names, group.extents, group.dtype, group.window) for group in keeper.groups
    )
    transfer = SnapshotTransfer(kept.store, lambda: {STAGE: replace(keeper, groups=groups)})
    assert isinstance(header, SnapshotHeader)
    with pytest.raises(ResourceExhausted) as caught:
        await transfer.import_snapshot(header)
    assert caught.value.reason == "OUT_OF_MEMORY"
    assert (kept.store.held_bytes, len(kept.store)) == (held, 1)


async def test_a_task_that_is_cancelled_while_memory_is_made(
    given: tuple[Chain, list[SnapshotFrame], list[SnapshotFrame]],
) -> None:
    """A caller that leaves between header and answer leaves no room taken."""
    there, whole, _ = given
    kept, header = there.snapshots[1], whole[0]
    assert isinstance(header, SnapshotHeader)
    held = kept.store.held_bytes
    for turns in range(4):
        task = asyncio.create_task(kept.transfer.import_snapshot(header))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        result = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(result, BaseException):
            assert result is not None
            result.abort()
        assert kept.store.held_bytes == held
