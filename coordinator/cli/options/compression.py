"""Whether long prompts are made shorter before they are computed, and by what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from coordinator.cli.option_groups import Flag
from coordinator.cli.options.model import CheckpointPath
from coordinator.cluster.cluster import Cluster
from coordinator.cluster.loading import LoadReporter
from coordinator.cluster.placement import WorkerPlace, parse_place
from coordinator.compression.compressor import Compressor
from coordinator.compression.drafter_worker import DrafterWorker
from coordinator.compression.settings import CompressionSettings, parse_keep
from coordinator.text.tokenizer import Tokenizer
from services.errors import InvalidArgument, NotFound
from services.messages.inference_types import CompressionMode
from services.model.text_files import TOKENIZER, find_text_file

DRAFTER_FLAG = "--prefill-drafter"
DEFAULTS = CompressionSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionOptions:
    """The small model that reads long prompts, where it runs, and how much of them it keeps."""

    prefill_drafter: Annotated[
        Path | None,
        Flag(
            "A small Qwen3, like Qwen3-0.6B, that reads long prompts first and says which parts of them the end asks "
            "for; only these are computed. The answer is then that to the shorter prompt.",
            type=CheckpointPath(),
            metavar="DIR",
        ),
    ] = None
    prefill_compression: Annotated[
        str | None,
        Flag(
            "off, auto (long prompts, where it pays) or always.  [default: auto with --prefill-drafter]",
            type=click.Choice([mode.value for mode in CompressionMode]),
        ),
    ] = None
    prefill_threshold: Annotated[
        int | None,
        Flag(
            f"Prompt tokens from which auto compresses.  [default: {DEFAULTS.threshold}]",
            type=click.IntRange(1),
            metavar="N",
        ),
    ] = None
    prefill_keep_ratio: Annotated[
        str | None,
        Flag(
            "Share of the prompt to keep, or TOKENS:RATIO pairs like 8000:0.3,64000:0.05 with a line between them.  "
            "[default: 0.05]",
            metavar="RATIO",
        ),
    ] = None
    prefill_device: Annotated[
        str | None,
        Flag(
            "Where the drafter runs: a worker of its own.  [default: beside the first stage]", metavar="DEVICE|ADDRESS"
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise InvalidArgument for options without effect and values that make no sense.

        Raises NotFound for a checkpoint without a tokenizer.
        """
        others = {
            "--prefill-compression": self.prefill_compression not in (None, "off"),
            "--prefill-threshold": self.prefill_threshold is not None,
            "--prefill-keep-ratio": self.prefill_keep_ratio is not None,
            "--prefill-device": self.prefill_device is not None,
        }
        if self.prefill_drafter is None:
            for flag, is_set in others.items():
                if is_set:
                    raise InvalidArgument(
                        f"{flag} has no effect without {DRAFTER_FLAG}: name a small Qwen3 checkpoint, or leave it out",
                        field=flag,
                    )
        elif find_text_file(self.prefill_drafter, TOKENIZER) is None:
            raise NotFound(
                f"{DRAFTER_FLAG} {self.prefill_drafter} has no tokenizer.json: name a whole checkpoint",
                field=DRAFTER_FLAG,
            )
        if self.prefill_compression == "always" and self.prefill_threshold is not None:
            raise InvalidArgument(
                "--prefill-threshold has no effect with --prefill-compression always: leave out one of them",
                field="--prefill-threshold",
            )
        if self.prefill_keep_ratio is not None:
            parse_keep(self.prefill_keep_ratio)
        if self.prefill_device is not None:
            parse_place(self.prefill_device, "--prefill-device")

    @property
    def settings(self) -> CompressionSettings:
        """When prompts are compressed, and how much of them is kept."""
        return CompressionSettings(
            DEFAULTS.mode if self.prefill_compression is None else CompressionMode(self.prefill_compression),
            self.prefill_threshold or DEFAULTS.threshold,
            DEFAULTS.keep if self.prefill_keep_ratio is None else parse_keep(self.prefill_keep_ratio),
        )

    @property
    def places(self) -> tuple[WorkerPlace, ...]:
        """Where workers run that only read prompts: one place, or none."""
        return () if self.prefill_device is None else (parse_place(self.prefill_device, "--prefill-device"),)

    async def open(self, cluster: Cluster, reporter: LoadReporter, dtype: str | None) -> Compressor | None:
        """Return a compressor whose drafter is loaded, which the caller closes; None without a drafter.

        dtype: of the drafter's weights; None for the checkpoint's. Raises what starting and loading a worker raises.
        """
        if self.prefill_drafter is None:
            return None
        directory = self.prefill_drafter.absolute()
        tokenizer = Tokenizer.from_checkpoint(directory)
        if tokenizer is None:
            raise NotFound(f"{DRAFTER_FLAG} {directory} has no tokenizer.json any more", field=DRAFTER_FLAG)
        place = next(iter(self.places), cluster.first_place)
        worker = DrafterWorker(
            place,
            directory,
            dtype=dtype,
            launch=cluster.launch,
            lost_after_s=cluster.lost_after_s,
            on_progress=lambda progress: reporter.progress(
                f"prefill drafter ({place})", progress.loaded_bytes, progress.total_bytes
            ),
        )
        try:
            await worker.start()
        except BaseException:
            await worker.close()
            raise
        return Compressor(worker, tokenizer, self.settings)
