"""Which of the steps that wait at the same time are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from services.messages.steps import Forward, StepKind
from shard_worker.batches import step_batches, waiting_steps
from shard_worker.batches.prepared_steps import PreparedBatch
from shard_worker.batches.step_batches import StepBatches
from shard_worker.batches.stepping import BatchRow
from shard_worker.device.busy_time import BusyTime
from shard_worker.sampling.verifier import ComputedStep


@dataclass
class RecordingStage:
    """Computes nothing, and knows the names of the sessions of each batch."""

    batches: list[list[str]] = field(default_factory=list)
    draws: bool = False

    def most_together(self, inputs: Sequence[Any]) -> int:
        return len(inputs)

    def overlaps(self, inputs: Sequence[Any]) -> bool:
        return False

    def step_together(self, inputs: Sequence[Any], *_: None) -> list[Any]:
        self.batches.append([given.name for given in inputs])
        return [SimpleNamespace(whole=SimpleNamespace(on_host=None), logits=None) for _ in inputs]


@dataclass(eq=False)
class Session:
    """A session as `StepBatches` needs it, of a chain with one stage."""

    name: str
    stage: RecordingStage
    chain_length: int = 1
    most_rows: int = 512
    is_first: bool = True
    closed: bool = False

    def kind(self, forward: Forward) -> str | None:
        if len(forward.token_ids) > self.most_rows:
            return None
        return "verify" if forward.kind is StepKind.VERIFY else "other"

    def begin(self, forward: Forward, behind: int | None = None) -> Any:
        return SimpleNamespace(
            stage=self.stage, token_ids=forward.token_ids, features=None, name=self.name, behind=behind
        )

    def begin_prepared(self, forward: Forward) -> None:
        """Nothing counts steps here."""

    def take_back(self, *, computed: bool) -> None:
        """Nor takes them back."""

    def compute_begun(self, forward: Forward, given: Any) -> ComputedStep:
        self.stage.batches.append([given.name])
        return ComputedStep(forward, given, None, 0, 1, len(given.token_ids), 0)  # type: ignore[arg-type]

    def is_copied_at_once(self, forward: Forward) -> bool:
        return False

    def draws(self, forward: Forward) -> None:
        return None

    def issue_together(self, steps: Sequence[Any], outputs: Sequence[Any]) -> list[None]:
        return [None] * len(steps)

    def prepare_frame(self, rows: Sequence[Any]) -> None:
        return None

    def send_ahead(self, *_: object) -> None:
        """No stage is beside this one."""

    def announce(self) -> None:
        """Nobody listens."""


class Scheduled:
    """Steps that wait on one thread. `answers` are single rows behind a prompt."""

    def __init__(self, chain_length: int = 1) -> None:
        self.chain_length = chain_length
        self.stage, self.sessions = RecordingStage(), list[Session]()
        self.thread = SimpleNamespace(
            serve=lambda work: None,
            notice=lambda: None,
            computes=lambda what, rows: None,
            about_to_wait=lambda: None,
            soon=lambda job, *args: None,
            do_put_off=lambda: None,
            busy_time=BusyTime(),
            has_jobs=False,
            busy=False,
        )
        nothing = SimpleNamespace(waiting=False)
        self.steps = StepBatches(self.thread, self.sessions, nothing)  # type: ignore[arg-type]

    def add(self, name: str, kind: StepKind, rows: int, base: int) -> None:
        session = Session(name, self.stage, self.chain_length)
        self.sessions.append(session)
        forward = Forward(1 if base else 0, base, (7,) * rows, kind)
        self.steps.add(session, forward, lambda step: None, _raise)  # type: ignore[arg-type]

    def add_answers(self, count: int) -> None:
        for number in range(count):
            self.add(f"answer {number}", StepKind.DECODE, 1, 100)

    def run(self) -> list[list[str]]:
        while self.steps.waiting:
            self.steps.run()
        return self.stage.batches


def _raise(error: Exception) -> None:
    raise error


def test_a_chunk_of_a_prompt_fills_a_step_of_many_answers() -> None:
    """Up to as many rows as cost hardly more; the other chunks wait for the next steps."""
    scheduled = Scheduled()
    for name in ("first", "second"):
        scheduled.add(name, StepKind.PREFILL, 64, 0)
    scheduled.add_answers(60)
    one, other = scheduled.run()
    assert len(one) == 61
    assert one[-1] == "first"
    assert other == ["second"]


def test_prompts_come_together_where_few_answers_wait_for_them() -> None:
    scheduled = Scheduled()
    scheduled.add_answers(3)
    for number in range(9):
        scheduled.add(f"prompt {number}", StepKind.PREFILL, 64, 0)
    one, other = scheduled.run()
    assert one == ["answer 0", "answer 1", "answer 2", *(f"prompt {number}" for number in range(7))]
    assert other == ["prompt 7", "prompt 8"]


def test_long_chunks_take_turns_with_the_steps_of_others() -> None:
    """Each is computed alone, and between two of them all that can be one step."""
    scheduled = Scheduled()
    for name in ("first", "second", "third"):
        scheduled.add(name, StepKind.PREFILL, 1024, 0)
    scheduled.add_answers(2)
    assert scheduled.run() == [["first"], ["answer 0", "answer 1"], ["second"], ["third"]]


def test_a_short_prompt_that_has_begun_is_ended_between_two_long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """But no more than four batches come before a long chunk."""
    monkeypatch.setattr(waiting_steps, "NEXT_CHUNK_S", 0.0)
    scheduled = Scheduled()
    for name in ("first", "second", "third"):
        scheduled.add(name, StepKind.PREFILL, 1024, 0)
    scheduled.add("begins", StepKind.PREFILL, 64, 0)
    for number in range(1, 7):
        scheduled.add(f"goes on {number}", StepKind.PREFILL, 512, 64 * number)
    going_on = [[f"goes on {number}"] for number in range(1, 7)]
    assert scheduled.run() == [["first"], *going_on[:4], ["second"], *going_on[4:], ["third"], ["begins"]]


def test_the_next_chunk_of_a_short_prompt_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes a moment after the one before it was computed; nothing comes behind the last one of a prompt."""
    monkeypatch.setattr(waiting_steps, "NEXT_CHUNK_S", 60.0)
    scheduled, going_on = Scheduled(), [("goes on", StepKind.PREFILL, 64, 64), ("ends", StepKind.DECODE, 32, 128)]
    for name in ("first", "second"):
        scheduled.add(name, StepKind.PREFILL, 1024, 0)
    scheduled.add("begins", StepKind.PREFILL, 64, 0)
    monkeypatch.setattr(step_batches.time, "sleep", lambda seconds: scheduled.add(*going_on.pop(0)))
    assert scheduled.run() == [["first"], ["begins"], ["goes on"], ["ends"], ["second"]]


def test_a_next_chunk_that_does_not_come_keeps_no_long_one_waiting() -> None:
    """Longer than two milliseconds: its session may be closed."""
    scheduled = Scheduled()
    for name in ("first", "second"):
        scheduled.add(name, StepKind.PREFILL, 1024, 0)
    scheduled.add("begins", StepKind.PREFILL, 64, 0)
    assert scheduled.run() == [["first"], ["begins"], ["second"]]


@pytest.mark.parametrize(("rows", "comes"), [(64, [["begins"], ["second"]]), (1024, [["second"], ["begins"]])])
def test_the_first_step_of_a_session_is_waited_for(
    rows: int, comes: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes a moment after the session was opened, which was in turn with a long chunk, and ends the waiting."""
    monkeypatch.setattr(waiting_steps, "FIRST_STEP_S", 60.0)
    scheduled, coming = Scheduled(), [("begins", StepKind.DECODE, rows, 0)]
    for name in ("first", "second"):
        scheduled.add(name, StepKind.PREFILL, 1024, 0)
    scheduled.steps.run()
    scheduled.steps.expect_first_step()
    monkeypatch.setattr(step_batches.time, "sleep", lambda seconds: scheduled.add(*coming.pop()))
    assert scheduled.run() == [["first"], *comes]


def test_sessions_that_take_no_step_keep_no_long_chunk_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are opened: they are waited for once between two long chunks, four milliseconds long."""
    slept_s = list[float]()
    clock = SimpleNamespace(monotonic_ns=lambda: round(sum(slept_s) * 1e9), sleep=slept_s.append)
    for module in (step_batches, waiting_steps):
        monkeypatch.setattr(module, "time", clock)
    scheduled = Scheduled()
    for name in ("first", "second"):
        scheduled.add(name, StepKind.PREFILL, 1024, 0)
    scheduled.steps.run()
    while len(scheduled.stage.batches) == 1:
        scheduled.steps.expect_first_step()
        scheduled.steps.run()
    assert sum(slept_s) == pytest.approx(4e-3)
    assert scheduled.stage.batches == [["first"], ["second"]]


def test_a_step_may_come_while_those_that_wait_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop adds it on its own thread."""
    scheduled, looks, coming = Scheduled(), waiting_steps._goes_on, [("answer", StepKind.DECODE, 1, 100)]

    def goes_on(waiting: Any) -> bool:
        if coming:
            scheduled.add(*coming.pop())
        return looks(waiting)

    monkeypatch.setattr(waiting_steps, "_goes_on", goes_on)
    scheduled.add("long", StepKind.PREFILL, 1024, 0)
    for name in ("one", "other"):
        scheduled.add(name, StepKind.PREFILL, 64, 0)
    assert scheduled.run() == [["long"], ["answer", "one", "other"]]


def test_looking_for_results_is_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a chain, what is on the device is looked for many times: the short prompt is ended before the long one's next
    chunk all the same."""
    monkeypatch.setattr(waiting_steps, "NEXT_CHUNK_S", 60.0)
    monkeypatch.setattr(step_batches, "looks_without_sleep", lambda: True)
    monkeypatch.setattr(Session, "is_copied_at_once", lambda session, forward: True)
    scheduled, looks, on_host = Scheduled(chain_length=2), iter(range(9)), SimpleNamespace(there=False)
    whole = SimpleNamespace(on_host=on_host, argmax=None)

    def launch(inputs: Sequence[Any], *_: None) -> list[Any]:
        scheduled.stage.batches.append([given.name for given in inputs])
        return [SimpleNamespace(whole=whole, logits=None) for _ in inputs]

    def look() -> None:
        on_host.there = next(looks, None) is None

    monkeypatch.setattr(scheduled.stage, "step_together", launch)
    monkeypatch.setattr(scheduled.thread, "about_to_wait", look)
    monkeypatch.setattr(step_batches.time, "sleep", lambda seconds: scheduled.add("ends", StepKind.DECODE, 32, 64))
    for name in ("first", "second"):
        scheduled.add(name, StepKind.PREFILL, 1024, 0)
    scheduled.add("begins", StepKind.PREFILL, 64, 0)
    scheduled.add_answers(1)
    assert scheduled.run() == [["first"], ["answer 0", "begins"], ["ends"], ["second"]]
    assert next(looks, None) is None


class Travelling:
    """Steps of a chain of two stages on its first one; time stands still but for `pass_ms`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_ns = 1
        monkeypatch.setattr(step_batches.time, "monotonic_ns", lambda: self._now_ns)
        monkeypatch.setattr(step_batches.time, "sleep", lambda seconds: self.pass_ms(0.1))
        self.scheduled = Scheduled(chain_length=2)
        self.sessions: dict[str, Session] = {}

    def pass_ms(self, ms: float) -> None:
        self._now_ns += int(ms * 1e6)

    def open(self, *names: str) -> None:
        for name in names:
            self.sessions[name] = Session(name, self.scheduled.stage, 2)
            self.scheduled.sessions.append(self.sessions[name])

    def come(self, *names: str, kind: StepKind = StepKind.DECODE, rows: int = 1) -> None:
        for name in names:
            forward = Forward(5, 100, (7,) * rows, kind, more=9)
            self.scheduled.steps.add(self.sessions[name], forward, lambda step: None, _raise)  # type: ignore[arg-type]

    def batches(self) -> list[list[str]]:
        """What is computed by now."""
        for _ in range(3):
            if self.scheduled.steps.waiting:
                self.scheduled.steps.run()
        batches, self.scheduled.stage.batches = self.scheduled.stage.batches, []
        return batches


@pytest.fixture
def travelling(monkeypatch: pytest.MonkeyPatch) -> Travelling:
    """Two batches of two and one of one, which took 8 ms to come back the first time."""
    chain = Travelling(monkeypatch)
    chain.open("a", "b", "c", "d", "e")
    for names in (("a", "b"), ("c", "d"), ("e",)):
        chain.come(*names)
        assert chain.batches() == [[*names]]
        chain.pass_ms(0.1)
    chain.pass_ms(8)
    return chain


def test_no_more_batches_travel_than_there_are_stages(travelling: Travelling) -> None:
    """What would be one more waits for the next that comes back, and goes on with it."""
    travelling.come("e")
    assert travelling.batches() == []
    travelling.come("a", "b")
    assert travelling.batches() == [["e", "a", "b"]]
    # Now there are two.
    travelling.pass_ms(3)
    travelling.come("c", "d")
    assert travelling.batches() == [["c", "d"]]


def test_rows_that_are_prepared_wait_as_well(travelling: Travelling, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be one more is not begun before it is asked for, and what comes next is."""
    steps = travelling.scheduled.steps
    # As long as the batches are away by now.
    steps._away._round_ns = 8.3e6

    def begin(*names: str) -> None:
        forward = Forward(6, 101, (7,), StepKind.DECODE, more=9)
        sessions = [travelling.sessions[name] for name in names]
        rows = [BatchRow(one, forward, one.begin(forward), None) for one in sessions]  # type: ignore[arg-type]
        monkeypatch.setattr(steps._prepared, "take", lambda *_: PreparedBatch(rows))
        steps.begin_prepared([(one, forward) for one in sessions])  # type: ignore[misc]

    begin("e")
    assert travelling.scheduled.stage.batches == []
    travelling.come("e")
    begin("a", "b")
    assert travelling.batches() == [["a", "b"]]
    steps.leave_unasked()
    travelling.come("a", "b")
    assert travelling.batches() == [["e", "a", "b"]]


def test_nobody_waits_for_a_batch_that_does_not_come_back(travelling: Travelling) -> None:
    """Or is late by half of the time that it took before."""
    travelling.come("a", "b", "c", "d", "e")
    assert [sorted(names) for names in travelling.batches()] == [["a", "b", "c"], ["d", "e"]]
    travelling.pass_ms(1)
    for name in ("a", "b", "c"):
        travelling.sessions[name].closed = True
    travelling.open("new")
    travelling.come("new")
    assert travelling.batches() == [["new"]]
    travelling.open("other")
    travelling.come("other")
    assert travelling.batches() == []
    travelling.pass_ms(20)
    assert travelling.batches() == [["other"]]


def test_a_chunk_alone_waits_for_a_batch(travelling: Travelling) -> None:
    travelling.open("prompt")
    travelling.come("a", "b", "c", "d", "e")
    assert len(travelling.batches()) == 2
    travelling.pass_ms(2)
    travelling.come("prompt", kind=StepKind.PREFILL, rows=64)
    assert travelling.batches() == []
    travelling.come("a", "b")
    assert travelling.batches() == [["a", "b", "prompt"]]
    # And not for one that is late.
    travelling.pass_ms(2)
    travelling.come("prompt", kind=StepKind.PREFILL, rows=64)
    assert travelling.batches() == []
    travelling.pass_ms(40)
    assert travelling.batches() == [["prompt"]]


def test_prompts_that_have_begun_come_first() -> None:
    scheduled = Scheduled()
    scheduled.add("new", StepKind.DECODE, 64, 0)
    scheduled.add("begun", StepKind.DECODE, 64, 64)
    scheduled.add_answers(40)
    one, other = scheduled.run()
    assert one[-1] == "begun"
    assert other == ["new"]


@pytest.mark.parametrize("rows", [64, 500])
def test_no_answers_keep_a_prompt_waiting(rows: int) -> None:
    """However many rows they have: a chunk is in the next step, with as many answers as there is room for."""
    scheduled = Scheduled()
    scheduled.add_answers(100)
    scheduled.add("prompt", StepKind.PREFILL, rows, 0)
    first, *others = scheduled.run()
    assert "prompt" in first
    assert len(first) == 1 + min(100, 512 - rows)
    assert sum(map(len, others)) == 101 - len(first)


def test_there_is_room_for_the_chunk_that_comes_first() -> None:
    """And not for the shortest of them alone."""
    scheduled = Scheduled()
    scheduled.add_answers(100)
    scheduled.add("new", StepKind.PREFILL, 64, 0)
    scheduled.add("begun", StepKind.PREFILL, 500, 64)
    first, *_ = scheduled.run()
    assert first == [*(f"answer {number}" for number in range(12)), "begun"]


def test_steps_of_another_kind_come_next() -> None:
    scheduled = Scheduled()
    scheduled.add("one", StepKind.VERIFY, 4, 100)
    scheduled.add("prompt", StepKind.PREFILL, 64, 0)
    scheduled.add("two", StepKind.VERIFY, 4, 100)
    assert scheduled.run() == [["one", "two"], ["prompt"]]
