"""`flashsplit serve`: the model for clients that speak OpenAI's and Anthropic's APIs, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import structlog
import uvicorn
import yaml
from fastapi import FastAPI

from coordinator.console import LoadBars, console
from coordinator.engine import Engine
from coordinator.grpc_door import GrpcDoor
from coordinator.model_files import read_model_files
from coordinator.options import PlacementOptions, PrefixOptions, model_options, placement_options, prefix_options
from coordinator.running import run
from coordinator.server.app import create_app
from coordinator.server.auth import ApiKeys, read_keys
from coordinator.store_options import chosen_store
from services.addresses import is_loopback
from services.errors import InvalidArgument, Unavailable

log = structlog.get_logger()


def _read_config(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Values of a YAML file become the defaults of the flags they are named after."""
    if path is None:
        return
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.BadParameter(f"{path} is not readable YAML: {error}") from error
    if not isinstance(values, dict):
        raise click.BadParameter(f"{path} must hold keys named after the flags, like target-devices: cpu,cpu")
    known = {str(parameter.name) for parameter in context.command.params}
    flags = {
        flag.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for flag in [*parameter.opts, *parameter.secondary_opts]
    }
    defaults: dict[str, Any] = {}
    for key, value in values.items():
        flag = flags.get(str(key).replace("-", "_"))
        if flag is None or flag.name == "config":
            raise click.BadParameter(f"{path}: {key!r} is not a flag of serve; see flashsplit serve --help")
        if isinstance(value, list) and not flag.multiple:
            value = ",".join(str(item) for item in value)
        if isinstance(value, bool) and f"--no-{str(key).replace('_', '-')}" in flag.opts:
            value = not value
        defaults[str(flag.name)] = value
    assert known.issuperset(defaults)
    context.default_map = {**(context.default_map or {}), **defaults}


@click.command(context_settings={"auto_envvar_prefix": "FLASHSPLIT"})
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.yaml",
              is_eager=True, expose_value=False, callback=_read_config,
              help="Flags from a YAML file by their names. The command line and the environment win.")  # fmt: skip
@model_options(required=True)
@placement_options
@prefix_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Where HTTP listens.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--grpc/--no-grpc", default=True, show_default=True, help="Listen for gRPC clients too.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=50051, show_default=True,
              help="Where, on the same host. 0 takes a free one.")  # fmt: skip
@click.option("--api-key", "api_keys", multiple=True, metavar="KEY",
              help="Clients must send it; may be given several times. Better in a file.")  # fmt: skip
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="The same, one key a line.")
@click.option("--insecure", is_flag=True, help="Listen beyond this host without an API key.")
@click.option("--served-model-name", "names", multiple=True, metavar="NAME",
              help="What clients call the model; further ones are aliases.  [default: the directory]")  # fmt: skip
@click.option("--max-model-len", type=click.IntRange(2), metavar="N",
              help="Most tokens of prompt and answer together.  [default: the model's context]")  # fmt: skip
@click.option("--max-concurrent-requests", type=click.IntRange(1), default=16, show_default=True, metavar="N",
              help="Requests that run at once; more of them wait.")  # fmt: skip
@click.option("--max-waiting-requests", type=click.IntRange(0), default=64, show_default=True, metavar="N",
              help="Requests that wait; more of them are told to come again (429).")  # fmt: skip
@click.option("--metrics-compat", type=click.Choice(["vllm"]), help="Metrics under these names too.")
@click.option("--drain-timeout", type=click.FloatRange(0), default=60.0, show_default=True, metavar="SECONDS",
              help="How long running answers may take to finish after SIGTERM.")  # fmt: skip
def serve(
    model: Path,
    draft: Path | None,
    host: str,
    port: int,
    grpc: bool,
    grpc_port: int,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    insecure: bool,
    names: tuple[str, ...],
    max_model_len: int | None,
    max_concurrent_requests: int,
    max_waiting_requests: int,
    metrics_compat: str | None,
    drain_timeout: float,
    prefix_cache: bool,
    prefix_cache_bytes: str | None,
    kv_cache_dir: str | None,
    kv_cache_url: str | None,
    kv_cache_budget: str,
    kv_cache_min_tokens: int,
    **placement: str | int | None,
) -> None:
    """Serve a model over HTTP: OpenAI's chat completions, completions and models.

    \b
      flashsplit serve --model DIR --draft DIR --target-devices cuda:0,hip:0
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
           -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    Every flag can also be set as an environment variable (FLASHSPLIT_PORT for --port) or in --config. SIGTERM and
    Ctrl-C let running answers finish and refuse new ones; a second signal ends everything at once.
    """

    async def main() -> None:
        store = chosen_store(kv_cache_dir, kv_cache_url)
        keeping = PrefixOptions(prefix_cache, prefix_cache_bytes, store, kv_cache_budget, kv_cache_min_tokens)
        keys = ApiKeys(read_keys(api_keys, api_key_file))
        if not keys and not insecure and not is_loopback(f"{host}:{port}"):
            raise InvalidArgument(
                f"--host {host} can be reached from other hosts and no API key is set: set one with --api-key-file, "
                "listen on 127.0.0.1, or accept that with --insecure",
                field="--host",
            )
        files = read_model_files(model)
        async with contextlib.AsyncExitStack() as stack:
            with LoadBars() as bars:
                cluster = PlacementOptions(**placement).cluster(  # type: ignore[arg-type]
                    files, draft, bars, prefix_cache_bytes=keeping.worker_bytes
                )
                await stack.enter_async_context(cluster)
            cache = keeping.open(cluster, files)
            if cache is not None:
                await stack.enter_async_context(cache)
            called = names or (model.absolute().name,)
            engine = Engine(
                cluster,
                files,
                cache,
                name=called[0],
                aliases=called[1:],
                max_model_len=max_model_len,
                max_running=max_concurrent_requests,
                max_waiting=max_waiting_requests,
            )
            app = create_app(engine, keys, vllm_metrics=metrics_compat == "vllm")
            door = await stack.enter_async_context(GrpcDoor(engine, keys, host, grpc_port)) if grpc else None
            await _listen(engine, app, host, port, drain_timeout, door, with_key=bool(keys))

    run(main())


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: what a signal means is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _listen(
    engine: Engine,
    app: FastAPI,
    host: str,
    port: int,
    drain_timeout: float,
    door: GrpcDoor | None,
    *,
    with_key: bool,
) -> None:
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = _Server(config)
    told = asyncio.Event()

    def stop() -> None:
        if told.is_set():
            # Told twice: at once. The workers end with this process.
            os._exit(128 + signal.SIGTERM)
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    serving = asyncio.ensure_future(_serve(server, host, port))
    waiting = asyncio.ensure_future(told.wait())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        _banner(engine, server, door, with_key=with_key)
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    if told.is_set():
        load = engine.load
        console.print(f"shutting down: {load.running + load.waiting} requests to finish; once more ends them at once")
        if not await engine.drain(drain_timeout):
            console.print(f"{engine.load.running} requests did not finish within {drain_timeout:g} s")
        server.should_exit = True
    waiting.cancel()
    await serving


async def _serve(server: uvicorn.Server, host: str, port: int) -> None:
    """Raises Unavailable when the port cannot be had; uvicorn itself would exit."""
    try:
        await server.serve()
    except SystemExit as error:
        raise Unavailable(
            f"cannot listen on {host}:{port}: it is in use or not of this host", field="--port"
        ) from error


def _banner(engine: Engine, server: uvicorn.Server, door: GrpcDoor | None, *, with_key: bool) -> None:
    """Where everything is, and a line to try."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    for index, worker in enumerate(engine.cluster.workers):
        target = worker.target
        assert target is not None
        console.print(
            f"stage {index}: layers {target.layers} on {worker.device} of {worker.host}, "
            f"{target.weight_bytes / 2**30:.2f} GiB",
            markup=False,
        )
    if engine.cluster.draft is not None:
        console.print(f"draft: blocks of {engine.cluster.draft.block_size}", markup=False)
    console.print(f"{engine.name} at {url}/v1, {engine.max_model_len} tokens of context", markup=False)
    if door is not None:
        console.print(f"gRPC at {door.address}", markup=False)
    key = " -H 'authorization: Bearer KEY'" if with_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    print(
        f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'",
        file=sys.stderr,
        flush=True,
    )
    log.info("serve.ready", url=url, grpc=door.address if door is not None else None, model=engine.name)
