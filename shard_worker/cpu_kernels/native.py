"""A function in LLVM's language, compiled for this CPU and run by torch's own threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llvmlite import ir

_LEAST_SHARE = 1 << 15
"""How many elements of a matrix are worth a thread."""

THREAD_NUMBER, THREAD_COUNT = "omp_get_thread_num", "omp_get_num_threads"
"""OpenMP's functions, `int32 ()` both, by which a kernel knows which share of the work is its thread's."""

THREADS_BARRIER = "GOMP_barrier"
"""OpenMP's function, `void ()`, that returns once all of a kernel's threads have called it."""


@functools.cache
def is_available() -> bool:
    """Return whether kernels can be compiled and run here."""
    return importlib.util.find_spec("llvmlite") is not None and _openmp() is not None


@functools.cache
def lanes() -> int:
    """Return how many float32 a vector of this CPU has. Only where `is_available`."""
    return 16 if _has("avx512f") else 8


@functools.cache
def multiplies_pairs() -> bool:
    """Return whether this CPU multiplies 16 whole numbers of 16 bits at once, and adds neighbours. Only where
    `is_available`."""
    return _has("avx2")


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies elements of this type, of 16 bits, by instructions that this CPU has for them."""
    ops = torch.ops.mkldnn
    return bool((ops._is_mkldnn_bf16_supported if dtype is torch.bfloat16 else ops._is_mkldnn_fp16_supported)())


def threads_for(elements: int) -> int:
    """Return how many of torch's threads a matrix of so many elements is worth."""
    return max(1, min(elements // _LEAST_SHARE, torch.get_num_threads()))


class NativeFunction:
    """A compiled `void (int64 *arguments)`."""

    def __init__(self, module: ir.Module, name: str) -> None:
        """Compile a module whose function of that name it is. Only where `is_available`."""
        from llvmlite import binding

        openmp = _openmp()
        assert openmp is not None
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        for function in (THREAD_NUMBER, THREAD_COUNT, THREADS_BARRIER):
            binding.add_symbol(function, ctypes.cast(getattr(openmp, function), ctypes.c_void_p).value)
        machine = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
        )
        # The code is freed with the engine.
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
        self._engine.finalize_object()
        self._address: int = self._engine.get_function_address(name)
        self._run_alone = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._address)
        self._run_by_threads = openmp.GOMP_parallel
        self._run_by_threads.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint]

    @property
    def address(self) -> int:
        """Where its code is."""
        return self._address

    def run(self, arguments: bytes, threads: int) -> None:
        """Run it on so many threads, all with the same arguments; other Python threads go on beside it."""
        if threads == 1:
            self._run_alone(arguments)
        else:
            self._run_by_threads(self._address, arguments, threads, 0)


@dataclass(frozen=True, slots=True)
class Call:
    """A compiled function with what it is told: whole numbers of 64 bits, some of them addresses of tensors, which are
    kept for as long as it may run. threads: how many of torch's it is worth."""

    function: NativeFunction
    arguments: bytes
    threads: int

    def run(self) -> None:
        """Run it now."""
        self.function.run(self.arguments, self.threads)


def _has(feature: str) -> bool:
    """Return whether this CPU has it, by LLVM's name."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get(feature, False))


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library whose threads torch uses, so that kernels use the same; None where it uses none."""
    paths: list[str] = []
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        paths = [line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if "/libgomp" in line]
    # Other packages may have brought one along.
    own = sorted(paths, key=lambda path: "/torch" not in path)
    return ctypes.CDLL(own[0]) if own else None
