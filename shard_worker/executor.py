"""The one thread that owns a worker's devices. Async code awaits it and never computes.

Jobs run in the order in which they were submitted, so a commit that was submitted before a forward is applied before
it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from services.errors import ResourceExhausted

T = TypeVar("T")


class DeviceThread:
    """Runs jobs one after the other. `threads`: intra-op threads on the CPU, None for torch's default."""

    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="device",
            initializer=functools.partial(torch.set_num_threads, threads) if threads else None,
        )

    def submit(self, job: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Queue a job now; await the future for its result."""
        return asyncio.wrap_future(self.queue(job, *args))

    def queue(self, job: Callable[..., T], *args: object) -> Future[T]:
        """As `submit`, from any thread; a job may queue what comes behind it."""
        return self._pool.submit(_in_inference_mode, job, *args)

    def shutdown(self) -> None:
        """Drop what has not begun; what runs ends on its own."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _in_inference_mode(job: Callable[..., T], *args: object) -> T:
    try:
        with torch.inference_mode():
            return job(*args)
    except RuntimeError as error:
        # The CPU's allocators have no exception of their own. The plain one's sentence comes behind a place in torch's
        # sources, that of page-locked memory is CUDA's.
        place, cpu_allocator, rest = str(error).partition("DefaultCPUAllocator")
        page_locked = place.startswith(("CUDA error: out of memory", "HIP error: out of memory"))
        if isinstance(error, torch.OutOfMemoryError) or cpu_allocator or page_locked:
            sentence = (cpu_allocator + rest if cpu_allocator else place).partition("\n")[0].partition(".")[0]
            raise ResourceExhausted(
                f"the device has no memory left: {sentence}; give this stage fewer layers or use a shorter context",
                reason="OUT_OF_MEMORY",
            ) from error
        raise
