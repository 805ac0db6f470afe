"""How local workers are started: the program for each vendor, its arguments and its environment.

A torch build drives one vendor's GPUs, so a host with both has two environments with a worker each; a program may be
named for every vendor.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from services.errors import InvalidArgument
from services.net.security import OPEN, Security
from services.processes.visible_gpus import environment_for
from services.rpc.payload_transport import PayloadTransport

VENDORS = ("cpu", "cuda", "hip")
DEFAULT_COMMAND = (sys.executable, "-m", "shard_worker")
_FLAG = "--worker-command"


@dataclass(frozen=True, slots=True)
class Launch:
    """What all local workers of one coordinator have in common.

    threads: how many CPU threads each has; None for torch's default. prefix_cache_bytes: what kept prefixes may take in
    each; None for the worker's own default. memory_share: of each device's memory, what a worker may take; None for its
    own default. cuda_graphs: whether those with GPUs capture graphs; None leaves it to
    them. security: their certificates and token. log_level: the least important line that they log. transport: how
    payloads travel. commands: for a vendor, the words of the program to start for its devices where it isn't this one.
    """

    threads: int | None = None
    prefix_cache_bytes: int | None = None
    memory_share: float | None = None
    cuda_graphs: bool | None = None
    security: Security = OPEN
    log_level: str = "info"
    transport: PayloadTransport = PayloadTransport.AUTO
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def command(self, devices: str) -> tuple[str, ...]:
        """Return the program, as words, for devices like "hip:0+hip:1"."""
        return tuple(self.commands.get(vendor_of(devices), DEFAULT_COMMAND))

    def arguments(self, devices: str, roles: Sequence[str], memory: str | None = None) -> list[str]:
        """Return the flags of a worker on these devices with these roles.

        memory: how much of each device's memory it keeps to, like "8GiB"; None for all of it.
        """
        optional = {
            "--device-memory": memory,
            "--threads": self.threads,
            "--prefix-cache-bytes": self.prefix_cache_bytes,
            "--gpu-memory-utilization": self.memory_share,
        }
        graphs = None if vendor_of(devices) == "cpu" else self.cuda_graphs
        return [
            *("--device", devices),
            *("--roles", ",".join(roles)),
            *("--log-level", self.log_level, "--payload-transport", self.transport),
            *self.security.child_arguments(),
            *{None: (), True: ("--cuda-graphs",), False: ("--no-cuda-graphs",)}[graphs],
            *(word for flag, value in optional.items() if value is not None for word in (flag, str(value))),
        ]

    def environment(self, devices: str) -> dict[str, str]:
        """Return the environment variables of a worker on these devices."""
        return environment_for(devices, self.security.child_environment(os.environ))


DEFAULT_LAUNCH = Launch()


def vendor_of(devices: str) -> str:
    """Return the vendor of devices like "hip:0+hip:1": "cpu", "cuda", "hip" or "best"."""
    return devices.partition(":")[0].partition("+")[0]


def parse_commands(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Parse texts like "VENDOR=PROGRAM [ARGUMENT…]", where the program is in PATH or named by its path.

    Raises InvalidArgument for another form, an unknown or repeated vendor, and a program that cannot be run.
    """
    commands: dict[str, tuple[str, ...]] = {}
    for text in texts:
        vendor, equals, program = text.partition("=")
        try:
            words = shlex.split(program)
        except ValueError as error:
            raise InvalidArgument(f"{_FLAG} {text!r} cannot be read: {error}", field=_FLAG) from None
        if not equals or vendor not in VENDORS or not words:
            raise InvalidArgument(
                f"{_FLAG} {text!r} must be VENDOR=PROGRAM with one of {', '.join(VENDORS)}, like "
                "hip=/opt/rocm-env/bin/flashsplit-worker",
                field=_FLAG,
            )
        if vendor in commands:
            raise InvalidArgument(f"{_FLAG} names a program for {vendor} twice: give one", field=_FLAG)
        if shutil.which(words[0]) is None:
            raise InvalidArgument(
                f"{_FLAG} {text!r}: {words[0]} is not a program that can be run here; name one by its path",
                field=_FLAG,
            )
        commands[vendor] = tuple(words)
    return commands
