"""Holds back what is queued on a GPU's stream until the host lets it pass, so that a launch can be made before what it
works on is known.

The driver makes the stream wait for a number in page-locked memory; letting it pass is one store. torch has no name for
that, so the driver is called itself. Where it cannot do this, there is no gate.
"""

from __future__ import annotations

import ctypes

import torch

from shard_worker.device.devices import Device, build_vendor
from shard_worker.device.dtypes import bytes_of

_AT_LEAST = 0
_DRIVER = "libcuda.so.1"


class StreamGate:
    """Shuts and opens the stream of one device; use `on`. It must be open before anything waits for the device."""

    def __init__(self, device: Device, wait: ctypes._NamedFuncPointer) -> None:
        self._device, self._wait = device, wait
        self._passed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._number = bytes_of(self._passed).cast("i")
        self._shut = 0

    @classmethod
    def on(cls, device: Device) -> StreamGate | None:
        """Return a device's gate; None on a CPU, and where the driver has no such thing."""
        if not device.is_gpu or build_vendor() != "cuda":
            # HIP waits only for memory of a kind that torch does not allocate.
            return None
        try:
            wait = ctypes.CDLL(_DRIVER).cuStreamWaitValue32_v2
        except (OSError, AttributeError):
            return None
        wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        gate = cls(device, wait)
        try:
            # It passes at once, if it is possible at all.
            gate._number[0] = 1
            gate.shut()
        except RuntimeError:
            return None
        return gate

    def shut(self) -> None:
        """Make what is queued on the current stream from now on wait. Raises RuntimeError when the driver refuses."""
        number = self._shut + 1
        with self._device.current():
            stream = torch.cuda.current_stream().cuda_stream
            refusal = self._wait(stream, self._passed.data_ptr(), number, _AT_LEAST)
        if refusal:
            raise RuntimeError(f"cuStreamWaitValue32 failed with {refusal}")
        self._shut = number

    def open(self) -> None:
        """Let what waits run."""
        self._number[0] = self._shut
