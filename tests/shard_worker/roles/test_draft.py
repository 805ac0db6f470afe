"""The draft role as a worker of its own: sessions over the wire's dataclasses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument, NotFound
from services.messages.description import FeatureTransport, HeadPlace, StepEngine
from services.messages.draft_session import OpenDraft, Propose
from services.messages.loading import LoadDraft
from services.messages.steps import FeatureSlice, Location, SnapshotRestore, SnapshotSave
from services.messages.tensors import WireTensor
from shard_worker.device.dtypes import from_wire, to_wire
from shard_worker.device.executor import DeviceThread
from shard_worker.drafting.drafters import Draft
from shard_worker.drafting.drafters.dflash import DFlashDraft
from shard_worker.roles import draft as draft_role
from shard_worker.roles.draft import DraftRole, LocalDraftSession
from tests.reference import checkpoints, storage, target
from tests.reference.dense_draft import DenseDraft
from tests.shard_worker.chain import resources
from tests.shard_worker.tiny import Tiny, ignore_progress

SUM, SLICES = FeatureTransport.SUM, FeatureTransport.SLICES
LOADED, PROJECTED = HeadPlace.LOADED, HeadPlace.PROJECTED
KNOWN, HIDDEN = 17, 64
MakeRole = Callable[[HeadPlace, FeatureTransport], DraftRole]


def new_role(thread: DeviceThread) -> DraftRole:
    """A role that holds nothing yet."""
    return DraftRole(resources(thread))


@pytest.fixture
def make_role(tiny: Tiny) -> Iterator[MakeRole]:
    """A role with the draft loaded."""
    thread = DeviceThread(1)

    def make(place: HeadPlace, transport: FeatureTransport) -> DraftRole:
        role = new_role(thread)
        draft, model = str(tiny.draft("qwen3", "plain")), str(tiny.path("qwen3"))
        role.load(LoadDraft(draft, model, place, transport), ignore_progress)
        return role

    yield make
    thread.shutdown()


class Ended:
    """What refers to itself and to a draft, as sessions that have ended do."""

    def __init__(self, draft: Draft) -> None:
        self.itself, self.draft = self, draft


def test_a_draft_is_freed_before_another_is_loaded(
    make_role: MakeRole, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the garbage collector can tell that nothing needs it any more."""
    role = make_role(LOADED, SUM)
    assert role.loaded is not None
    gone = weakref.ref(Ended(role.loaded.engine.draft))
    opening, was_gone = draft_role.open_checkpoint, list[bool]()

    def watched(*args: Any, **options: Any) -> Any:
        was_gone.append(gone() is None)
        return opening(*args, **options)

    monkeypatch.setattr(draft_role, "open_checkpoint", watched)
    gc.disable()
    try:
        role.load(LoadDraft(str(tiny.draft("qwen3", "plain")), str(tiny.path("qwen3")), LOADED, SUM), ignore_progress)
    finally:
        gc.enable()

    assert was_gone[0]


async def opened(role: DraftRole, max_length: int = 40) -> LocalDraftSession:
    described = role.describe()
    assert described is not None
    return await role.open(OpenDraft("test", described.fingerprint, max_length))


def joined(rows: int) -> torch.Tensor:
    """Random captures of both blocks, one after the other."""
    return torch.randn(rows, 2 * HIDDEN, generator=torch.Generator().manual_seed(rows))


def pieces(role: DraftRole, transport: FeatureTransport, captures: torch.Tensor, start: int) -> list[FeatureSlice]:
    """Captures as they travel."""
    if transport is SLICES:
        return [FeatureSlice(start, to_wire(part), i) for i, part in enumerate(captures.split(HIDDEN, -1))]
    assert role.loaded is not None
    return [FeatureSlice(start, to_wire(role.loaded.draft.fc.matmul(captures)))]


class KernelDraft:
    """A draft that says that kernels could run it, and otherwise is what it wraps."""

    has_kernels = True

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)


@pytest.mark.parametrize("place", [LOADED, PROJECTED])
@pytest.mark.parametrize("kernels", [True, False])
def test_the_step_engine_is_the_one_that_computes(make_role: MakeRole, place: HeadPlace, kernels: bool) -> None:
    """A draft that kernels could run is described as what it is where plain torch runs it, as after a failure."""
    role = make_role(place, SUM)
    assert role.loaded is not None
    draft: Any = KernelDraft(role.loaded.draft)
    runner: Any = draft if kernels else None
    role.loaded = replace(role.loaded, engine=replace(role.loaded.engine, draft=draft, runner=runner))

    described = role.describe()

    assert described is not None
    assert described.step_engine is (StepEngine.GRAPHS if kernels else StepEngine.TORCH)


class FailingRunner:
    """The kernels of a draft, which cannot be prepared."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def prepare(self, *_: object) -> None:
        raise self._error


def test_a_draft_is_loaded_without_kernels_that_cannot_be_compiled(
    make_role: MakeRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch serves in their place."""
    runner = FailingRunner(RuntimeError("no compiler was found"))
    monkeypatch.setattr(DFlashDraft, "has_kernels", True)
    monkeypatch.setattr(DFlashDraft, "make_runner", lambda *_, **__: runner)

    described = make_role(LOADED, SUM).describe()

    assert described is not None
    assert described.step_engine is StepEngine.TORCH


def test_a_draft_for_which_there_is_no_memory_is_not_loaded(
    make_role: MakeRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out while kernels are prepared is an error of the load."""
    runner = FailingRunner(torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(DFlashDraft, "has_kernels", True)
    monkeypatch.setattr(DFlashDraft, "make_runner", lambda *_, **__: runner)

    with pytest.raises(torch.OutOfMemoryError):
        make_role(LOADED, SUM)


@pytest.mark.parametrize("place", [LOADED, PROJECTED])
@pytest.mark.parametrize("transport", [SUM, SLICES])
async def test_a_session_proposes_what_the_dense_formula_says(
    tiny: Tiny, make_role: MakeRole, place: HeadPlace, transport: FeatureTransport
) -> None:
    """Token ids with a head of its own, hidden rows without one, from features in either form."""
    role, model = make_role(place, transport), tiny.model("qwen3")
    dense = DenseDraft(tiny.draft("qwen3", "plain"))
    embedding, head = target.embedding(model), target.lm_head(model)
    session = await opened(role)
    for rows, start in ((9, 0), (4, 9)):
        for piece in pieces(role, transport, joined(rows), start):
            await session.feature_slice(piece)
    expected = dense.forward(torch.cat((joined(9), joined(4))), embedding, head, KNOWN)
    embed = to_wire(embedding[[KNOWN, dense.mask_token_id]]) if place is PROJECTED else None

    answer = await session.propose(Propose(0, 13, KNOWN, 7, embed))

    if isinstance(answer, WireTensor):
        assert place is PROJECTED
        hidden = from_wire(answer, torch.device("cpu"))
        torch.testing.assert_close(hidden.double(), expected.hidden, rtol=0, atol=1e-4)
    else:
        assert place is LOADED
        assert answer == tuple(expected.logits.argmax(-1).tolist())
    await session.close()


async def test_a_tied_target_lends_its_embedding_as_head(tiny: Tiny) -> None:
    """Where the target's head is tied, the draft worker projects with the embedding."""
    thread = DeviceThread(1)
    role = new_role(thread)
    path = tiny.draft("qwen3-tied", "plain")
    role.load(LoadDraft(str(path), str(tiny.path("qwen3-tied")), LOADED, SLICES), ignore_progress)
    embedding = target.embedding(tiny.model("qwen3-tied"))
    session = await opened(role)
    for piece in pieces(role, SLICES, joined(9), 0):
        await session.feature_slice(piece)

    answer = await session.propose(Propose(0, 9, KNOWN, 7))

    assert answer == tuple(DenseDraft(path).forward(joined(9), embedding, embedding, KNOWN).logits.argmax(-1).tolist())
    thread.shutdown()


def test_a_draft_describes_itself(tiny: Tiny, make_role: MakeRole) -> None:
    """Everything that a coordinator needs for planning is said."""
    described = make_role(PROJECTED, SLICES).describe()

    assert described is not None
    assert (described.block_size, described.mask_token_id, described.capture_layers) == (8, 254, (1, 2))
    assert (described.hidden_size, described.vocab_size, described.num_target_layers) == (64, 256, 4)
    assert (described.head_place, described.feature_transport) == (PROJECTED, SLICES)
    assert (described.max_position, described.dtype) == (4096, "float32")
    stored = storage.load_tensors(tiny.draft("qwen3", "plain"))
    # A CPU multiplies the matrices that make keys and values of the target's features in a form of their own.
    twice = [tensor for name, tensor in stored.items() if name.endswith(("k_proj.weight", "v_proj.weight"))]
    assert described.weight_bytes == sum(tensor.numel() * 4 for tensor in (*stored.values(), *twice))


async def test_nothing_is_served_before_a_load() -> None:
    """Opening on an empty worker is refused, and it describes nothing."""
    thread = DeviceThread(1)
    role = new_role(thread)

    assert role.describe() is None
    with pytest.raises(FailedPrecondition, match="no draft is loaded"):
        await role.open(OpenDraft("test", "0", 10))
    thread.shutdown()


def test_a_load_that_fails_leaves_nothing_loaded(make_role: MakeRole) -> None:
    """After a failed load the old draft isn't served as if it were the new one."""
    role = make_role(PROJECTED, SUM)

    with pytest.raises(NotFound):
        role.load(LoadDraft("/nowhere", "", PROJECTED, SUM), ignore_progress)

    assert role.describe() is None


def test_a_head_of_another_target_is_refused(tiny: Tiny, tmp_path: Path, make_role: MakeRole) -> None:
    """The head that a draft worker loads must have the draft's vocabulary and width."""
    other = checkpoints.write_qwen3(tmp_path / "m", vocab=128)
    role = make_role(PROJECTED, SUM)

    with pytest.raises(InvalidArgument, match=r"lm_head\.weight has shape \[128, 64\], the draft needs \[256, 64\]"):
        role.load(LoadDraft(str(tiny.draft("qwen3", "plain")), str(other), LOADED, SUM), ignore_progress)


async def test_a_session_for_another_draft_is_refused(make_role: MakeRole) -> None:
    """Another fingerprint, an empty session and one longer than any context are refused."""
    role = make_role(PROJECTED, SUM)
    described = role.describe()
    assert described is not None

    with pytest.raises(FailedPrecondition) as caught:
        await role.open(OpenDraft("test", "0" * 32, 10))
    assert caught.value.reason == "FINGERPRINT_MISMATCH"
    for length in (0, (1 << 20) + 1, 1 << 32):
        with pytest.raises(InvalidArgument, match=f"max_length is {length}; it must be between 1 and 1048576"):
            await role.open(OpenDraft("test", described.fingerprint, length))
    assert role.open_sessions == 0


def wire(rows: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> WireTensor:
    return to_wire(torch.zeros(rows, hidden).to(dtype))


@pytest.mark.parametrize(
    ("transport", "piece", "kind", "field"),
    [
        (SUM, FeatureSlice(0, wire(3)), FailedPrecondition, "start_position"),
        (SUM, FeatureSlice(6, wire(3)), FailedPrecondition, "start_position"),
        (SUM, FeatureSlice(5, wire(3), 0), InvalidArgument, "capture_index"),
        (SUM, FeatureSlice(5, wire(36)), InvalidArgument, "features"),
        (SUM, FeatureSlice(5, wire(0)), InvalidArgument, "features"),
        (SUM, FeatureSlice(5, wire(3, 32)), InvalidArgument, "features"),
        (SUM, FeatureSlice(5, wire(3, dtype=torch.int32)), InvalidArgument, "features"),
        (SUM, FeatureSlice(5, WireTensor("float32", (192,), bytes(768))), InvalidArgument, "features"),
        (SLICES, FeatureSlice(5, wire(3)), InvalidArgument, "capture_index"),
        (SLICES, FeatureSlice(5, wire(3), 1), InvalidArgument, "capture_index"),
        (SLICES, FeatureSlice(5, wire(3), 2), InvalidArgument, "capture_index"),
    ],
)
async def test_features_out_of_step_are_refused_and_the_session_goes_on(
    make_role: MakeRole, transport: FeatureTransport, piece: FeatureSlice, kind: type[FlashsplitError], field: str
) -> None:
    """Gaps, repeats, foreign captures and shapes that don't fit are named; the right features are still taken."""
    role = make_role(PROJECTED, transport)
    session = await opened(role)
    for good in pieces(role, transport, joined(5), 0):
        await session.feature_slice(good)

    with pytest.raises(kind) as caught:
        await session.feature_slice(piece)
    assert caught.value.where["field"] == field

    for good in pieces(role, transport, joined(3), 5):
        await session.feature_slice(good)
    answer = await session.propose(Propose(0, 8, KNOWN, 3, wire(2)))
    assert isinstance(answer, WireTensor)
    assert answer.shape == (3, HIDDEN)


@pytest.mark.parametrize(
    ("piece", "kind"),
    [(FeatureSlice(0, wire(4), 1), InvalidArgument), (FeatureSlice(3, wire(3), 1), FailedPrecondition)],
)
async def test_slices_of_one_step_are_of_the_same_rows(
    make_role: MakeRole, piece: FeatureSlice, kind: type[FlashsplitError]
) -> None:
    """Captures of different lengths or positions don't make a step together; the right one still does."""
    session = await opened(make_role(PROJECTED, SLICES))
    with pytest.raises(FailedPrecondition):
        await session.feature_slice(FeatureSlice(3, wire(3), 0))
    await session.feature_slice(FeatureSlice(0, wire(3), 0))
    with pytest.raises(kind):
        await session.feature_slice(piece)

    await session.feature_slice(FeatureSlice(0, wire(3), 1))

    assert isinstance(await session.propose(Propose(0, 3, KNOWN, 2, wire(2))), WireTensor)


@pytest.mark.parametrize(
    ("place", "request_", "kind", "field"),
    [
        (PROJECTED, Propose(0, 4, KNOWN, 3, wire(2)), FailedPrecondition, "position"),
        (PROJECTED, Propose(0, 6, KNOWN, 3, wire(2)), FailedPrecondition, "position"),
        (PROJECTED, Propose(0, 5, KNOWN, 0, wire(2)), FailedPrecondition, "tokens"),
        (PROJECTED, Propose(0, 5, KNOWN, 8, wire(2)), FailedPrecondition, "tokens"),
        (PROJECTED, Propose(0, 5, 256, 3, wire(2)), InvalidArgument, "token_id"),
        (PROJECTED, Propose(0, 500, KNOWN, 3, wire(2)), InvalidArgument, "position"),
        (PROJECTED, Propose(0, 5, KNOWN, 3), InvalidArgument, "embed.rows"),
        (PROJECTED, Propose(0, 5, KNOWN, 3, wire(1)), InvalidArgument, "embed.rows"),
        (PROJECTED, Propose(0, 5, KNOWN, 3, wire(2, 32)), InvalidArgument, "embed.rows"),
        (LOADED, Propose(0, 4, KNOWN, 3), FailedPrecondition, "position"),
        (LOADED, Propose(0, 5, KNOWN, 8), FailedPrecondition, "tokens"),
        (LOADED, Propose(0, 5, 256, 3), InvalidArgument, "token_id"),
    ],
)
async def test_a_proposal_that_cannot_be_made_is_refused_and_the_session_goes_on(
    make_role: MakeRole, place: HeadPlace, request_: Propose, kind: type[FlashsplitError], field: str
) -> None:
    """Other positions than the context's end, too many draft tokens, unknown tokens and missing rows are named."""
    role = make_role(place, SUM)
    session = await opened(role)
    for good in pieces(role, SUM, joined(5), 0):
        await session.feature_slice(good)

    with pytest.raises(kind) as caught:
        await session.propose(request_)
    assert caught.value.where["field"] == field

    await session.propose(Propose(1, 5, KNOWN, 7, wire(2) if place is PROJECTED else None))


async def test_sessions_are_counted_until_they_close(make_role: MakeRole) -> None:
    """Closing twice frees one session."""
    role = make_role(PROJECTED, SUM)
    first, second = await opened(role), await opened(role)
    assert role.open_sessions == 2

    await first.close()
    await first.close()

    assert role.open_sessions == 1
    await second.close()
    assert role.open_sessions == 0


@pytest.mark.parametrize("transport", [SUM, SLICES])
async def test_a_kept_context_is_taken_up_by_another_session(make_role: MakeRole, transport: FeatureTransport) -> None:
    """Draft tokens behind a restored context are those behind the context itself, in a session of another size too."""
    role = make_role(LOADED, transport)
    first, second = await opened(role, 60), await opened(role, 40)
    for piece in pieces(role, transport, joined(9), 0):
        await first.feature_slice(piece)
    saved = await first.save_snapshot(SnapshotSave("a", 9))
    assert (saved.refusal, saved.location) == ("", Location(None, "here", "cpu", "here:1"))

    restored = await second.restore_snapshot(SnapshotRestore("a", 9))

    assert restored.size_bytes == saved.size_bytes == 2 * 2 * 2 * 16 * 9 * 4
    assert await second.propose(Propose(0, 9, KNOWN, 7)) == await first.propose(Propose(0, 9, KNOWN, 7))
    for session in (first, second):
        for piece in pieces(role, transport, joined(4), 9):
            await session.feature_slice(piece)
    assert await second.propose(Propose(1, 13, KNOWN, 7)) == await first.propose(Propose(1, 13, KNOWN, 7))


async def test_snapshots_out_of_step_are_refused_and_the_session_goes_on(make_role: MakeRole) -> None:
    """Other lengths than the context's, restores behind features or beyond the session, and unknown names."""
    role = make_role(LOADED, SUM)
    first, small = await opened(role), await opened(role, 8)
    for piece in pieces(role, SUM, joined(9), 0):
        await first.feature_slice(piece)
    for length in (0, 8, 10):
        with pytest.raises(FailedPrecondition, match=f"length is {length}, the draft's context has 9 tokens"):
            await first.save_snapshot(SnapshotSave("a", length))
    await first.save_snapshot(SnapshotSave("a", 9))
    with pytest.raises(FailedPrecondition, match="restore comes first"):
        await first.restore_snapshot(SnapshotRestore("a", 9))
    with pytest.raises(InvalidArgument, match="length is 9, the session holds 8 tokens"):
        await small.restore_snapshot(SnapshotRestore("a", 9))
    for length in (0, 10):
        with pytest.raises((FailedPrecondition, InvalidArgument)):
            await small.restore_snapshot(SnapshotRestore("a", length))
    with pytest.raises(NotFound):
        await small.restore_snapshot(SnapshotRestore("b", 8))

    await small.restore_snapshot(SnapshotRestore("a", 5))
    assert len(await small.propose(Propose(0, 5, KNOWN, 7))) == 7
    assert len(await first.propose(Propose(0, 9, KNOWN, 7))) == 7
