"""Where the state of prompts' prefixes is kept: in the workers' memory, and in a store on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import click
from click.core import ParameterSource

from coordinator.cli.option_groups import Flag
from coordinator.cluster.cluster import Cluster
from coordinator.prefix.cache import PrefixCache, lineage_of
from coordinator.prefix.disk.catalog import DiskCatalog
from coordinator.prefix.disk.disk_cache import DiskCache
from coordinator.prefix.disk.threads import in_thread
from coordinator.prefix.stores import Store, open_store
from coordinator.text.model_files import ModelFiles
from services.errors import InvalidArgument, NotFound
from services.sizes import parse_size

_STORE_OPTIONS = ("kv_cache_dir", "kv_cache_url")


def _give_way(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Leave out a store that the environment or a file names where the command line names one in the other way."""
    typed = [name for name in _STORE_OPTIONS if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    return value if not typed or option.name in typed else None


def _store_flag(help: str, variable: str, metavar: str, *names: str) -> Flag:
    """Return a flag that names a store, which the environment may name as well."""
    return Flag(help, *names, metavar=metavar, envvar=variable, show_envvar=True, callback=_give_way)


_DIRECTORY = (
    "A store of prefixes on disk in a directory: they survive restarts and serve any split.",
    "FLASHSPLIT_KV_CACHE_DIR",
    "DIR",
)
_URL = (
    "A store of prefixes on disk in any place that fsspec reaches, like s3://bucket/prefixes; needs the extra "
    "remote-store.",
    "FLASHSPLIT_KV_CACHE_URL",
    "URL",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """A store of prefix snapshots on disk: none, a directory, or a URL.

    What is on the command line wins over the environment. All methods raise InvalidArgument naming the option, NotFound
    and StoreError.
    """

    section: ClassVar = "Store options"

    kv_cache_dir: Annotated[str | None, _store_flag(*_DIRECTORY)] = None
    kv_cache_url: Annotated[str | None, _store_flag(*_URL)] = None

    @property
    def flag(self) -> str | None:
        """The option that names a store, if one does."""
        if self.kv_cache_dir is not None and self.kv_cache_url is not None:
            raise InvalidArgument("give one of --kv-cache-dir and --kv-cache-url, not both", field="--kv-cache-url")
        if self.kv_cache_dir is not None:
            return "--kv-cache-dir"
        return "--kv-cache-url" if self.kv_cache_url is not None else None

    def open(self) -> Store:
        """Return the store, whether it is there yet or not."""
        if self.flag is None:
            raise InvalidArgument(
                "--kv-cache-dir is missing: name the directory that serve or generate was given, or its --kv-cache-url",
                field="--kv-cache-dir",
            )
        return open_store(
            Path(self.kv_cache_dir) if self.kv_cache_dir is not None else str(self.kv_cache_url), self.flag
        )

    def open_existing(self) -> Store:
        """Return the store, which must be there: looking at one never creates it."""
        store = self.open()
        if not store.exists():
            raise NotFound(f"{self.flag} {(self.kv_cache_dir or self.kv_cache_url)!r} is not there: check its spelling")
        return store

    async def load(self, budget_bytes: int = 0) -> tuple[Store, DiskCatalog]:
        """Return the store and the catalog of all its entries."""
        store = await in_thread(self.open_existing)
        catalog = DiskCatalog(store, budget_bytes, warn=False)
        await catalog.load()
        return store, catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortStoreOptions(StoreOptions):
    """A store of prefix snapshots on disk, which must be there: a directory or a URL.

    The flags have short names, for commands that take no other directory or URL.
    """

    kv_cache_dir: Annotated[str | None, _store_flag(*_DIRECTORY, "--kv-cache-dir", "--dir")] = None
    kv_cache_url: Annotated[str | None, _store_flag(*_URL, "--kv-cache-url", "--url")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """Whether the state of prompts' prefixes is kept, where, and how much of it."""

    prefix_cache: Annotated[
        bool,
        Flag(
            "Keep the state of prompts in the workers' memory, so that a later prompt that begins alike is not "
            "computed again.",
            "--prefix-cache/--no-prefix-cache",
        ),
    ] = True
    prefix_cache_bytes: Annotated[
        str | None,
        Flag(
            "Host memory for kept prefixes in each local worker, like 8GiB; remote ones have their own flag.  "
            "[default: a tenth of the memory, at most 4GiB]",
            metavar="SIZE",
        ),
    ] = None
    store: StoreOptions = StoreOptions()
    kv_cache_budget: Annotated[
        str, Flag("Most bytes that the store on disk may take; what is worth least is given up first.", metavar="SIZE")
    ] = "4GiB"
    kv_cache_min_tokens: Annotated[
        int, Flag("Shorter prefixes are not written to disk.", type=click.IntRange(1), metavar="N")
    ] = 512

    def __post_init__(self) -> None:
        """Raise InvalidArgument for options that contradict each other, and for sizes that are none."""
        if self.store.flag is not None and not self.prefix_cache:
            raise InvalidArgument(
                f"{self.store.flag} has no effect with --no-prefix-cache: what comes from disk goes through the "
                "workers' memory; leave out one of them",
                field=self.store.flag,
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
        """Host memory for prefixes in each local worker, in bytes; None for the worker's own default."""
        if not self.prefix_cache:
            return 0
        return None if self.prefix_cache_bytes is None else parse_size(self.prefix_cache_bytes, "--prefix-cache-bytes")

    def check(self, cluster: Cluster) -> None:
        """Raise InvalidArgument for a budget of local workers where there are none."""
        if self.prefix_cache_bytes is not None and not cluster.starts_workers:
            raise InvalidArgument(
                f"--prefix-cache-bytes {self.prefix_cache_bytes} has no effect on workers that run already: give it to "
                "flashsplit-worker, or leave it out",
                field="--prefix-cache-bytes",
            )

    def open(self, cluster: Cluster, files: ModelFiles) -> PrefixCache | None:
        """Return the cache of a started cluster, not yet entered; None where it is switched off."""
        if not self.prefix_cache:
            return None
        disk = None
        if self.store.flag is not None:
            disk = DiskCache(
                self.store.open(),
                [lineage_of(cluster, files.text_fingerprint, with_draft=with_draft) for with_draft in (False, True)],
                files.num_layers,
                files.name,
                budget_bytes=parse_size(self.kv_cache_budget, "--kv-cache-budget"),
                min_tokens=self.kv_cache_min_tokens,
            )
        return PrefixCache(cluster, files.text_fingerprint, disk=disk)
