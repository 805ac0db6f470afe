"""Placement: what is accepted, what is refused, and which layers come of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.cluster import placement
from coordinator.cluster.placement import (
    Plan,
    WorkerPlace,
    make_plan,
    parse_places,
    parse_weights,
    split_layers,
    threads_each,
)
from services.errors import InvalidArgument
from services.layers import LayerRange


def plan(**options: object) -> Plan:
    defaults: dict[str, object] = {
        "target_devices": None,
        "layer_split": None,
        "draft_device": None,
        "num_layers": 12,
        "has_draft": False,
    }
    return make_plan(**(defaults | options))  # type: ignore[arg-type]


def bounds(ranges: list[LayerRange]) -> list[int]:
    return [ranges[0].first, *(layers.last for layers in ranges)]


@pytest.mark.parametrize(
    ("layers", "weights", "expected"),
    [
        (12, [1.0], [0, 12]),
        (12, [0.3, 0.7], [0, 4, 12]),
        (64, [0.08, 0.46, 0.46], [0, 5, 35, 64]),
        (12, [1, 1, 1], [0, 4, 8, 12]),
        (12, [1e-9, 1], [0, 1, 12]),
        (12, [1, 1e-9], [0, 11, 12]),
        (3, [1000, 1, 1], [0, 1, 2, 3]),
        (5, [1, 1000, 1, 1], [0, 1, 3, 4, 5]),
    ],
)
def test_split_is_proportional_with_one_layer_at_least(layers: int, weights: list[float], expected: list[int]) -> None:
    """Ranges follow the weights, rounded, cover every layer once and are never empty."""
    ranges = split_layers(layers, weights)

    assert bounds(ranges) == expected
    assert all(len(part) >= 1 for part in ranges)
    assert all(range_.last == after.first for range_, after in zip(ranges, ranges[1:], strict=False))


@pytest.mark.parametrize(
    ("weights", "last_cut", "expected"),
    [([1, 1], 11, [0, 6, 12]), ([1, 1], 4, [0, 4, 12]), ([1, 1, 1], 4, [0, 3, 4, 12]), ([1, 3], 4, [0, 3, 12])],
)
def test_cuts_through_layers_that_share_keys_are_moved(
    weights: list[float], last_cut: int, expected: list[int]
) -> None:
    """To where the first of them begins, or before it."""
    assert bounds(split_layers(12, weights, last_cut)) == expected
    devices = ",".join(["cpu"] * len(weights))
    split = ",".join(map(str, weights))
    moved = plan(target_devices=devices, layer_split=split, last_cut=last_cut)
    assert [stage.layers.last for stage in moved.stages] == expected[1:]


def test_cuts_that_are_named_behind_the_last_possible_one_are_refused() -> None:
    """So are more workers than there are places to cut at."""
    assert plan(target_devices="cpu,cpu", target_layers="0:4,4:12", last_cut=4)
    with pytest.raises(InvalidArgument, match=r"0:5,5:12.*from 4 on share keys and values.*begin at 4") as caught:
        plan(target_devices="cpu,cpu", target_layers="0:5,5:12", last_cut=4)
    assert caught.value.where["field"] == "--target-layers"
    with pytest.raises(InvalidArgument, match="names 3 workers.*from layer 1 on.*name at most 2"):
        plan(target_devices="cpu,cpu,cpu", last_cut=1)


def test_entries_are_devices_joined_devices_or_addresses() -> None:
    """A comma starts a worker, + joins devices of one vendor, HOST:PORT and unix:PATH are running workers."""
    stages = plan(target_devices="cuda:0,hip:0+hip:1,10.0.0.7:7001,unix:/run/w.sock,cpu,cpu").stages

    assert [stage.place for stage in stages] == [
        WorkerPlace("cuda:0", None),
        WorkerPlace("hip:0+hip:1", None),
        WorkerPlace(None, "10.0.0.7:7001"),
        WorkerPlace(None, "unix:/run/w.sock"),
        WorkerPlace("cpu", None),
        WorkerPlace("cpu", None),
    ]


def test_draft_is_beside_the_last_stage_unless_named() -> None:
    """--draft-device puts the draft in a worker of its own; naming the last stage's address changes nothing."""
    assert plan(has_draft=True).draft is None
    assert plan(has_draft=True, draft_device="cpu").draft == WorkerPlace("cpu", None)
    assert plan(has_draft=True, target_devices="cpu,h:1", draft_device="h:1").draft is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_devices": "cuda:0,cuda:0"}, ["--target-devices", "cuda:0", "twice"]),
        ({"target_devices": "cuda:0+cuda:0"}, ["--target-devices", "twice"]),
        ({"target_devices": "cuda:0,cuda:1+cuda:0"}, ["--target-devices", "twice"]),
        ({"target_devices": "h:1,h:1"}, ["--target-devices", "twice"]),
        ({"target_devices": "cuda:0+hip:0"}, ["several vendors", "comma"]),
        ({"target_devices": "gpu0"}, ["--target-devices", "gpu0", "neither"]),
        ({"target_devices": "cpu,"}, ["--target-devices", "neither"]),
        ({"target_devices": "host:99999"}, ["--target-devices", "neither"]),
        ({"layer_split": "0.3,0.7"}, ["--target-layer-split", "no effect"]),
        ({"target_devices": "cpu,cpu", "layer_split": "1"}, ["--target-layer-split", "1 weights", "2 workers"]),
        ({"target_devices": "cpu,cpu", "layer_split": "1,0"}, ["--target-layer-split", "above 0"]),
        ({"target_devices": "cpu,cpu", "layer_split": "1,-2"}, ["--target-layer-split", "above 0"]),
        ({"target_devices": "cpu,cpu", "layer_split": "1,nan"}, ["--target-layer-split", "finite"]),
        ({"target_devices": "cpu,cpu", "layer_split": "1,inf"}, ["--target-layer-split", "finite"]),
        ({"target_devices": "cpu,cpu", "layer_split": "a,b"}, ["--target-layer-split", "numbers"]),
        ({"target_devices": ",".join(["cpu"] * 13)}, ["13 workers", "12 layers"]),
        ({"draft_device": "cpu"}, ["--draft-device", "no effect", "--draft"]),
        ({"draft_device": "gpu", "has_draft": True}, ["--draft-device", "gpu"]),
        ({"draft_device": "cuda:0+cuda:1", "has_draft": True}, ["--draft-device", "cuda:0+cuda:1", "on one"]),
        ({"layer_split": "auto"}, ["--target-layer-split", "no effect", "--target-devices"]),
        ({"target_devices": "cpu", "layer_split": "auto"}, ["--target-layer-split auto", "one worker", "cpu"]),
        ({"target_devices": "cpu,cpu", "layer_split": "auto,1"}, ["--target-layer-split", "auto,1", "or auto"]),
        ({"target_layers": "0:12"}, ["--target-layers", "no effect", "--target-devices"]),
        (
            {"target_devices": "cpu,cpu", "target_layers": "0:6,6:12", "layer_split": "1,1"},
            ["--target-layers", "0:6,6:12", "--target-layer-split", "1,1", "one of them"],
        ),
        (
            {"target_devices": "cpu,cpu", "target_layers": "0:6,6:12", "layer_split": "auto"},
            ["--target-layers", "--target-layer-split", "'auto'"],
        ),
        ({"target_devices": "cpu,cpu", "target_layers": "6,6"}, ["--target-layers", "'6'", "0:5,5:12"]),
        ({"target_devices": "cpu,cpu", "target_layers": "0:6,"}, ["--target-layers", "''", "no range"]),
        ({"target_devices": "cpu,cpu", "target_layers": "-1:6,6:12"}, ["--target-layers", "'-1:6'"]),
        ({"target_devices": "cpu,cpu", "target_layers": "0:12"}, ["--target-layers", "1 ranges", "2 workers"]),
        ({"target_devices": "cpu,cpu", "target_layers": "0:0,0:12"}, ["--target-layers", "0:0 holds no layer"]),
        ({"target_devices": "cpu,cpu", "target_layers": "0:6,12:6"}, ["--target-layers", "12:6 holds no layer"]),
        ({"target_devices": "cpu,cpu", "target_layers": "1:6,6:12"}, ["1:6 leaves out layers 0:1", "begin it at 0"]),
        ({"target_devices": "cpu,cpu", "target_layers": "0:6,8:12"}, ["8:12 leaves out layers 6:8", "begin it at 6"]),
        ({"target_devices": "cpu,cpu", "target_layers": "0:6,5:12"}, ["5:12 repeats layers 5:6", "begin it at 6"]),
        ({"target_devices": "cpu,cpu", "target_layers": "0:6,6:11"}, ["ends at layer 11", "has 12", "end it at 12"]),
        ({"target_devices": "cpu,cpu", "target_layers": "0:6,6:13"}, ["ends at layer 13", "has 12", "end it at 12"]),
        (
            {"expert_devices": "cpu", "has_experts": False},
            ["--expert-devices 'cpu'", "no effect", "mixture of experts"],
        ),
        ({"expert_devices": "cuda:0"}, ["--expert-devices", "'cuda:0' is no device", "like cuda:0=0.4,cpu=0.6"]),
        ({"expert_devices": "cuda:0=nan,cpu=1"}, ["--expert-devices", "'cuda:0=nan'", "finite share above 0"]),
        ({"expert_devices": "cuda:0=0,cpu=1"}, ["'cuda:0=0'", "write cpu for all experts"]),
        ({"expert_devices": "best=1,best=1"}, ["--expert-devices", "names best twice"]),
        ({"expert_devices": "best=1"}, ["--expert-devices", "does not name cpu"]),
        ({"expert_devices": "cpu=1"}, ["--expert-devices", "does not name the device that keeps"]),
        (
            {"target_devices": "hip:0@8GiB,h:1", "expert_devices": "cuda:0=1,cpu=1"},
            ["--expert-devices", "cuda:0 is none", "name one of hip:0, h:1"],
        ),
    ],
)
def test_contradictions_are_refused_by_name(options: dict[str, object], words: list[str]) -> None:
    """A refusal names the option, the value and what to change."""
    with pytest.raises(InvalidArgument) as caught:
        plan(**options)

    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    ("devices", "text", "expected"),
    [
        ("cpu", "0:12", [0, 12]),
        ("cpu,cpu", "0:1,1:12", [0, 1, 12]),
        ("cpu,cuda:0,h:1", " 0:5, 5:11 ,11:12", [0, 5, 11, 12]),
    ],
)
def test_layers_may_be_named(devices: str, text: str, expected: list[int]) -> None:
    """--target-layers gives each worker its half-open range as it stands."""
    assert bounds([stage.layers for stage in plan(target_devices=devices, target_layers=text).stages]) == expected


def test_auto_leaves_the_layers_open() -> None:
    """--target-layer-split auto marks the plan and makes equal shares until workers have been measured."""
    auto_plan = plan(target_devices="cpu,cpu,h:1", layer_split="auto")

    assert auto_plan.auto
    assert bounds([stage.layers for stage in auto_plan.stages]) == [0, 4, 8, 12]
    assert not plan(target_devices="cpu,cpu,h:1", layer_split="1,1,1").auto


def test_weights_default_to_equal_shares() -> None:
    """Without --target-layer-split every worker gets the same share."""
    assert parse_weights(None, 3) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("devices", "cores", "smt", "expected"),
    [
        ("cpu", 16, "0", None),
        ("cuda:0", 16, "0", None),
        ("cuda:0,cuda:1", 16, "0", None),
        ("cpu,h:1", 16, "0", None),
        ("cpu,cpu", 16, "1", 8),
        ("cpu,cpu,cpu", 2, None, 1),
        ("cuda:0,cpu", 16, "0", 14),
        ("cuda:0,cpu", 32, "1", 14),
        ("cuda:0,cpu", 16, None, 14),
        ("cuda:0,cpu,hip:0,cpu", 16, "0", 6),
        ("cuda:0,cpu", 2, "0", 1),
    ],
)
def test_local_workers_share_the_cores(
    devices: str,
    cores: int,
    smt: str | None,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Those with GPUs keep two of them awake; of threads that share a core one counts. smt: what the system says, if it
    does."""
    if smt is not None:
        (tmp_path / "active").write_text(f"{smt}\n")
    monkeypatch.setattr(placement, "SMT_FILE", tmp_path / "active")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    assert threads_each(parse_places(devices)) == expected


@pytest.mark.parametrize(
    ("devices", "text", "shares"),
    [
        (None, "cpu", [1.0]),
        ("cuda:0,cpu,h:1", " cpu ", [1.0, 1.0, 1.0]),
        ("cuda:0,cuda:1,h:1", "cuda:0=0.4,cpu=0.6", [0.6, 0.0, 0.0]),
        ("cuda:0@8GiB,cuda:0+cuda:1@8GiB,h:1", "cuda:0=3,cuda:0+cuda:1=1,h:1=9,cpu=1", [0.25, 0.5, 0.1]),
    ],
)
def test_a_share_of_the_experts_may_be_the_hosts(devices: str | None, text: str, shares: list[float]) -> None:
    """Of all stages, or of those that are named, by proportional weights; without the option it is none."""
    made = plan(target_devices=devices, expert_devices=text)

    assert [stage.host_experts for stage in made.stages] == pytest.approx(shares)
    assert made.host_computing == {stage.place for stage, share in zip(made.stages, shares, strict=True) if share}
    assert made.host_experts_of(LayerRange(0, 12)) == pytest.approx(max(shares))
    assert made.host_experts_of(made.stages[-1].layers) == pytest.approx(shares[-1])
    assert not plan(target_devices=devices).host_computing


def test_gpus_that_leave_experts_to_the_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers on it do."""
    monkeypatch.setattr(placement, "SMT_FILE", Path("/nowhere"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for text, expected in (("cpu", 8), ("cuda:0=1,cpu=1", 14)):
        made = plan(target_devices="cuda:0,cuda:1", expert_devices=text)
        assert threads_each([stage.place for stage in made.stages], made.host_computing) == expected


def test_several_workers_share_a_gpu_by_parts_of_its_memory() -> None:
    """Each entry says how much of each of its devices is its own; the CPU's memory can be cut likewise."""
    places = parse_places("cuda:0@8GiB, cuda:0@16GiB,cuda:0+cuda:1@1.5GB,cpu@4GiB,cpu")
    assert [str(place) for place in places] == [
        "cuda:0@8GiB",
        "cuda:0@16GiB",
        "cuda:0+cuda:1@1.5GB",
        "cpu@4GiB",
        "cpu",
    ]
    assert places[2] == WorkerPlace("cuda:0+cuda:1", None, "1.5GB")
    assert parse_places(",".join(map(str, places))) == places


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda:0@8GiB,cuda:0", "names cuda:0 twice: .* like cuda:0@8GiB"),
        ("cuda:0,cuda:1+cuda:0@8GiB", "names cuda:0 twice"),
        ("cuda:0@8pounds", r"--target-devices cuda:0@8pounds: the size '8pounds' has the unknown unit"),
        ("cuda:0@", r"the size is ''"),
        ("cuda:0@512MiB", "the size '512MiB' is too little for cuda:0"),
        ("h:1@8GiB", "neither a device"),
    ],
)
def test_parts_of_memory_that_make_no_sense_are_refused(text: str, words: str) -> None:
    """With what would be accepted."""
    with pytest.raises(InvalidArgument, match=words):
        parse_places(text)
