"""Device names, on machines of either vendor that the tests pretend to be."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.processes.device_memory import GPU_CONTEXT_BYTES
from services.processes.visible_gpus import VARIABLE
from shard_worker.device.devices import (
    Device,
    best_devices,
    build_vendor,
    check_room,
    cuda_target,
    describe,
    float8_lack,
    free_bytes,
    hip_target,
    keep_to_limit,
    kernel_target,
    parse_devices,
    product_precision,
)


def pretend(monkeypatch: pytest.MonkeyPatch, vendor: str | None, gpus: int) -> None:
    """torch as built for a vendor, on a machine with so many of its GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0" if vendor == "cuda" else None)
    monkeypatch.setattr(torch.version, "hip", "7.1" if vendor == "hip" else None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_the_cpu_is_always_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """cpu, even several times over, needs no GPU build."""
    pretend(monkeypatch, None, 0)

    [single] = parse_devices("cpu")
    assert (single.name, single.torch_device, single.is_gpu) == ("cpu", torch.device("cpu"), False)
    assert [device.name for device in parse_devices("cpu + cpu")] == ["cpu", "cpu"]
    assert build_vendor() is None
    assert best_devices() == ["cpu"]


@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_gpus_of_the_builds_vendor_are_found(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    """Both vendors' devices are torch's cuda devices of the same index, under their own names."""
    pretend(monkeypatch, vendor, 2)

    devices = parse_devices(f"{vendor}:1+{vendor}:0")

    assert [device.name for device in devices] == [f"{vendor}:1", f"{vendor}:0"]
    assert [device.torch_device for device in devices] == [torch.device("cuda", 1), torch.device("cuda", 0)]
    assert all(device.is_gpu for device in devices)
    assert build_vendor() == vendor
    assert best_devices() == [f"{vendor}:0", f"{vendor}:1"]


@pytest.mark.parametrize(
    ("build", "wanted", "words"),
    [
        ("hip", "cuda:0", "'cuda:0' needs a CUDA build of torch .* is a ROCm build"),
        ("cuda", "hip:0", "'hip:0' needs a ROCm build of torch .* is a CUDA build"),
        (None, "cuda:0", "'cuda:0' needs a CUDA build of torch .* is a CPU build"),
        (None, "hip:3", "'hip:3' needs a ROCm build of torch .* is a CPU build"),
    ],
)
def test_the_wrong_vendor_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, build: str | None, wanted: str, words: str
) -> None:
    """Asking one vendor's build for the other's GPU says which build is needed and which one this is."""
    pretend(monkeypatch, build, 4)

    with pytest.raises(FailedPrecondition, match=words) as caught:
        parse_devices(wanted)

    assert caught.value.reason == "WRONG_VENDOR"
    assert caught.value.where["field"] == "--device"


@pytest.mark.parametrize(
    ("gpus", "words"), [(2, r"'cuda:2' does not exist here: there is cuda:0, cuda:1"), (0, "no GPU that torch can")]
)
def test_an_index_beyond_the_machines_gpus_is_refused(monkeypatch: pytest.MonkeyPatch, gpus: int, words: str) -> None:
    """The refusal names what is there."""
    pretend(monkeypatch, "cuda", gpus)

    with pytest.raises(FailedPrecondition, match=words):
        parse_devices("cuda:2")


@pytest.mark.parametrize("text", ["cuda:0+hip:0", "cpu+cuda:0", "hip:1+cpu"])
@pytest.mark.parametrize("build", ["cuda", "hip", None])
def test_mixed_vendors_in_one_worker_are_refused(monkeypatch: pytest.MonkeyPatch, build: str | None, text: str) -> None:
    """One process drives one vendor; the refusal says how to start a worker each, whatever this build is."""
    pretend(monkeypatch, build, 2)

    with pytest.raises(InvalidArgument, match="several vendors .* separate them with a comma"):
        parse_devices(text)


def test_a_gpu_named_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage cannot be spread over one GPU."""
    pretend(monkeypatch, "cuda", 2)

    with pytest.raises(InvalidArgument, match="names a GPU twice"):
        parse_devices("cuda:1+cuda:0+cuda:1")


@pytest.mark.parametrize(
    "text", ["", "gpu:0", "cuda", "cuda:", "cuda:-1", "cuda:x", "cuda:01", "cuda:1000", "cpu:0", "cpu+", "CPU"]
)
def test_what_is_no_device_name_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Only cpu, cuda:N and hip:N are names, each GPU with one spelling."""
    pretend(monkeypatch, "cuda", 2)

    with pytest.raises(InvalidArgument):
        parse_devices(text, "--draft-device")


def test_the_cpu_is_described_with_its_memory() -> None:
    """Product and memory are filled in; free memory is part of the whole."""
    described = describe(parse_devices("cpu")[0])

    assert described.name == "cpu"
    assert described.product
    assert 0 < described.free_bytes <= described.total_bytes


def test_hidden_gpus_keep_the_numbers_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was given cuda:3 and cuda:1 alone calls them so; torch counts them from 0."""
    pretend(monkeypatch, "cuda", 2)
    monkeypatch.setenv(VARIABLE, "3,1")

    devices = parse_devices("cuda:1+cuda:3")

    assert [device.name for device in devices] == ["cuda:1", "cuda:3"]
    assert [device.torch_device for device in devices] == [torch.device("cuda", 1), torch.device("cuda", 0)]
    assert best_devices() == ["cuda:3", "cuda:1"]
    with pytest.raises(FailedPrecondition, match="'cuda:0' does not exist here: there is cuda:3, cuda:1"):
        parse_devices("cuda:0")


@pytest.mark.parametrize(
    ("capability", "lack", "float8_lack"),
    [
        (
            (6, 1),
            "its compute capability is 6.1, and 8.0 is needed",
            "its compute capability is 6.1, and 8.9 is needed",
        ),
        (
            (7, 5),
            "its compute capability is 7.5, and 8.0 is needed",
            "its compute capability is 7.5, and 8.9 is needed",
        ),
        ((8, 0), None, "its compute capability is 8.0, and 8.9 is needed"),
        ((8, 6), None, "its compute capability is 8.6, and 8.9 is needed"),
        ((8, 9), None, None),
        ((9, 0), None, None),
        ((12, 0), None, None),
    ],
)
def test_what_kernels_lack_on_nvidias_gpus(
    capability: tuple[int, int], lack: str | None, float8_lack: str | None
) -> None:
    """Kernels need Ampere's matrix instructions, eight bits those of Ada; shared memory is what torch tells."""
    major, minor = capability
    target = cuda_target(
        SimpleNamespace(major=major, minor=minor, multi_processor_count=84, shared_memory_per_block_optin=101376)
    )

    assert target.architecture == f"sm_{major}{minor}"
    assert target.shared_bytes == 101376
    assert (target.lack, target.float8_lack) == (lack, float8_lack)


@pytest.mark.parametrize(
    ("architecture", "runs", "float8"),
    [
        ("gfx906", False, False),
        ("gfx90c", False, False),
        ("gfx90a", True, False),
        ("gfx942", True, False),
        ("gfx950", True, True),
        ("gfx1030", False, False),
        ("gfx1100", True, False),
        ("gfx1201", True, True),
    ],
)
def test_what_kernels_lack_on_amds_gpus(architecture: str, runs: bool, float8: bool) -> None:
    """Kernels need matrix instructions, which Vega and RDNA 2 have not; the refusal names the architecture."""
    target = hip_target(
        SimpleNamespace(
            gcnArchName=f"{architecture}:sramecc+:xnack-", multi_processor_count=60, shared_memory_per_block=65536
        )
    )

    assert target.architecture == architecture
    assert target.lack == (None if runs else f"Triton has no matrix instructions for {architecture}")
    assert (target.float8_lack is None) == float8


def test_builds_that_do_not_tell_shared_memory() -> None:
    """AMD's GPUs have 64 KiB for a program, whether torch says so or not."""
    assert hip_target(SimpleNamespace(gcnArchName="gfx1100", multi_processor_count=48)).shared_bytes == 65536
    assert (
        hip_target(
            SimpleNamespace(gcnArchName="gfx950", multi_processor_count=256, shared_memory_per_block=163840)
        ).shared_bytes
        == 163840
    )


def test_a_cpu_is_no_target_of_kernels() -> None:
    """It keeps numbers of eight bits by plain torch, and multiplies float32 as it is."""
    assert kernel_target(torch.device("cpu")) is None
    assert float8_lack(Device("cpu", torch.device("cpu")), kernels=False) is None
    assert product_precision(torch.zeros(1)) == "ieee"


GIB = 1 << 30


class PretendedMemory:
    """A GPU's memory: others use some of it, and torch has set some of it aside for this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int, free: int, reserved: int) -> None:
        self.shares: list[tuple[float, torch.device]] = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: reserved)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "GPU")
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda share, device: self.shares.append((share, device))
        )


def test_a_limit_is_all_the_memory_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the context; less what this process has, and no more than others leave. torch is told to refuse more."""
    gpu = Device("cuda:1", torch.device("cuda", 1), 8 * GIB)
    usable = 8 * GIB - GPU_CONTEXT_BYTES
    memory = PretendedMemory(monkeypatch, total=24 * GIB, free=20 * GIB, reserved=2 * GIB)
    assert free_bytes(gpu) == (usable - 2 * GIB, usable)
    assert (describe(gpu).free_bytes, describe(gpu).total_bytes) == (usable - 2 * GIB, usable)
    keep_to_limit(gpu)
    assert memory.shares == [(usable / (24 * GIB), torch.device("cuda", 1))]
    PretendedMemory(monkeypatch, total=24 * GIB, free=GIB, reserved=0)
    assert free_bytes(gpu) == (GIB, usable)
    PretendedMemory(monkeypatch, total=6 * GIB, free=6 * GIB, reserved=0)
    with pytest.raises(InvalidArgument, match="--device-memory 8.0 GiB is more than cuda:1 has, 6.0 GiB"):
        keep_to_limit(gpu)


def test_without_a_limit_nothing_is_kept_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is told nothing, and all of the device's memory counts."""
    gpu = Device("cuda:0", torch.device("cuda", 0))
    memory = PretendedMemory(monkeypatch, total=24 * GIB, free=20 * GIB, reserved=2 * GIB)
    keep_to_limit(gpu)
    check_room(gpu, 1 << 50, "weights")
    assert memory.shares == []
    assert free_bytes(gpu) == (20 * GIB, 24 * GIB)


def test_what_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of it is loaded."""
    gpu = Device("cuda:0", torch.device("cuda", 0), 8 * GIB)
    PretendedMemory(monkeypatch, total=24 * GIB, free=20 * GIB, reserved=GIB)
    check_room(gpu, 6 * GIB, "the weights of layers 0:5")
    with pytest.raises(FailedPrecondition) as caught:
        check_room(gpu, 7 * GIB, "the weights of layers 0:5")
    for words in ("the weights of layers 0:5 take 7.0 GiB on cuda:0", "of the 8.0 GiB", "6.4 GiB are free"):
        assert words in caught.value.message


def test_a_limit_of_the_cpu_counts_what_the_process_has() -> None:
    """Its own memory, beside files that are mapped."""
    plain, limited = Device("cpu", torch.device("cpu")), Device("cpu", torch.device("cpu"), 8 * GIB)
    assert free_bytes(limited)[1] == 8 * GIB < free_bytes(plain)[1]
    before = free_bytes(limited)[0]
    # Not by torch, which may give out memory that the process has had for long.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert before - free_bytes(limited)[0] >= len(held) // 2
    with pytest.raises(FailedPrecondition, match="on cpu"):
        check_room(limited, 8 * GIB, "weights")
