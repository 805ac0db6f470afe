"""Steps by kernels and graphs against the same stage in plain torch, and against each other, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.layers import LayerRange
from shard_worker.device.dtypes import bytes_of, to_wire
from shard_worker.model.features import Features
from shard_worker.model.head import Head
from shard_worker.stage.loader import CaptureRequest
from shard_worker.stage.stage import Stage, StageState
from shard_worker.stage.step_graph import StepRows
from shard_worker.stage.step_runner import StepRunner
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device
from tests.shard_worker.tiny import BY_KERNELS, Tiny, ids, load_stage

pytestmark = pytest.mark.gpu

KV_DTYPES = (None, "float8_e4m3fn")
WAYS: tuple[dict[str, Any], ...] = ({}, {"kv_dtype": "float8_e4m3fn"}, {"dtype": torch.float32})
NAMES = (*BY_KERNELS, "qwen3-bias")
Load = Callable[..., Stage]


@pytest.fixture(scope="module")
def load(tiny: Tiny) -> Load:
    """A stage with runners, by checkpoint; each made once."""
    made: dict[object, Stage] = {}

    def load(
        name: str,
        layers: tuple[int, int] | None = None,
        *,
        fc: torch.Tensor | None = None,
        dtype: torch.dtype = DTYPE,
        kv_dtype: str | None = None,
    ) -> Stage:
        key = (name, layers, fc is None, dtype, kv_dtype)
        if key not in made:
            capture = CaptureRequest((2, 0), fc)
            stage = load_stage(
                tiny.path(name),
                layers,
                devices=[device()],
                dtype=str(dtype).removeprefix("torch."),
                capture=capture,
                kv_dtype=kv_dtype,
            )
            runners = [StepRunner(segment, stage.embedding, stage.head, graphs=ON_GPU) for segment in stage.segments]
            made[key] = replace(stage, runners=tuple(runners))
        return made[key]

    return load


def plain(stage: Stage) -> Stage:
    return stage.without_kernels()


class Session:
    """One session of a stage that has embedding and head."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.state: StageState = stage.allocate(640, 64)

    @torch.inference_mode()
    def __call__(
        self, token_ids: Sequence[int], features: Features | None = None, *, uncommitted: bool = False
    ) -> torch.Tensor:
        """Logits after each token, a copy."""
        output = self.stage.step(self.state, tuple(token_ids), features, uncommitted=uncommitted)
        head: Head | None = self.stage.head
        assert head is not None
        logits = head.logits(output.hidden) if output.logits is None else output.logits
        if output.argmax is not None:
            assert torch.equal(output.argmax, logits.argmax(-1))
        return logits.clone()

    @torch.inference_mode()
    def commit(self, rows: int) -> None:
        self.stage.commit(self.state, self.state.length + rows)


def steps(session: Session, tokens: list[int]) -> list[torch.Tensor]:
    """A prefill, single rows, blocks of which a part counts, and behind the first page more of the prefill, where
    sliding layers give it back: the logits of all."""
    rows = [session(tokens[:250])]
    at = 250
    for count, kept in ((1, 1), (1, 1), (8, 3), (40, 40), (16, 16), (1, 1), (5, 1), (16, 7), (1, 1)):
        rows.append(session(tokens[at : at + count], uncommitted=1 < count < 40))
        if 1 < count < 40:
            session.commit(kept)
        at += kept
    assert session.state.length == at
    return rows


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    """The same but for the rounding of 16 bits through some layers; a wrong layer is another picture altogether."""
    distance = (one.float() - other.float()).norm() / other.float().norm()
    assert distance < (0.06 if DTYPE is torch.bfloat16 else 0.02)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_plain_torch(load: Load, name: str, kv_dtype: str | None) -> None:
    """Across a page's end, whatever number of rows counts: as near to the logits of float32 as plain torch comes, with
    keys and values of eight bits too."""
    stage, tokens = load(name, kv_dtype=kv_dtype), ids(330)
    exact, own, usual = (
        torch.cat(steps(Session(one), tokens)).float()
        for one in (plain(load(name, dtype=torch.float32, kv_dtype=kv_dtype)), stage, plain(stage))
    )

    assert (own - exact).norm() < 1.5 * (usual - exact).norm()


@pytest.mark.parametrize("name", NAMES)
def test_steps_in_float32_are_those_of_plain_torch(load: Load, name: str) -> None:
    """But for the last bits: far nearer than one pass of the matrix units over tf32 would come."""
    stage, tokens = load(name, dtype=torch.float32), ids(330)
    own, expected = (torch.cat(steps(Session(one), tokens)) for one in (stage, plain(stage)))

    assert (own - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("way", WAYS, ids=("usual", "float8", "float32"))
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_same_alone_and_in_a_block(load: Load, name: str, way: dict[str, Any]) -> None:
    """Plain decode and verifying, with any number of rows and any commits, give each token's logits bit for bit."""
    if not ON_GPU:
        pytest.skip("the CPU's products differ with the number of rows")
    stage, tokens = load(name, **way), ids(400)
    alone, block = Session(stage), Session(stage)
    for session in (alone, block):
        session(tokens[:245])
    single = torch.cat([alone([token]) for token in tokens[245:325]])

    rows, at = [], 245
    for count, kept in ((16, 16), (16, 5), (3, 2), (1, 1), (40, 16), (9, 1), (64, 13), (16, 16), (2, 2), (17, 8)):
        logits = block(tokens[at : at + count], uncommitted=True)
        rows.append(logits[:kept])
        block.commit(kept)
        at += kept

    together = torch.cat(rows)
    assert len(together) == 80
    assert torch.equal(together, single)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-ratio-3"])
def test_sessions_share_graphs_and_nothing_else(load: Load, name: str) -> None:
    """Two sessions in turn on one runner give what each gives alone; one that has ended leaves no trace."""
    stage = load(name)
    texts = [ids(60, seed=1), ids(60, seed=2)]
    alone = []
    for text in texts:
        session = Session(stage)
        alone.append(
            [session(text[:20]), *(session([token]) for token in text[20:30]), session(text[30:41], uncommitted=True)]
        )
    sessions = [Session(stage), Session(stage)]
    together = [[session(text[:20])] for session, text in zip(sessions, texts, strict=True)]
    for step in range(20, 30):
        for session, text, rows in zip(sessions, texts, together, strict=True):
            rows.append(session(text[step : step + 1]))
    for session, text, rows in zip(sessions, texts, together, strict=True):
        rows.append(session(text[30:41], uncommitted=True))

    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-ratio-3"])
@pytest.mark.parametrize("summed", [True, False])
def test_captures_are_those_of_plain_torch(load: Load, name: str, summed: bool) -> None:
    """For one row and for a block, as slices and as the sum through `fc`."""
    width = 64
    fc = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(7)) / 16 if summed else None
    stage, tokens = load(name, fc=fc), ids(40)
    found: list[list[Features]] = []
    for one in (stage, plain(stage)):
        session = Session(one)
        gathered = [Features(), Features()]
        session(tokens[:20], Features())
        session(tokens[20:21], gathered[0])
        session(tokens[21:32], gathered[1], uncommitted=True)
        found.append(gathered)

    for own, expected in zip(*found, strict=True):
        pairs = [(own.slices[index], piece) for index, piece in expected.slices.items()]
        if summed:
            assert own.total is not None
            assert expected.total is not None
            assert own.total.dtype == torch.float32
            pairs.append((own.total, expected.total))
        assert pairs
        for one, other in pairs:
            assert one.shape == other.shape
            assert_close(one, other)


def test_a_later_stage_takes_hidden_rows(load: Load) -> None:
    """Without an embedding, rows come as activations."""
    first, second = load("qwen3_5-ratio-3", (0, 2)), load("qwen3_5-ratio-3", (2, 4))
    assert first.layers == LayerRange(0, 2)
    answers = []
    for stages in ((first, second), (plain(first), plain(second))):
        states = [stage.allocate(100, 16) for stage in stages]
        rows = []
        with torch.inference_mode():
            for tokens, uncommitted in ((ids(20), False), ([5], False), (ids(9, seed=4), True)):
                moving: torch.Tensor | None = None
                for stage, state in zip(stages, states, strict=True):
                    hidden = None if moving is None else to_wire(moving)
                    moving = stage.step(state, tokens, None, uncommitted=uncommitted, hidden=hidden).hidden.clone()
                assert moving is not None
                rows.append(moving)
        answers.append(torch.cat(rows))

    assert_close(*answers)


@torch.inference_mode()
def in_turn(stage: Stage, *, prelaunched: bool) -> list[torch.Tensor]:
    """Return what rows and blocks of two sessions in turn become, and what they leave.

    prelaunched: steps are launched ahead wherever that goes, and one in three of them is cancelled.
    """
    rows = torch.randn(300, stage.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(DTYPE)
    tokens, made = ids(300), []
    states = [stage.allocate(640, 16) for _ in range(2)]
    plan = [(0, 250, 250), *((at, 1, 1) for at in range(250, 262)), (262, 16, 5), (267, 16, 16), (283, 16, 1)]
    for turn, (at, count, kept) in enumerate(plan):
        for state in states:
            uncommitted = count == 16
            hidden = None if stage.embedding is not None else to_wire(rows[at : at + count])
            output = stage.step(state, tokens[at : at + count], None, uncommitted=uncommitted, hidden=hidden)
            made.append(output.hidden.cpu())
            if uncommitted:
                stage.commit(state, state.length + kept)
            if prelaunched and turn:
                # What comes next is the other session's, and now and then of another number of rows.
                stage.prelaunch(state, count)
                assert stage.runners[0] is not None
                assert stage.runners[0].prelaunched is not None
                if turn % 3 == 0:
                    stage.cancel()
    stage.cancel()
    for state in states:
        made += [view.read(0, state.length).cpu() for caches in state.caches for view in caches.views()]
    return made


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-ratio-3"])
@pytest.mark.parametrize("part", [(0, 4), (2, 4)])
def test_a_prelaunched_step_is_the_same(load: Load, name: str, part: tuple[int, int]) -> None:
    """Launched before its numbers were known: bit for bit what a step is, over a page's end, for the session it was
    launched for and for another one; cancelled, it leaves everything as it was."""
    if not ON_GPU:
        pytest.skip("the CPU has no queue in which something could wait")
    found, expected = (in_turn(load(name, part), prelaunched=prelaunched) for prelaunched in (True, False))

    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@torch.inference_mode()
def decoded(stage: Stage, *, ahead: bool) -> list[torch.Tensor]:
    """Return the most probable tokens of one session's single rows, over pages' ends, and what they leave.

    ahead: each row is launched while the one before runs, and released before it is asked for, but for some where
    another session's step comes.
    """
    tokens, found = ids(640), []
    state, other = (stage.allocate(640, 16) for _ in range(2))
    runner = stage.runners[0]
    assert runner is not None
    for one in (state, other):
        stage.step(one, tokens[:250], None, uncommitted=False)
        stage.step(one, tokens[250:251], None, uncommitted=False)
    for turn, at in enumerate(range(251, 540)):
        output = stage.step(state, tokens[at : at + 1], None, uncommitted=False)
        if ahead:
            stage.prelaunch(state, 1, running=True)
        assert output.on_host is not None
        found.append(output.on_host.wait().clone())
        if ahead and turn % 5 != 4:
            stage.release(state, StepRows(at + 1, (tokens[at + 1],), False, False), None, certain=False)
        if ahead and turn % 7 == 6:
            stage.step(other, tokens[turn : turn + 1], None, uncommitted=False)
        if ahead and turn % 11 == 10:
            stage.cancel()
    stage.cancel()
    return [*found, *(view.read(0, state.length).cpu() for caches in state.caches for view in caches.views())]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-ratio-3"])
def test_a_row_that_was_launched_ahead_is_the_same(load: Load, name: str) -> None:
    """Bit for bit; recurrent layers advance once."""
    if not ON_GPU:
        pytest.skip("the CPU has no queue in which something could wait")
    found, expected = (decoded(load(name), ahead=ahead) for ahead in (True, False))

    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@torch.inference_mode()
def verified(stage: Stage, *, early: bool) -> list[torch.Tensor]:
    """What blocks of one session become, and what they leave; early: each is released before its step is asked for, and
    in one turn in three another session's step comes between."""
    rows = torch.randn(400, stage.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(DTYPE)
    tokens, made = ids(400), []
    state, other = (stage.allocate(640, 16) for _ in range(2))
    runner = stage.runners[0]
    assert runner is not None
    stage.step(state, tokens[:250], None, uncommitted=False, hidden=to_wire(rows[:250]))
    stage.step(other, tokens[:250], None, uncommitted=False, hidden=to_wire(rows[:250]))
    for turn, kept in enumerate((16, 3, 1, 16, 9, 16, 2, 5)):
        at = state.length
        count = 16 if turn % 4 else 11
        block, hidden = tokens[at : at + count], rows[at : at + count]
        if early:
            asked = StepRows(at, tuple(block), True, False)
            if turn:
                # Sometimes it knows its rows, sometimes others.
                known = (None, asked, replace(asked, token_ids=(*block[1:], 0)))[turn % 5 % 3]
                stage.prelaunch(state, count, known=known)
            stage.release(state, asked, bytes_of(hidden), certain=turn % 3 == 0)
            assert (runner.released is not None) == bool(turn)
            if turn % 3 == 1:
                first = other.length
                between = rows[first : first + 16]
                stage.step(other, tokens[first : first + 16], None, uncommitted=True, hidden=to_wire(between))
                stage.commit(other, other.length + 1)
            elif turn % 3 == 2:
                stage.prelaunch(other, 16)
        output = stage.step(state, block, None, uncommitted=True, hidden=to_wire(hidden))
        # Waiting for the device itself would wait for what is prelaunched.
        if runner.prelaunched is None:
            made.append(output.hidden.cpu())
        elif output.on_host is not None:
            made.append(output.on_host.wait().clone())
        stage.cancel()
        stage.commit(state, state.length + min(kept, count))
    return [*made, *(view.read(0, state.length).cpu() for caches in state.caches for view in caches.views())]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-ratio-3"])
def test_a_step_that_was_released_early_is_the_same(load: Load, name: str) -> None:
    """Before it is asked for: bit for bit what it is else, and done again where another session's came between."""
    if not ON_GPU:
        pytest.skip("the CPU has no queue in which something could wait")
    found, expected = (verified(load(name, (1, 3)), early=early) for early in (True, False))

    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@torch.inference_mode()
def told(stage: Stage, *, early: bool) -> list[torch.Tensor]:
    """What single rows of one session become; early: they are known before they come, but for some that are others, and
    are released with their activation before their step is asked for."""
    rows = torch.randn(400, stage.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(DTYPE)
    tokens, made = ids(400), []
    state, runner = stage.allocate(640, 16), stage.runners[0]
    assert runner is not None
    stage.step(state, tokens[:250], None, uncommitted=False, hidden=to_wire(rows[:250]))
    for turn, at in enumerate(range(250, 290)):
        hidden = rows[at : at + 1]
        asked = StepRows(at, (tokens[at],), False, False)
        if early and turn:
            right = turn % 5 != 4
            stage.prelaunch(state, 1, known=asked if right else replace(asked, token_ids=(tokens[at] + 1,)))
            if turn % 3:
                stage.release(state, asked, bytes_of(hidden), certain=turn % 4 != 3)
                assert (runner.released is not None) == (turn % 4 != 3 or not stage.is_recurrent)
        output = stage.step(state, tokens[at : at + 1], None, uncommitted=False, hidden=to_wire(hidden))
        assert output.on_host is not None
        made.append(output.on_host.wait().clone())
    return [*made, *(view.read(0, state.length).cpu() for caches in state.caches for view in caches.views())]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5-ratio-3"])
def test_a_row_that_was_known_is_the_same(load: Load, name: str) -> None:
    """Bit for bit, and where the row is another one too; recurrent layers advance once."""
    if not ON_GPU:
        pytest.skip("the CPU has no queue in which something could wait")
    found, expected = (told(load(name, (1, 3)), early=early) for early in (True, False))

    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
