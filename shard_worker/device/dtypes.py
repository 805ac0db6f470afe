"""Element types: torch's, the wire's and the checkpoint's names for the same thing, and tensors to bytes and back."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.dtypes import FLOAT8, WEIGHT_DTYPES
from services.errors import InvalidArgument
from services.messages.tensors import WireTensor

_BY_NAME = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    FLOAT8: torch.float8_e4m3fn,
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_from_name(name: str, field: str = "dtype") -> torch.dtype:
    """Raises InvalidArgument for a type that weights cannot have here."""
    if name not in WEIGHT_DTYPES:
        raise InvalidArgument(f"{field} {name!r} is not one of {', '.join(WEIGHT_DTYPES)}", field=field)
    return _BY_NAME[name]


def kv_dtype_from_name(name: str | None) -> torch.dtype | None:
    """What keys and values are kept in; None for the type of the weights.

    Raises InvalidArgument for a type that they cannot have.
    """
    if name not in (None, FLOAT8):
        raise InvalidArgument(f"kv_dtype {name!r} is not {FLOAT8}, nor left to the weights", field="kv_dtype")
    return None if name is None else _BY_NAME[name]


def dtype_to_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


PAGE_LOCKED_BYTES = 128 << 10
"""From this size on copies from GPUs go through page-locked memory: at 8 MB that takes a third of the time, at 256 KB
as long as without, but nothing waits for it."""


@dataclass(frozen=True, slots=True)
class OnHost:
    """A tensor that is copied to page-locked memory behind what computes it, and perhaps overwritten by the next step.
    done: when it is there; None where nothing needs to be waited for."""

    tensor: torch.Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OnHost:
        """Queue a copy of a GPU's tensor, in memory of its own."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return cls(host, torch.cuda.current_stream(tensor.device).record_event())

    @property
    def there(self) -> bool:
        """Whether `wait` would return at once."""
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        if self.done is not None:
            self.done.synchronize()
        return self.tensor


_LOOKED_FOR_BYTES = 16 << 10
"""Tensors of so many bytes on average are looked for in page-locked memory, where they may lie already."""


class Leaving:
    """Tensors on their way to the host: copies are queued behind what computes them; nothing waits before `wait`."""

    def __init__(self, tensors: Sequence[torch.Tensor], first: OnHost | None = None) -> None:
        """first: what comes before them, and is there before them."""
        self._first = first
        self._host = [_queued(tensor.detach()) for tensor in tensors]
        # Several devices of one stage have a stream each.
        devices = {tensor.device for tensor in tensors if _goes_page_locked(tensor)}
        streams = [torch.cuda.current_stream(device) for device in devices]
        self._arrived = [stream.record_event() for stream in streams]

    @property
    def lent(self) -> bool:
        """Whether the first one lasts only until the next step."""
        return self._first is not None

    @property
    def there(self) -> bool:
        """Whether nothing needs to be waited for."""
        return self._first is None and all(event.query() for event in self._arrived)

    def views(self) -> list[WireTensor]:
        """At once: where their bytes will be."""
        first = [] if self._first is None else [self._first.tensor]
        return [_bytes_of(tensor) for tensor in (*first, *self._host)]

    def wait_first(self) -> None:
        """From any thread: until the first one is there."""
        if self._first is not None:
            self._first.wait()
        else:
            self.wait()

    def wait(self) -> list[WireTensor]:
        """From any thread: until all are there; their bytes."""
        if self._first is not None:
            self._first.wait()
        for event in self._arrived:
            event.synchronize()
        return self.views()


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """Copy a tensor of any device to bytes."""
    return Leaving([tensor]).wait()[0]


def _goes_page_locked(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu" and tensor.nbytes >= PAGE_LOCKED_BYTES


def _queued(tensor: torch.Tensor) -> torch.Tensor:
    if not _goes_page_locked(tensor):
        return tensor.contiguous().cpu()
    # A copy to memory of another kind would wait for the device here.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _bytes_of(host: torch.Tensor) -> WireTensor:
    return WireTensor(_NAMES[host.dtype], tuple(host.shape), bytes_of(host))


def bytes_of(host: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return host.view(-1).view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


def page_locked(size_bytes: int) -> memoryview:
    """Return page-locked memory. Of what lies in it `over_wire` makes tensors from which GPUs copy themselves, and
    which keep it."""
    return bytes_of(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))


def from_wire(tensor: WireTensor, device: torch.device) -> torch.Tensor:
    """A tensor of the bytes on the device."""
    return to_device(over_wire(tensor), device)


def rows_from_wire(tensors: Sequence[WireTensor], device: torch.device) -> torch.Tensor:
    """The rows of tensors that are alike, one's behind the other's, on the device."""
    # A worker on a CPU must not ask, which may begin a context on the host's GPU.
    if device.type != "cpu" and (whole := adjoining_rows(tensors)) is not None:
        return whole.to(device, non_blocking=True)
    shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
    host = torch.empty(shape, dtype=_BY_NAME[tensors[0].dtype], pin_memory=device.type != "cpu")
    copy_rows(tensors, bytes_of(host))
    return host.to(device, non_blocking=True)


def adjoining_rows(tensors: Sequence[WireTensor]) -> torch.Tensor | None:
    """Return the rows of tensors that lie one behind the other in memory of `page_locked`, which are not copied; None
    where they lie elsewhere, or are so small that looking for where would take longer than to copy them."""
    if sum(tensor.size_bytes for tensor in tensors) < len(tensors) * _LOOKED_FOR_BYTES:
        return None
    return _as_one([over_wire(tensor) for tensor in tensors])


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors of rows that lie one behind the other in page-locked memory as one; None where they do not."""
    first, rows, end = tensors[0], 0, tensors[0].data_ptr()
    if not first.is_pinned():
        return None
    memory = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != memory or tensor.data_ptr() != end or not tensor.is_contiguous():
            return None
        rows, end = rows + len(tensor), end + tensor.nbytes
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def copy_rows(tensors: Sequence[WireTensor], into: memoryview) -> None:
    """Write the bytes of tensors one behind the other."""
    first = 0
    # One by one: torch would wake all its threads for them.
    for tensor in tensors:
        data = memoryview(tensor.data)
        into[first : first + len(data)] = data
        first += len(data)


def over_wire(tensor: WireTensor) -> torch.Tensor:
    """A tensor on the CPU over the bytes; no copy of large ones."""
    dtype = _BY_NAME[tensor.dtype]
    if not math.prod(tensor.shape):
        return torch.empty(tensor.shape, dtype=dtype)
    data = memoryview(tensor.data)
    # Beneath the numpy array of `bytes_of` is the tensor itself, which knows whether it is page-locked.
    memory = data.obj.base if isinstance(data.obj, np.ndarray) else None
    if isinstance(memory, torch.Tensor):
        first = ctypes.addressof(ctypes.c_char.from_buffer(data)) - memory.data_ptr()
        return memory[first : first + len(data)].view(dtype).view(tensor.shape)
    # torch wants a buffer that may be written to. A tensor that came in pieces has one, a small one is copied.
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype).view(tensor.shape)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on a device."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    # Queued behind the step before, while the host goes on: a copy from memory of another kind would wait for that.
    host = tensor.contiguous()
    locked = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    copy_bytes(locked, host)
    return locked.to(device, non_blocking=True)


def joined_on(tensors: Sequence[torch.Tensor], device: torch.device | None) -> torch.Tensor:
    """Return the rows of tensors that are alike, one's behind the other's: where they are, or from the CPU to a GPU."""
    if device is None or device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in tensors):
        return torch.cat([*tensors])
    if (whole := _as_one(tensors)) is not None:
        return whole.to(device, non_blocking=True)
    shape = (sum(map(len, tensors)), *tensors[0].shape[1:])
    locked, first = torch.empty(shape, dtype=tensors[0].dtype, pin_memory=True), 0
    for tensor in tensors:
        copy_bytes(locked[first : first + len(tensor)], tensor.contiguous())
        first += len(tensor)
    return locked.to(device, non_blocking=True)


def copy_bytes(into: torch.Tensor, source: torch.Tensor) -> None:
    """Between contiguous tensors on the CPU, by one thread: torch would wake all it has, for some milliseconds."""
    np.copyto(into.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
