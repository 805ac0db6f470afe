"""Starts what answers prompts: workers with a model loaded, what shortens prompts, and what keeps their prefixes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.cli.console import LoadBars
from coordinator.cli.options.cluster import NO_STANDBY, ClusterOptions
from coordinator.cli.options.compression import CompressionOptions
from coordinator.cli.options.prefix import PrefixOptions
from coordinator.cli.options.standby import StandbyOptions
from coordinator.cluster.cluster import Cluster
from coordinator.compression.compressor import Compressor
from coordinator.prefix.cache import PrefixCache
from coordinator.text.model_files import ModelFiles

WITHOUT_COMPRESSION = CompressionOptions()


@dataclass(frozen=True, slots=True)
class StartedModel:
    """A started cluster; compressor and cache are None where the options switch them off."""

    cluster: Cluster
    compressor: Compressor | None
    cache: PrefixCache | None


@contextlib.asynccontextmanager
async def start_model(
    files: ModelFiles,
    draft: Path | None,
    options: ClusterOptions,
    prefix: PrefixOptions,
    compression: CompressionOptions = WITHOUT_COMPRESSION,
    *,
    standby: StandbyOptions = NO_STANDBY,
    keep_prefixes: bool = True,
) -> AsyncIterator[StartedModel]:
    """Start workers, load the model and end everything with the context. Bars show how far loading is.

    standby: who takes the place of lost workers. keep_prefixes: False leaves the cache closed whatever the options say.
    Raises InvalidArgument for options that contradict each other or have no effect, and what starting and loading
    workers raises.
    """
    async with contextlib.AsyncExitStack() as stack:
        with LoadBars() as bars:
            cluster = options.cluster(
                files,
                draft,
                bars,
                prefix_cache_bytes=prefix.worker_bytes,
                beside=compression.places,
                standby=standby,
            )
            prefix.check(cluster)
            await stack.enter_async_context(cluster)
            compressor = await compression.open(cluster, bars, options.compute.dtype)
            if compressor is not None:
                stack.push_async_callback(compressor.close)
        cache = prefix.open(cluster, files) if keep_prefixes else None
        if cache is not None:
            await stack.enter_async_context(cache)
        yield StartedModel(cluster, compressor, cache)
