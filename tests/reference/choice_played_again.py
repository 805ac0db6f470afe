"""The choice of draft tokens over recorded answers, in virtual time: the coordinator's own code, and in the place of
the workers a chain that takes as long for a step as a machine was measured to take.

`python -m tests.reference.choice_played_again` prints, for each kind of prompt, how fast the choice is beside the best
way that is fixed (plain decode, whole blocks of the draft, what is looked up alone), as `bench drafts` does with real
workers: in seconds, and without other processes' noise.

What the draft proposes where was recorded by `record_drafts`: of the demo pair, in float32, eight prompts of each kind.
chat, code, functions: held-out prompts of `deploy/demo/prompts.py`. edits: the first 100 lines of modules of Python's
library, ten of them changed, in the prompt and forced as the answer. random: 40 random tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from coordinator.engine import chain_attempt
from coordinator.engine.batch_costs import BatchCosts
from coordinator.engine.generation import generate
from services.errors import FlashsplitError
from services.messages.steps import Commit, Event, Forward, Proposal, StageTiming, StepKind
from services.rpc.stage import StageSession
from tests.coordinator.fakes import Script, ScriptedCluster, ScriptedSession, request

RECORDED = Path(__file__).with_name("recorded_drafts.json")
FIXED = ("plain", "blocks", "ngram")
CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Machine:
    """What takes how many milliseconds.

    step_ms: a step of a lone session by its draft tokens, and those between by straight lines. block_ms: the draft's
    block. read_ms: for each row that the draft reads beyond a block's. rest_ms: more for a step of a session with a
    draft. sent_ms: until a step that is sent begins. told_ms: for the coordinator to take an answer in.
    """

    step_ms: Mapping[int, float]
    block_ms: float
    read_ms: float
    rest_ms: float
    sent_ms: float
    told_ms: float

    def step(self, draft_tokens: int) -> float:
        """Return the milliseconds of a step."""
        lower = max(count for count in self.step_ms if count <= draft_tokens)
        upper = min(count for count in self.step_ms if count >= draft_tokens)
        share = (draft_tokens - lower) / max(1, upper - lower)
        return self.step_ms[lower] + share * (self.step_ms[upper] - self.step_ms[lower])


MACHINES = {
    "Xeon": Machine({0: 20.0, 1: 22.0, 3: 25.5, 7: 30.0, 15: 38.0}, 12.0, 0.025, 0.1, 0.7, 0.25),
    "EPYC": Machine({0: 6.1, 1: 6.9, 3: 7.8, 7: 8.8, 15: 10.8}, 3.3, 0.008, 0.06, 0.35, 0.1),
}
"""One thread of each, the demo pair in float32. The Xeon's others were in use too."""

DRIFT, JITTER, LASTING = 0.28, 0.3, 0.96
"""Of the noise, by how much a machine becomes faster or slower with each step, how much a step by itself differs, and
how much of that is left with the next one."""


@dataclass(slots=True)
class Clock:
    """Stands for the module `time`. ms: milliseconds since it began."""

    ms: float = 0.0

    def monotonic(self) -> float:
        """Return seconds."""
        return self.ms / 1e3

    def monotonic_ns(self) -> int:
        """Return nanoseconds."""
        return int(self.ms * 1e6)


@dataclass(slots=True)
class Pace:
    """How long steps take beside what they should: a drift and a jitter, both of which have no mean. noise: the
    standard deviation of its logarithm, about."""

    noise: float
    draw: random.Random
    drift: float = 0.0

    def next(self) -> float:
        """Return the factor for the next step."""
        self.drift = LASTING * self.drift + DRIFT * self.noise * self.draw.gauss(0, 1)
        return math.exp(self.drift + JITTER * self.noise * self.draw.gauss(0, 1))


@dataclass
class Recorded(Script):
    """One recorded answer. prompt: its tokens' numbers. right: how many draft tokens of a block are right behind each
    token of the answer, from the first one on."""

    prompt: tuple[int, ...] = ()
    right: tuple[int, ...] = ()

    def block(self, first: int, count: int) -> tuple[int, ...]:
        right = self.right[first - 1] if first <= len(self.right) else 0
        # No token of the answer has such a number.
        return tuple(self.token(first + index) if index < right else -1 for index in range(count))


class TimedSession(ScriptedSession):
    """A session whose steps take time. cost_ms: of its decode steps and the draft's blocks, if there were no noise."""

    def __init__(
        self, opening: Mapping[str, Any], script: Recorded, machine: Machine, clock: Clock, pace: Pace
    ) -> None:
        super().__init__(script, opening, {})
        self._machine, self._clock, self._pace = machine, clock, pace
        self._free_ms, self._unread = clock.ms, 0
        self._due: deque[float] = deque()
        """When each answer that was not told yet is there."""
        self.cost_ms = 0.0

    async def forward(self, forward: Forward) -> None:
        self._clock.ms += self._machine.sent_ms
        self.cost_ms += self._machine.sent_ms
        self._free_ms = max(self._free_ms, self._clock.ms)
        await super().forward(forward)

    def _answer(self, event: Event | FlashsplitError) -> None:
        ms = 0.0
        forward, machine = self.forwards[-1], self._machine
        if isinstance(event, Commit):
            self._unread += event.length - forward.base_position
            if forward.kind is StepKind.VERIFY or (forward.kind is StepKind.DECODE and len(forward.token_ids) == 1):
                ms = machine.step(len(forward.token_ids) - 1) + machine.rest_ms * self.opening["speculate"]
        elif isinstance(event, Proposal):
            ms = machine.block_ms + machine.read_ms * max(0, self._unread - 16)
            self._unread = 0
        self.cost_ms += ms
        ms *= self._pace.next()
        nanoseconds = int(ms * 1e6)
        if isinstance(event, Commit):
            event = replace(event, timings=(StageTiming(nanoseconds, nanoseconds),))
        elif isinstance(event, Proposal):
            event = replace(event, elapsed_ns=nanoseconds)
        self._free_ms += ms
        self._due.append(self._free_ms)
        super()._answer(event)

    async def events(self) -> AsyncIterator[Event]:
        async for event in super().events():
            self._clock.ms = max(self._clock.ms, self._due.popleft())
            if isinstance(event, Commit):
                self._clock.ms += self._machine.told_ms
            yield event


class TimedCluster(ScriptedCluster):
    """One worker of such a machine, with a draft of 16 rows."""

    def __init__(self, machine: Machine, clock: Clock, pace: Pace) -> None:
        super().__init__(block_size=16, vocab_size=1 << 20)
        self._made_of = machine, clock, pace

    async def open(self, **opening: Any) -> StageSession:
        assert isinstance(self.script, Recorded)
        self.sessions.append(TimedSession(opening, self.script, *self._made_of))
        return self.sessions[-1]


@dataclass(slots=True)
class Played:
    """How long each answer took in each way: milliseconds by kind, in the order of the prompts, then of the repeats."""

    of: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def of_best(self, kind: str, repeat: int | None = None) -> float:
        """Return how fast the choice was, beside the best fixed way for the kind: in a repeat, or in all."""
        chosen = self.of[CHOICE][kind]
        best = min(sum(self.of[way][kind]) for way in FIXED)
        prompts = len(self.of[FIXED[0]][kind])
        parts = [chosen[first : first + prompts] for first in range(0, len(chosen), prompts)]
        return best / statistics.fmean(map(sum, parts if repeat is None else [parts[repeat]]))


def recorded(path: Path = RECORDED) -> dict[str, list[Recorded]]:
    """Return the recorded answers by kind."""
    kinds = json.loads(path.read_text(encoding="utf-8"))
    return {
        kind: [
            Recorded(tuple(answer["answer"]), prompt=tuple(answer["prompt"]), right=tuple(answer["right"]))
            for answer in answers
        ]
        for kind, answers in kinds.items()
    }


def play(
    kinds: Mapping[str, Sequence[Recorded]], machine: Machine, *, repeats: int = 1, noise: float = 0.0, seed: int = 0
) -> Played:
    """Answer all prompts in the fixed ways, without noise, and `repeats` times by choice: the kinds in turn, by one
    engine's measurements for each way."""
    played = Played()
    for way in (*FIXED, CHOICE):
        count, own_noise = (repeats, noise) if way == CHOICE else (1, 0.0)
        played.of[way] = asyncio.run(_play(kinds, way, machine, count, Pace(own_noise, random.Random(seed))))
    return played


async def _play(
    kinds: Mapping[str, Sequence[Recorded]], way: str, machine: Machine, repeats: int, pace: Pace
) -> dict[str, list[float]]:
    clock, costs = Clock(), BatchCosts()
    cluster: Any = TimedCluster(machine, clock, pace)
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    with patch.object(chain_attempt, "time", clock):
        for kind, script in [*_in_turn(kinds)] * repeats:
            cluster.script = script
            answer = await generate(
                cluster,
                request(script.prompt, max_tokens=len(script.answer), stop_token_ids=frozenset()),
                None,
                costs=costs,
                prompt_lookup=way in ("ngram", CHOICE),
                draft_tokens={"plain": 0, "blocks": 15, "ngram": 0, CHOICE: None}[way],
            )
            assert answer.token_ids == script.answer
            took[kind].append(cluster.session.cost_ms)
            cluster.sessions.clear()
    return took


def _in_turn(kinds: Mapping[str, Sequence[Recorded]]) -> Iterator[tuple[str, Recorded]]:
    """Return the first prompt of each kind, then the second of each and so on."""
    for place in range(max(map(len, kinds.values()))):
        for kind, scripts in kinds.items():
            if place < len(scripts):
                yield kind, scripts[place]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kinds", help="only these, separated by commas")
    parser.add_argument("--repeats", type=int, default=2, help="of all prompts, which the choice has learnt from")
    parser.add_argument("--noise", type=float, default=0.06, help="standard deviation of a step's time")
    parser.add_argument("--draws", type=int, default=5, help="of that noise")
    arguments = parser.parse_args()
    kinds = recorded()
    if arguments.kinds:
        kinds = {kind: kinds[kind] for kind in arguments.kinds.split(",")}
    for name, machine in MACHINES.items():
        played = [
            play(kinds, machine, repeats=arguments.repeats, noise=arguments.noise, seed=seed)
            for seed in range(arguments.draws)
        ]
        print(name)
        for kind in kinds:
            repeats = [[one.of_best(kind, repeat) for one in played] for repeat in range(arguments.repeats)]
            print(
                f"  {kind:10}",
                f"{statistics.fmean(one.of_best(kind) for one in played):.3f} of the best fixed way;",
                *(f"{statistics.fmean(ratios):.3f} ({min(ratios):.2f}-{max(ratios):.2f})" for ratios in repeats),
            )


if __name__ == "__main__":
    main()
