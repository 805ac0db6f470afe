"""Two hosts on one machine: network namespaces with an address each and a cable between them.

sudo .venv/bin/python -m tests.deploy.two_hosts      # what the cable's delay costs, as the README has it
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from coordinator.cli.commands.certs import certs
from tests.deploy.wire import Wire
from tests.e2e.conftest import ROOT, end, until

HOSTS = ("a", "b")
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
PORT = 7001
DEMO = ROOT / "deploy" / "demo"
PAIR = ("--model", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--dtype", "float32")


def why_not() -> str | None:
    """What this machine lacks, if it lacks something."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip is missing: install iproute2"
    if not os.access("/dev/net/tun", os.W_OK):
        return "/dev/net/tun is missing"
    probe = f"fs-{os.getpid()}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"no network namespace can be made: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class TwoHosts:
    """Use as a context; programs that were started end with it. workers: on each host one, behind certificates."""

    def __init__(self, folder: Path, *, delay_s: float) -> None:
        self._folder, self._delay_s = folder, delay_s
        self._stack = contextlib.ExitStack()
        self.wire: Wire
        self.targets = ",".join(f"{ADDRESSES[host]}:{PORT}" for host in HOSTS)

    def __enter__(self) -> TwoHosts:
        with contextlib.ExitStack() as stack:
            for host in HOSTS:
                run("ip", "netns", "add", self._space(host))
                stack.callback(run, "ip", "netns", "del", self._space(host))
            devices = tuple(f"fs{os.getpid()}{host}" for host in HOSTS)
            self.wire = Wire((devices[0], devices[1]), delay_s=self._delay_s)
            stack.callback(self.wire.close)
            for host, device in zip(HOSTS, devices, strict=True):
                run("ip", "link", "set", device, "txqueuelen", "10000", "netns", self._space(host))
                inside = ("ip", "-n", self._space(host))
                run(*inside, "addr", "add", f"{ADDRESSES[host]}/24", "dev", device)
                run(*inside, "link", "set", device, "up")
                run(*inside, "link", "set", "lo", "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *ending: object) -> None:
        self._stack.close()

    def start(self, host: str, *command: str, log: str) -> subprocess.Popen[bytes]:
        """A program on a host, its output in a file of the folder."""
        with (self._folder / log).open("wb") as output:
            process = subprocess.Popen(self.on(host, *command), cwd=ROOT, stdout=output, stderr=output)
        self._stack.callback(end, process)
        return process

    def run(self, host: str, *command: str, timeout: float = 120) -> str:
        """A program's output; raises CalledProcessError."""
        done = subprocess.run(
            self.on(host, *command), cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def on(self, host: str, *command: str) -> list[str]:
        """A command line that runs on a host."""
        return ["ip", "netns", "exec", self._space(host), *command]

    def start_workers(self) -> list[subprocess.Popen[bytes]]:
        """A worker on each host, listening."""
        made = self._folder / "certificates"
        if not made.exists():
            hosts = [word for host in HOSTS for word in ("--host", ADDRESSES[host])]
            assert CliRunner().invoke(certs, ["--out", str(made), *hosts]).exit_code == 0
        workers = []
        for host in HOSTS:
            address = f"{ADDRESSES[host]}:{PORT}"
            command = [sys.executable, "-m", "shard_worker", "--listen", address, "--device", "cpu", "--threads", "1"]
            workers.append(self.start(host, *command, *self.certificates(ADDRESSES[host]), log=f"worker-{host}.log"))
        for host in HOSTS:
            until(lambda host=host: "worker.ready" in (self._folder / f"worker-{host}.log").read_text(), 60)
        return workers

    def certificates(self, stem: str) -> list[str]:
        """The flags for a host's certificate, or the coordinator's."""
        made = self._folder / "certificates"
        files = {"cert": f"{stem}.pem", "key": f"{stem}-key.pem", "ca": "ca.pem"}
        return [word for name, file in files.items() for word in (f"--tls-{name}", str(made / file))]

    def flashsplit(self, *command: str) -> list[str]:
        """A coordinator's command line on the first host, over both workers."""
        verb, *rest = command
        placed = ["--target-devices", self.targets, *self.certificates("coordinator")]
        return [sys.executable, "-m", "coordinator", *verb.split(), *PAIR, *placed, *rest]

    def round_trip_ms(self) -> float:
        """Of a byte over the wire, there and back: the shortest of several."""
        server = "import socket\ns = socket.create_server(('10.77.0.2', 7999))\nc = s.accept()[0]\n"
        server += "while data := c.recv(1): c.sendall(data)"
        process = self.start("b", sys.executable, "-c", server, log="echo.log")
        client = "import socket, time\n"
        client += "for _ in range(100):\n  try: s = socket.create_connection(('10.77.0.2', 7999)); break\n"
        client += "  except OSError: time.sleep(0.05)\n"
        client += "t = []\nfor _ in range(50):\n  a = time.perf_counter(); s.sendall(b'.'); s.recv(1)\n"
        client += "  t.append(time.perf_counter() - a); time.sleep(0.01)\nprint(1e3 * min(t))"
        try:
            return float(self.run("a", sys.executable, "-c", client))
        finally:
            end(process)

    def _space(self, host: str) -> str:
        return f"fs-{os.getpid()}-{host}"


def run(*command: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run(command, check=True, capture_output=True)


@click.command()
@click.option("--delays", default="0.1,1,10", show_default=True, help="Milliseconds, each way.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Each delay once in each.")
@click.option("--limit", type=click.IntRange(1), default=3, show_default=True, help="Prompts of each kind.")
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True)
def main(delays: str, rounds: int, limit: int, max_tokens: int) -> None:
    """Decode speed of the demo pair over two hosts, for several delays in turn."""
    lacking = why_not()
    if lacking is not None:
        raise click.ClickException(lacking)
    with tempfile.TemporaryDirectory() as name, TwoHosts(Path(name), delay_s=0.0) as hosts:
        prompts = Path(name) / "prompts.json"
        subprocess.run(
            [sys.executable, DEMO / "prompts.py", "--out", prompts], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        hosts.start_workers()
        found: dict[str, list[dict[str, Any]]] = {}
        trips: dict[str, list[float]] = {}
        for _ in range(rounds):
            for delay in delays.split(","):
                hosts.wire.delay_s = float(delay) / 1e3
                trips.setdefault(delay, []).append(hosts.round_trip_ms())
                bench = hosts.flashsplit("bench generate", "--prompts", str(prompts), "--limit", str(limit), "--json",
                                         "--max-tokens", str(max_tokens))  # fmt: skip
                found.setdefault(delay, []).extend(json.loads(hosts.run("a", *bench, timeout=600))["rows"])
                print(".", end="", file=sys.stderr, flush=True)
    print("\n".join(table(found, trips)))


def table(found: dict[str, list[dict[str, Any]]], trips: dict[str, list[float]]) -> Sequence[str]:
    """As the README has it: the median of the rounds, for each kind of prompt in turn."""
    kinds = list(dict.fromkeys(row["kind"] for rows in found.values() for row in rows))
    columns = {"plain_tokens_per_s": 0, "dflash_tokens_per_s": 0, "speedup": 1, "acceptance_length": 1, "hop_ms": 1}
    headings = ["", "round trip", "plain tok/s", "DFlash tok/s", "ratio", "tokens a step", "hop ms"]
    lines = [f"| {' / '.join(kinds)} | {' | '.join(headings[1:])} |", "|---" * len(headings) + "|"]
    for delay, rows in found.items():
        cells = [f"{delay} ms", f"{min(trips[delay]):.1f} ms"]
        for name, digits in columns.items():
            values = [[float(row[name]) for row in rows if row["kind"] == kind] for kind in kinds]
            cells.append(" / ".join(f"{statistics.median(of_kind):.{digits}f}" for of_kind in values))
        lines.append(f"| {' | '.join(cells)} |")
    identical = sum(row["identical"] for rows in found.values() for row in rows)
    asked = sum(row["prompts"] for rows in found.values() for row in rows)
    return [*lines, f"{identical} of {asked} pairs of plain and speculated answers were equal."]


if __name__ == "__main__":
    main()
