"""What a plan says: bytes on the edges, why the draft is where it is, what does not fit."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.cli.commands.plan import parse_lengths
from coordinator.cluster.placement import Plan, make_plan
from coordinator.planning.draft_size import read_draft_size
from coordinator.planning.edges import Edge, plan_edges
from coordinator.planning.memory import Models
from coordinator.planning.model_size import read_model_size
from coordinator.planning.picture import BAR, show
from coordinator.planning.planner import free_bytes
from coordinator.planning.report import as_json, draft_reason, make_report
from services.errors import InvalidArgument
from services.layers import LayerRange
from services.messages.description import FeatureTransport, HeadPlace
from services.processes.device_memory import GPU_CONTEXT_BYTES
from tests.coordinator.planning.conftest import mixture_worker, worker
from tests.reference import checkpoints
from tests.reference.draft_checkpoints import DFLASH2

Pairs = dict[str, tuple[Path, Path]]


def models_of(pairs: Pairs, *, draft: bool = True, **how: object) -> Models:
    target = read_model_size(pairs["qwen3"][0], None)
    drafted = read_draft_size(pairs["qwen3"][1], target, None) if draft else None
    return Models(target, drafted, **how)  # type: ignore[arg-type]


def plan_of(devices: str, *, draft: str | None = None, has_draft: bool = True, layers: str | None = None) -> Plan:
    return make_plan(
        target_devices=devices,
        layer_split=None,
        target_layers=layers,
        draft_device=draft,
        num_layers=6,
        has_draft=has_draft,
    )


def test_rows_cross_each_edge_once(pairs: Pairs) -> None:
    """A plain row is a hidden vector and a token id; the coordinator sends ids alone."""
    hidden = 64 * 2 + 4
    assert plan_edges(models_of(pairs, draft=False), plan_of("cpu,cpu", has_draft=False), 512) == [
        Edge("coordinator", "stage 0", 4, 0, 4 * 512),
        Edge("stage 0", "stage 1", hidden, 0, hidden * 512),
    ]


def test_experts_in_the_hosts_memory_stand_apart(pairs: Pairs) -> None:
    """In the table and the object, with what they take of which memory, how long a step waits for them, and where the
    option changes nothing."""
    models = Models(read_model_size(pairs["qwen3_moe"][0], None), None)
    plan = make_plan(
        target_devices="cuda:0,cpu",
        layer_split=None,
        draft_device=None,
        num_layers=4,
        has_draft=False,
        expert_devices="cpu",
    )
    workers = (mixture_worker(free=1 << 30, host=1 << 29), worker("cpu", free=1 << 29))
    report = make_report(models, plan, lengths=(64, 128), sessions=1, workers=workers)
    [_, experts] = models.target.left_bytes(LayerRange(0, 2), 1.0)
    assert [(load.owner, load.memory) for load in report.devices] == [
        ("stage 0", "cuda:0 of a"),
        ("stage 0 experts", "cpu of a"),
        ("stage 1", "cpu of a"),
    ]
    assert (report.devices[1].weight_bytes, report.devices[1].free_bytes) == (experts, 1 << 29)
    assert report.fitting is not None
    assert min(report.fitting.values()) > 0
    out = io.StringIO()
    show(report, Console(file=out, width=500))
    text = out.getvalue()
    assert "experts ms" in text
    assert "Note: stage 1 is on a CPU, whose memory holds its experts anyway: --expert-devices cpu" in text
    assert "--target-devices cuda:0,cpu --target-layers 0:2,2:4 --expert-devices cpu" in text
    found = as_json(report)
    assert found["expert_devices"] == "cpu"
    assert found["predicted"]["stages"][0]["host_s"] > 0  # type: ignore[index]
    unasked = make_report(models, plan, lengths=(64,), sessions=1, local_memory=(1 << 30, 1 << 20))
    assert [load.free_bytes for load in unasked.devices] == [None, 1 << 20, 1 << 20]
    plain = make_report(models, replace(plan, stages=plan.stages[1:]), lengths=(64,), sessions=1)
    assert [load.owner for load in plain.devices] == ["stage 0"]


def test_features_ride_once_there_are_any(pairs: Pairs) -> None:
    """Before the first captured block nothing rides along; then one float32 sum, or a slice for every capture."""
    summed, sliced = models_of(pairs), models_of(pairs, transport=FeatureTransport.SLICES)
    assert summed.draft is not None
    captured, block, hidden = summed.draft.capture_layers, summed.draft.block_size, 64 * 2 + 4
    early = plan_of("cpu,cpu", layers=f"0:{min(captured)},{min(captured)}:6")
    late = plan_of("cpu,cpu", layers="0:5,5:6")
    before = sum(1 for layer in captured if layer < 5)

    assert plan_edges(summed, early, 1)[1].verify_bytes == hidden * block
    assert plan_edges(summed, late, 1)[1].verify_bytes == (hidden + 64 * 4) * block
    assert plan_edges(sliced, late, 1)[1].verify_bytes == (hidden + before * 64 * 2) * block
    assert plan_edges(summed, late, 1)[1].decode_bytes == hidden


def test_a_draft_elsewhere_has_an_edge(pairs: Pairs) -> None:
    """Its own worker gets the features; with a projected head also embedding rows, and sends hidden rows back."""
    plan = plan_of("cpu", draft="cpu")
    loaded, projected = (
        plan_edges(models_of(pairs, head_place=place), plan, 512)[-1]
        for place in (HeadPlace.LOADED, HeadPlace.PROJECTED)
    )
    draft = models_of(pairs).draft
    assert draft is not None
    assert (loaded.source, loaded.to, loaded.decode_bytes) == ("stage 0", "draft", 0)
    assert loaded.verify_bytes == 64 * 4 * draft.block_size
    assert projected.verify_bytes - loaded.verify_bytes == (draft.block_size + 1) * 64 * draft.item_bytes


@pytest.mark.parametrize(
    ("device", "place", "words"),
    [
        (None, HeadPlace.LOADED, ["beside stage 1", "shares that stage's lm_head", "--draft-device"]),
        ("cpu", HeadPlace.LOADED, ["on cpu, as --draft-device says", "lm_head", "more", "--draft-head projected"]),
        ("cpu", HeadPlace.PROJECTED, ["on cpu, as --draft-device says", "projected", "saves 64.0 KiB"]),
    ],
)
def test_the_drafts_place_has_a_reason(pairs: Pairs, device: str | None, place: HeadPlace, words: list[str]) -> None:
    """Where it is, what that costs or saves, which option changes it."""
    reason = draft_reason(models_of(pairs, head_place=place), plan_of("cpu,cpu", draft=device))

    assert reason is not None
    assert all(word in reason for word in words), reason
    assert draft_reason(models_of(pairs, draft=False), plan_of("cpu", has_draft=False)) is None


def test_a_drafts_layout_is_said(pairs: Pairs, tmp_path: Path) -> None:
    """In words and in the object; and where what chooses its tokens is, if that is not in its own worker."""
    target = read_model_size(pairs["qwen3"][0], None)
    directory = checkpoints.write_draft(tmp_path / "draft", pairs["qwen3"][0], own=DFLASH2)
    models = Models(target, read_draft_size(directory, target, None), HeadPlace.PROJECTED)
    report = make_report(models, plan_of("cpu", draft="cpu"), lengths=(64,), sessions=1)
    out = io.StringIO()
    show(report, Console(file=out, width=500))

    assert as_json(report)["draft"]["layout"] == "DFlash2"  # type: ignore[index]
    assert "It is a DFlash2 draft." in out.getvalue()
    assert "and has the 18.0 KiB there by which its tokens are chosen" in out.getvalue()


def test_what_does_not_fit_is_said(pairs: Pairs) -> None:
    """Workers of one memory are added up; the sentence has sizes and options. With room there is none."""
    models, plan = models_of(pairs), plan_of("cpu,cpu")
    small = [worker(free=300_000), worker(free=300_000)]
    (note,) = make_report(models, plan, lengths=(64, 4096), sessions=2, workers=small).notes

    words = ("cpu of a has 293.0 KiB free", "2 sessions of 4096 tokens", "--max-model-len", "--sessions")
    assert all(word in note for word in words), note
    assert make_report(models, plan, lengths=(64,), sessions=1, workers=[worker(), worker()]).notes == ()


@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_what_keys_and_values_are_kept_in_is_said(pairs: Pairs, kv_dtype: str | None) -> None:
    """Where it is not what the weights are in; and the caches take as much less."""
    models = Models(read_model_size(pairs["qwen3"][0], "bfloat16", kv_dtype), None)
    report = make_report(models, plan_of("cpu", has_draft=False), lengths=(64,), sessions=3, workers=[])
    out = io.StringIO()
    show(report, Console(file=out, width=160))
    found = as_json(report)

    assert ("in bfloat16, keys and values in float8_e4m3fn; caches of 3" in out.getvalue()) is (kv_dtype is not None)
    assert ("in bfloat16; caches of 3" in out.getvalue()) is (kv_dtype is None)
    assert (found["dtype"], found["kv_dtype"]) == ("bfloat16", kv_dtype or "bfloat16")
    (device,) = found["devices"]  # type: ignore[misc]
    # Three sessions of 64 tokens in six layers of two heads of 16.
    assert device["cache_bytes"] == {"64": 3 * 64 * 6 * 2 * 2 * 16 * (2 if kv_dtype is None else 1)}


@pytest.mark.parametrize("measured", [True, False])
def test_the_picture_and_the_object_say_the_same(pairs: Pairs, measured: bool) -> None:
    """Every device has its row and every memory its bar; figures that were not measured are not made up."""
    models, plan = models_of(pairs), plan_of("cpu,cuda:0+cuda:1")
    workers = [worker(), worker("cuda:0+cuda:1", held=100)] if measured else []
    report = make_report(models, plan, lengths=(64, 1024), sessions=3, workers=workers)
    out = io.StringIO()
    show(report, Console(file=out, width=160))
    text, found = out.getvalue(), as_json(report)

    assert text.count("▒") > 2
    bars = [line for line in text.splitlines() if line.startswith(("cpu of", "cuda:0 of", "cuda:1 of"))]
    assert len(bars) == 3
    assert all(sum(line.count(sign) for sign in "█▒░") <= BAR for line in bars)
    assert ("not asked" in text) is not measured
    assert ("predicted tokens/s" in text) is measured
    assert text.rstrip().endswith("--target-devices cpu,cuda:0+cuda:1 --target-layers 0:3,3:6")
    assert [device["layers"] for device in found["devices"]] == [[0, 3], [3, 4], [4, 6]]  # type: ignore[attr-defined]
    assert (found["predicted"] is not None) is measured
    assert found["target_layers"] == "0:3,3:6"


@pytest.mark.parametrize(
    ("text", "most", "expected"),
    [
        (None, 4096, (4096,)),
        (None, 40960, (4096, 32768, 40960)),
        (None, 1 << 18, (4096, 32768, 131072, 1 << 18)),
        ("512, 64,512", 4096, (64, 512)),
        ("4096", 4096, (4096,)),
    ],
)
def test_lengths(text: str | None, most: int, expected: tuple[int, ...]) -> None:
    """The usual ones as far as the model goes, or those that are asked for, each once."""
    assert parse_lengths(text, most) == expected


@pytest.mark.parametrize(
    ("text", "word"), [("1", "from 2 to 4096"), ("4097", "from 2 to 4096"), ("a", "whole numbers")]
)
def test_senseless_lengths_are_refused(text: str, word: str) -> None:
    """Below two, beyond the model's context, or no number."""
    with pytest.raises(InvalidArgument, match=word) as caught:
        parse_lengths(text, 4096)
    assert caught.value.where["field"] == "--max-model-len"


def test_parts_of_one_gpu_are_memories_of_their_own(pairs: Pairs) -> None:
    """Unasked they have what is written less a GPU's context; measured, what each worker says."""
    models, plan = models_of(pairs), plan_of("cuda:0@1GiB,cuda:0@2GiB")
    report = make_report(models, plan, lengths=(64,), sessions=1)
    assert [load.free_bytes for load in report.devices] == [
        (1 << 30) - GPU_CONTEXT_BYTES,
        (2 << 30) - GPU_CONTEXT_BYTES,
    ]
    assert len({load.memory for load in report.devices}) == 2
    assert as_json(report)["target_devices"] == "cuda:0@1GiB,cuda:0@2GiB"

    whole = [worker("cuda:0", free=300_000), worker("cuda:0", free=400_000)]
    parts = [replace(one, devices=(replace(one.devices[0], limited=True),)) for one in whole]
    assert set(free_bytes(whole).values()) == {300_000}
    assert sorted(free_bytes(parts).values()) == [300_000, 400_000]
    notes = make_report(models, plan, lengths=(64, 4096), sessions=2, workers=parts).notes
    assert [note[: note.index(" has")] for note in notes] == ["cuda:0 of a for stage 0", "cuda:0 of a for stage 1"]


def test_so_many_sessions_fit_as_their_caches_do(pairs: Pairs) -> None:
    """On each device in its share of what weights leave, by whole pages on a GPU; the fullest one decides. Of two
    workers in one memory both take theirs from it."""
    models, plan = models_of(pairs, draft=False), plan_of("cpu,cuda:0")
    sizes = [layer.token_bytes for layer in models.target.layers]
    workers = [worker("cpu", free=90_000_000), worker("cuda:0", free=90_000_000)]
    workers = [replace(one, devices=(replace(one.devices[0], total_bytes=100_000_000),)) for one in workers]
    report = make_report(models, plan, lengths=(64,), sessions=1, workers=workers, memory_share=0.5)
    first, second = report.devices
    most = models.target.max_position
    half = len(sizes) // 2
    pools = ((90_000_000 - first.weight_bytes) // 2, 40_000_000 - second.weight_bytes)
    rows = (sum(sizes[:half]), sum(sizes[half:]))
    expected = {
        length: min(pool // (row * length) for pool, row in zip(pools, rows, strict=True)) for length in (2048, most)
    }
    assert report.fitting == expected
    assert expected[2048] >= 2 * expected[most] > 0
    assert as_json(report)["fitting_sessions"] == {str(length): count for length, count in expected.items()}
    console = Console(file=io.StringIO(), width=160)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    assert f"{expected[2048]} of 2048 tokens" in console.file.getvalue()

    memory = (100_000_000, 90_000_000)
    alone, both, unknown = (
        make_report(models, plan_of(where), lengths=(64,), sessions=1, local_memory=memory).fitting
        for where in ("cpu", "cpu,cpu", "cpu,h:1")
    )
    assert alone is not None
    assert both is not None
    assert abs(alone[2048] - both[2048]) <= 1
    assert unknown is None
