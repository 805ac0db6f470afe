"""Device names and the only place that asks which vendor a device is of.

`cpu`, `cuda:N` (NVIDIA) and `hip:N` (AMD). torch calls both vendors' devices "cuda"; which of them a build drives
stands in `torch.version`. The wrong one is refused by name.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from dataclasses import dataclass

import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.messages.description import DeviceDescription
from services.processes.visible_gpus import visible_numbers

_NAME = re.compile(r"cpu|(cuda|hip):(0|[1-9]\d{0,2})")
_BUILD = {"cuda": "CUDA", "hip": "ROCm"}

FLOAT8_CAPABILITY = (8, 9)
"""From this compute capability on NVIDIA's GPUs convert float8_e4m3fn (Ada, Hopper and later)."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device by flashsplit's name and by torch's."""

    name: str
    torch_device: torch.device

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


def build_vendor() -> str | None:
    """Which vendor's GPUs this torch drives: "cuda", "hip" or None."""
    if torch.version.hip:
        return "hip"
    return "cuda" if torch.version.cuda else None


def float8_lack(device: Device, *, kernels: bool) -> str | None:
    """Why numbers cannot be kept as float8_e4m3fn on a device; None where they can. kernels: whether flashsplit's own
    convert them, and not torch."""
    if not device.is_gpu:
        return None
    if build_vendor() == "hip":
        return "AMD's GPUs have another 8-bit type, or none"
    if kernels and (found := torch.cuda.get_device_capability(device.torch_device)) < FLOAT8_CAPABILITY:
        has, needed = (f"{major}.{minor}" for major, minor in (found, FLOAT8_CAPABILITY))
        return f"its compute capability is {has}, and {needed} is needed"
    return None


def product_precision(like: torch.Tensor) -> str:
    """How Triton is to multiply numbers of this tensor's type on its device. float32 on NVIDIA's: by three passes of
    the matrix units, which know tf32 only; that is as good but for the last bits, and far faster than one by one."""
    return "tf32x3" if like.dtype is torch.float32 and like.is_cuda and build_vendor() == "cuda" else "ieee"


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


def describe(device: Device) -> DeviceDescription:
    """Product name and memory."""
    if device.is_gpu:
        free, total = torch.cuda.mem_get_info(device.torch_device)
        product = torch.cuda.get_device_name(device.torch_device)
        return DeviceDescription(device.name, product, total, free)
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    return DeviceDescription(device.name, platform.processor() or platform.machine(), total, free)
