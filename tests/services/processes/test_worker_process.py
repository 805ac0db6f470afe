"""One child worker: started, found dead, stopped, in every order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from services.errors import FailedPrecondition, Unavailable
from services.processes.launch import Launch
from services.processes.worker_process import WorkerFailed, WorkerProcess, failure_fields, list_devices
from tests.e2e.stopped_thread import device_thread, stopped
from tests.services.fakes import until


def shell(script: str) -> Launch:
    """A worker program that is none."""
    return Launch(commands={"cpu": ["sh", "-c", script, "sh"]})


def scratch_of(process: WorkerProcess) -> Path:
    return Path(process.address.removeprefix("unix:")).parent


async def test_started_worker_listens_and_stops_without_a_trace() -> None:
    """After start the socket is there; after stop, called twice, process and scratch directory are gone."""
    process = WorkerProcess("cpu", ["target"], Launch(threads=1))
    await process.start()
    scratch, pid = scratch_of(process), process.process_id
    assert pid is not None
    assert (scratch / "worker.sock").exists()

    await process.stop()
    await process.stop()

    assert not scratch.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("own_processes")
async def test_a_worker_that_cannot_be_killed_holds_up_nobody() -> None:
    """One of its threads does not return from the kernel, here from a debugger, so that it does not end when killed."""
    process = WorkerProcess("cpu", ["target"], Launch(threads=1))
    await process.start()
    assert process.process_id is not None
    scratch, pid = scratch_of(process), process.process_id
    with stopped(device_thread(pid)):
        async with asyncio.timeout(30):
            await process.stop()
        assert not scratch.exists()
        # It is still there, as its end has not been taken note of.
        os.kill(pid, 0)
    await until(lambda: not Path(f"/proc/{pid}").exists(), 10)
    await asyncio.sleep(0.1)


async def test_death_is_told_with_signal_and_device() -> None:
    """`died` ends when the process does, unasked, and says how."""
    process = WorkerProcess("cpu", ["target"], Launch(threads=1))
    await process.start()
    assert process.process_id is not None
    os.kill(process.process_id, signal.SIGKILL)

    death = await asyncio.wait_for(process.died(), 5)
    await process.stop()

    assert "cpu" in death.message
    assert "SIGKILL" in death.message


async def test_worker_that_refuses_its_device_says_why() -> None:
    """A refusal on the worker's command line comes up as its own sentence."""
    process = WorkerProcess("hip:0", ["target"])
    try:
        with pytest.raises(FailedPrecondition, match="hip:0"):
            await process.start()
    finally:
        await process.stop()


async def test_program_that_is_no_worker_is_reported_with_its_last_lines() -> None:
    """A command that exits at once is told with its exit code; its output stands beside the sentence, not in it."""
    process = WorkerProcess("cpu", ["target"], shell("echo wrong program; echo try another; exit 3"))
    try:
        with pytest.raises(WorkerFailed, match="exited with code 3$") as caught:
            await process.start()
    finally:
        await process.stop()
    assert caught.value.log_lines == ("wrong program", "try another")


def test_a_failure_in_the_log_as_a_program_reads_it(json_events: Callable[[], list[dict[str, Any]]]) -> None:
    """A dead worker's last lines are a list in a field of their own: events as objects, not as JSON in a string."""
    lines = ['{"level": "error", "event": "call.failed", "why": "no \\"room\\""}', "Killed"]

    structlog.get_logger().error("cluster.lost", **failure_fields(WorkerFailed("the worker was killed", lines)))

    [event] = json_events()
    assert event["why"] == "the worker was killed"
    assert event["last_lines"] == [{"level": "error", "event": "call.failed", "why": 'no "room"'}, "Killed"]


def test_other_failures_in_the_log_have_no_lines() -> None:
    """What no worker process wrote lines for is described by its sentence alone."""
    assert failure_fields(Unavailable("gone")) == {"why": "gone"}
    assert failure_fields(WorkerFailed("silent")) == {"why": "silent"}


async def test_last_exception_is_read_from_the_log() -> None:
    """What a worker logged as an exception is told as type and text."""
    line = '{"level": "error", "event": "call.failed", "exception": [{"exc_type": "ValueError", "exc_value": "bad"}]}'
    process = WorkerProcess("cpu", ["target"], shell(f"echo '{line}'; echo more; exit 1"))
    try:
        with pytest.raises(Unavailable):
            await process.start()
        assert process.last_exception() == "ValueError: bad"
    finally:
        await process.stop()


def test_devices_are_listed() -> None:
    """At least one device, and on a machine without a GPU exactly the CPU."""
    devices = list_devices()

    assert devices
    assert devices == ["cpu"] or all(name.partition(":")[0] in ("cuda", "hip") for name in devices)
