"""A stage that tells a test what a session asks of it, and fails where the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from shard_worker.cache.recurrent_cache import RecurrentCache
from shard_worker.device.dtypes import OnHost
from shard_worker.model.features import Features
from shard_worker.roles.target.role import TargetRole
from shard_worker.stage.batch_runner import DrawTokens, PlacedStep
from shard_worker.stage.stage import Stage, StageState, StepInput
from shard_worker.stage.step_graph import StepOutput, StepPart, StepRows


def do_nothing(*_: object) -> None:
    """A hook that a test does not need."""


class LateEvent:
    """An event of a device that has not happened before it was looked for so many times."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def query(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def synchronize(self) -> None:
        """Nothing is under way."""


def recurrent_caches(state: StageState) -> list[RecurrentCache]:
    """Return those of a session, behind all rows that count."""
    for caches in state.caches:
        caches.settle()
    return [caches.recurrent for caches in state.caches if caches.recurrent is not None]


class RecurrentState:
    """What recurrent layers have of a session before a step."""

    def __init__(self, cache: RecurrentCache) -> None:
        self._cache, self._state, self._conv = cache, cache.state.clone(), cache.conv.clone()

    def defer(self) -> None:
        """Let the step's row be one that the cache is to advance by later, as kernels do with a row that follows."""
        after = RecurrentState(self._cache)
        self._put()
        self._cache.begin_row(lambda _: after._put())

    def _put(self) -> None:
        self._cache.state.copy_(self._state)
        self._cache.conv.copy_(self._conv)


@dataclass(frozen=True)
class WatchedStage(Stage):
    """A stage that calls hooks on the device thread, then does what every stage does.

    before_step: called with the session's state before each step of its own; what it raises is the step's error.
    before_together: called with the rows of each step of several sessions; what it raises is all these steps' error.
    before_release:
    called with the rows that are released, and whether the step is certain. before_prelaunch: called with the state,
    the number of rows and the rows where they are known. with_gpu: prelaunch as if the stage were on a GPU. behind:
    compute steps before the results of the last one are read, as a GPU does; here the tokens behind its rows, of each
    step.
    looks: how often the results of a step of several sessions are looked for before they are there, as on a GPU, where
    the next one overwrites all but what is copied; None for at once.
    """

    before_step: Callable[[StageState], None] = do_nothing
    before_together: Callable[[Sequence[StepInput]], None] = do_nothing
    before_release: Callable[[StepRows, bool], None] = do_nothing
    before_prelaunch: Callable[[StageState, int, StepRows | None], None] = do_nothing
    with_gpu: bool = False
    most: int | None = None
    behind: list[torch.Tensor] | None = None
    looks: int | None = None
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def prelaunches(self) -> bool:
        return self.with_gpu

    @property
    def draws(self) -> bool:
        return super().draws if self.behind is None else True

    def step(
        self, state: StageState, token_ids: Sequence[int], features: Features | None, **options: Any
    ) -> StepOutput | StepPart:
        self.before_step(state)
        return super().step(state, token_ids, features, **options)

    def most_together(self, inputs: Sequence[StepInput]) -> int:
        return super().most_together(inputs) if self.most is None else min(self.most, len(inputs))

    def steps_behind(self, rows: int, *, blocks: bool) -> bool:
        return super().steps_behind(rows, blocks=blocks) if self.behind is None else rows <= (256 if blocks else 16)

    def overlaps(self, inputs: Sequence[StepInput]) -> bool:
        return super().overlaps(inputs) if self.looks is None else True

    def step_together(
        self,
        inputs: Sequence[StepInput],
        complete: Callable[[Any], None] | None = None,
        placed: PlacedStep | None = None,
        draw: DrawTokens | None = None,
    ) -> list[StepPart]:
        self.before_together(inputs)
        if self.looks is not None:
            return self._step_with_late_results(inputs, self.looks)
        if self.behind is None:
            return super().step_together(inputs, complete, placed, draw)
        known = [
            given
            if given.behind is not None
            else replace(given, token_ids=tuple(self._token(token) for token in given.token_ids))
            for given in inputs
        ]
        if complete is not None:
            # What a device does in the step's parameters, with states that know where the rows begin.
            complete(known)
        following = [one for one in inputs if one.behind is None and one.token_ids[0] < 0]
        before = [RecurrentState(cache) for one in following for cache in recurrent_caches(one.state)]
        whole = super().step_together(known)[0].whole
        for held in before:
            held.defer()
        for one, given in zip(known, inputs, strict=True):
            if one.state is not given.state:
                self._count(given.state, len(given.token_ids), given.uncommitted)
        assert whole.logits is not None
        tokens = whole.logits.argmax(-1)
        made = tokens.clone()
        if draw is not None:
            draw(whole.logits, tokens, made)
            whole = replace(whole, argmax=tokens, on_host=OnHost(tokens, None))
        self.behind.append(made)
        return whole.parts([len(one.token_ids) for one in inputs])

    def _step_with_late_results(self, inputs: Sequence[StepInput], looks: int) -> list[StepPart]:
        while self.logits:
            self.logits.pop().fill_(torch.nan)
        output = super().step_together(inputs)[0].whole
        argmax = None if output.logits is None else output.logits.argmax(-1)
        if output.logits is not None:
            self.logits.append(output.logits)
        done: Any = LateEvent(looks)
        on_host = OnHost((output.hidden if argmax is None else argmax).clone(), done)
        total = None if output.total is None or self.head is not None else output.total.clone()
        output = replace(output, argmax=argmax, on_host=on_host, total_on_host=total)
        return output.parts([len(one.token_ids) for one in inputs])

    def _token(self, token: int) -> int:
        assert self.behind is not None
        return token if token >= 0 else int(self.behind[-1][-1 - token])

    def release(self, state: StageState, rows: StepRows, activation: memoryview | None, *, certain: bool) -> None:
        self.before_release(rows, certain)
        super().release(state, rows, activation, certain=certain)

    def prelaunch(self, state: StageState, rows: int, *, known: StepRows | None = None, running: bool = False) -> None:
        self.before_prelaunch(state, rows, known)
        super().prelaunch(state, rows, known=known, running=running)


def watch(role: TargetRole, **hooks: Any) -> None:
    """Let a role's sessions run on a WatchedStage from now on. hooks: its fields."""
    loaded = role.loaded
    assert loaded is not None
    stage = {field.name: getattr(loaded.stage, field.name) for field in fields(Stage)}
    role.loaded = replace(loaded, stage=WatchedStage(**stage, **hooks))
