"""Options that several commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from coordinator.cli.store_options import StoreOptions, store_options
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints, LoadReporter
from coordinator.cluster.placement import Plan, WorkerPlace, make_plan
from coordinator.planning.draft_size import read_draft_size
from coordinator.planning.measuring import SplitChooser
from coordinator.planning.memory import Models
from coordinator.planning.model_size import read_model_size
from coordinator.prefix.cache import PrefixCache, lineage_of
from coordinator.prefix.disk.disk_cache import DiskCache
from coordinator.text.model_files import ModelFiles
from services.addresses import socket_path
from services.dtypes import FLOAT8
from services.errors import InvalidArgument
from services.messages.description import FeatureTransport, HeadPlace
from services.net.security import Security, load_security
from services.processes.launch import Launch, parse_commands, vendor_of
from services.rpc.payload_transport import PayloadTransport
from services.sizes import parse_size

Command = Callable[..., Any]

KV_DTYPES = {"auto": None, "fp8": FLOAT8}
"""What --kv-dtype can say, and what workers are told."""

_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)

_PLACEMENT = (
    click.option("--target-devices", metavar="ENTRY[,ENTRY…]",
                 help="Who runs the target, in layer order. A comma starts a new worker; + joins devices of one vendor "
                 "in one worker (cuda:0,hip:0+hip:1); an entry may be the address of a running flashsplit-worker "
                 "(HOST:PORT or unix:PATH). cpu may repeat, a GPU may not.  [default: one worker on all GPUs, or the "
                 "CPU]"),
    click.option("--target-layer-split", metavar="WEIGHT[,WEIGHT…]",
                 help="Proportional share of the layers for each entry, like 0.3,0.7; or auto: measure the workers "
                 "and take what decodes fastest with room for a session of 8192 tokens (flashsplit plan --auto shows "
                 "it first).  [default: equal shares]"),
    click.option("--target-layers", metavar="FIRST:BEHIND[,FIRST:BEHIND…]",
                 help="The layers of each entry instead of a share, like 0:5,5:35,35:64: each begins where the one "
                 "before ends."),
    click.option("--draft-device", metavar="DEVICE|ADDRESS",
                 help="Put the draft in a worker of its own.  [default: beside the last stage]"),
    click.option("--draft-head", type=click.Choice([HeadPlace.LOADED.value, HeadPlace.PROJECTED.value]),
                 help="With --draft-device: the draft's worker loads the target's lm_head and reads its embedding, or "
                 "it sends hidden rows back to the last stage to be projected (for small cards).  [default: loaded]"),
    click.option("--features", "features", type=click.Choice([kind.value for kind in FeatureTransport]),
                 help="With --draft: captured features travel summed through the draft's fc by each stage, or as plain "
                 "slices.  [default: sum]"),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
                 help="Element type of weights and activations.  [default: the checkpoint's]"),
    click.option("--kv-dtype", type=click.Choice(list(KV_DTYPES)),
                 help="Element type of the target's attention keys and values: that of the weights (auto), or 8-bit "
                 "floats (fp8: float8_e4m3fn), which take half of the memory of 16 bits for each token of all sessions "
                 "and kept prefixes. For long contexts and many sessions; answers differ slightly from those of "
                 "auto. Works on CPUs, and on NVIDIA's GPUs from compute capability 8.9 on.  [default: auto]"),
    click.option("--threads", type=click.IntRange(1), metavar="N",
                 help="CPU threads of each local worker.  [default: the cores shared out]"),
    click.option("--cuda-graphs/--no-cuda-graphs", default=None,
                 help="Local workers with a GPU launch a step as one captured graph, or its kernels one by one.  "
                 "[default: graphs]"),
    click.option("--exact", is_flag=True,
                 help="Compute plain and speculated answers to the same bits in plain torch too, by slower steps: on "
                 "CPUs in 16 bits near-ties may flip otherwise. Where flashsplit's kernels run a GPU's steps that "
                 "holds anyway, and nothing changes."),
    click.option("--payload-transport", type=click.Choice([kind.value for kind in PayloadTransport]),
                 help="How large payloads (prompts' activations, snapshots) reach workers: within the stream, through "
                 "memory shared with them, or auto: shared on this host.  [default: auto]"),
    click.option("--worker-command", multiple=True, metavar="VENDOR=PROGRAM",
                 help="Start this program for workers on cpu, cuda:N or hip:N, from another environment with that "
                 "vendor's torch: hip=/opt/rocm-env/bin/flashsplit-worker. May be given for each vendor.  [default: "
                 "the worker beside this program]"),
    click.option("--wait-for-workers", type=click.FloatRange(0), default=0.0, show_default=True, metavar="SECONDS",
                 help="How long to go on calling a worker that runs elsewhere and doesn't answer yet, at the start."),
    click.option("--tls-cert", metavar="FILE",
                 help="This host's PEM certificate, for workers over TCP; see flashsplit certs."),
    click.option("--tls-key", metavar="FILE", help="The certificate's key."),
    click.option("--tls-ca", metavar="FILE", help="Who must have signed the workers' certificates."),
    click.option("--tls-server-name", metavar="NAME",
                 help="Expect this name in the workers' certificates.  [default: the host dialled]"),
    click.option("--cluster-token-file", metavar="FILE",
                 help="The secret that the workers ask for.  [default: what FLASHSPLIT_CLUSTER_TOKEN holds, if set]"),
)  # fmt: skip


_PREFIX = (
    click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True,
                 help="Keep the state of prompts in the workers' memory, so that a later prompt that begins alike is "
                 "not computed again."),
    click.option("--prefix-cache-bytes", metavar="SIZE",
                 help="Host memory for that in each local worker, like 8GiB; remote ones have their own flag.  "
                 "[default: a tenth of the memory, at most 4GiB]"),
    click.option("--kv-cache-budget", default="4GiB", show_default=True, metavar="SIZE",
                 help="Most bytes on disk; what is worth least is given up first."),
    click.option("--kv-cache-min-tokens", type=click.IntRange(1), default=512, show_default=True, metavar="N",
                 help="Shorter prefixes are not written to disk."),
)  # fmt: skip


def prefix_options(command: Command) -> Command:
    """Everything about keeping prefixes."""
    for option in reversed(_PREFIX):
        command = option(command)
    return store_options(command, short=False)


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """Those options as given."""

    prefix_cache: bool
    prefix_cache_bytes: str | None
    store: StoreOptions
    kv_cache_budget: str
    kv_cache_min_tokens: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument for options that contradict each other, and for sizes that are none."""
        if not self.prefix_cache and self.store.given is not None:
            raise InvalidArgument(
                f"{self.store.given} has no effect with --no-prefix-cache: what comes from disk goes through the "
                "workers' memory; leave out one of them",
                field=self.store.given,
            )
        if not self.prefix_cache and self.prefix_cache_bytes is not None:
            raise InvalidArgument(
                "--prefix-cache-bytes has no effect with --no-prefix-cache: leave out one of them",
                field="--prefix-cache-bytes",
            )
        parse_size(self.kv_cache_budget, "--kv-cache-budget")
        if self.prefix_cache_bytes is not None:
            parse_size(self.prefix_cache_bytes, "--prefix-cache-bytes")

    @property
    def worker_bytes(self) -> int | None:
        """Budget of each local worker; None for its own default."""
        if not self.prefix_cache:
            return 0
        return None if self.prefix_cache_bytes is None else parse_size(self.prefix_cache_bytes, "--prefix-cache-bytes")

    def check(self, cluster: Cluster) -> None:
        """Raises InvalidArgument for a budget of local workers where there are none."""
        if self.prefix_cache_bytes is not None and not cluster.starts_workers:
            raise InvalidArgument(
                f"--prefix-cache-bytes {self.prefix_cache_bytes} has no effect on workers that run already: give it to "
                "flashsplit-worker, or leave it out",
                field="--prefix-cache-bytes",
            )

    def open(self, cluster: Cluster, files: ModelFiles) -> PrefixCache | None:
        """The cache of a started cluster, not yet entered; None where it is switched off."""
        if not self.prefix_cache:
            return None
        disk = None
        if self.store.given is not None:
            disk = DiskCache(
                self.store.open(),
                [lineage_of(cluster, files.text_fingerprint, with_draft=with_draft) for with_draft in (False, True)],
                files.num_layers,
                files.directory.absolute().name,
                budget_bytes=parse_size(self.kv_cache_budget, "--kv-cache-budget"),
                min_tokens=self.kv_cache_min_tokens,
            )
        return PrefixCache(cluster, files.text_fingerprint, disk=disk)


def placement_options(command: Command) -> Command:
    """--model, --draft and everything about where they run."""
    for option in reversed(_PLACEMENT):
        command = option(command)
    return command


def model_options(*, required: bool) -> Callable[[Command], Command]:
    """--model and --draft."""

    def decorate(command: Command) -> Command:
        command = click.option("--draft", type=_DIRECTORY, metavar="DIR",
                               help="DFlash draft checkpoint made for the target.")(command)  # fmt: skip
        return click.option("--model", type=_DIRECTORY, metavar="DIR", required=required,
                            help="Target checkpoint, a Hugging Face directory.")(command)  # fmt: skip

    return decorate


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """The shared options as given."""

    target_devices: str | None
    target_layer_split: str | None
    draft_device: str | None
    draft_head: str | None
    features: str | None
    dtype: str | None
    threads: int | None
    target_layers: str | None = None
    kv_dtype: str | None = None
    cuda_graphs: bool | None = None
    worker_command: tuple[str, ...] = ()
    payload_transport: str | None = None
    exact: bool | None = None
    wait_for_workers: float = 0.0
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    tls_server_name: str | None = None
    cluster_token_file: str | None = None

    def cluster(
        self,
        files: ModelFiles,
        draft: Path | None,
        reporter: LoadReporter,
        *,
        prefix_cache_bytes: int | None = None,
        beside: Sequence[WorkerPlace] = (),
    ) -> Cluster:
        """A cluster that is not started yet. beside: where further workers will be started as these are.

        Raises InvalidArgument for options that contradict each other.
        """
        plan = self.plan(files.num_layers, has_draft=draft is not None, beside=beside)
        checkpoints = Checkpoints(
            model=files.directory.absolute(),
            draft=None if draft is None else draft.absolute(),
            dtype=self.dtype,
            kv_dtype=KV_DTYPES[self.kv_dtype or "auto"],
            head_place=self.head_place,
            transport=self.transport,
        )
        choose_split = None
        if plan.auto:
            choose_split = SplitChooser(self.models(files.directory, draft), str(checkpoints.model))
        return Cluster(
            plan,
            checkpoints,
            launch=self.launch(prefix_cache_bytes),
            wait_s=self.wait_for_workers,
            reporter=reporter,
            choose_split=choose_split,
            exact=bool(self.exact),
        )

    def models(self, model: Path, draft: Path | None) -> Models:
        """What is placed, from the checkpoints' headers. Raises what `read_model_size` and `read_draft_size` raise."""
        target = read_model_size(model, self.dtype, KV_DTYPES[self.kv_dtype or "auto"])
        drafted = None if draft is None else read_draft_size(draft, target, self.dtype)
        return Models(target, drafted, self.head_place, self.transport)

    @property
    def head_place(self) -> HeadPlace:
        return HeadPlace(self.draft_head or HeadPlace.LOADED)

    @property
    def transport(self) -> FeatureTransport:
        return FeatureTransport(self.features or FeatureTransport.SUM)

    def plan(self, num_layers: int, *, has_draft: bool, beside: Sequence[WorkerPlace] = ()) -> Plan:
        """Raises InvalidArgument for options that contradict each other or have no effect."""
        plan = make_plan(
            target_devices=self.target_devices,
            layer_split=self.target_layer_split,
            target_layers=self.target_layers,
            draft_device=self.draft_device,
            num_layers=num_layers,
            has_draft=has_draft,
        )
        if self.features is not None and not has_draft:
            raise InvalidArgument(
                f"--features {self.features} has no effect without --draft: name the draft checkpoint, or leave it out",
                field="--features",
            )
        if self.draft_head is not None and plan.draft is None:
            raise InvalidArgument(
                f"--draft-head {self.draft_head} has no effect on a draft beside the last stage, which shares that "
                "stage's lm_head: name another worker in --draft-device, or leave it out",
                field="--draft-head",
            )
        places = [*(stage.place for stage in plan.stages), *([plan.draft] if plan.draft is not None else [])]
        vendors = {vendor_of(place.devices) for place in (*places, *beside) if place.devices is not None}
        for vendor in parse_commands(self.worker_command):
            if vendor not in vendors:
                raise InvalidArgument(
                    f"--worker-command {vendor}=… has no effect: no worker is started on {vendor}; name such a device "
                    "in --target-devices or --draft-device, or leave it out",
                    field="--worker-command",
                )
        remote = [place.address for place in (*places, *beside) if place.address is not None]
        for name in ("tls_cert", "tls_key", "tls_ca", "tls_server_name"):
            if getattr(self, name) is not None and all(socket_path(address) is not None for address in remote):
                flag = f"--{name.replace('_', '-')}"
                raise InvalidArgument(
                    f"{flag} {getattr(self, name)} has no effect: no worker is reached over TCP, and a Unix socket is "
                    "private to its user; name a worker's HOST:PORT, or leave it out",
                    field=flag,
                )
        if self.threads is not None and all(place.devices is None for place in places):
            raise InvalidArgument(
                f"--threads {self.threads} has no effect on workers that run already: give it to flashsplit-worker, or "
                "leave it out",
                field="--threads",
            )
        if self.cuda_graphs is not None and all(place.devices in (None, "cpu") for place in places):
            flag = "--cuda-graphs" if self.cuda_graphs else "--no-cuda-graphs"
            raise InvalidArgument(
                f"{flag} has no effect without a GPU in a worker that is started here: name one in --target-devices, "
                "give it to flashsplit-worker, or leave it out",
                field=flag,
            )
        return plan

    def launch(self, prefix_cache_bytes: int | None = None) -> Launch:
        """How local workers are started. Raises what `security` and `parse_commands` raise."""
        commands = parse_commands(self.worker_command)
        transport = PayloadTransport(self.payload_transport or PayloadTransport.AUTO)
        return Launch(
            threads=self.threads,
            prefix_cache_bytes=prefix_cache_bytes,
            cuda_graphs=self.cuda_graphs,
            security=self.security(),
            transport=transport,
            commands=commands,
        )

    def security(self) -> Security:
        """What to call the workers with. Raises InvalidArgument for files that cannot be used."""
        return load_security(
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_ca=self.tls_ca,
            tls_server_name=self.tls_server_name,
            cluster_token_file=self.cluster_token_file,
        )
