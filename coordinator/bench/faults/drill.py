"""One cluster whose workers are ended or stopped while it answers, and what clients are told meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from coordinator.answer import Answer, Phase as AnswerPhase, Request
from coordinator.bench.faults.cases import Case, Fault, Phase, Shape
from coordinator.bench.faults.elsewhere import Elsewhere
from coordinator.bench.faults.recovery import Recovering, Recovery
from coordinator.bench.faults.traces import Watched
from coordinator.cli.started_model import StartedModel
from coordinator.cluster.successor import Successor
from coordinator.cluster.supervisor import Quiet
from coordinator.engine.engine import Engine
from coordinator.engine.handover import HandedOver, Handover
from coordinator.engine.prefill_chunk import chunk_for
from coordinator.engine.step_times import StepTaken
from coordinator.prefix.cache import PrefixCache
from coordinator.text.model_files import ModelFiles
from coordinator.text.prompt import text_prompt
from services.errors import FlashsplitError, Unavailable
from services.messages.sampling import SamplingParams
from services.messages.steps import StepKind

CHUNKS = 6
"""Prefill steps of a prompt at least, so that a worker can be lost between two."""

WHOLE_S = 120.0
"""How long a cluster may take until it is whole again."""

_LOOK_S, _SHORT_S = 0.01, 0.001
"""Between two looks at whether the cluster is whole, and at whether a moment is there."""

_LONGEST_DELAY_S = 0.02
"""How much later than at the first moment of saving or loading prefixes a worker is lost, at most."""

_LONGEST_HANDOVER_S = 0.2
"""How long after its beginning a hand-over is disturbed, at most: it is over by then or goes on for little longer."""

_STEPS_OF = {
    Phase.HANDOVER: (StepKind.DECODE, StepKind.VERIFY),
    Phase.LOADING: (StepKind.DECODE, StepKind.VERIFY),
    Phase.PREFILL: (StepKind.PREFILL,),
    Phase.DECODE: (StepKind.DECODE,),
    Phase.VERIFY: (StepKind.VERIFY,),
}

_SIGNALS = {Fault.KILL: signal.SIGKILL, Fault.STOP: signal.SIGSTOP}

KINDS = (
    (SamplingParams(), True),
    (SamplingParams(temperature=0.8, seed=7), False),
    (SamplingParams(presence_penalty=0.7, frequency_penalty=0.3), True),
    (SamplingParams(temperature=0.7, seed=3), True),
)
"""What answers differ in, by turns: how tokens are chosen, and whether the draft proposes."""


@dataclass(slots=True)
class Told:
    """What a client was told of one answer: the text and the time of each piece. error: what ended it, if one did.
    phases: when it was restored, prefilled and decoded, again and again.
    """

    asked_at: float
    texts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    answer: Answer | None = None
    error: FlashsplitError | None = None
    phases: Sequence[AnswerPhase] = ()

    def silence_s(self, since: float) -> float:
        """Return the longest time without a new token, from a moment on; 0 where the answer had ended by then."""
        moments = [max(since, moment) for moment in (self.asked_at, *self.times)]
        return max((after - before for before, after in itertools.pairwise(moments)), default=0.0)

    def computed_anew_s(self, since: float) -> float:
        """Return how long attempts that began after a moment restored the answer so far, or computed it anew."""
        return sum(
            phase.ended_s - phase.began_s
            for phase in self.phases
            if phase.began_s >= since and phase.name in ("restore", "prefill")
        )


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for. prompt_tokens, max_tokens: of each prompt and answer. after_tokens: before so many of each
    answer, on average, nothing befalls a worker at a step. is_compared: whether an answer has the
    same tokens each time, so that it is compared with an undisturbed one."""

    prompt_tokens: int = 192
    max_tokens: int = 64
    after_tokens: int = 0
    is_compared: bool = True


@dataclass(frozen=True, slots=True)
class LinkedHandOver:
    """A hand-over, and how many bytes a second pass from this process to the worker that takes over."""

    handed: HandedOver
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault came to.

    befell: whether there was that worker, and that phase; otherwise nothing was done to anybody. told: of the answers
    in flight and, where prefixes were concerned, of the same ones asked for once more. undisturbed: the answers to the
    same requests, without kept prefixes; None where they are not to be compared. at: when it happened, by
    `time.monotonic`. noticed_s: how long afterwards the cluster knew of a fault that passes; None for other faults, and
    where it never did. recovery: how it came over a loss, None without one. hand_over: None where none came to its end.
    """

    case: Case
    befell: bool
    told: Sequence[Told]
    undisturbed: Sequence[Answer | None]
    at: float
    noticed_s: float | None = None
    recovery: Recovery | None = None
    hand_over: LinkedHandOver | None = None


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What became of answers while nothing befell anybody.

    stages, draft_apart: the cluster's shape. seconds: how long it was; clients: so many asked all the while. tokens: of
    all answers. lost: answers that ended with an error; different: that have other tokens than alone. doubts: how often
    a worker was silent for so long that it was asked whether it lives; alarms: how often one was taken for lost.
    """

    stages: int
    draft_apart: bool
    seconds: float
    clients: int
    answers: int
    tokens: int
    lost: int
    different: int
    doubts: int
    alarms: int

    @property
    def is_clean(self) -> bool:
        """Whether no worker was taken for lost, no answer was, and none came out otherwise."""
        return not (self.lost or self.different or self.alarms)


ASKED = Asked()


class Drill:
    """One cluster, and the answers that it gives."""

    def __init__(
        self,
        started: StartedModel,
        cache: PrefixCache,
        files: ModelFiles,
        watched: Watched,
        elsewhere: Elsewhere | None = None,
        lasts_s: float = 0.0,
        asked: Asked = ASKED,
    ) -> None:
        """watched: is told of all workers that there are. elsewhere: the cluster's workers, where they are not its
        children. lasts_s: how long a fault lasts that passes. asked: what is asked for."""
        self._elsewhere, self._lasts_s, self._asked = elsewhere, lasts_s, asked
        self._chunk = max(1, min(asked.prompt_tokens // CHUNKS, chunk_for(started.cluster.workers)))
        self._cluster, self._cache, self._files, self._watched = started.cluster, cache, files, watched
        self._engine = Engine(started.cluster, files, cache, name="faults", resume_timeout_s=WHOLE_S)
        self._engine.step_listeners.append(self._count_step)
        self._plain = Engine(started.cluster, files, None, name="faults", resume_timeout_s=WHOLE_S)
        self._awaited: tuple[StepKind, ...] = ()
        self._countdown = self._spared = 0
        """Steps of the phase until a worker meets its fault, which count once so many tokens have come."""
        self._reached = asyncio.Event()
        self._alarms = 0

    async def run(self, case: Case) -> Outcome:
        """Ask for answers, have a worker meet its fault meanwhile, and ask for them undisturbed.

        Where the phase was over before the step that was drawn, all of it is done once more, at the phase's first step.

        Raises Unavailable where the cluster is not whole again in time, and what the undisturbed answers raise.
        """
        outcome = await self._run(case, first_step=False)
        return outcome if outcome.befell else await self._run(case, first_step=True)

    async def _run(self, case: Case, *, first_step: bool) -> Outcome:
        """Do what `run` says, once."""
        await self._whole()
        requests = [self._request(case, number) for number in range(case.requests)]
        draw = random.Random(case.number)
        if case.phase is Phase.RESTORE:
            await self._ask_all(self._engine, requests)
            await self._settled()
            self._cache.drop_all()
            await self._settled()
        # Beforehand: it takes longer than answers do.
        is_drained = case.fault is Fault.DRAIN or case.phase is Phase.HANDOVER
        successor, bytes_per_s, hand_over = None, 0.0, None
        if is_drained:
            successor = await self._cluster.prepare(case.worker, str(self._cluster.places[case.worker]))
            worker, target = await self._cluster.worker(successor.member.address), self._cluster.target
            link = await worker.measure_link(2 * target.hidden_size)
            bytes_per_s = link.bytes_per_s
        self._awaited = _STEPS_OF.get(case.phase, ())
        self._spared = 0 if first_step else self._asked.after_tokens * case.requests
        self._countdown = 1 if first_step else draw.randrange(1, 2 + 3 * case.requests)
        self._reached = asyncio.Event()
        asking = asyncio.ensure_future(self._ask_all(self._engine, requests))
        passing: asyncio.Task[None] | None = None
        recovering: Recovering | None = None
        try:
            await self._moment(asking, draw)
            at, befell = time.monotonic(), not asking.done()
            lost = self._process_id(case.worker) if befell else None
            if not is_drained and case.worker in case.shape.placed:
                recovering = Recovering(self._cluster, case.worker, case.shape.workers.index(case.worker))
            if case.fault.passes:
                if befell:
                    passing = asyncio.ensure_future(self._pass(case))
            elif successor is None:
                befell = lost is not None
                self._strike(lost, case.fault)
            elif case.fault is Fault.DRAIN:
                hand_over = LinkedHandOver(await Handover(self._engine).hand_over(successor), bytes_per_s)
            else:
                lost = await self._strike_meanwhile(successor, case, draw)
                befell = lost is not None
            if case.phase is Phase.LOADING and lost is not None:
                while self._process_id(case.worker) in (lost, None) and not asking.done():
                    await asyncio.sleep(_SHORT_S)
                self._watch()
                await asyncio.sleep(draw.random() * _LONGEST_DELAY_S)
                self._strike(self._process_id(case.worker), case.fault)
            told = await asking
            recovery = None if recovering is None else recovering.found
            if passing is not None:
                await passing
            noticed_s = recovering.known_s if recovering is not None and case.fault.passes else None
        finally:
            asking.cancel()
            if recovering is not None:
                recovering.close()
            if passing is not None:
                passing.cancel()
                await asyncio.wait([passing])
        self._watch()
        await self._whole(lost)
        undisturbed: Sequence[Answer | None] = [None] * len(requests)
        if self._asked.is_compared:
            undisturbed = await self._alone(requests)
        if case.phase in (Phase.SAVE, Phase.RESTORE):
            told += await self._ask_all(self._engine, requests)
            undisturbed = [*undisturbed, *undisturbed]
        return Outcome(case, befell, told, undisturbed, at, noticed_s, recovery, hand_over)

    async def leave_alone(self, shape: Shape, clients: int, lasts_s: float) -> Undisturbed:
        """Have so many clients ask for one answer after the other while nothing befalls anybody.

        Raises as `run` does.
        """
        await self._whole()
        requests = [self._request(Case(-1, shape, "", Phase.SAVE, clients, Fault.KILL), one) for one in range(clients)]
        alone = [await self._alone([request]) for request in requests]
        began, doubts = time.monotonic(), self._cluster.doubts
        told: list[list[Told]] = [[] for _ in requests]

        async def ask_again_and_again(number: int) -> None:
            while time.monotonic() - began < lasts_s:
                told[number].append(await _ask(self._engine, requests[number]))

        watching = asyncio.ensure_future(self._count_alarms(shape))
        try:
            await asyncio.gather(*(ask_again_and_again(number) for number in range(clients)))
        finally:
            watching.cancel()
        seconds = time.monotonic() - began
        pairs = [(one.answer, answer) for one_client, [answer] in zip(told, alone, strict=True) for one in one_client]
        return Undisturbed(
            stages=shape.stages,
            draft_apart=shape.draft_apart,
            seconds=seconds,
            clients=clients,
            answers=len(pairs),
            tokens=sum(len(answer.token_ids) for answer, _ in pairs if answer is not None),
            lost=sum(answer is None for answer, _ in pairs),
            different=sum(answer is not None and answer.token_ids != one.token_ids for answer, one in pairs)
            if self._asked.is_compared
            else 0,
            doubts=self._cluster.doubts - doubts,
            alarms=self._alarms,
        )

    async def _count_alarms(self, shape: Shape) -> None:
        """Count the workers that are taken for lost, until cancelled."""
        self._alarms, known = 0, set[int]()
        while True:
            now = {index for index in range(len(shape.placed)) if self._cluster.loss(index) is not None}
            self._alarms += len(now - known)
            known = now
            await asyncio.sleep(_LOOK_S)

    @property
    def quiet(self) -> Quiet:
        """The context within which no answer is given, once those that were asked for have ended."""
        return self._engine.quiet

    async def _alone(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answers that nothing disturbs, and of which no prefix is kept."""
        undisturbed = []
        for alone in await self._ask_all(self._plain, requests):
            if alone.answer is None:
                raise alone.error or Unavailable("an answer that nothing disturbed has not ended")
            undisturbed.append(alone.answer)
        return undisturbed

    async def _strike_meanwhile(self, successor: Successor, case: Case, draw: random.Random) -> int | None:
        """Hand a worker over to another one, and have one of both meet the fault meanwhile; return its process."""
        taking = successor.member.process
        assert taking is not None
        self._watch()
        self._watched.see(taking)
        struck = taking.process_id if draw.random() < 0.5 else self._process_id(case.worker)
        handing = asyncio.ensure_future(Handover(self._engine).hand_over(successor))
        await asyncio.sleep(draw.random() * _LONGEST_HANDOVER_S)
        self._strike(struck, case.fault)
        with contextlib.suppress(FlashsplitError):
            # Where it fails, answers go on behind the loss.
            await handing
        return struck

    async def _pass(self, case: Case) -> None:
        """Have a worker meet a fault that passes, and wait until it has."""
        assert self._elsewhere is not None
        address = self._cluster.places[case.worker].address
        assert address is not None
        end = self._elsewhere.strike(address, case.fault)
        try:
            await asyncio.sleep(self._lasts_s)
        finally:
            await end()

    async def _moment(self, asking: asyncio.Future[list[Told]], draw: random.Random) -> None:
        """Wait until the phase is there in which the fault is to happen, or all answers have ended."""
        if self._awaited:
            reached = asyncio.ensure_future(self._reached.wait())
            waited: list[asyncio.Future[Any]] = [asking, reached]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            return
        while not self._cache.arriving and not asking.done():
            await asyncio.sleep(_SHORT_S)
        await asyncio.sleep(draw.random() * _LONGEST_DELAY_S)

    @staticmethod
    def _strike(process_id: int | None, fault: Fault) -> None:
        """Kill or stop a worker, where there is one."""
        if process_id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, _SIGNALS[fault])

    def _process_id(self, worker: str) -> int | None:
        """Return the process of the worker that is called so now; None while there is none."""
        process = self._cluster.processes.get(worker)
        return None if process is None else process.process_id

    async def _whole(self, lost: int | None = None) -> None:
        """Wait until all workers are there, and that process is not one of them any more."""
        cluster = self._cluster
        try:
            async with asyncio.timeout(WHOLE_S):
                while (
                    (lost is not None and lost in map(self._process_id, cluster.processes))
                    or not cluster.alive
                    or cluster.degraded is not None
                    or (cluster.draft is None and cluster.draft_worker is not None)
                    or any(one.why is not None for one in cluster.standbys)
                ):
                    await asyncio.sleep(_LOOK_S)
                await self._settled()
        except TimeoutError:
            raise Unavailable(f"the cluster was not whole again within {WHOLE_S:g} s") from None
        self._watch()

    async def _settled(self) -> None:
        """Wait until all prefixes are where they are to be kept."""
        while self._cache.pending:
            await asyncio.sleep(_LOOK_S)

    def _watch(self) -> None:
        """Note which workers there are."""
        elsewhere = [] if self._elsewhere is None else self._elsewhere.processes
        for process in (*self._cluster.processes.values(), *elsewhere):
            self._watched.see(process)

    def _request(self, case: Case, number: int) -> Request:
        sampling, speculate = KINDS[(case.number + number) % len(KINDS)]
        return Request(
            request_id=secrets.token_hex(8),
            prompt_ids=self._prompt(case, number),
            max_tokens=self._asked.max_tokens,
            sampling=sampling,
            # Only answers with drafts are verified, and those without one alone are sure to be decoded token by token.
            speculate=(speculate or case.phase is Phase.VERIFY) and case.phase is not Phase.DECODE,
            prefill_chunk=self._chunk,
        )

    def _prompt(self, case: Case, number: int) -> tuple[int, ...]:
        """Return a prompt that no other answer of any case has: sums, or random tokens where there is no tokenizer."""
        length = self._asked.prompt_tokens
        if self._files.tokenizer is None:
            draw = random.Random(f"{case.number}, {number}")
            return tuple(draw.randrange(self._cluster.target.vocab_size) for _ in range(length))
        # Each sum has more tokens than three.
        turns = range(max(60, length // 3))
        sums = " ".join(f"Calculate {17 * number + turn} + {turn * turn}." for turn in turns)
        return text_prompt(self._files, f"{case.number}, {number}: {sums}").token_ids[:length]

    async def _ask_all(self, engine: Engine, requests: Sequence[Request]) -> list[Told]:
        return list(await asyncio.gather(*(_ask(engine, request) for request in requests)))

    def _count_step(self, step: StepTaken) -> None:
        if step.kind is not StepKind.PREFILL:
            self._spared -= step.kept
        if step.kind in self._awaited and (self._spared < 0 or step.kind is StepKind.PREFILL):
            self._countdown -= 1
            if self._countdown <= 0:
                self._reached.set()


async def _ask(engine: Engine, request: Request) -> Told:
    """Return what a client is told of the answer to a request."""
    told = Told(time.monotonic())
    try:
        async with engine.answering(request) as generation:
            async for piece in generation.pieces():
                told.texts.append(piece.text)
                told.times.append(time.monotonic())
            told.answer = generation.answer
            told.phases = generation.phases
    except FlashsplitError as error:
        told.error = error
    return told
