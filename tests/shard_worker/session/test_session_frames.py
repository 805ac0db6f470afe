"""Frames that a session refuses, on the first stage and behind it, and those that may come ahead of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument
from services.messages.description import FeatureTransport
from services.messages.steps import FeatureSlice, Forward, StepKind
from services.messages.tensors import WireTensor
from shard_worker.device.dtypes import to_wire
from tests.shard_worker.chain import Chain, Client, MakeChain
from tests.shard_worker.session.held_back import unanswered
from tests.shard_worker.tiny import Tiny

SUM, SLICES = FeatureTransport.SUM, FeatureTransport.SLICES
PREFILL, DECODE, VERIFY = StepKind.PREFILL, StepKind.DECODE, StepKind.VERIFY
COUNT = 100


def wire(rows: int, hidden: int = 64, dtype: torch.dtype = torch.float32) -> WireTensor:
    return to_wire(torch.zeros(rows, hidden, dtype=dtype))


REFUSED_EVERYWHERE: list[tuple[dict[str, Any], type[FlashsplitError], str]] = [
    ({"step": 1}, FailedPrecondition, "step"),
    ({"step": 3}, FailedPrecondition, "step"),
    ({"base_position": 8}, FailedPrecondition, "base_position"),
    ({"base_position": 10}, FailedPrecondition, "base_position"),
    ({"token_ids": ()}, InvalidArgument, "token_ids"),
    ({"token_ids": (1,) * 17, "kind": VERIFY}, InvalidArgument, "token_ids"),
    ({"token_ids": (1,) * 201}, InvalidArgument, "token_ids"),
    ({"token_ids": (1, 2, 256)}, InvalidArgument, "token_ids"),
    ({"token_ids": (1,) * 60}, InvalidArgument, "base_position"),
]
LIMITS = {"max_length": 60}


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize(("changes", "kind", "field"), REFUSED_EVERYWHERE)
async def test_the_first_stage_refuses_what_is_out_of_step_and_goes_on(
    tiny: Tiny, make_chain: MakeChain, drafted: bool, changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """A lost, repeated or malformed step names its field and place, changes nothing and is not passed on."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, COUNT)

    async with make_chain("qwen3_5", (3,), drafted).session(**LIMITS) as client:
        await client.prefill(prompt[:5])
        await client.prefill(prompt[5:9])
        with pytest.raises(kind) as caught:
            await client.session.forward(replace(client.frame(PREFILL, (1, 2, 3)), **changes))
        assert caught.value.where["field"] == field
        assert (caught.value.where["stage"], caught.value.where["host"]) == ("0", "host-0")

        assert await client.plain(prompt[9:], 10) == truth[:10]


async def test_the_first_stage_takes_no_activation(make_chain: MakeChain) -> None:
    """Hidden rows sent to a stage that embeds tokens itself are refused."""
    async with make_chain("qwen3_5", (3,)).session() as client:
        with pytest.raises(InvalidArgument, match="takes token ids alone"):
            await client.send(client.frame(PREFILL, (1, 2, 3), activation=wire(3)))


def slices(rows: int, *indices: int | None, start: int = 9, **options: Any) -> tuple[FeatureSlice, ...]:
    return tuple(FeatureSlice(start, wire(rows, **options), index) for index in indices)


REFUSED_LATER: list[tuple[dict[str, Any], str]] = [
    ({"activation": None}, "activation"),
    ({"activation": wire(2)}, "activation"),
    ({"activation": wire(4)}, "activation"),
    ({"activation": wire(3, 63)}, "activation"),
    ({"activation": wire(3, dtype=torch.bfloat16)}, "activation"),
    ({"activation": replace(wire(3), shape=(192,))}, "activation"),
]
REFUSED_FEATURES: dict[FeatureTransport, list[tuple[tuple[FeatureSlice, ...], str]]] = {
    SUM: [
        ((), "features"),
        (slices(3, 1), "features"),
        (slices(3, None, None), "features"),
        (slices(2, None), "features"),
        (slices(3, None, hidden=32), "features"),
        (slices(3, None, dtype=torch.float16), "features"),
        (slices(3, None, start=8), "start_position"),
    ],
    SLICES: [
        ((), "features"),
        (slices(3, None), "features"),
        (slices(3, 0), "features"),
        (slices(3, 7), "features"),
        (slices(3, 1, 1), "features"),
        (slices(3, 1, 2), "features"),
        (slices(4, 1), "features"),
        (slices(3, 1, start=0), "start_position"),
    ],
}
GOOD_FEATURES = {SUM: (None,), SLICES: (1,)}


async def direct(chain: Chain, features: Sequence[int | None]) -> Client:
    """A session opened on the last of two stages alone, which has taken two steps."""
    client = Client(await chain.roles[1].open(chain.request(1, **LIMITS)))
    for rows, start in ((5, 0), (4, 5)):
        frame = client.frame(PREFILL, (1,) * rows, activation=wire(rows), features=slices(rows, *features, start=start))
        await client.send(frame)
        await client.commit()
    return client


async def assert_refused(client: Client, frame: Forward, kind: type[FlashsplitError], field: str) -> None:
    with pytest.raises(kind) as caught:
        await client.session.forward(frame)
    assert caught.value.where["field"] == field
    assert caught.value.where["stage"] == "1"


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [*REFUSED_EVERYWHERE, *((changes, InvalidArgument, field) for changes, field in REFUSED_LATER)],
)
async def test_a_later_stage_refuses_what_is_out_of_step_and_goes_on(
    make_chain: MakeChain, changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """Activations that are missing or don't fit are refused like a frame out of sequence, each by its field."""
    client = await direct(make_chain("qwen3_5", (3,)), ())

    good = client.frame(PREFILL, (1, 2, 3), activation=wire(3))
    await assert_refused(client, replace(good, **changes), kind, field)

    await client.send(client.frame(DECODE, (1, 2, 3), activation=wire(3)))
    commit = await client.commit()
    assert (commit.length, len(commit.token_ids)) == (12, 1)
    await client.session.close()


@pytest.mark.parametrize(
    ("transport", "features", "field"),
    [(transport, *case) for transport, cases in REFUSED_FEATURES.items() for case in cases],
)
async def test_a_later_stage_refuses_features_that_are_not_those_of_the_stages_before(
    make_chain: MakeChain, transport: FeatureTransport, features: tuple[FeatureSlice, ...], field: str
) -> None:
    """Missing, doubled, foreign or mis-shaped captures are refused: what the draft proposes would silently get
    worse."""
    client = await direct(make_chain("qwen3_5", (3,), True, transport=transport), GOOD_FEATURES[transport])
    good = client.frame(DECODE, (1, 2, 3), activation=wire(3), features=slices(3, *GOOD_FEATURES[transport]))

    await assert_refused(client, replace(good, features=features), InvalidArgument, field)

    await client.send(good)
    assert (await client.commit()).length == 12
    await client.session.close()


async def test_features_for_a_session_without_a_draft_are_refused(make_chain: MakeChain) -> None:
    """Where the session has no draft no stage captures, though it could."""
    chain = make_chain("qwen3_5", (3,), True)
    client = Client(await chain.roles[1].open(chain.request(1, draft=None)))

    with pytest.raises(InvalidArgument, match=r"capture_index of the features is \[None\], expected \[\]"):
        await client.send(client.frame(PREFILL, (1, 2, 3), activation=wire(3), features=slices(3, None, start=0)))

    await client.session.close()


@pytest.mark.parametrize("cuts", [(3,), (2, 5)])
async def test_no_step_may_follow_an_unanswered_verify(
    tiny: Tiny, make_chain: MakeChain, cuts: tuple[int, ...]
) -> None:
    """Until a stage knows how many rows of a verify count, it takes no further step."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, COUNT)

    async with make_chain("qwen3_5", cuts).session() as client:
        await client.prefill(prompt)
        async with unanswered(client, client.frame(VERIFY, truth[:4])) as first:
            with pytest.raises(FailedPrecondition, match="the last verify has not been answered yet"):
                await first.forward(client.frame(PREFILL, (1,), step=2))
        assert (await client.commit()).token_ids == tuple(truth[1:5])
        commit, _ = await client.step(DECODE, truth[4:5])

    assert commit.token_ids == (truth[5],)


async def test_prefills_may_be_sent_ahead_of_their_answers(tiny: Tiny, make_chain: MakeChain) -> None:
    """Chunks in flight together are answered one by one, in order."""
    prompt, truth = tiny.clear_prompt("qwen3_5", 12, COUNT)

    async with make_chain("qwen3_5", (3,)).session() as client:
        for first in range(0, 9, 3):
            await client.send(client.frame(PREFILL, prompt[first : first + 3], base_position=first))
        commits = [await client.commit() for _ in range(3)]

        assert [(commit.step, commit.length) for commit in commits] == [(0, 3), (1, 6), (2, 9)]
        assert await client.plain(prompt[9:], 5) == truth[:5]
