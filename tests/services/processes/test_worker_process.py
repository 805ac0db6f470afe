"""One child worker: started, found dead, stopped, in every order."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.errors import FailedPrecondition, Unavailable
from services.processes.launch import Launch
from services.processes.worker_process import WorkerProcess, list_devices


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


async def test_death_is_told_with_signal_and_device() -> None:
    """`died` ends when the process does, unasked, and says how."""
    process = WorkerProcess("cpu", ["target"], Launch(threads=1))
    await process.start()
    assert process.process_id is not None
    os.kill(process.process_id, signal.SIGKILL)

    sentence = await asyncio.wait_for(process.died(), 5)
    await process.stop()

    assert "cpu" in sentence
    assert "SIGKILL" in sentence


async def test_worker_that_refuses_its_device_says_why() -> None:
    """A refusal on the worker's command line comes up as its own sentence."""
    process = WorkerProcess("hip:0", ["target"])
    try:
        with pytest.raises(FailedPrecondition, match="hip:0"):
            await process.start()
    finally:
        await process.stop()


async def test_program_that_is_no_worker_is_reported_with_its_last_words() -> None:
    """A command that exits at once is told with its exit code and output."""
    process = WorkerProcess("cpu", ["target"], shell("echo wrong program; exit 3"))
    try:
        with pytest.raises(Unavailable, match="(?s)exited with code 3.*wrong program"):
            await process.start()
    finally:
        await process.stop()


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
