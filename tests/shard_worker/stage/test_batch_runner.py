"""Steps of several sessions at once against steps of each session alone, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from shard_worker.cache.prefix_state import WholeView
from shard_worker.cache.segment_caches import SegmentCaches
from shard_worker.model.features import Features
from shard_worker.model.rows import SessionRows
from shard_worker.stage.batch_runner import (
    FEW_ROW_COUNTS,
    PACKED_ROW_COUNTS,
    ROW_COUNTS,
    BatchRunner,
    SessionTokens,
    row_counts,
)
from shard_worker.stage.loader import CaptureRequest
from shard_worker.stage.stage import Stage
from shard_worker.stage.step_graph import token_of_row
from shard_worker.stage.step_runner import StepRunner
from tests.shard_worker.model.kernels.machine import DTYPE, ON_GPU, device
from tests.shard_worker.packed import Packed
from tests.shard_worker.tiny import BY_KERNELS, Tiny, ids, load_stage

pytestmark = pytest.mark.gpu


@dataclass
class Session:
    """A session's tokens, how many of them count, and its caches for steps alone and for steps among others."""

    tokens: list[int]
    alone: SegmentCaches
    among: SegmentCaches
    length: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def load(tiny: Tiny, name: str, dtype: torch.dtype = DTYPE, kv_dtype: str | None = None) -> Stage:
    fc = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)) * 0.1
    return load_stage(
        tiny.path(name),
        devices=[device()],
        dtype=str(dtype).removeprefix("torch."),
        capture=CaptureRequest((2, 0), fc.to(dtype)),
        kv_dtype=kv_dtype,
    )


def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
    """To the bit on a GPU; the interpreter's sums differ with the shape of a tile."""
    if ON_GPU:
        assert torch.equal(one, other)
    else:
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", BY_KERNELS)
@torch.inference_mode()
def test_a_session_is_the_same_alone_and_among_others(tiny: Tiny, name: str) -> None:
    """Whatever blocks, rows and sessions stand in a step, and however many of them count: logits and features."""
    stage = load(tiny, name)
    [segment] = stage.segments
    single = StepRunner(segment, stage.embedding, stage.head, graphs=ON_GPU)
    many = BatchRunner(segment, stage.embedding, stage.head, graphs=ON_GPU)
    draw = random.Random(name)
    sessions = [
        Session(ids(420, seed=seed), segment.allocate(420, 16), segment.allocate(420, 16))
        for seed in range(24 if ON_GPU else 3)
    ]
    for seed, session in enumerate(sessions):
        # Some end a page, some begin one, some are at their very beginning.
        prompt = ((0, 1, 130, 254, 256, 300) if ON_GPU else (0, 1, 254))[seed % 6]
        if prompt:
            tokens = session.tokens[:prompt]
            for caches in (session.alone, session.among):
                rows = [SessionRows(0, prompt, caches, False)]
                segment.run(stage.embed(tokens), rows, None, token_ids=tokens)
        session.length = prompt

    for turn in range(12 if ON_GPU else 2):
        chosen = draw.sample(sessions, draw.randint(2, len(sessions)))
        # Blocks, single rows that count at once, or some of both.
        uncommitted = [turn % 3 == 1 or (turn % 3 == 2 and draw.random() < 0.6) for _ in chosen]
        counts = [draw.choice((1, 1, 3, 8, 16) if ON_GPU else (1, 3, 4)) if later else 1 for later in uncommitted]
        compare(single, many, chosen, counts, uncommitted, draw)


def test_packed_matrices_and_experts_have_steps_of_more_numbers_of_rows(tiny: Tiny, packed: Packed) -> None:
    """Unused rows of a step cost time there."""
    [dense], [int4], [mixture] = (
        load_stage(path, devices=[device()], dtype="bfloat16").segments
        for path in (tiny.path("qwen3"), packed("ct-4-group")[0], tiny.path("qwen3_moe"))
    )
    assert row_counts(dense) == ROW_COUNTS
    assert row_counts(int4) == FEW_ROW_COUNTS + PACKED_ROW_COUNTS
    assert row_counts(mixture) == FEW_ROW_COUNTS + ROW_COUNTS


def compare(
    single: StepRunner,
    many: BatchRunner,
    chosen: Sequence[Session],
    counts: Sequence[int],
    uncommitted: Sequence[bool],
    draw: random.Random,
) -> None:
    """Take one step of the chosen sessions together, and one of each alone."""
    parts = [
        SessionTokens(one.length, tuple(one.tokens[one.length : one.length + count]), one.among, None, later)
        for one, count, later in zip(chosen, counts, uncommitted, strict=True)
    ]
    assert many.fits(parts)
    together = Features()
    output = many.run(parts, (), together)
    assert output.logits is not None
    assert output.argmax is not None
    assert together.total is not None
    assert output.on_host is not None
    logits, argmax = output.logits.clone(), output.argmax.clone()
    output.on_host.wait()
    assert torch.equal(output.on_host.tensor, argmax.cpu())
    kept = [draw.randint(1, count) if later else count for count, later in zip(counts, uncommitted, strict=True)]
    undecided = [(one.among, rows) for one, rows, later in zip(chosen, kept, uncommitted, strict=True) if later]
    if undecided:
        many.commit(*zip(*undecided, strict=True))

    first = 0
    for one, count, rows, part in zip(chosen, counts, kept, parts, strict=True):
        features = Features()
        alone = single.run(part.token_ids, None, one.length, one.alone, features, uncommitted=part.uncommitted)
        assert alone.logits is not None
        assert features.total is not None
        assert_equal(logits[first : first + count], alone.logits)
        assert_equal(together.total[first : first + count], features.total)
        if part.uncommitted:
            single.commit(one.alone, rows)
        one.length += rows
        first += count


@pytest.mark.parametrize("name", BY_KERNELS)
@torch.inference_mode()
def test_a_prompt_is_the_same_in_any_chunks_beside_anything(tiny: Tiny, name: str) -> None:
    """Chunks of more rows than a block has, beside blocks and single rows of others: as row by row alone."""
    stage = load(tiny, name)
    [segment] = stage.segments
    single = StepRunner(segment, stage.embedding, stage.head, graphs=ON_GPU)
    many = BatchRunner(segment, stage.embedding, stage.head, graphs=ON_GPU)
    tokens, other = ids(200 if ON_GPU else 12, seed=3), ids(40, seed=4)
    # Plain answers have no room for a block's rows.
    alone, among, beside = segment.allocate(220, 1), segment.allocate(220, 1), segment.allocate(60, 16)
    expected = []
    for position, token in enumerate(tokens):
        output = single.run((token,), None, position, alone, None, uncommitted=False)
        assert output.logits is not None
        expected.append(output.logits.clone())
    position = 0
    for turn, count in enumerate((64, 1, 2, 40, 93) if ON_GPU else (7, 1, 2, 2)):
        blocks = turn % 2 == 1
        part = SessionTokens(position, tuple(tokens[position : position + count]), among)
        rows = tuple(other[2 * turn : 2 * turn + (2 if blocks else 1)])
        parts = [SessionTokens(2 * turn, rows, beside, None, blocks), part]
        output = many.run(parts, (), None)
        assert output.logits is not None
        logits = output.logits.clone()
        if blocks:
            many.commit([beside], [2])
        else:
            many.run([SessionTokens(2 * turn + 1, (other[2 * turn + 1],), beside)], (), None)
        for row in range(count):
            assert_equal(logits[len(rows) + row], expected[position + row][0])
        position += count
    if among.recurrent is not None and alone.recurrent is not None:
        before = among.recurrent.taps - 1
        assert_equal(among.recurrent.state, alone.recurrent.state)
        assert_equal(among.recurrent.conv[:, :before], alone.recurrent.conv[:, :before])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@torch.inference_mode()
def test_steps_that_are_placed_before_their_tokens_are_known(tiny: Tiny, name: str) -> None:
    """Launched late, with others behind them, or never: as if nothing had been placed. What stood in a step that was
    never launched is in no later one; the first stage looks up the unused rows as well."""
    stage = load(tiny, name)
    [segment] = stage.segments
    runner = BatchRunner(segment, stage.embedding, None, graphs=ON_GPU)
    draw = random.Random(name)
    count = 20 if ON_GPU else 3
    sessions = [Session(ids(60, seed=one), segment.allocate(60, 1), segment.allocate(60, 1)) for one in range(count)]

    def rows(chosen: Sequence[Session], caches: str, *, known: bool = True) -> list[SessionTokens]:
        return [
            SessionTokens(one.length, (one.tokens[one.length] if known else -1,), getattr(one, caches))
            for one in chosen
        ]

    for _ in range(12 if ON_GPU else 3):
        chosen = draw.sample(sessions, draw.randint(2, count))
        before = draw.randint(1, len(chosen))
        placed = [runner.place(rows(chosen[:before], "among", known=False)) for _ in range(draw.choice((1, 2)))][0]
        for _ in range(draw.randint(0, 4)):
            runner.place(rows(sessions, "alone", known=False))
        one = runner.run(rows(chosen, "among"), (), None, placed=placed).hidden.clone()
        other = runner.run(rows(chosen, "alone"), (), None).hidden.clone()
        assert torch.isfinite(one).all()
        assert torch.equal(one, other)
        for session in chosen:
            session.length += 1


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@torch.inference_mode()
def test_rows_that_follow_may_be_taken_back(tiny: Tiny, name: str) -> None:
    """A step behind another one whose tokens the host does not know: its rows are those of known tokens, one that is
    taken back was never there, whatever comes behind it, and so is what a prefix keeps."""
    stage = load(tiny, name)
    [segment] = stage.segments
    single = StepRunner(segment, stage.embedding, stage.head, graphs=ON_GPU)
    many = BatchRunner(segment, stage.embedding, stage.head, graphs=ON_GPU)
    draw = random.Random(name)
    count = 20 if ON_GPU else 3
    sessions = [Session(ids(1, seed=one), segment.allocate(120, 8), segment.allocate(120, 8)) for one in range(count)]

    def alone(session: Session) -> torch.Tensor:
        rows, session.length = session.tokens[session.length :][:1], session.length + 1
        output = single.run(rows, None, session.length - 1, session.alone, None, uncommitted=False)
        assert output.logits is not None
        if session.length == len(session.tokens):
            session.tokens.append(int(output.logits[0].argmax()))
        return output.logits[0].clone()

    def among(chosen: Sequence[Session], *, follow: int | None = None, ahead: int = 0) -> torch.Tensor:
        """ahead: by how many rows these are further than their sessions. follow: from which one on the rows have those
        tokens that the rows of the last step came to."""
        output = many.run(
            [
                SessionTokens(
                    one.length + ahead,
                    (token_of_row(row) if follow is not None and row >= follow else one.tokens[one.length + ahead],),
                    one.among,
                )
                for row, one in enumerate(chosen)
            ],
            [],
            None,
        )
        assert output.logits is not None
        return output.logits[: len(chosen)].clone()

    for _ in range(10 if ON_GPU else 2):
        # Those that sit out now have perhaps a row left that their states have not advanced by.
        chosen = draw.sample(sessions, draw.randint(2, count))
        steps = [among(chosen)]
        for ahead in range(1, draw.randint(2, 5)):
            steps.append(among(chosen, follow=0, ahead=ahead))
        taken_back = set(draw.sample(range(len(chosen)), draw.randint(0, len(chosen))))
        for number, logits in enumerate(steps):
            last = number == len(steps) - 1
            for row, session in enumerate(chosen):
                if last and number and row in taken_back:
                    session.among.take_back()
                else:
                    assert_equal(logits[row], alone(session))
        for session in chosen:
            how = draw.choice(("as it is", "alone", "rows", "a block", "kept"))
            if how == "alone":
                output = single.run(
                    session.tokens[session.length :][:1], None, session.length, session.among, None, uncommitted=False
                )
                assert output.logits is not None
                one = output.logits[0].clone()
                assert_equal(one, alone(session))
            elif how in ("rows", "a block"):
                session.tokens += ids(2, seed=session.length)
                tokens = tuple(session.tokens[session.length :][:2])
                later = how == "a block"
                output = many.run([SessionTokens(session.length, tokens, session.among, uncommitted=later)], [], None)
                assert output.logits is not None
                both = output.logits[:2].clone()
                if later:
                    many.commit([session.among], [2])
                for row in both:
                    assert_equal(row, alone(session))
                session.tokens[session.length :] = []
                session.tokens += ids(1, seed=session.length)
            elif how == "kept":
                for own, other in zip(states(session.among), states(session.alone), strict=True):
                    assert_equal(own, other)
    for session in sessions:
        for own, other in zip(states(session.among), states(session.alone), strict=True):
            assert_equal(own, other)


def states(caches: SegmentCaches) -> list[torch.Tensor]:
    """What a prefix keeps of recurrent layers."""
    return [view.read(0, 0).clone() for view in caches.views() if isinstance(view, WholeView)]
