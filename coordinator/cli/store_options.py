"""Options that name a store of prefix snapshots, for the commands that look into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from coordinator.prefix.disk.catalog import DiskCatalog
from coordinator.prefix.disk.threads import in_thread
from coordinator.prefix.stores import Store, open_store
from services.errors import InvalidArgument, NotFound


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The options as given. All methods raise InvalidArgument naming them, NotFound, and StoreError."""

    directory: str | None
    url: str | None

    @property
    def given(self) -> str | None:
        """The option that names a store, if one does."""
        if self.directory is not None and self.url is not None:
            raise InvalidArgument("give one of --kv-cache-dir and --kv-cache-url, not both", field="--kv-cache-url")
        return "--kv-cache-dir" if self.directory is not None else "--kv-cache-url" if self.url is not None else None

    def open(self) -> Store:
        """The store, whether it is there yet or not."""
        if self.given is None:
            raise InvalidArgument(
                "--kv-cache-dir is missing: name the directory that serve or generate was given, or its --kv-cache-url",
                field="--kv-cache-dir",
            )
        return open_store(Path(self.directory) if self.directory is not None else str(self.url), self.given)

    def open_existing(self) -> Store:
        """The store, which must be there: looking at one never creates it."""
        store = self.open()
        if not store.exists():
            raise NotFound(f"{self.given} {(self.directory or self.url)!r} is not there: check its spelling")
        return store

    async def load(self, budget_bytes: int = 0) -> tuple[Store, DiskCatalog]:
        """The store and all its entries."""
        store = await in_thread(self.open_existing)
        catalog = DiskCatalog(store, budget_bytes, warn=False)
        await catalog.load()
        return store, catalog


def store_options(command: Callable[..., Any], *, short: bool = True) -> Callable[..., Any]:
    """--kv-cache-dir and --kv-cache-url; what is on the command line wins over the environment.

    short: as --dir and --url too, for commands that have no other.
    """
    for option in (
        click.option("--kv-cache-url", *(["--url"] if short else []), "kv_cache_url", metavar="URL",
                     envvar="FLASHSPLIT_KV_CACHE_URL", show_envvar=True,
                     help="A store of prefixes on disk in any place that fsspec reaches, like s3://bucket/prefixes; "
                     "needs the extra remote-store."),
        click.option("--kv-cache-dir", *(["--dir"] if short else []), "kv_cache_dir", metavar="DIR",
                     envvar="FLASHSPLIT_KV_CACHE_DIR", show_envvar=True,
                     help="A store of prefixes on disk in a directory: they survive restarts and serve any split."),
    ):  # fmt: skip
        command = option(command)
    return command


def chosen_store(kv_cache_dir: str | None, kv_cache_url: str | None) -> StoreOptions:
    """Leaves out the environment's where the command line has one."""
    source = click.get_current_context().get_parameter_source
    names = ("kv_cache_dir", "kv_cache_url")
    typed = {name for name in names if source(name) is click.core.ParameterSource.COMMANDLINE}
    if typed == {"kv_cache_url"}:
        kv_cache_dir = None
    elif typed == {"kv_cache_dir"}:
        kv_cache_url = None
    return StoreOptions(kv_cache_dir, kv_cache_url)
