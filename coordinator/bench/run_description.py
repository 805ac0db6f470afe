"""Where figures come from: the machine, the workers' devices, the command and the version of flashsplit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from services.messages.description import WorkerDescription

_CPU_INFO = Path("/proc/cpuinfo")
_CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What must be known of a run so that somebody else can repeat it.

    processor, cores: of the host that the command ran on; cores counts those that the process may use. devices: of each
    worker, with the product's name where it is a GPU. commit: of the checkout that flashsplit runs from, with a + where
    its files differ; None where it doesn't run from one.
    """

    processor: str
    cores: int
    devices: tuple[str, ...]
    command: str
    version: str
    commit: str | None


def describe_run(workers: Sequence[WorkerDescription]) -> RunDescription:
    """Describe this process's run and the workers that it measured."""
    return RunDescription(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        devices=tuple(_devices(workers)),
        command=shlex.join(["flashsplit", *sys.argv[1:]]),
        version=metadata.version("flashsplit"),
        commit=_commit(),
    )


def run_lines(run: Mapping[str, Any]) -> list[str]:
    """Return the description in a report as lines for people."""
    machine = f"{run['processor']}, {run['cores']} cores"
    machine += f"; workers on {', '.join(run['devices'])}" if run["devices"] else ""
    commit = f", commit {run['commit']}" if run["commit"] else ""
    return [f"{machine}; flashsplit {run['version']}{commit}", f"$ {run['command']}"]


def _processor() -> str:
    """Return the processor's product name, or at least its architecture."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _devices(workers: Iterable[WorkerDescription]) -> Iterable[str]:
    """Yield each worker's devices, its host where that is another one, and the products that its GPUs are."""
    for worker in workers:
        products = ", ".join(dict.fromkeys(device.product for device in worker.devices if device.name != "cpu"))
        place = worker.device if worker.host == platform.node() else f"{worker.device} of {worker.host}"
        yield f"{place} ({products})" if products else place


def _commit() -> str | None:
    """Return the commit that this code is of, None where it doesn't lie in a checkout with its history."""
    if not (_CHECKOUT / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        """Return what git prints. Raises OSError and CalledProcessError."""
        command = ["git", "-C", str(_CHECKOUT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None
