"""Who computes what: which workers hold the target and the draft, how they compute, and how they are reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import structlog

from coordinator.cli.option_groups import Flag
from coordinator.cli.options.standby import StandbyOptions
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import Checkpoints, LoadReporter
from coordinator.cluster.placement import Plan, WorkerPlace, make_plan
from coordinator.planning.draft_size import read_draft_size
from coordinator.planning.measuring import SplitChooser
from coordinator.planning.memory import Models
from coordinator.planning.model_size import read_model_size
from coordinator.text.model_files import ModelFiles
from services.addresses import socket_path
from services.dtypes import FLOAT8
from services.errors import InvalidArgument
from services.messages.description import FeatureTransport, HeadPlace
from services.model.quantization import Quantization, QuantizedTo
from services.model.rope import parse_rope_scaling
from services.net.security import Security, load_security
from services.processes.launch import Launch, parse_commands, vendor_of
from services.rpc.liveness import LOST_AFTER_S
from services.rpc.payload_transport import PayloadTransport

log = structlog.get_logger()

IN_HOST_ANYWAY = "all layers are on CPUs, whose memory holds the experts anyway, so that it changes nothing"
"""What there is to say of --expert-devices without a GPU."""

NO_STANDBY = StandbyOptions()

KV_DTYPES: Mapping[str, str | None] = {"auto": None, "fp8": FLOAT8}
"""What `--kv-dtype` can be, and what workers are told for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """Which worker holds which layers of the target, and where the draft runs."""

    target_devices: Annotated[
        str | None,
        Flag(
            "Who runs the target, in layer order. A comma starts a new worker; + joins devices of one vendor in one "
            "worker (cuda:0,hip:0+hip:1); an entry may be the address of a running flashsplit-worker (HOST:PORT or "
            "unix:PATH). @SIZE behind an entry keeps that worker to so much of each of its devices' memory "
            "(cuda:0@8GiB), for a device that others use too: a GPU may then stand in several entries.  [default: one "
            "worker on all GPUs, or the CPU]",
            metavar="ENTRY[,ENTRY…]",
        ),
    ] = None
    target_layer_split: Annotated[
        str | None,
        Flag(
            "Proportional share of the layers for each entry, like 0.3,0.7; or auto: measure the workers and take what "
            "decodes fastest with room for a session of 8192 tokens (flashsplit plan --auto shows it first).  "
            "[default: equal shares]",
            metavar="WEIGHT[,WEIGHT…]",
        ),
    ] = None
    target_layers: Annotated[
        str | None,
        Flag(
            "The layers of each entry instead of a share, like 0:5,5:35,35:64: each begins where the one before ends.",
            metavar="FIRST:BEHIND[,FIRST:BEHIND…]",
        ),
    ] = None
    expert_devices: Annotated[
        str | None,
        Flag(
            "For a mixture of experts on a GPU with too little memory: keep its routed experts in the host's memory "
            "and compute them on the host's CPU, within the same worker. cpu for all of them, or shares for an entry "
            "of --target-devices and for the CPU (cuda:0=0.4,cpu=0.6). Attention, routers and shared experts stay on "
            "the GPU. Steps are slower, as they wait for the CPU in each layer and run without flashsplit's kernels "
            "and graphs. Changes nothing for layers on a CPU. flashsplit plan --auto chooses a share where experts do "
            "not fit.  [default: with their layer]",
            metavar="cpu|ENTRY=SHARE[,…],cpu=SHARE",
        ),
    ] = None
    draft_device: Annotated[
        str | None,
        Flag(
            "Put the draft in a worker of its own.  [default: beside the last stage]",
            metavar="DEVICE|ADDRESS",
        ),
    ] = None
    draft_head: Annotated[
        str | None,
        Flag(
            "With --draft-device: the draft's worker loads the target's lm_head and reads its embedding, or it sends "
            "hidden rows back to the last stage to be projected (for small cards).  [default: loaded]",
            type=click.Choice([HeadPlace.LOADED.value, HeadPlace.PROJECTED.value]),
        ),
    ] = None
    features: Annotated[
        str | None,
        Flag(
            "With --draft: captured features travel summed through the draft's fc by each stage, or as plain slices.  "
            "[default: sum]",
            type=click.Choice([kind.value for kind in FeatureTransport]),
        ),
    ] = None

    @property
    def head_place(self) -> HeadPlace:
        """Where the hidden rows of a draft in a worker of its own become tokens."""
        return HeadPlace(self.draft_head or HeadPlace.LOADED)

    @property
    def transport(self) -> FeatureTransport:
        """How captured features travel to the draft."""
        return FeatureTransport(self.features or FeatureTransport.SUM)

    def plan(self, num_layers: int, *, has_draft: bool, last_cut: int | None = None, has_experts: bool = True) -> Plan:
        """Return who holds which of so many layers. last_cut, has_experts: as of `make_plan`.

        Raises InvalidArgument for options that contradict each other or have no effect.
        """
        plan = make_plan(
            target_devices=self.target_devices,
            layer_split=self.target_layer_split,
            target_layers=self.target_layers,
            draft_device=self.draft_device,
            num_layers=num_layers,
            has_draft=has_draft,
            last_cut=last_cut,
            expert_devices=self.expert_devices,
            has_experts=has_experts,
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
        return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """In which number formats and with which positions all workers compute, and whether a row's bits depend on its
    batch."""

    dtype: Annotated[
        str | None,
        Flag(
            "Element type of weights and activations.  [default: the checkpoint's]",
            type=click.Choice(["float32", "bfloat16", "float16"]),
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        Flag(
            "Element type of the target's attention keys and values: that of the weights (auto), or 8-bit floats (fp8: "
            "float8_e4m3fn), which take half of the memory of 16 bits for each token of all sessions and kept "
            "prefixes. For long contexts and many sessions; answers differ slightly from those of auto. Works on CPUs, "
            "and on NVIDIA's GPUs from compute capability 8.9 on.  [default: auto]",
            type=click.Choice(list(KV_DTYPES)),
        ),
    ] = None
    quantize: Annotated[
        str | None,
        Flag(
            "Pack the target's matrices of 16 or 32 bits while they are loaded, in groups of 128 columns with a scale "
            "each: to 8 bits (int8, or fp8: float8_e4m3fn) or 4 (int4), which take a half or a quarter of the memory "
            "and, where weights are what a step waits for, of its time. Answers differ slightly with 8 bits, and more "
            "with 4. For checkpoints that are not packed already.  [default: as the checkpoint has them]",
            type=click.Choice([str(kind) for kind in QuantizedTo]),
        ),
    ] = None
    quantize_head: Annotated[
        bool,
        Flag("With --quantize: pack the embedding and lm_head too, which decide more of each token."),
    ] = False
    quantize_draft: Annotated[
        str | None,
        Flag(
            "Pack the draft's matrices as --quantize does the target's. Answers stay the same, fewer draft tokens may "
            "be accepted.  [default: as the checkpoint has them]",
            type=click.Choice([str(kind) for kind in QuantizedTo]),
        ),
    ] = None
    rope_scaling: Annotated[
        str | None,
        Flag(
            "Stretch the target's context: what takes the place of the scaling of RoPE in its config.json, as a JSON "
            'object of the same keys, like {"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768} '
            "for Qwen3 up to 131072 tokens. Types are linear, llama3 and yarn. Answers to short prompts change too, "
            "and may be slightly worse: leave it out unless prompts are longer than the model's own context. A draft "
            "keeps its own.  [default: as the checkpoint says]",
            metavar="JSON",
        ),
    ] = None
    exact: Annotated[
        bool,
        Flag(
            "Compute plain and speculated answers to the same bits in plain torch too, by slower steps: on CPUs in 16 "
            "bits near-ties may flip otherwise. Where flashsplit's kernels run a GPU's steps that holds anyway, and "
            "nothing changes."
        ),
    ] = False

    @property
    def workers_kv_dtype(self) -> str | None:
        """The element type of keys and values as workers are told it; None for that of the weights."""
        return KV_DTYPES[self.kv_dtype or "auto"]

    @property
    def quantization(self) -> Quantization | None:
        """How the target's matrices are packed while they are loaded."""
        return None if self.quantize is None else Quantization(QuantizedTo(self.quantize), self.quantize_head)

    @property
    def draft_quantization(self) -> Quantization | None:
        """How the draft's are."""
        return None if self.quantize_draft is None else Quantization(QuantizedTo(self.quantize_draft))

    @property
    def workers_rope_scaling(self) -> str | None:
        """How RoPE is scaled as workers are told it, None for as the checkpoint says.

        Raises as `parse_rope_scaling`.
        """
        return None if self.rope_scaling is None else parse_rope_scaling(self.rope_scaling)

    def check(self, *, has_draft: bool) -> None:
        """Raise InvalidArgument for an option without effect."""
        if self.quantize_head and self.quantize is None:
            raise InvalidArgument(
                "--quantize-head has no effect without --quantize: say what to pack to, or leave it out",
                field="--quantize-head",
            )
        if self.quantize_draft is not None and not has_draft:
            raise InvalidArgument(
                f"--quantize-draft {self.quantize_draft} has no effect without --draft: name the draft checkpoint, or "
                "leave it out",
                field="--quantize-draft",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How workers of this host are started, and how all of them are given large payloads."""

    threads: Annotated[
        int | None,
        Flag("CPU threads of each local worker.  [default: the cores shared out]", type=click.IntRange(1), metavar="N"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Flag(
            "Share of each device's memory for weights, captured steps and keys and values of sessions, in local "
            "workers; taken at the start on a GPU. Less leaves room for other programs there.  [default: 0.9]",
            type=click.FloatRange(0, 1, min_open=True),
            metavar="SHARE",
        ),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        Flag(
            "Local workers with a GPU launch a step as one captured graph, or its kernels one by one.  "
            "[default: graphs]",
            "--cuda-graphs/--no-cuda-graphs",
        ),
    ] = None
    payload_transport: Annotated[
        str | None,
        Flag(
            "How large payloads (prompts' activations, snapshots) reach workers: within the stream, through memory "
            "shared with them, or auto: shared on this host.  [default: auto]",
            type=click.Choice([kind.value for kind in PayloadTransport]),
        ),
    ] = None
    worker_command: Annotated[
        tuple[str, ...],
        Flag(
            "Start this program for workers on cpu, cuda:N or hip:N, from another environment with that vendor's "
            "torch: hip=/opt/rocm-env/bin/flashsplit-worker. May be given for each vendor.  [default: the worker "
            "beside this program]",
            metavar="VENDOR=PROGRAM",
        ),
    ] = ()
    wait_for_workers: Annotated[
        float,
        Flag(
            "How long to go on calling a worker that runs elsewhere and doesn't answer yet, at the start.",
            type=click.FloatRange(0),
            metavar="SECONDS",
        ),
    ] = 0.0
    lost_after: Annotated[
        float,
        Flag(
            "A worker is lost when nothing has been heard of it for so long: its process was stopped, its host is gone "
            "or the link passes nothing. One that merely computes or loads for longer is not.",
            type=click.FloatRange(1.0),
            metavar="SECONDS",
        ),
    ] = LOST_AFTER_S

    def check(self, places: Iterable[WorkerPlace], beside: Iterable[WorkerPlace]) -> None:
        """Raise InvalidArgument for an option without effect on the workers at these places.

        places: where the target and the draft run; beside: where further workers will be started with the same program.
        """
        devices = [place.devices for place in places]
        local = {vendor_of(names) for names in (*devices, *(place.devices for place in beside)) if names is not None}
        for vendor in parse_commands(self.worker_command):
            if vendor not in local:
                raise InvalidArgument(
                    f"--worker-command {vendor}=… has no effect: no worker is started on {vendor}; name such a device "
                    "in --target-devices or --draft-device, or leave it out",
                    field="--worker-command",
                )
        for flag, value in (
            ("--threads", self.threads),
            ("--gpu-memory-utilization", self.gpu_memory_utilization),
        ):
            if value is not None and all(names is None for names in devices):
                raise InvalidArgument(
                    f"{flag} {value} has no effect on workers that run already: give it to flashsplit-worker, or leave "
                    "it out",
                    field=flag,
                )
        if self.cuda_graphs is not None and all(names in (None, "cpu") for names in devices):
            flag = "--cuda-graphs" if self.cuda_graphs else "--no-cuda-graphs"
            raise InvalidArgument(
                f"{flag} has no effect without a GPU in a worker that is started here: name one in --target-devices, "
                "give it to flashsplit-worker, or leave it out",
                field=flag,
            )

    def launch(self, security: Security, prefix_cache_bytes: int | None) -> Launch:
        """Return how local workers are started. Raises InvalidArgument for a program that cannot be run."""
        return Launch(
            threads=self.threads,
            prefix_cache_bytes=prefix_cache_bytes,
            memory_share=self.gpu_memory_utilization,
            cuda_graphs=self.cuda_graphs,
            security=security,
            transport=PayloadTransport(self.payload_transport or PayloadTransport.AUTO),
            commands=parse_commands(self.worker_command),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityOptions:
    """How this process proves to workers who it is, and knows them."""

    tls_cert: Annotated[
        str | None,
        Flag("This host's PEM certificate, for workers over TCP; see flashsplit certs.", metavar="FILE"),
    ] = None
    tls_key: Annotated[str | None, Flag("The certificate's key.", metavar="FILE")] = None
    tls_ca: Annotated[str | None, Flag("Who must have signed the workers' certificates.", metavar="FILE")] = None
    tls_server_name: Annotated[
        str | None,
        Flag("Expect this name in the workers' certificates.  [default: the host dialled]", metavar="NAME"),
    ] = None
    tls_crl: Annotated[
        str | None,
        Flag("PEM list of certificates that the authority has revoked; see flashsplit certs revoke.", metavar="FILE"),
    ] = None
    cluster_token_file: Annotated[
        str | None,
        Flag(
            "The secret that the workers ask for; of several lines the first one.  [default: what "
            "FLASHSPLIT_CLUSTER_TOKEN holds, if set]",
            metavar="FILE",
        ),
    ] = None

    def check(self, addresses: Iterable[str]) -> None:
        """Raise InvalidArgument for certificates where no worker at these addresses is reached over TCP."""
        if any(socket_path(address) is None for address in addresses):
            return
        for name in ("tls_cert", "tls_key", "tls_ca", "tls_server_name", "tls_crl"):
            if (value := getattr(self, name)) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidArgument(
                    f"{flag} {value} has no effect: no worker is reached over TCP, and a Unix socket is private to its "
                    "user; name a worker's HOST:PORT, or leave it out",
                    field=flag,
                )

    def load(self) -> Security:
        """Return what to call the workers with. Raises InvalidArgument for files that cannot be used."""
        return load_security(
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            tls_ca=self.tls_ca,
            tls_server_name=self.tls_server_name,
            tls_crl=self.tls_crl,
            cluster_token_file=self.cluster_token_file,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """All that makes a cluster of workers for a model."""

    placement: PlacementOptions = PlacementOptions()
    compute: ComputeOptions = ComputeOptions()
    workers: WorkerOptions = WorkerOptions()
    security: SecurityOptions = SecurityOptions()

    def plan(
        self,
        num_layers: int,
        *,
        has_draft: bool,
        beside: Sequence[WorkerPlace] = (),
        last_cut: int | None = None,
        has_experts: bool = True,
    ) -> Plan:
        """Return who holds which of so many layers.

        beside: where further workers will be started as these are. last_cut, has_experts: as of `make_plan`.

        Raises InvalidArgument for options that contradict each other or have no effect.
        """
        plan = self.placement.plan(num_layers, has_draft=has_draft, last_cut=last_cut, has_experts=has_experts)
        self.compute.check(has_draft=has_draft)
        places = [*(stage.place for stage in plan.stages), *([plan.draft] if plan.draft is not None else [])]
        self.workers.check(places, beside)
        self.security.check(place.address for place in (*places, *beside) if place.address is not None)
        return plan

    def plan_of(self, files: ModelFiles, *, has_draft: bool, beside: Sequence[WorkerPlace] = ()) -> Plan:
        """Return who holds which layers of a model. Raises as `plan`. beside: as there."""
        return self.plan(
            files.num_layers,
            has_draft=has_draft,
            beside=beside,
            last_cut=files.last_cut,
            has_experts=self.placement.expert_devices is None or files.has_experts,
        )

    def cluster(
        self,
        files: ModelFiles,
        draft: Path | None,
        reporter: LoadReporter,
        *,
        prefix_cache_bytes: int | None = None,
        beside: Sequence[WorkerPlace] = (),
        standby: StandbyOptions = NO_STANDBY,
    ) -> Cluster:
        """Return a cluster for a target and its draft; it is not started yet.

        prefix_cache_bytes: memory for kept prefixes in each local worker; None for the worker's own default.
        beside: where further workers will be started as these are. standby: who stands by for them. Raises what `plan`,
        `launch` and `StandbyOptions.check` raise.
        """
        plan = self.plan_of(files, has_draft=draft is not None, beside=(*beside, *standby.places))
        if plan.expert_devices is not None and all(stage.place.devices == "cpu" for stage in plan.stages):
            log.warning("experts.in_host_anyway", expert_devices=plan.expert_devices, why=IN_HOST_ANYWAY)
        standby.check([*(stage.place for stage in plan.stages), *([] if plan.draft is None else [plan.draft])])
        rope_scaling = self.compute.workers_rope_scaling
        if rope_scaling is not None:
            log.warning(
                "model.rope_scaled",
                rope_scaling=rope_scaling,
                why="answers to short prompts change too, and may be slightly worse than without --rope-scaling",
            )
        checkpoints = Checkpoints(
            model=files.path.absolute(),
            draft=None if draft is None else draft.absolute(),
            dtype=self.compute.dtype,
            kv_dtype=self.compute.workers_kv_dtype,
            quantization=self.compute.quantization,
            rope_scaling=rope_scaling,
            draft_quantization=self.compute.draft_quantization,
            head_place=self.placement.head_place,
            transport=self.placement.transport,
        )
        choose_split = None
        if plan.auto:
            choose_split = SplitChooser(self.models(files.path, draft), str(checkpoints.model))
        return Cluster(
            plan,
            checkpoints,
            launch=self.launch(prefix_cache_bytes),
            wait_s=self.workers.wait_for_workers,
            reporter=reporter,
            choose_split=choose_split,
            exact=self.compute.exact,
            standbys=standby.plan(lambda: self.models(files.path, draft), plan),
            lost_after_s=self.workers.lost_after,
        )

    def models(self, model: Path, draft: Path | None) -> Models:
        """Return the sizes of what is placed, from the checkpoints' headers.

        Raises what `read_model_size` and `read_draft_size` raise.
        """
        compute = self.compute
        target = read_model_size(
            model,
            compute.dtype,
            compute.workers_kv_dtype,
            quantization=compute.quantization,
            rope_scaling=compute.workers_rope_scaling,
        )
        draft_size = None
        if draft is not None:
            draft_size = read_draft_size(draft, target, compute.dtype, compute.draft_quantization)
        return Models(target, draft_size, self.placement.head_place, self.placement.transport)

    def launch(self, prefix_cache_bytes: int | None = None) -> Launch:
        """Return how local workers are started. Raises what `SecurityOptions.load` and `WorkerOptions.launch` raise."""
        return self.workers.launch(self.security.load(), prefix_cache_bytes)
