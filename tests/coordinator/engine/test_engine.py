"""The engine's queue: who runs, who waits, who is turned away, and what is reported of every request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

import coordinator.engine.engine
from coordinator.answer import Request
from coordinator.engine.engine import Engine, FinishedRequest
from services.errors import InvalidArgument, ResourceExhausted, Unavailable
from tests.coordinator.fakes import CONTEXT, Script, ScriptedCluster, engine, request, says
from tests.services.fakes import until


async def answer(engine: Engine, asked: Request) -> str | None:
    """The text of an answer, taken to its end."""
    async with engine.answering(asked) as generation:
        async for _ in generation.pieces():
            pass
    assert generation.answer is not None
    return generation.answer.text


def held(**more: Any) -> tuple[Engine, asyncio.Event]:
    """An engine whose chain answers nothing until the event is set."""
    release = asyncio.Event()
    return engine(Script(hold=release), **more), release


def listen(engine: Engine) -> list[FinishedRequest]:
    """All requests that the engine will report."""
    finished: list[FinishedRequest] = []
    engine.listeners.append(finished.append)
    return finished


async def test_a_request_is_answered_and_reported() -> None:
    """Its outcome is the finish reason; nothing runs or waits behind it."""
    served = engine()
    finished = listen(served)
    assert await answer(served, request()) == "hello"
    [report] = finished
    assert (report.request.request_id, report.outcome) == ("r", "stop")
    assert report.answer is not None
    assert report.total_s >= report.queued_s >= 0
    assert (served.load.running, served.load.waiting) == (0, 0)


async def test_a_request_that_would_never_find_memory_is_refused_with_the_numbers() -> None:
    """Before it waits for its turn: prompt and longest answer against each stage's pages. One that just fits is
    answered, and answers of no named length are as long as fits."""
    served, release = held(max_running=1)
    cluster = cast(ScriptedCluster, served.cluster)
    first = replace(cluster.workers[0], target=replace(cluster.target, session_tokens=30))
    cluster.workers = (first, replace(first, host="b"), *cluster.workers)
    finished = listen(served)
    fitting = request([65] * 20, max_tokens=10)
    running = asyncio.ensure_future(answer(served, fitting))
    await until(lambda: served.load.running == 1)
    numbers = "the prompt has 20 tokens and max_tokens is 11, 31 together.* of 30 in one request"
    with pytest.raises(InvalidArgument, match=numbers) as refused:
        await answer(served, replace(fitting, max_tokens=11))
    assert "stage 0 (cuda:0+cuda:1 on" in refused.value.message
    assert "stage 1 (cuda:0+cuda:1 on b) of 30" in refused.value.message
    assert "stage 2" not in refused.value.message
    release.set()
    assert await running == "hello"
    assert served.longest == 30
    assert [report.outcome for report in finished] == ["stop"]


async def test_no_more_run_than_may() -> None:
    """Further requests wait and run in the order in which they came."""
    served, release = held(max_running=2, max_waiting=9)
    finished = listen(served)
    tasks = []
    for index in range(5):
        tasks.append(asyncio.ensure_future(answer(served, request(request_id=str(index)))))
        await until(lambda count=index + 1: served.load.running + served.load.waiting == count)
    assert (served.load.running, served.load.waiting) == (2, 3)
    release.set()
    assert await asyncio.gather(*tasks) == ["hello"] * 5
    assert [report.request.request_id for report in finished] == ["0", "1", "2", "3", "4"]
    assert all(report.queued_s > 0 for report in finished[2:])


async def test_a_full_queue_turns_requests_away() -> None:
    """The refusal says how busy the server is and when to come again; those that wait are not disturbed."""
    served, release = held(max_running=1, max_waiting=1)
    finished = listen(served)
    tasks = [asyncio.ensure_future(answer(served, request())) for _ in range(2)]
    await until(lambda: served.load.waiting == 1)
    with pytest.raises(ResourceExhausted, match="1 requests run and 1 wait") as refused:
        await answer(served, request())
    assert (refused.value.reason, refused.value.where["retry_after_s"]) == ("QUEUE_FULL", "1")
    assert [report.outcome for report in finished] == ["queue_full"]
    release.set()
    assert await asyncio.gather(*tasks) == ["hello", "hello"]


async def test_a_cancelled_request_frees_its_turn() -> None:
    """The one that waits behind it runs, the session is closed, and it is reported as cancelled."""
    served, release = held(max_running=1)
    finished = listen(served)
    first = asyncio.ensure_future(answer(served, request(request_id="first")))
    second = asyncio.ensure_future(answer(served, request(request_id="second")))
    await until(lambda: served.load.waiting == 1)
    first.cancel()
    release.set()
    assert await second == "hello"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert [(report.request.request_id, report.outcome) for report in finished] == [
        ("first", "cancelled"),
        ("second", "stop"),
    ]
    assert all(session.closed for session in served.cluster.sessions)  # type: ignore[attr-defined]


async def test_who_goes_while_waiting_leaves_the_queue() -> None:
    """No session was opened for it, and its place is free."""
    served, release = held(max_running=1, max_waiting=1)
    first = asyncio.ensure_future(answer(served, request()))
    waiting = asyncio.ensure_future(answer(served, request()))
    await until(lambda: served.load.waiting == 1)
    waiting.cancel()
    await until(lambda: served.load.waiting == 0)
    release.set()
    assert await first == "hello"
    assert len(served.cluster.sessions) == 1  # type: ignore[attr-defined]


async def test_draining_takes_nothing_new_and_waits_for_the_rest() -> None:
    """What runs and waits is answered; whoever comes is sent to another server."""
    served, release = held(max_running=1)
    tasks = [asyncio.ensure_future(answer(served, request())) for _ in range(2)]
    await until(lambda: served.load.waiting == 1)
    assert not await served.drain(0)
    assert served.load.draining
    assert not served.ready
    with pytest.raises(Unavailable, match="shutting down") as refused:
        await answer(served, request())
    assert refused.value.reason == "DRAINING"
    release.set()
    assert await served.drain(5)
    assert await asyncio.gather(*tasks) == ["hello", "hello"]


async def test_an_idle_engine_drains_at_once() -> None:
    """There is nothing to wait for."""
    served = engine()
    await answer(served, request())
    assert await served.drain(0)


async def test_while_an_engine_is_quiet_requests_wait() -> None:
    """It is quiet once what runs and waits has its answer; who comes then is answered behind it, and nobody refused."""
    served, release = held(max_running=1)
    tasks = [asyncio.ensure_future(answer(served, request())) for _ in range(2)]
    await until(lambda: served.load.waiting == 1)
    entered = asyncio.Event()
    leave = asyncio.Event()

    async def be_quiet() -> None:
        async with served.quiet():
            entered.set()
            await leave.wait()

    quiet = asyncio.ensure_future(be_quiet())
    await asyncio.sleep(0.01)
    assert not entered.is_set()
    release.set()
    assert await asyncio.gather(*tasks) == ["hello", "hello"]
    await asyncio.wait_for(entered.wait(), 10)
    late = asyncio.ensure_future(answer(served, request()))
    await asyncio.sleep(0.01)
    assert (late.done(), served.load.running) == (False, 0)
    leave.set()
    assert await late == "hello"
    await quiet


@pytest.mark.parametrize("resumes", [True, False])
async def test_an_engine_that_is_never_idle_is_quiet_all_the_same(
    resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers wait in their midst, and go on behind it, where they would also behind a lost chain; else it is quiet
    once they have ended."""
    monkeypatch.setattr(coordinator.engine.engine, "IDLE_S", 0.0)
    text = "the quick brown fox jumps over the lazy dog"
    serving = engine(Script(says(text)), resume_timeout_s=10.0 if resumes else 0.0)
    said: list[str] = []

    async def ask() -> None:
        async with serving.answering(request()) as generation:
            async for piece in generation.pieces():
                said.append(piece.text)
                begun.set()
                await asyncio.sleep(0)

    begun = asyncio.Event()
    asked = asyncio.create_task(ask())
    await begun.wait()
    async with serving.quiet():
        assert all(session.closed for session in cast(Any, serving.cluster).sessions)
        assert asked.done() == (not resumes)
        so_far = [*said]
        late = asyncio.create_task(answer(serving, request()))
        await asyncio.sleep(0.02)
        assert said == so_far
        assert not late.done()
    await asked
    assert ["".join(said), await late] == [text, text]


async def test_a_dead_cluster_is_not_tried() -> None:
    """Requests get the reason at once, and the engine is not ready."""
    served = engine()
    cluster: Any = served.cluster
    cluster.alive, cluster.trouble = False, Unavailable("stage 1 has died", reason="WORKER_DIED")
    assert not served.ready
    with pytest.raises(Unavailable, match="stage 1 has died") as refused:
        await answer(served, request())
    assert refused.value.reason == "WORKER_DIED"
    assert not cluster.sessions


async def test_a_request_that_fails_is_reported_with_its_reason() -> None:
    """The outcome is the error's reason, and the turn is free again."""
    served = engine(Script(open_error=Unavailable("no worker answers", reason="LINK_BROKEN")), max_running=1)
    finished = listen(served)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no worker answers"):
            await answer(served, request())
    assert [report.outcome for report in finished] == ["link_broken"] * 2
    assert all(report.answer is None for report in finished)


async def test_a_request_beyond_the_context_is_refused() -> None:
    """The context may be set smaller than the model's own; prompt and answer have to fit together."""
    served = engine(max_model_len=10)
    with pytest.raises(
        InvalidArgument, match=r"maximum context length is 10 tokens\. However, you requested 11 tokens"
    ) as refused:
        await answer(served, request("hi", max_tokens=9))
    assert (refused.value.reason, refused.value.where["field"]) == ("CONTEXT_OVERFLOW", "max_tokens")
    assert await answer(served, request("hi", max_tokens=8)) == "hello"


@pytest.mark.parametrize("length", [1, CONTEXT + 1])
def test_a_context_that_the_model_lacks_is_refused(length: int) -> None:
    """--max-model-len must lie within the model's own."""
    with pytest.raises(InvalidArgument, match=f"--max-model-len is {length}; it must be between 2 and"):
        engine(max_model_len=length)


def test_names_of_the_model() -> None:
    """Clients may call it by its name and its aliases, and by nothing else."""
    served = engine(aliases=("gpt-4",))
    assert [served.serves(name) for name in ("demo", "gpt-4", "other")] == [True, True, False]


async def test_listeners_hear_of_steps() -> None:
    """Whoever watches the chain hears of each step of each request."""
    served = engine(Script(says("abc")))
    steps: list[str] = []
    served.step_listeners.append(lambda step: steps.append(step.request_id))
    await answer(served, request(request_id="watched"))
    assert steps == ["watched"] * 4


async def test_all_answers_pause_and_go_on() -> None:
    """Behind their next steps, in the midst of prompts and answers; those that come meanwhile begin behind that."""
    text = "the quick brown fox jumps over the lazy dog"
    serving = engine(Script(says(text)))
    sessions: list[Any] = cast(Any, serving.cluster).sessions

    async def ask(prompt: str, pause_at: int) -> tuple[str, int]:
        said, pieces = "", 0
        async with serving.answering(request(prompt, prefill_chunk=2)) as generation:
            async for piece in generation.pieces():
                said, pieces = said + piece.text, pieces + 1
                if pieces == pause_at:
                    pausing.set()
                    # A client that does not read holds its answer up.
                    await asyncio.sleep(0)
        assert generation.answer is not None
        return said, generation.answer.stats.resumed

    pausing = asyncio.Event()
    asked = [asyncio.create_task(ask("hi", 5)), asyncio.create_task(ask("hi there, and so on", 0))]
    await pausing.wait()
    async with serving.paused(10) as going_on:
        assert going_on == 0
        opened = len(sessions)
        assert all(session.closed for session in sessions)
        asked.append(asyncio.create_task(ask("late", 0)))
        await asyncio.sleep(0.02)
        assert len(sessions) == opened
    assert await asyncio.gather(*asked) == [(text, 0)] * 3
    assert len(sessions) > 3


async def test_a_pause_does_not_wait_for_ever() -> None:
    """An answer whose client does not read is counted, and goes on."""
    serving = engine(Script(says("hello")))
    async with serving.answering(request()) as generation:
        pieces = generation.pieces()
        await anext(pieces)
        async with serving.paused(0.01) as going_on:
            assert going_on == 1
        assert "".join([piece.text async for piece in pieces]).endswith("llo")
