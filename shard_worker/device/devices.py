"""Device names, and what a device can do: the only module that asks which vendor a device is of.

Names are `cpu`, `cuda:N` (NVIDIA) and `hip:N` (AMD). torch calls both vendors' devices "cuda"; which of them a build
drives stands in `torch.version`. A name of the other vendor is refused by name.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.messages.description import DeviceDescription
from services.processes.device_memory import usable_bytes
from services.processes.visible_gpus import visible_numbers
from services.sizes import format_size

_NAME = re.compile(r"cpu|(cuda|hip):(0|[1-9]\d{0,2})")
_BUILD = {"cuda": "CUDA", "hip": "ROCm"}

_KERNEL_CAPABILITY = (8, 0)
"""From this compute capability on NVIDIA's GPUs have the matrix instructions that Triton uses (Ampere and later)."""

_FLOAT8_CAPABILITY = (8, 9)
"""From this compute capability on NVIDIA's GPUs convert float8_e4m3fn (Ada, Hopper and later)."""

_WIDEST_FLASH_HEADS = 256
"""Numbers of the widest heads that flash attention takes."""

_CDNA, _RDNA = ("gfx908", "gfx90a", "gfx942", "gfx950"), ("gfx11", "gfx12")
"""Beginnings of the names of AMD's architectures that Triton compiles matrix instructions for."""

_HIP_FLOAT8 = ("gfx950", "gfx12")
"""Those of them that convert float8_e4m3fn. gfx942 has another 8-bit type, e4m3fnuz; the others have none."""

_HIP_SHARED_BYTES = 64 << 10
"""Shared memory of a program on AMD's GPUs but gfx950, for builds of torch that do not tell it."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device by flashsplit's name and by torch's.

    limit_bytes: how much of its memory this process keeps to, None for no limit.
    """

    name: str
    torch_device: torch.device
    limit_bytes: int | None = None

    @property
    def is_gpu(self) -> bool:
        return self.torch_device.type != "cpu"

    def current(self) -> contextlib.AbstractContextManager[None]:
        """What is launched inside is launched on this GPU; on the CPU there is nothing to choose."""
        return torch.cuda.device(self.torch_device) if self.torch_device.type != "cpu" else contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait for all that is queued on a GPU; the CPU has no queue."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)


HOST = Device("cpu", torch.device("cpu"))
"""Where experts are that a GPU leaves to its host."""


@dataclass(frozen=True, slots=True)
class KernelTarget:
    """What flashsplit's kernels need to know of a GPU: whether they can run there, and what their tiles must fit into.

    architecture: as compilers name it, "sm_90" or "gfx942". processors: those that run programs side by side.
    shared_bytes: shared memory that one program may take. lane_registers: registers of 32 bits that a thread may have.
    tile_bytes: the largest tile of keys or values that four warps' registers hold beside the sums of attention, in
    bytes. one_tile_height: whether tiles of more than 16 rows are summed in another order than those of 16.
    tensor_engine: whether an engine of its own fetches tiles, and the matrix instructions behind it sum in the same
    order as those for 16 rows. lane_columns: how many neighbouring columns of an operand that is made of bytes Triton
    lets a lane multiply, 0 where it is not known. lack: why the kernels cannot run there, None where they can.
    float8_lack: why they cannot convert float8_e4m3fn, None where they can.
    float32_precision: how products of float32 are made, as Triton's `input_precision`.
    """

    architecture: str
    processors: int
    shared_bytes: int
    lane_registers: int
    tile_bytes: int
    one_tile_height: bool
    tensor_engine: bool
    lane_columns: int
    lack: str | None
    float8_lack: str | None
    float32_precision: str

    @property
    def widest_heads(self) -> int:
        """Numbers of the widest heads whose queries a warp's registers hold beside a tile of keys."""
        return 512 if self.tile_bytes >= 16 << 10 else 256


def build_vendor() -> str | None:
    """Return which vendor's GPUs this torch drives: "cuda", "hip" or None."""
    if torch.version.hip:
        return "hip"
    return "cuda" if torch.version.cuda else None


@functools.cache
def kernel_target(device: torch.device) -> KernelTarget | None:
    """Return what kernels need to know of a GPU; None for the CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return hip_target(properties) if build_vendor() == "hip" else cuda_target(properties)


def _lane_columns() -> int:
    """Return `KernelTarget.lane_columns` of NVIDIA's GPUs: 2, as matrix instructions have them, but 4 up to Triton 3.7,
    unless four warps multiply together."""
    try:
        release = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return 0
    return 4 if tuple(map(int, release.split(".")[:2])) < (3, 8) else 2


def cuda_target(properties: Any) -> KernelTarget:
    """Describe one of NVIDIA's GPUs. properties: of `torch.cuda.get_device_properties`."""
    capability = (properties.major, properties.minor)

    def lack(needed: tuple[int, int]) -> str | None:
        if capability >= needed:
            return None
        has, asked = (f"{major}.{minor}" for major, minor in (capability, needed))
        return f"its compute capability is {has}, and {asked} is needed"

    return KernelTarget(
        architecture=f"sm_{properties.major}{properties.minor}",
        processors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
        lane_registers=255,
        tile_bytes=32 << 10,
        one_tile_height=False,
        # Seen to keep the order on Hopper. Others have such an engine too, but nobody has compared their sums.
        tensor_engine=capability == (9, 0),
        # Blackwell's larger chips take operands from a memory of their own.
        lane_columns=0 if properties.major == 10 else _lane_columns(),
        lack=lack(_KERNEL_CAPABILITY),
        float8_lack=lack(_FLOAT8_CAPABILITY),
        # The matrix units know tf32 only. Three passes are as good as float32 but for the last bits, and far faster
        # than numbers one by one.
        float32_precision="tf32x3",
    )


def hip_target(properties: Any) -> KernelTarget:
    """Describe one of AMD's GPUs. properties: of `torch.cuda.get_device_properties`."""
    # The name may be followed by features: "gfx90a:sramecc+:xnack-".
    architecture = properties.gcnArchName.partition(":")[0]
    shared_bytes = getattr(properties, "shared_memory_per_block", _HIP_SHARED_BYTES)
    rdna = architecture.startswith(_RDNA)
    lack = None if rdna or architecture.startswith(_CDNA) else f"Triton has no matrix instructions for {architecture}"
    float8 = architecture.startswith(_HIP_FLOAT8)
    return KernelTarget(
        architecture=architecture,
        processors=properties.multi_processor_count,
        shared_bytes=shared_bytes,
        lane_registers=256 if rdna else 512,
        # On RDNA each warp holds the whole tile.
        tile_bytes=4 << 10 if rdna else 32 << 10,
        # Other heights are other instructions, or lie otherwise over a program's warps.
        one_tile_height=True,
        tensor_engine=False,
        lane_columns=0,
        lack=lack,
        float8_lack=None if float8 else f"{architecture} has another 8-bit type, or none",
        float32_precision="ieee",
    )


def float8_lack(device: Device, *, kernels: bool) -> str | None:
    """Return why numbers cannot be kept as float8_e4m3fn on a device; None where they can.

    kernels: whether flashsplit's own kernels convert them, and not torch.
    """
    target = kernel_target(device.torch_device)
    if target is None or not (kernels or build_vendor() == "hip"):
        return None
    return target.float8_lack


def has_flash_attention(device: Device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether torch has flash attention there for numbers of this type and heads of so many, with windows and
    the log-sum-exp of each query's scores: on NVIDIA's GPUs; AMD's builds of it differ in what they take."""
    target = kernel_target(device.torch_device)
    if target is None or target.lack is not None or build_vendor() != "cuda":
        return False
    return dtype.itemsize == 2 and head_dim % 8 == 0 and head_dim <= _WIDEST_FLASH_HEADS


def product_precision(like: torch.Tensor) -> str:
    """Return how Triton is to multiply numbers of this tensor's type on its device, as its `input_precision`."""
    target = kernel_target(like.device)
    return target.float32_precision if target is not None and like.dtype is torch.float32 else "ieee"


def parse_devices(text: str, field: str = "--device") -> tuple[Device, ...]:
    """Devices joined by "+", of one vendor.

    Raises InvalidArgument for a malformed or repeated name and for mixed vendors, FailedPrecondition for a device that
    this torch build or this machine doesn't have.
    """
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"{field} {name!r} is not a device: use cpu, cuda:N or hip:N", field=field)
    vendors = {name.partition(":")[0] for name in names}
    if len(vendors) > 1:
        raise InvalidArgument(
            f"{field} {text!r} joins devices of several vendors in one worker: separate them with a comma, "
            "which starts a worker each",
            field=field,
        )
    gpus = [name for name in names if name != "cpu"]
    if len(set(gpus)) < len(gpus):
        raise InvalidArgument(f"{field} {text!r} names a GPU twice: name each once", field=field)
    return tuple(_find(name, field) for name in names)


def _find(name: str, field: str) -> Device:
    vendor, _, number = name.partition(":")
    if vendor == "cpu":
        return Device(name, torch.device("cpu"))
    built_for = build_vendor()
    if built_for != vendor:
        has = "a CPU build" if built_for is None else f"a {_BUILD[built_for]} build"
        raise FailedPrecondition(
            f"{field} {name!r} needs a {_BUILD[vendor]} build of torch and torch {torch.__version__} is {has}: "
            "install the other build, or name a device of this one",
            reason="WRONG_VENDOR",
            field=field,
        )
    numbers = _numbers()
    if int(number) not in numbers:
        there = ", ".join(f"{vendor}:{known}" for known in numbers) or "no GPU that torch can use"
        raise FailedPrecondition(f"{field} {name!r} does not exist here: there is {there}", field=field)
    return Device(name, torch.device("cuda", numbers.index(int(number))))


def _numbers() -> list[int]:
    """Of the GPUs that torch can use, in torch's order."""
    count = torch.cuda.device_count()
    given = visible_numbers()
    return list(range(count)) if given is None else given[:count]


def best_devices() -> list[str]:
    """All GPUs that torch can use, or else the CPU."""
    vendor = build_vendor()
    numbers = _numbers() if vendor is not None else []
    return [f"{vendor}:{number}" for number in numbers] or ["cpu"]


def free_bytes(device: Device) -> tuple[int, int]:
    """Return how much of a device's memory is free, and how much it has.

    On a GPU what torch has set aside without using it counts as free, and is given back for that. On a CPU what the
    host could make free counts too, such as cached files. A limit is all that there is, and what this process uses of
    it is not free.
    """
    if device.is_gpu:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device.torch_device)
    else:
        free, total = (_kilobytes("/proc/meminfo", name) for name in ("MemAvailable", "MemTotal"))
    return _within_limit(device, free, total)


def keep_to_limit(device: Device) -> None:
    """Have torch refuse what goes beyond a GPU's limit, where the device has one.

    Raises InvalidArgument for a limit beyond the device's memory.
    """
    if device.limit_bytes is None:
        return
    total = describe(replace(device, limit_bytes=None)).total_bytes
    if device.limit_bytes > total:
        raise InvalidArgument(
            f"--device-memory {format_size(device.limit_bytes)} is more than {device.name} has, {format_size(total)}: "
            "give less, or leave it out",
            field="--device-memory",
        )
    if device.is_gpu:
        share = usable_bytes(device.limit_bytes, device.name) / total
        torch.cuda.set_per_process_memory_fraction(share, device.torch_device)


def check_room(device: Device, needed_bytes: int, what: str) -> None:
    """Raise FailedPrecondition where a device's limit has no room for what is to be loaded. what: what that is."""
    if device.limit_bytes is None:
        return
    free, _ = free_bytes(device)
    if needed_bytes > free:
        raise FailedPrecondition(
            f"{what} take {format_size(needed_bytes)} on {device.name}, and of the {format_size(device.limit_bytes)} "
            f"that --device-memory leaves this worker {format_size(free)} are free for them: give it fewer layers or "
            "more memory, or pack matrices with --quantize",
            reason="DOES_NOT_FIT",
            field="--device-memory",
        )


def _within_limit(device: Device, free: int, total: int) -> tuple[int, int]:
    """Return free and total memory as this process may use it."""
    if device.limit_bytes is None:
        return free, total
    if device.is_gpu:
        used = torch.cuda.memory_reserved(device.torch_device)
    else:
        used = _kilobytes("/proc/self/status", "RssAnon")
    usable = usable_bytes(device.limit_bytes, device.name)
    return max(0, min(free, usable - used)), usable


def _kilobytes(path: str, name: str) -> int:
    """Return the bytes of a line like "MemTotal:  16 kB" of a file of Linux's."""
    lines = dict(line.split(":", 1) for line in Path(path).read_text(encoding="utf-8").splitlines())
    return int(lines[name].split()[0]) << 10


def describe(device: Device) -> DeviceDescription:
    """Product name and memory."""
    if device.is_gpu:
        free, total = torch.cuda.mem_get_info(device.torch_device)
        product = torch.cuda.get_device_name(device.torch_device)
        free, total = _within_limit(device, free, total)
        return DeviceDescription(device.name, product, total, free)
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    free, total = _within_limit(device, free, total)
    return DeviceDescription(device.name, platform.processor() or platform.machine(), total, free)
