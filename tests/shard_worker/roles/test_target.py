"""The target role: what it loads, what it says of itself, and which sessions it refuses to open."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, NotFound, ResourceExhausted
from services.layers import LayerRange
from services.messages.description import FeatureTransport, HeadPlace
from services.messages.loading import FeatureCapture, LoadDraft, LoadTarget
from services.messages.sampling import SamplingParams
from services.messages.steps import Commit, DraftRoute, Failure, FailureReason, Hop, OpenSession, Proposal, StepKind
from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.drafters import Draft
from shard_worker.drafting.engine import DraftEngine
from shard_worker.model.layer_weights import DecoderWeights
from shard_worker.roles.target import role as target_role
from shard_worker.roles.target.role import TargetRole
from shard_worker.stage import batch_invariance
from shard_worker.stage.batch_invariance import check_batch_invariance
from shard_worker.stage.loader import StageLoader
from shard_worker.stage.stage import Stage, StageState
from shard_worker.stage.step_runner import StepRunner
from shard_worker.weights.opening import open_checkpoint
from tests.reference import checkpoints, storage
from tests.reference.draft_checkpoints import DFLASH2, DOMINO, DSPARK
from tests.shard_worker.chain import DRAFT_ADDRESS, Chain, resources
from tests.shard_worker.tiny import Run, Tiny, ids, ignore_progress, load_stage


@pytest.fixture(scope="module")
def chain(tiny: Tiny) -> Iterator[Chain]:
    """Two stages with a draft beside the last one."""
    chain = Chain(tiny.path("qwen3_5"), (3,), draft=tiny.draft("qwen3_5", "role", target_layer_ids=(6, 0)))
    yield chain
    chain.shutdown()


@pytest.fixture
def role() -> Iterator[TargetRole]:
    """A role that holds nothing yet."""
    thread = DeviceThread(1)
    yield TargetRole(resources(thread))
    thread.shutdown()


def part(path: Path, first: int = 0, last: int = 4, draft: Path | None = None) -> LoadTarget:
    capture = None if draft is None else FeatureCapture(str(draft), FeatureTransport.SUM)
    return LoadTarget(str(path), LayerRange(first, last), None, capture)


def test_a_stage_describes_itself(chain: Chain, tiny: Tiny) -> None:
    """Identity, layers, sizes and captures are those of what was loaded."""
    described = chain.roles[1].describe()
    checkpoint = open_checkpoint(tiny.path("qwen3_5"))

    assert described is not None
    assert described.fingerprint == checkpoint.fingerprint
    assert (described.family, described.layers, described.num_layers) == ("qwen3_5", LayerRange(3, 8), 8)
    assert (described.hidden_size, described.vocab_size, described.max_position) == (64, 256, 4096)
    assert (described.dtype, described.capture_layers) == ("float32", (6, 0))
    assert described.feature_transport is FeatureTransport.SUM
    own = [name for name in checkpoint.headers if any(name.startswith(f"model.layers.{i}.") for i in range(3, 8))]
    assert described.weight_bytes == sum(map(checkpoint.size_bytes, [*own, "model.norm.weight", "lm_head.weight"]))


@pytest.mark.parametrize(
    ("own", "form"), [(None, "zlab"), (None, "speculators"), (DFLASH2, "zlab"), (DSPARK, "zlab"), (DOMINO, "zlab")]
)
def test_a_draft_made_for_another_model_is_refused_with_both_names(
    role: TargetRole, tmp_path: Path, own: dict[str, Any] | None, form: str
) -> None:
    """Whatever its layout, and by whatever it can be told."""
    target = checkpoints.write_qwen3(tmp_path / "target", layers=4)
    others = {
        "hidden_size is 96, the target's 64": {"hidden": 96},
        "vocab_size is 320, the target's 256": {"vocab": 320},
        "captures block 6, the target has 4 blocks": {"layers": 8},
    }
    for number, (why, shape) in enumerate(others.items()):
        other = checkpoints.write_qwen3(tmp_path / f"other-{number}", **shape)
        draft = checkpoints.write_draft(tmp_path / f"its-draft-{number}", other, own=own, form=form)

        with pytest.raises(InvalidArgument) as caught:
            role.load(part(target, draft=draft), ignore_progress)

        assert caught.value.message.startswith(f"draft its-draft-{number} was made for another model than target: ")
        assert why in caught.value.message


def test_a_load_that_fails_leaves_nothing_loaded(role: TargetRole, tiny: Tiny) -> None:
    """After a failed load the old stage isn't served as if it were the new one."""
    role.load(part(tiny.path("qwen3")), ignore_progress)
    assert role.describe() is not None

    with pytest.raises(NotFound):
        role.load(part(Path("/nowhere")), ignore_progress)

    assert role.describe() is None


class Ended:
    """What refers to itself and to a stage, as sessions that have ended do."""

    def __init__(self, stage: Stage) -> None:
        self.itself, self.stage = self, stage


def test_what_another_stage_does_not_take_is_freed_before_it_is_loaded(
    role: TargetRole, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the garbage collector can tell that nothing needs it any more."""
    role.load(part(tiny.path("qwen3"), 0, 4), ignore_progress)
    assert role.loaded is not None
    gone = weakref.ref(Ended(role.loaded.stage))
    load, was_gone = StageLoader.load, list[bool]()

    def watched(*args: Any, **options: Any) -> Stage:
        was_gone.append(gone() is None)
        return load(*args, **options)

    monkeypatch.setattr(StageLoader, "load", watched)
    gc.disable()
    try:
        role.load(part(tiny.path("qwen3"), 0, 3), ignore_progress)
    finally:
        gc.enable()

    assert was_gone == [True]


def prepared(role: TargetRole, wanted: LoadTarget) -> set[int]:
    """Have the role load a part. Returns the numbers of rows that were tried out."""
    role.load(wanted, ignore_progress)
    role.prepare()
    assert role.loaded is not None
    return role.loaded.invariant_rows


@pytest.mark.parametrize(
    ("name", "of_fewer"),
    [
        ("qwen3_5", False),
        ("gemma4-inputs", True),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("qwen3", "qwen3-tied")),
    ],
)
def test_what_exact_sessions_will_ask_for_is_tried_out_at_loading(
    role: TargetRole, tiny: Tiny, name: str, of_fewer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried out again of matrices that were in memory already, as in a worker that takes a lost one's place;
    of others it is, as of those that have a row for each element of all layers' inputs."""
    tried = list[LayerRange]()

    def checked(stage: Stage, rows: int) -> None:
        tried.append(stage.layers)
        check_batch_invariance(stage, rows)

    monkeypatch.setattr(batch_invariance, "check_batch_invariance", checked)
    layers = open_checkpoint(tiny.path(name)).config["num_hidden_layers"]
    whole = part(tiny.path(name), 0, layers)
    exact = replace(whole, batch_invariant_rows=16)

    assert prepared(role, whole) == set()
    assert tried == []
    assert prepared(role, exact) == {16}
    assert tried == [LayerRange(0, layers)]
    fewer = LayerRange(2, layers)
    assert prepared(role, replace(exact, layers=fewer)) == {16}
    assert tried == [LayerRange(0, layers), *([fewer] if of_fewer else [])]
    assert prepared(role, exact) == {16}
    assert tried[-1] == LayerRange(0, layers)
    assert len(tried) == 2 + of_fewer


@pytest.mark.parametrize("rows", [0, 65])
def test_rows_that_no_step_has_are_refused_at_loading(role: TargetRole, tiny: Tiny, rows: int) -> None:
    """Nothing is loaded then."""
    with pytest.raises(InvalidArgument, match=f"exact_rows is {rows}; it must be between 1 and 64"):
        prepared(role, replace(part(tiny.path("qwen3")), batch_invariant_rows=rows))

    assert role.describe() is None


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"hidden": 32}, "hidden_size is 64, the target's 32"),
        ({"vocab": 128}, "vocab_size is 256, the target's 128"),
        ({"layers": 2}, "captures block 2, the target has 2 blocks"),
    ],
)
def test_a_draft_for_another_target_is_refused(
    role: TargetRole, tiny: Tiny, tmp_path: Path, target: dict[str, int], words: str
) -> None:
    """Width, vocabulary and captured blocks of the draft must be the target's."""
    path = checkpoints.write_qwen3(tmp_path / "m", **target)

    with pytest.raises(InvalidArgument, match=words) as caught:
        role.load(part(path, 0, 2, tiny.draft("qwen3", "plain")), ignore_progress)

    assert caught.value.where["field"] == "--draft"
    assert role.describe() is None


def test_what_is_no_draft_is_refused(role: TargetRole, tiny: Tiny) -> None:
    """A target's checkpoint in the draft's place is named as such."""
    with pytest.raises(FlashsplitError, match="is not a draft of a known kind .architectures: Qwen3ForCausalLM"):
        role.load(part(tiny.path("qwen3"), draft=tiny.path("qwen3")), ignore_progress)


async def test_nothing_is_served_before_a_load(role: TargetRole, chain: Chain) -> None:
    """Opening on an empty worker says so, and where."""
    with pytest.raises(FailedPrecondition, match="no stage is loaded") as caught:
        await role.open(chain.request())

    assert caught.value.reason == "NOT_LOADED"
    assert caught.value.where == {"stage": "0", "host": "here", "device": "cpu"}


REFUSED: list[tuple[dict[str, Any], type[FlashsplitError], str]] = [
    ({"fingerprint": "0" * 32}, FailedPrecondition, "fingerprint"),
    ({"layers": LayerRange(0, 4)}, FailedPrecondition, "layers"),
    ({"layers": LayerRange(1, 3)}, FailedPrecondition, "layers"),
    ({"route": ()}, InvalidArgument, "route"),
    ({"route": (Hop("stage:1", LayerRange(4, 8)),)}, InvalidArgument, "route"),
    ({"route": (Hop("stage:1", LayerRange(2, 8)),)}, InvalidArgument, "route"),
    ({"route": (Hop("stage:1", LayerRange(3, 7)),)}, InvalidArgument, "route"),
    ({"route": (Hop("stage:1", LayerRange(3, 8)), Hop("x", LayerRange(3, 8)))}, InvalidArgument, "route"),
    ({"max_length": 0}, InvalidArgument, "max_length"),
    ({"max_length": 4097}, InvalidArgument, "max_length"),
    ({"max_rows": 0}, InvalidArgument, "max_rows"),
    ({"max_rows": 10_000}, InvalidArgument, "max_rows"),
    ({"block_rows": 0}, InvalidArgument, "block_rows"),
    ({"block_rows": 65}, InvalidArgument, "block_rows"),
    ({"batch_invariant_rows": 15}, InvalidArgument, "exact_rows"),
    ({"batch_invariant_rows": 65}, InvalidArgument, "exact_rows"),
    ({"stop_token_ids": frozenset({3, 256})}, InvalidArgument, "stop_token_ids"),
    ({"sampling": SamplingParams(logit_bias={256: 1.0})}, InvalidArgument, "logit_bias"),
]


@pytest.mark.parametrize(("changes", "kind", "field"), REFUSED)
async def test_a_session_for_something_else_is_refused(
    chain: Chain, changes: dict[str, Any], kind: type[FlashsplitError], field: str
) -> None:
    """Another model, other layers, a route with gaps and numbers out of range are refused, and nothing stays open."""
    with pytest.raises(kind) as caught:
        await chain.roles[0].open(chain.request(**changes))

    assert caught.value.where["field"] == field
    assert caught.value.where["host"] == "host-0"
    assert [role.open_sessions for role in chain.roles] == [0, 0]


@pytest.mark.parametrize("changes", [{"max_length": 4096, "max_rows": 8192, "block_rows": 64}, {"max_length": 1}])
async def test_limits_themselves_are_accepted(chain: Chain, changes: dict[str, Any]) -> None:
    """The largest and the smallest sessions can be opened."""
    session = await chain.roles[0].open(chain.request(**changes))

    assert len(session.stages) == 2
    await session.close()


async def test_a_refusal_further_down_says_where(chain: Chain) -> None:
    """What the last stage refuses reaches the caller with the last stage's place, and the first stage is free again."""
    loaded = chain.roles[1].loaded
    chain.roles[1].loaded = None
    try:
        with pytest.raises(FailedPrecondition, match="no stage is loaded") as caught:
            await chain.roles[0].open(chain.request())
    finally:
        chain.roles[1].loaded = loaded

    assert (caught.value.where["stage"], caught.value.where["host"]) == ("1", "host-1")
    assert chain.roles[0].open_sessions == 0


@pytest.mark.parametrize(("stage", "late"), [(0, False), (0, True), (1, False)])
async def test_what_is_opened_meanwhile_is_closed_where_there_is_no_memory(
    chain: Chain, stage: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage takes a session's memory while the next stage, or the draft beside the last one, opens it: the error says
    which stage has none, and the session stays open nowhere, whether the next stage had opened it by then or not."""
    first, last = chain.roles
    stages = [role.loaded.stage for role in chain.roles if role.loaded is not None]
    there, closed, allocate = threading.Event(), list[str](), target_role.allocate

    def allocate_or_fail(request: OpenSession, of: Stage, checked: set[int]) -> StageState:
        if of is not stages[stage]:
            return allocate(request, of, checked)
        assert not late or there.wait(10)
        raise ResourceExhausted("no memory is left")

    def watched(opening: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def open_and_watch(*given: Any, **options: Any) -> Any:
            made = await opening(*given, **options)
            close = made.close

            async def closing(*why: str) -> None:
                closed.append("closed")
                await close(*why)

            monkeypatch.setattr(made, "close", closing)
            there.set()
            return made

        return open_and_watch

    monkeypatch.setattr(target_role, "allocate", allocate_or_fail)
    opener: object = last._drafts if stage else first
    name = "open" if stage else "_open_next"
    monkeypatch.setattr(opener, name, watched(getattr(opener, name)))
    with pytest.raises(ResourceExhausted, match="no memory is left") as caught:
        await first.open(chain.request())

    assert caught.value.where["stage"] == str(stage)
    assert closed == ["closed"] * there.is_set()
    assert there.is_set() or not late
    assert [role.open_sessions for role in chain.roles] == [0, 0]


async def test_a_session_with_a_draft_begins_without_one(chain: Chain, tiny: Tiny) -> None:
    """Without a draft beside the last stage, or at the named address, the session says so at its first step, answers
    that, and proposes nothing."""
    bare = Chain(tiny.path("qwen3_5"))
    bare.directory.drafts[DRAFT_ADDRESS] = chain.draft_role
    assert chain.draft_role is not None
    loaded = chain.draft_role.loaded
    chain.draft_role.loaded = None
    try:
        for route, words in ((DraftRoute(), "beside the last stage"), (DraftRoute(DRAFT_ADDRESS), "at draft:1")):
            async with bare.session(draft=route) as client:
                await client.send(client.frame(StepKind.DECODE, [1, 2], 3))
                events = [await anext(client.events) for _ in range(3)]
                [lost] = [event for event in events if isinstance(event, Failure)]
                assert (lost.reason, lost.code) == (FailureReason.DRAFT_LOST, "UNAVAILABLE")
                assert words in lost.message
                [answer] = [event for event in events if isinstance(event, Commit)]
                assert len(answer.token_ids) == 1
                assert isinstance(events[-1], Proposal)
                assert events[-1].token_ids == ()
    finally:
        chain.draft_role.loaded = loaded
        bare.shutdown()


@pytest.mark.parametrize("beside", [True, False])
async def test_stages_and_draft_must_speak_of_the_same_blocks(tiny: Tiny, beside: bool) -> None:
    """A draft loaded after stages that capture other blocks is refused: its draft tokens would be noise."""
    own = tiny.draft("qwen3_5", "role", target_layer_ids=(6, 0))
    other = tiny.draft("qwen3_5", "other", target_layer_ids=(0, 6))
    place = HeadPlace.SHARED if beside else HeadPlace.PROJECTED
    chain = Chain(tiny.path("qwen3_5"), draft=own, place=place)
    assert chain.draft_role is not None
    chain.draft_role.load(LoadDraft(str(other), "", place, FeatureTransport.SUM), ignore_progress)

    with pytest.raises(FailedPrecondition, match=r"reads blocks \[0, 6\], this stage captures \[6, 0\]") as caught:
        await chain.roles[0].open(chain.request())

    assert caught.value.reason == "CAPTURE_MISMATCH"
    assert (chain.roles[0].open_sessions, chain.draft_role.open_sessions) == (0, 0)
    chain.shutdown()


async def test_stages_that_capture_nothing_take_no_draft(chain: Chain, tiny: Tiny) -> None:
    """Stages loaded without a draft refuse a session with one."""
    bare = Chain(tiny.path("qwen3_5"))
    bare.directory.drafts[DRAFT_ADDRESS] = chain.draft_role

    with pytest.raises(FailedPrecondition, match=r"this stage captures \[\]"):
        await bare.roles[0].open(bare.request(draft=DraftRoute(DRAFT_ADDRESS)))

    bare.shutdown()


def test_the_fingerprint_is_the_checkpoints(role: TargetRole, tiny: Tiny, tmp_path: Path) -> None:
    """Two workers with copies of a checkpoint in different places hold the same model, whatever their layers."""
    copy = Path(shutil.copytree(tiny.path("qwen3"), tmp_path / "elsewhere"))
    seen = []
    for loaded in (part(tiny.path("qwen3"), 0, 2), part(copy, 2, 4), replace(part(copy), dtype="bfloat16")):
        role.load(loaded, ignore_progress)
        described = role.describe()
        assert described is not None
        seen.append(described.fingerprint)
    storage.edit_config(copy, lambda config: config.update(rms_norm_eps=1e-4))
    role.load(part(copy), ignore_progress)
    described = role.describe()

    assert described is not None
    assert len(set(seen)) == 1
    assert described.fingerprint != seen[0]


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_5"])
def test_layers_that_are_held_are_not_read_again(role: TargetRole, tiny: Tiny, name: str) -> None:
    """A worker that holds all layers makes any stage of them, and one that holds a stage reads only what a longer one
    has beside it, with the logits of one that read everything; in another element type all are read."""
    path, whole = tiny.path(name), load_stage(tiny.path(name))
    end, before = whole.config.num_layers, dict[int, DecoderWeights]()
    for first, read in ((0, end), (2, 0), (1, 1), (0, 1)):
        role.load(part(path, first, end), ignore_progress)
        assert role.loaded is not None
        stage = role.loaded.stage
        now = dict(enumerate(stage.segments[0].weights, first))
        assert sum(before.get(layer) is not weights for layer, weights in now.items()) == read
        assert stage.weight_bytes == load_stage(path, (first, end)).weight_bytes
        before = now
    prompt = ids(20)
    assert torch.equal(Run([stage])(prompt), Run([whole])(prompt))
    role.load(replace(part(path, 0, end), dtype="bfloat16"), ignore_progress)
    assert role.loaded is not None
    assert not any(weights is before[layer] for layer, weights in enumerate(role.loaded.stage.segments[0].weights))


class KernelDraft:
    """A draft whose kernels run on a CPU too: it is what it wraps, and counts when they are prepared."""

    has_kernels = True

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.prepared = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def make_runner(self, _: torch.Tensor, *, graphs: bool, sessions: int | None = None) -> KernelDraft:
        return self

    def prepare(self, mask_row: torch.Tensor, embedding: torch.Tensor | None) -> None:
        self.prepared += 1


class BrokenKernelDraft(KernelDraft):
    """A draft whose kernels cannot be compiled."""

    def prepare(self, mask_row: torch.Tensor, embedding: torch.Tensor | None) -> None:
        raise RuntimeError("no compiler was found")


class StageKernels:
    """Stands for the kernels of a stage, which a CPU does not have."""

    def prepare(self, *, drafted: bool) -> None:
        """Nothing has to be prepared."""


@pytest.mark.parametrize("same", [True, False])
def test_only_a_draft_of_this_target_is_prepared_with_it(tiny: Tiny, same: bool) -> None:
    """A draft that was loaded before may be another target's, whose tokens are not in this target's embedding."""
    chain = Chain(tiny.path("qwen3_5"), (3,), draft=tiny.draft("qwen3_5", "role", target_layer_ids=(6, 0)))
    role, draft_role = chain.roles[1], chain.draft_role
    assert role.loaded is not None
    assert draft_role is not None
    assert draft_role.loaded is not None
    draft: Any = KernelDraft(draft_role.loaded.draft)
    draft_role.loaded = replace(draft_role.loaded, engine=DraftEngine(draft))
    part = role.loaded.part if same else replace(role.loaded.part, model_path="/another")
    stage = replace(role.loaded.stage, runners=(cast(StepRunner, StageKernels()),))
    role.loaded = replace(role.loaded, part=part, stage=stage)

    role.prepare()

    # For one session and for several.
    assert draft.prepared == 2 * same
    assert role.loaded.stage.runners
    chain.shutdown()


async def test_sessions_draft_in_plain_torch_where_kernels_failed(tiny: Tiny) -> None:
    """Where the kernels of a draft beside the stage cannot be compiled, its sessions do without them."""
    prompt, _ = tiny.clear_prompt("qwen3_5", 12, 12)
    chain = Chain(tiny.path("qwen3_5"), (3,), draft=tiny.draft("qwen3_5", "role", target_layer_ids=(6, 0)))
    async with chain.session() as client:
        expected = await client.speculate(prompt, 12)
    role, draft_role = chain.roles[1], chain.draft_role
    assert role.loaded is not None
    assert draft_role is not None
    assert draft_role.loaded is not None
    draft: Any = BrokenKernelDraft(draft_role.loaded.draft)
    draft_role.loaded = replace(draft_role.loaded, engine=DraftEngine(draft))
    stage = replace(role.loaded.stage, runners=(cast(StepRunner, StageKernels()),))
    role.loaded = replace(role.loaded, stage=stage)

    role.prepare()
    async with chain.session() as client:
        answer = await client.speculate(prompt, 12)

    assert answer.tokens == expected.tokens
    assert answer.proposals == expected.proposals
    chain.shutdown()
