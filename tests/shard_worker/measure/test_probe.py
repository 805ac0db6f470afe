"""The probe: figures of the right order, in bounded time, for every family's kinds of layers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from services.errors import FailedPrecondition, NotFound, Unimplemented
from services.messages.description import FeatureTransport, HeadPlace, Role
from services.messages.draft_session import OpenDraft
from services.messages.loading import LoadDraft
from services.messages.measure import MeasureRequest
from services.model.checkpoint_files import read_config
from shard_worker.device.devices import describe, parse_devices
from shard_worker.measure import probe
from shard_worker.roles.draft import DraftRole
from shard_worker.worker import Worker, WorkerConfig
from tests.shard_worker.tiny import AS_GPU, Tiny

CPU = parse_devices("cpu")[0]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs: the figures need not be good here."""
    for name in ("READ_S", "LAYER_S", "MATMUL_S"):
        monkeypatch.setattr(probe, name, 0.02)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3", {"full_attention"}),
        ("qwen3-sliding", {"full_attention", "sliding_attention"}),
        ("qwen3_moe", {"full_attention"}),
        ("gpt_oss", {"full_attention", "sliding_attention"}),
        ("qwen3_5-nested", {"linear_attention", "full_attention"}),
    ],
)
@torch.inference_mode()
def test_every_kind_of_layer_is_measured(tiny: Tiny, name: str, kinds: set[str]) -> None:
    """Rates and times are above nothing, there is one cost for each kind that the model has, and it is soon done."""
    began = time.perf_counter()
    speed = probe.measure(CPU, read_config(tiny.path(name)), MeasureRequest("", "bfloat16", 1 << 20))

    assert time.perf_counter() - began < 5
    assert set(speed.layer_s) == kinds
    assert 1e6 < speed.read_bytes_per_s < 1e15
    assert 1e6 < speed.matmul_flops_per_s < 1e17
    assert all(0 <= seconds < 1 for seconds in (*speed.layer_s.values(), speed.step_s, speed.choose_s))
    assert 0 < speed.free_bytes <= speed.total_bytes


@pytest.mark.parametrize(
    "name",
    ["gpt_oss", "gemma4-experts", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "laguna"))],
)
@torch.inference_mode()
def test_experts_beside_a_gpu_are_measured_on_its_host(tiny: Tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real layers of which the device has all else; a CPU, and a dense model, have no such figures."""
    # Of little memory little is read and copied.
    memory = replace(describe(CPU), free_bytes=4 << 20)
    monkeypatch.setattr(probe, "describe", lambda _: memory)
    config, wanted = read_config(tiny.path(name)), MeasureRequest("", "float32", 1 << 20)
    speed = probe.measure(AS_GPU, config, wanted)

    assert speed.host is not None
    assert set(speed.host.layer_s) == set(speed.layer_s)
    assert all(0 <= seconds < 1 for seconds in speed.host.layer_s.values())
    assert 1e6 < speed.host.read_bytes_per_s < 1e15
    assert 1e6 < speed.host.copy_bytes_per_s < 1e15
    assert (speed.host.total_bytes, speed.host.free_bytes) == (memory.total_bytes, memory.free_bytes)
    assert probe.measure(CPU, config, wanted).host is None
    assert probe.measure(AS_GPU, read_config(tiny.path("qwen3")), wanted).host is None


@torch.inference_mode()
def test_an_unknown_family_is_refused(tiny: Tiny) -> None:
    """As a load of it would be."""
    config = {**read_config(tiny.path("qwen3")), "model_type": "other"}

    with pytest.raises(Unimplemented, match="model_type 'other'"):
        probe.measure(CPU, config, MeasureRequest("", "float32", 1))


async def test_a_worker_measures_each_device_unless_sessions_are_open(tiny: Tiny) -> None:
    """One figure a device; with a session open both calls are refused, after its end they work again."""
    worker = Worker(WorkerConfig(parse_devices("cpu+cpu"), (Role.TARGET, Role.DRAFT), threads=1))
    wanted = MeasureRequest(str(tiny.path("qwen3")), "float32", 1 << 20)
    assert [speed.name for speed in await worker.measure(wanted)] == ["cpu", "cpu"]
    assert await worker.echo(b"12345") == 5

    part = LoadDraft(
        str(tiny.draft("qwen3", "plain")), str(tiny.path("qwen3")), HeadPlace.PROJECTED, FeatureTransport.SUM
    )
    assert [event async for event in worker.load(part)]
    draft = (await worker.describe()).draft
    assert draft is not None
    role = worker.roles[Role.DRAFT]
    assert isinstance(role, DraftRole)
    session = await role.open(OpenDraft("test", draft.fingerprint, 10))
    for call in (worker.measure(wanted), worker.echo(b"")):
        with pytest.raises(FailedPrecondition, match="1 sessions are open") as caught:
            await call
        assert caught.value.reason == "SESSIONS_OPEN"
    await session.close()

    assert len(await worker.measure(wanted)) == 2
    with pytest.raises(NotFound, match="/elsewhere"):
        await worker.measure(MeasureRequest("/elsewhere", "float32", 1))
    await worker.close()


async def test_the_workers_own_model_wins(tiny: Tiny) -> None:
    """--model of the worker's command line replaces the path that a coordinator names."""
    worker = Worker(
        WorkerConfig(parse_devices("cpu"), (Role.TARGET,), paths={"model_path": str(tiny.path("qwen3"))}, threads=1)
    )

    assert len(await worker.measure(MeasureRequest("/elsewhere", "float32", 1))) == 1
    await worker.close()
