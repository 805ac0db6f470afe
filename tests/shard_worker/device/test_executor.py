"""The device thread: one at a time, in order, off the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from services.errors import ResourceExhausted, Unavailable
from shard_worker.device.executor import DeviceThread


@pytest.fixture
def thread() -> Iterator[DeviceThread]:
    thread = DeviceThread()
    yield thread
    thread.shutdown()


async def test_jobs_run_one_after_the_other_in_order(thread: DeviceThread) -> None:
    """A job submitted first is done first, however long it takes, and all run on one thread."""
    done: list[int] = []

    def job(number: int) -> int:
        time.sleep(0.02 if number == 0 else 0)
        done.append(number)
        return threading.get_ident()

    idents = await asyncio.gather(*[thread.submit(job, number) for number in range(5)])

    assert done == [0, 1, 2, 3, 4]
    assert len(set(idents)) == 1
    assert threading.get_ident() not in idents


async def test_the_event_loop_goes_on_while_a_job_runs(thread: DeviceThread) -> None:
    """Awaiting a forward leaves the loop free, so that health can answer."""
    release = threading.Event()
    job = thread.submit(release.wait)

    # The loop runs this while the job waits for it.
    asyncio.get_running_loop().call_soon(release.set)

    assert await job


async def test_jobs_run_without_autograd(thread: DeviceThread) -> None:
    """Jobs are in inference mode and the caller isn't."""
    assert await thread.submit(torch.is_inference_mode_enabled)
    assert not torch.is_inference_mode_enabled()


async def test_errors_reach_the_caller_and_the_thread_goes_on(thread: DeviceThread) -> None:
    """A failing job fails its own future only."""
    with pytest.raises(ZeroDivisionError):
        await thread.submit(lambda: 1 // 0)

    assert await thread.submit(lambda: 7) == 7


async def test_memory_that_runs_out_is_named(thread: DeviceThread) -> None:
    """torch's out-of-memory error becomes one that says how much was asked for and what to change, without torch's own
    paragraphs."""

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. See documentation.")

    with pytest.raises(
        ResourceExhausted, match="out of memory. Tried to allocate 2 GiB; give this stage fewer layers"
    ) as caught:
        await thread.submit(fail)

    assert caught.value.reason == "OUT_OF_MEMORY"


async def test_page_locked_memory_can_run_out(thread: DeviceThread) -> None:
    """CUDA's refusal of page-locked memory, an error like any other to torch, becomes the same error."""

    def fail(sentence: str) -> None:
        raise RuntimeError(sentence)

    refusal = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda"
    with pytest.raises(ResourceExhausted, match="no memory left: CUDA error: out of memory; give this stage"):
        await thread.submit(fail, refusal)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await thread.submit(fail, "CUDA error: an illegal memory access was encountered\nout of memory")


async def test_the_cpus_memory_can_run_out_too(thread: DeviceThread) -> None:
    """What the CPU's allocator refuses becomes the same error; another failure of torch stays what it is."""
    with pytest.raises(ResourceExhausted, match="no memory left: .*DefaultCPUAllocator"):
        await thread.submit(torch.empty, 1 << 55)
    with pytest.raises(RuntimeError, match="size of tensor"):
        await thread.submit(torch.add, torch.zeros(2), torch.zeros(3))


async def test_the_number_of_cpu_threads_is_the_jobs_own() -> None:
    """`threads` counts inside the jobs and leaves the rest of the process alone."""
    outside = torch.get_num_threads()
    thread = DeviceThread(2)

    assert await thread.submit(torch.get_num_threads) == 2
    thread.shutdown()
    assert torch.get_num_threads() == outside


@pytest.mark.parametrize("broken", [True, False])
async def test_a_broken_device_is_reported(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    """After a fault every call fails, and the caller hears that the worker ends; other errors are a call's own."""
    reported = threading.Event()
    thread = DeviceThread(1, reported.set)
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for it")

    def fails() -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", fails if broken else lambda: None)
    with pytest.raises(Unavailable if broken else torch.AcceleratorError, match="illegal memory access") as caught:
        await thread.submit(fails)
    if broken:
        assert str(caught.value).endswith("was encountered")
        assert reported.wait(5)
    assert reported.is_set() is broken
    assert await thread.submit(int) == 0
    thread.shutdown()
