"""Drafts of several sessions that wait for the device thread are computed together."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from services.errors import FailedPrecondition
from services.messages.steps import Location
from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.draft_batches import DraftBatches, DraftWork
from shard_worker.drafting.engine import DraftEngine, DraftRequest, make_engine
from shard_worker.drafting.link import LocalDraftLink
from shard_worker.model.features import Features
from shard_worker.session_record import SessionRecord
from shard_worker.snapshots.keeper import SnapshotKeeper
from shard_worker.weights.weight import DenseWeight
from tests.shard_worker.tiny import Tiny, load_draft

PLACE = Location(0, "here", "cpu", "here:1")


class CountingDraft:
    """A draft that notes for how many sessions it is called."""

    def __init__(self, draft: Any) -> None:
        self._draft = draft
        self.appended: list[int] = []
        self.proposed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def append(self, states: Any, counts: Any, features: Any) -> None:
        self.appended.append(len(states))
        self._draft.append(states, counts, features)

    def propose(self, states: Any, embedded: Any, draft_tokens: Any) -> Any:
        self.proposed.append(len(states))
        return self._draft.propose(states, embedded, draft_tokens)


@pytest.fixture
def engine(tiny: Tiny) -> DraftEngine:
    """A draft with a random embedding and lm_head."""
    draft = load_draft(tiny.draft("qwen3", "plain"), "float32")
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(256, 64, generator=generator) for _ in range(2))
    engine = make_engine(
        draft, lambda token_ids: embedding[list(token_ids)], DenseWeight(head).prepared(), graphs=False
    )
    return replace(engine, draft=cast(Any, CountingDraft(engine.draft)))


def link_to(engine: DraftEngine) -> LocalDraftLink:
    record = SessionRecord("test", None, PLACE, None)
    return LocalDraftLink(engine, engine.draft.allocate(60), cast(SnapshotKeeper, None), PLACE, record)


def features_of(seed: int, rows: int) -> Features:
    return Features(total=torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)))


def test_sessions_that_wait_are_drafted_together(engine: DraftEngine) -> None:
    """Their draft tokens are those of each alone; what a session adds twice is done in turn, and an error is only that
    of the session that made it."""
    thread = DeviceThread(1)
    told: list[str] = []
    batches = DraftBatches(thread, lambda: told.append("announced"))
    links, alone = [link_to(engine) for _ in range(5)], [link_to(engine) for _ in range(5)]
    features = [features_of(seed, 3 + seed) for seed in range(5)]
    requests = [None if one == 1 else DraftRequest(0, 3 + one, 10 + one, 2 + one) for one in range(5)]
    requests[3] = DraftRequest(0, 6, 13, 99)

    answers: list[Future[tuple[int, ...]]] = [Future() for _ in range(6)]

    def add(one: int, answer: Future[tuple[int, ...]], features: Features, start: int, request: Any) -> None:
        def then(draft_tokens: tuple[int, ...], elapsed_ns: int) -> None:
            assert elapsed_ns > 0
            answer.set_result(draft_tokens)

        batches.add(DraftWork(links[one], features, start, request, then, answer.set_exception))

    def add_all() -> None:
        for one in range(5):
            add(one, answers[one], features[one], 0, requests[one])
        add(0, answers[5], features_of(9, 2), 3, DraftRequest(1, 5, 7, 4))

    thread.queue(add_all).result()
    with pytest.raises(FailedPrecondition, match="propose asks for 99 tokens, this draft proposes 1 to 7"):
        answers[3].result(10)
    found = [answer.result(10) for one, answer in enumerate(answers) if one != 3]
    counting = cast(CountingDraft, engine.draft)
    assert (counting.appended, counting.proposed) == ([4, 1], [3, 1])
    with torch.inference_mode():
        expected = []
        for one, request in enumerate(requests):
            if one != 3:
                engine.append(alone[one].state, features[one], 0)
                expected.append(() if request is None else engine.propose(alone[one].state, request))
        engine.append(alone[0].state, features_of(9, 2), 3)
        expected.append(engine.propose(alone[0].state, DraftRequest(1, 5, 7, 4)))
    assert found == expected
    assert told
    thread.shutdown()


def test_what_waits_of_a_session_that_is_over_is_not_done(engine: DraftEngine) -> None:
    """Its context may be another one's by then; what waits of others is done."""
    thread = DeviceThread(1)
    batches = DraftBatches(thread, lambda: None)
    links, answers = [link_to(engine) for _ in range(2)], [Future[tuple[int, ...]]() for _ in range(2)]

    def add_and_forget() -> None:
        for link, answer in zip(links, answers, strict=True):
            then = functools.partial(lambda answer, tokens, _: answer.set_result(tokens), answer)
            batches.add(DraftWork(link, features_of(1, 3), 0, DraftRequest(0, 3, 7, 4), then, answer.set_exception))
        batches.forget(links[0])

    thread.queue(add_and_forget).result()
    assert len(answers[1].result(10)) == 4
    assert not batches.waiting
    assert [link.state.length for link in links] == [0, 3]
    assert not answers[0].done()
    thread.shutdown()
