"""The planner: memory decides what may be, measured speed what is best, and both say why."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.cluster.placement import Plan, StagePlan, WorkerPlace, make_plan, parse_expert_devices
from coordinator.planning.draft_size import read_draft_size
from coordinator.planning.memory import Models, draft_share, plan_shares, stage_shares
from coordinator.planning.model_size import read_model_size
from coordinator.planning.planner import (
    CONTEXT,
    RESERVE,
    SessionLoad,
    choose_split,
    faster_subset,
    free_bytes,
    taken_bytes,
)
from coordinator.planning.split import TOLERANCE
from coordinator.planning.step_time import COORDINATOR_S, SESSION_S, WorkerSpeed, bottleneck, predict
from services.errors import FailedPrecondition
from services.layers import LayerRange
from services.messages.measure import DeviceSpeed
from tests.coordinator.planning.conftest import KINDS, mixture_worker, worker

LOAD = SessionLoad(256, 1)


@pytest.fixture
def models(pairs: dict[str, tuple[Path, Path]]) -> Models:
    """The hybrid pair: layers of two sizes."""
    target = read_model_size(pairs["qwen3_5"][0], None)
    return Models(target, read_draft_size(pairs["qwen3_5"][1], target, None))


def planned(workers: list[WorkerSpeed], layers: int = 8, *, draft: WorkerPlace | None = None) -> Plan:
    made = make_plan(
        target_devices="cpu," * (len(workers) - 1) + "cpu",
        layer_split=None,
        draft_device=None,
        num_layers=layers,
        has_draft=True,
    )
    stages = (StagePlan(one.place, stage.layers) for one, stage in zip(workers, made.stages, strict=True))
    return replace(made, stages=tuple(stages), draft=draft)


def ranges(plan: Plan) -> list[LayerRange]:
    return [stage.layers for stage in plan.stages]


def test_a_step_is_the_sum_of_its_parts(models: Models) -> None:
    """Weights and caches over bandwidth, operators a layer and a step, the head and the choice on the last stage, a
    session and a hop a stage; on a GPU reading and operators at the same time."""
    model = models.target
    workers = [worker(hop=1e-3, read=1e9), worker("cuda:0", hop=5e-3, read=1e12)]
    found = predict(model, [LayerRange(0, 3), LayerRange(3, 8)], workers, 1000)

    first, second = found.stages
    assert first.read_s == pytest.approx(sum(layer.read_bytes for layer in model.layers[:3]) / 1e9)
    assert first.operators_s == pytest.approx(3 * KINDS["linear_attention"] + 1e-5)
    read = sum(layer.read_bytes + layer.token_bytes * 1000 for layer in model.layers[3:]) + model.head_bytes
    assert second.read_s == pytest.approx(read / 1e12)
    assert second.operators_s == pytest.approx(3 * KINDS["linear_attention"] + 2 * KINDS["full_attention"] + 3e-5)
    assert (first.hop_s, second.hop_s) == (1e-3, 5e-3)
    assert first.total_s == pytest.approx(first.read_s + first.operators_s + SESSION_S + 1e-3)
    assert second.total_s == pytest.approx(max(second.read_s, second.operators_s) + SESSION_S + 5e-3)
    assert found.step_s == pytest.approx(first.total_s + second.total_s + COORDINATOR_S)
    assert "the way to stage 1 (cuda:0)" in bottleneck(found, workers)
    assert predict(model, ranges(planned(workers)), workers, 4000).step_s > found.step_s - 0.01


def test_the_largest_part_is_named(models: Models) -> None:
    """Reading, operators or the way: whichever takes longest."""
    slow = replace(worker(), devices=(replace(worker().devices[0], layer_s={"linear_attention": 1.0}),))
    for workers, words in (
        ([worker(read=1e3), worker()], "stage 0 (cpu) reading its weights"),
        ([worker(), slow], "operators of stage 1 (cpu)"),
        ([worker(hop=1.0), worker()], "the way to stage 0 (cpu)"),
    ):
        assert words in bottleneck(predict(models.target, ranges(planned(workers)), workers, CONTEXT), workers)


def test_the_fast_device_gets_more(models: Models) -> None:
    """Ten times the bandwidth: all but the layer that the other must have."""
    workers = [worker("cuda:0", read=1e6), worker("cuda:1", read=1e7)]

    assert ranges(choose_split(models, planned(workers), workers, None, LOAD)) == [LayerRange(0, 1), LayerRange(1, 8)]


@pytest.mark.parametrize("sessions", [1, 40])
@pytest.mark.parametrize("room", [1.02, 1.3, 2.0])
def test_no_split_that_fits_is_faster(models: Models, sessions: int, room: float) -> None:
    """Against all splits of three workers, two of them in one memory, when that gets scarce."""
    load = SessionLoad(256, sessions)
    (whole,) = plan_shares(models, planned([worker()]), [1])[0]
    size = int(taken_bytes(models, whole, load) * room)
    workers = [worker(free=size // 2), worker("cuda:0", free=size // 3, read=1e10), worker(free=size // 2)]
    free = free_bytes(workers)

    fitting = []
    for inner in itertools.combinations(range(1, 8), 2):
        parts = [LayerRange(*pair) for pair in itertools.pairwise((0, *inner, 8))]
        plan = planned(workers)
        plan = replace(plan, stages=tuple(map(StagePlan, (one.place for one in workers), parts)))
        used = dict.fromkeys(free, 0)
        for one, shares in zip(workers, plan_shares(models, plan, [1, 1, 1]), strict=True):
            used[one.host, one.devices[0].name] += taken_bytes(models, shares[0], load)
        if all(used[memory] <= free[memory] for memory in used):
            fitting.append(predict(models.target, parts, workers, CONTEXT).step_s)
    if not fitting:
        with pytest.raises(FailedPrecondition, match="no split fits"):
            choose_split(models, planned(workers), workers, None, load)
        return
    chosen = choose_split(models, planned(workers), workers, None, load)
    assert predict(models.target, ranges(chosen), workers, CONTEXT).step_s <= min(fitting) * (1 + TOLERANCE)


def test_what_does_not_fit_says_what_is_missing(models: Models) -> None:
    """The sentence has the sizes and the options; with a little more it fits."""
    with pytest.raises(FailedPrecondition) as caught:
        choose_split(models, planned([worker(free=1000)]), [worker(free=1000)], None, SessionLoad(4096, 3))

    words = ("of weights", "3 sessions of 4096 tokens", "1000 B usable", "--max-model-len", "--sessions", "--dtype")
    assert all(word in caught.value.message for word in words), caught.value.message
    assert choose_split(models, planned([worker()]), [worker()], None, SessionLoad(4096, 3)).stages


@pytest.fixture
def mixture(pairs: dict[str, tuple[Path, Path]]) -> Models:
    """Eight experts in three of four layers, of which a row goes through some."""
    return Models(read_model_size(pairs["qwen3_moe"][0], None), None)


def mixture_plan(devices: str, expert_devices: str | None = None) -> Plan:
    return make_plan(
        target_devices=devices,
        layer_split=None,
        draft_device=None,
        num_layers=4,
        has_draft=False,
        expert_devices=expert_devices,
    )


def test_a_step_waits_for_experts_in_the_hosts_memory(mixture: Models) -> None:
    """A GPU reads the less, its host reads the rest at its own rate, and nothing of a layer is launched ahead."""
    model, one = mixture.target, mixture_worker(read=1e6)
    host = one.devices[0].host
    assert host is not None
    layers, share = LayerRange(0, 4), model.in_host(0.5)
    [plain] = predict(model, [layers], [one], 100).stages
    [found] = predict(model, [layers], [one], 100, [0.5]).stages

    left = sum(layer.expert_read for layer in model.layers)
    assert left > 0
    assert found.read_s == pytest.approx(plain.read_s - left * share / 1e6)
    assert found.host_s == pytest.approx(left * share / host.read_bytes_per_s)
    assert found.operators_s == pytest.approx(plain.operators_s + 4 * 2 * KINDS["full_attention"])
    parts = found.read_s + found.operators_s + found.host_s + SESSION_S + found.hop_s
    assert found.total_s == pytest.approx(parts)
    slow = replace(one, devices=(replace(one.devices[0], host=replace(host, read_bytes_per_s=1.0)),))
    assert "its host's memory" in bottleneck(predict(model, [layers], [slow], 100, [0.5]), [slow])


def test_hosts_take_experts_where_devices_have_no_room(mixture: Models) -> None:
    """The smallest share that does, of every GPU; none where all fit, none where it is said, and what does not fit then
    is refused."""
    (whole,) = plan_shares(mixture, mixture_plan("cuda:0"), [1])[0]
    size, experts = taken_bytes(mixture, whole, LOAD), mixture.target.left_bytes(LayerRange(0, 4), 1.0)[0]

    def chosen(free: int, host: int = 1 << 40, said: str | None = None) -> Plan:
        one = mixture_worker(free=free, host=host)
        return choose_split(mixture, mixture_plan("cuda:0", said), [one], None, LOAD)

    assert (chosen(size).expert_devices, chosen(size).stages[0].host_experts) == (None, 0.0)
    half = chosen(size - experts // 2)
    assert (half.expert_devices, half.stages[0].host_experts) == ("cuda:0=0.5,cpu=0.5", 0.5)
    assert chosen(size - experts // 2 - 1).expert_devices == "cuda:0=0.375,cpu=0.625"
    assert chosen(size - experts).expert_devices == "cpu"
    assert chosen(size - experts, said="cpu").stages[0].host_experts == 1.0
    assert parse_expert_devices("cuda:0=0.375,cpu=0.625", [WorkerPlace("cuda:0", None)]) == [0.625]
    for free, host, said in (
        (size - experts - 1, 1 << 40, None),
        (size - experts, experts - 1, None),
        (size - experts // 2, 1 << 40, "cuda:0=3,cpu=1"),
    ):
        with pytest.raises(FailedPrecondition, match="no split fits"):
            chosen(free, host, said)


def test_experts_share_the_memory_of_a_cpu_stage(mixture: Models) -> None:
    """That of one host: what one of them takes the other has not."""
    plan = mixture_plan("cuda:0,cpu", "cpu")
    stages = stage_shares(mixture, LayerRange(0, 2), 1, draft_here=False, host_experts=1.0)
    behind = stage_shares(mixture, LayerRange(2, 4), 1, draft_here=False)
    beside = sum(share.bytes_beside("cuda:0") for share in stages)
    whole = sum(taken_bytes(mixture, share, LOAD, "cpu") for share in behind)
    assert beside > 0
    for free in (beside + whole, beside + whole - 1):
        workers = [mixture_worker(free=1 << 40, host=free), worker("cpu", free=free, read=1e12)]
        assert free_bytes(workers)["a", "cpu"] == free
        chosen = choose_split(mixture, plan, workers, None, LOAD)
        taken = mixture.target.left_bytes(chosen.stages[0].layers, 1.0)[1]
        [of_cpu] = stage_shares(mixture, chosen.stages[1].layers, 1, draft_here=False)
        assert taken + taken_bytes(mixture, of_cpu, LOAD, "cpu") <= free
        assert chosen.stages[1].host_experts == 1.0


def test_a_draft_elsewhere_takes_its_own_memory(models: Models) -> None:
    """With its own worker in the stage's memory both must fit; in another one only the stage."""
    draft = WorkerPlace("cuda:1", None)
    stage = worker("cuda:0", free=1 << 30)
    needed = taken_bytes(models, draft_share(models), LOAD)
    plan = planned([stage], draft=draft)

    assert choose_split(models, plan, [stage], worker("cuda:1", free=needed), LOAD).draft == draft
    with pytest.raises(FailedPrecondition, match="no split fits"):
        choose_split(models, plan, [replace(stage, devices=worker("cuda:1").devices)], worker("cuda:1", free=10), LOAD)


def test_free_memory_is_counted_once() -> None:
    """Workers of one device share what is free there; what a worker holds it gives up; a part stays in reserve."""
    big = DeviceSpeed("cpu", 1000, 900, 1.0, 1.0, {}, 0.0, 0.0)
    workers = [
        replace(worker(host="a"), devices=(big,)),
        replace(worker(host="a"), devices=(replace(big, free_bytes=880),), held_bytes=70),
        replace(worker(host="b"), devices=(big,)),
    ]

    reserve = int(1000 * RESERVE)
    assert free_bytes(workers) == {("a", "cpu"): 880 - reserve + 70, ("b", "cpu"): 900 - reserve}


def test_fewer_workers_are_named_where_they_are_faster(models: Models) -> None:
    """A slow worker that is not needed is left out; one that is needed, or makes no difference, is not."""
    workers = [worker("cuda:0"), worker("cpu", hop=0.1)]
    faster = faster_subset(models, planned(workers), workers, LOAD)
    assert faster is not None
    assert faster[0] == (0,)
    assert faster[1].step_s < predict(models.target, ranges(planned(workers)), workers, CONTEXT).step_s

    cheap = [worker("cuda:0", hop=0, read=1e7), worker("cuda:1", hop=0, read=1e7)]
    assert faster_subset(models, planned(cheap), cheap, LOAD) is None
    (whole,) = plan_shares(models, planned([worker()]), [1])[0]
    size = taken_bytes(models, whole, LOAD)
    needed = [worker("cuda:0", free=size * 2 // 3), worker("cpu", hop=0.1, free=size * 2 // 3)]
    assert faster_subset(models, planned(needed), needed, LOAD) is None
