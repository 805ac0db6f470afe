"""`flashsplit-worker`: one worker process. Parses the command line, listens, serves until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import signal
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import structlog

from services.addresses import is_loopback
from services.errors import FailedPrecondition, FlashsplitError, InvalidArgument
from services.event_loop import run
from services.messages.description import ROLE_SUMMARIES, Role
from services.messages.holder import ORPHAN_TIMEOUT_S
from services.net.security import Security, load_security
from services.net.server import Server
from services.processes.device_memory import MEMORY_SHARE, parse_limit
from services.processes.lifeline import die_with
from services.reread import read_again_on_hangup
from services.rpc.payload_transport import PayloadTransport
from services.sizes import parse_size
from services.telemetry.logs import FORMATS, LEVELS, configure_logs
from services.telemetry.tracing import start_tracing

log = structlog.get_logger()

BROKEN_EXIT, BROKEN_S = 3, 0.5
"""Exit status of a worker whose GPU is broken, and how long the answer that says so has to leave."""

_LOOKS_BEFORE_SLEEP = "300"
"""How often a thread of OpenMP that waits looks for the others before it sleeps."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line says, flag by flag; `--help` describes them."""

    listen: str
    devices: str
    roles: str
    model: str | None
    draft: str | None
    prefill_drafter: str | None
    threads: int | None
    cuda_graphs: bool | None
    gpu_memory_utilization: float | None
    device_memory: str | None
    prefix_cache_bytes: str | None
    kept_rows_bytes: str
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    tls_server_name: str | None
    tls_crl: str | None
    cluster_token_file: str | None
    payload_transport: str
    insecure: bool
    health_port: int
    drain_timeout: float
    orphan_timeout: float
    log_level: str
    log_format: str | None
    lifeline_fd: int | None
    scratch: Path | None

    @property
    def paths(self) -> dict[str, str]:
        """This host's checkpoint directories, by the field of a load part that they replace."""
        directories = {"model_path": self.model, "draft_path": self.draft, "drafter_path": self.prefill_drafter}
        return {field: directory for field, directory in directories.items() if directory}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--listen",
    required=True,
    metavar="unix:PATH|HOST:PORT",
    help="Where the coordinator and the other workers reach this one; port 0 takes a free one.",
)
@click.option(
    "--device",
    "devices",
    default="best",
    show_default=True,
    metavar="DEVICE[+DEVICE…]",
    help="cpu, cuda:N or hip:N; devices of one vendor joined by + share the stage. 'best': all GPUs, or "
    "the CPU without one.",
)
@click.option(
    "--roles",
    default=",".join(Role),
    show_default=True,
    help="What this worker offers, joined by commas: "
    f"{', '.join(f'{role} ({summary})' for role, summary in ROLE_SUMMARIES.items())}.",
)
@click.option(
    "--model",
    metavar="DIR|FILE.gguf",
    help="Target checkpoint on this host; wins over the coordinator's path.",
)
@click.option(
    "--draft",
    metavar="DIR",
    help="Draft checkpoint on this host; wins over the coordinator's path.",
)
@click.option(
    "--prefill-drafter",
    metavar="DIR",
    help="Checkpoint of a small Qwen3 to compress prompts with, on this host.  [default: the coordinator's path]",
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads for computing.  [default: all cores]")
@click.option(
    "--cuda-graphs/--no-cuda-graphs",
    default=None,
    help="On a GPU: launch a step as one captured graph, or its kernels one by one.  [default: graphs]",
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Share of each device's memory for weights, captured steps and keys and values of sessions. On a GPU it is "
    "taken once the model is loaded; on a CPU it is a share of what is free then, taken as sessions grow.  "
    "[default: 0.9]",
)
@click.option(
    "--device-memory",
    metavar="SIZE",
    help="Keep to so much of each device's memory, like 8GiB: for weights, sessions, activations and, on a GPU, the "
    "640 MiB of its context and kernels. For a device that others use too, other workers among them; a part that does "
    "not fit is refused.  [default: all of it]",
)
@click.option(
    "--prefix-cache-bytes",
    metavar="SIZE",
    help="Memory for the state of prompts' prefixes, so that a later request need not compute them again; like 8GiB, 0 "
    "for none. It is the host's; a GPU's own pages hold them as long as no session needs these.  [default: a tenth of "
    "the host's memory, at most 4GiB]",
)
@click.option(
    "--kept-rows-bytes",
    default="64MiB",
    show_default=True,
    metavar="SIZE",
    help="Host memory for what running answers have sent to the next stage. Where that is lost it is sent again, so "
    "that this stage computes nothing anew; an answer that finds no room here is computed anew by all stages. 0 keeps "
    "nothing.",
)
@click.option("--tls-cert", metavar="FILE", help="This worker's PEM certificate; see flashsplit certs.")
@click.option("--tls-key", metavar="FILE", help="The certificate's key.")
@click.option(
    "--tls-ca",
    metavar="FILE",
    help="Who must have signed the certificates of all that call and are called over TCP.",
)
@click.option(
    "--tls-server-name",
    metavar="NAME",
    help="Expect this name in the certificates of other workers.  [default: the host dialled]",
)
@click.option(
    "--tls-crl",
    metavar="FILE",
    help="PEM list of certificates that the authority has revoked; see flashsplit certs revoke.",
)
@click.option(
    "--cluster-token-file",
    metavar="FILE",
    help="The secret that every call must carry; of several, one a line, each is taken and the first one sent.  "
    "[default: what FLASHSPLIT_CLUSTER_TOKEN holds, if set]",
)
@click.option(
    "--payload-transport",
    type=click.Choice([kind.value for kind in PayloadTransport]),
    default=PayloadTransport.AUTO.value,
    show_default=True,
    help="How large payloads go on to other workers: within the stream, through memory shared with them, or auto: "
    "shared with those on this host.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond this host without TLS.")
@click.option(
    "--health-port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="N",
    help="Answer grpc.health.v1, and nothing else, without TLS on this port of the same host too (for probes).  "
    "[default: off]",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long sessions may go on after SIGTERM, while new ones are refused. Give it more than flashsplit serve's, "
    "so that answers can end when all processes are told to stop at once.",
)
@click.option(
    "--orphan-timeout",
    type=click.FloatRange(0),
    default=ORPHAN_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long weights and kept prefixes stay in memory once the coordinator is gone that had them loaded, its "
    "process or the link to it: one that comes within that time, with the same model and options, reads no weights "
    "again and finds the prefixes. 'inf' keeps them until another coordinator wants something else.",
)
@click.option(
    "--log-level",
    default="info",
    show_default=True,
    metavar=f"{'|'.join(LEVELS)}|@FILE",
    help="Least important line to log; read again from FILE at SIGHUP, with certificates and token.",
)
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    help="How log lines look.  [default: console on a terminal, json elsewhere]",
)
@click.option(
    "--list-devices",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, option, listing: _list_devices(context) if listing else None,
    help="Print the GPUs that this worker's torch can use, or cpu, a line each, and exit.",
)
@click.option("--lifeline-fd", type=int, hidden=True)
@click.option("--scratch", type=click.Path(path_type=Path), hidden=True)
@click.version_option(metadata.version("flashsplit"), prog_name="flashsplit-worker")
def main(**values: Any) -> None:
    """Serve layers of a model, or a draft, from this host's devices.

    The worker waits for a coordinator (flashsplit generate, serve) that names its address in --target-devices or
    --draft-device and tells it which layers to load:

    \b
      flashsplit-worker --listen 0.0.0.0:7001 --device cuda:0 --tls-cert a.pem --tls-key a-key.pem --tls-ca ca.pem
      flashsplit generate --model DIR --target-devices cpu,a:7001 --prompt Hi --tls-cert coordinator.pem …
    """
    flags = Flags(**values)
    if flags.lifeline_fd is not None:
        die_with(flags.lifeline_fd, flags.scratch)
    try:
        configure_logs(flags.log_level, flags.log_format)
        start_tracing("flashsplit-worker")
        security = load_security(
            tls_cert=flags.tls_cert,
            tls_key=flags.tls_key,
            tls_ca=flags.tls_ca,
            tls_server_name=flags.tls_server_name,
            tls_crl=flags.tls_crl,
            cluster_token_file=flags.cluster_token_file,
        )
        if not is_loopback(flags.listen) and security.tls is None and not flags.insecure:
            raise click.UsageError(
                f"--listen {flags.listen} can be reached from other hosts and nothing would be encrypted"
                f"{', the cluster token neither' if security.token is not None else ''}: give --tls-cert, --tls-key "
                "and --tls-ca (flashsplit certs makes them), listen on 127.0.0.1 or unix:PATH, or accept that with "
                "--insecure"
            )
        budget = flags.prefix_cache_bytes
        budget_bytes = None if budget is None else parse_size(budget, "--prefix-cache-bytes")
        rows_bytes = parse_size(flags.kept_rows_bytes, "--kept-rows-bytes")
        run(_serve(flags, _parse_roles(flags.roles), security, budget_bytes, rows_bytes))
    except FlashsplitError as error:
        print(f"flashsplit-worker: {error.message}", file=sys.stderr)
        sys.exit(2)


def _prepare_engine() -> None:
    """Check that what a worker needs is installed, before torch is imported, and have its threads wait asleep.

    By default a thread of OpenMP that waits for the others looks again and again for some milliseconds. Where cores are
    busy it does so while one of the others waits for a core, at every layer: two threads then compute a tenth of what
    one computes. So it looks for some microseconds, and then sleeps. OMP_WAIT_POLICY=active in the environment is for
    hosts that have no other work. Raises FailedPrecondition for what is not installed.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", _LOOKS_BEFORE_SLEEP)
    missing = [name for name in ("torch", "safetensors", "numpy", "llguidance") if find_spec(name) is None]
    if missing:
        raise FailedPrecondition(
            f"a worker needs {', '.join(missing)}, not installed here: pip install torch as its site says for this "
            "host's GPU, then 'flashsplit[worker]'; or name workers of other hosts in --target-devices"
        )


def _list_devices(context: click.Context) -> None:
    """Print the devices that this host has, and exit."""
    try:
        _prepare_engine()
    except FlashsplitError as error:
        raise click.UsageError(error.message) from error
    from shard_worker.device.devices import best_devices

    click.echo("\n".join(best_devices()))
    context.exit()


def _parse_roles(text: str) -> tuple[Role, ...]:
    """Return the roles in the value of --roles, each once. Raises UsageError for an unknown one."""
    known = [role.value for role in Role]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise click.UsageError(f"--roles {name!r} is not one of {', '.join(known)}")
    return tuple(Role(name) for name in dict.fromkeys(names))


async def _serve(
    flags: Flags, roles: tuple[Role, ...], security: Security, budget_bytes: int | None, rows_bytes: int
) -> None:
    """Serve until a signal asks to stop. budget_bytes: of --prefix-cache-bytes, None for the default. rows_bytes: of
    --kept-rows-bytes.

    Raises InvalidArgument for flags that this host's devices cannot follow.
    """
    _prepare_engine()
    # torch takes seconds to import: --help and a wrong flag should not wait for it. Its objects live as long as the
    # process: looking through them again and again while more of them are made would take a sixth of the start.
    gc.disable()
    from shard_worker.device.devices import best_devices, keep_to_limit, parse_devices
    from shard_worker.snapshots.store import default_budget_bytes
    from shard_worker.worker import Worker, WorkerConfig

    gc.freeze()
    gc.enable()
    devices = parse_devices("+".join(best_devices()) if flags.devices == "best" else flags.devices)
    if flags.device_memory is not None:
        limits = [parse_limit(flags.device_memory, device.name, "--device-memory") for device in devices]
        devices = tuple(replace(device, limit_bytes=limit) for device, limit in zip(devices, limits, strict=True))
        for device in devices:
            keep_to_limit(device)
    if flags.cuda_graphs is not None and not any(device.is_gpu for device in devices):
        flag = "--cuda-graphs" if flags.cuda_graphs else "--no-cuda-graphs"
        raise InvalidArgument(
            f"{flag} has no effect on {flags.devices}: name a GPU in --device, or leave it out", field=flag
        )
    loop = asyncio.get_running_loop()

    def on_broken() -> None:
        log.error("worker.broken", device=flags.devices)
        # Who asked hears of it first. What is left cannot be closed: that would call the device.
        loop.call_soon_threadsafe(loop.call_later, BROKEN_S, os._exit, BROKEN_EXIT)

    worker = Worker(
        WorkerConfig(
            devices=devices,
            roles=roles,
            paths=flags.paths,
            threads=flags.threads,
            snapshot_budget_bytes=default_budget_bytes() if budget_bytes is None else budget_bytes,
            kept_rows_bytes=rows_bytes,
            memory_share=MEMORY_SHARE if flags.gpu_memory_utilization is None else flags.gpu_memory_utilization,
            security=security,
            transport=PayloadTransport(flags.payload_transport),
            cuda_graphs=flags.cuda_graphs is not False,
            # A child process ends with the one that started it.
            orphan_timeout_s=flags.orphan_timeout if flags.lifeline_fd is None else math.inf,
            on_broken=on_broken,
        )
    )
    server = Server(flags.listen, worker.registrations(), security=security, health_port=flags.health_port)
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    read_again_on_hangup()
    await server.start()
    worker.address = server.address
    log.info("worker.ready", address=server.address, device=flags.devices, roles=[str(role) for role in roles])

    async def watch() -> None:
        async for serving in worker.watch():
            await server.set_serving(serving)

    watching = asyncio.gather(watch(), worker.free_when_orphaned())
    await stopping.wait()
    await worker.leave()
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    await server.set_serving(False)
    worker.life.end()
    ending = asyncio.ensure_future(worker.end_links_when_idle())
    await server.stop(flags.drain_timeout)
    ending.cancel()
    await worker.close()
    log.info("worker.stopped")
    # All of it goes with the process: looking through torch's objects once more would take half a second.
    gc.freeze()


if __name__ == "__main__":
    main()
