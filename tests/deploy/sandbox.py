"""Programs as deployment files start them, on loopback addresses of their own and with their paths in a folder.

Nothing of a command line is changed but these two: names of hosts become addresses, 0.0.0.0 the program's own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.conftest import ROOT, end

_SANDBOXES = itertools.count()
PROGRAMS = {"flashsplit": "coordinator", "flashsplit-worker": "shard_worker"}


@dataclass(frozen=True)
class Program:
    """A running one. address: of its host; command: as it was started."""

    process: subprocess.Popen[bytes]
    address: str
    command: list[str]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


class Sandbox:
    """Hosts and programs of one test; `close` ends those that still run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, str] = {}
        """Names that programs dial, and the addresses that are put in their place."""
        self.stand_ins: dict[str, str] = {}
        """Other words to change: what this machine lacks, and what stands in for it."""
        self._addresses: dict[str, str] = {}
        self._programs: list[Program] = []
        # Its own, so that neither two sandboxes nor two runs on one machine meet.
        number = os.getpid() * 7 + next(_SANDBOXES)
        self._network = f"127.{1 + number // 250 % 250}.{number % 250}"

    def address(self, host: str) -> str:
        """Where a host's programs listen; new for a new name."""
        return self._addresses.setdefault(host, f"{self._network}.{len(self._addresses) + 2}")

    def host(self, name: str) -> str:
        """The address of a host that programs dial by its name."""
        return self.hosts.setdefault(name, self.address(name))

    def rewrite(self, text: str, address: str, paths: Mapping[str, Path]) -> str:
        """A text with names of hosts as addresses, and paths where they are here."""
        words = self.hosts | self.stand_ins
        for word in sorted(words, key=len, reverse=True):
            text = text.replace(word, words[word])
        text = text.replace("0.0.0.0", address)
        for path in sorted(paths, key=len, reverse=True):
            text = text.replace(path, str(paths[path]))
        return text

    def start(
        self,
        host: str,
        command: Sequence[str],
        *,
        paths: Mapping[str, Path],
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        """`flashsplit …` or `flashsplit-worker …` on a host."""
        address = self.address(host)
        program, *arguments = command
        words = [sys.executable, "-m", PROGRAMS[program], *(self.rewrite(word, address, paths) for word in arguments)]
        given = {name: self.rewrite(value, address, paths) for name, value in (environment or {}).items()}
        log = self.folder / f"{len(self._programs)}-{host}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, **given}, stdout=output, stderr=output)
        self._programs.append(Program(process, address, words, log))
        return self._programs[-1]

    def close(self) -> None:
        for program in self._programs:
            end(program.process)


def listening_ports(address: str) -> set[int]:
    """TCP ports that somebody of this machine listens on at one address."""
    plain = "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
    # gRPC listens on it as an IPv6 address.
    wanted = (plain, f"{'0' * 16}FFFF0000{plain}")
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            host, _, port = local.partition(":")
            if state == "0A" and host in wanted:
                ports.add(int(port, 16))
    return ports
