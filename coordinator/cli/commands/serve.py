"""`flashsplit serve`: the model for clients of OpenAI's and Anthropic's APIs and of gRPC, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import click
import structlog

from coordinator.api.api_keys import ApiKeys, read_keys
from coordinator.api.grpc.server import GrpcServer
from coordinator.api.http.app import create_app
from coordinator.api.http.server import HttpServer
from coordinator.cli.compression_options import CompressionOptions, compression_options
from coordinator.cli.console import LoadBars, console
from coordinator.cli.options import PlacementOptions, PrefixOptions, model_options, placement_options, prefix_options
from coordinator.cli.running import run
from coordinator.cli.store_options import chosen_store
from coordinator.cluster.supervisor import supervised
from coordinator.config.config_file import read_config
from coordinator.engine.engine import Engine
from coordinator.status.board import Board
from coordinator.text.model_files import read_model_files
from services.addresses import is_loopback
from services.errors import InvalidArgument
from services.net.client_tls import load_client_tls

log = structlog.get_logger()

PATH = click.Path(path_type=Path)


@click.command(context_settings={"auto_envvar_prefix": "FLASHSPLIT"})
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.yaml",
              is_eager=True, expose_value=False, callback=read_config,
              help="Flags from a YAML file by their names. The command line and the environment win.")  # fmt: skip
@model_options(required=True)
@placement_options
@prefix_options
@compression_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Where HTTP listens.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--grpc/--no-grpc", default=True, show_default=True, help="Listen for gRPC clients too.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=50051, show_default=True,
              help="Where, on the same host. 0 takes a free one.")  # fmt: skip
@click.option("--api-key", "api_keys", multiple=True, metavar="KEY",
              help="Clients must send it; may be given several times. Better in a file.")  # fmt: skip
@click.option("--api-key-file", type=PATH, metavar="FILE", help="The same, one key a line.")
@click.option("--ssl-certfile", type=PATH, metavar="FILE", help="PEM certificate that clients see, HTTP and gRPC.")
@click.option("--ssl-keyfile", type=PATH, metavar="FILE", help="Its key.")
@click.option("--ssl-ca-certs", type=PATH, metavar="FILE", help="Who must have signed clients' own certificates.")
@click.option("--insecure", is_flag=True, help="Listen beyond this host without TLS or without an API key.")
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
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    ssl_ca_certs: Path | None,
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
    prefill_drafter: Path | None,
    prefill_compression: str | None,
    prefill_threshold: int | None,
    prefill_keep_ratio: str | None,
    prefill_device: str | None,
    **placement: str | int | None,
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's HTTP APIs, and over gRPC.

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
        shortening = CompressionOptions(
            prefill_drafter, prefill_compression, prefill_threshold, prefill_keep_ratio, prefill_device
        )
        keys = ApiKeys(read_keys(api_keys, api_key_file))
        tls = load_client_tls(ssl_certfile, ssl_keyfile, ssl_ca_certs)
        if not insecure:
            _check_exposure(host, with_key=bool(keys), with_tls=tls is not None)
        files = read_model_files(model)
        async with contextlib.AsyncExitStack() as stack:
            with LoadBars() as bars:
                options = PlacementOptions(**placement)  # type: ignore[arg-type]
                cluster = options.cluster(
                    files, draft, bars, prefix_cache_bytes=keeping.worker_bytes, beside=shortening.places
                )
                keeping.check(cluster)
                await stack.enter_async_context(cluster)
                compressor = await shortening.open(cluster, bars, options.dtype)
                if compressor is not None:
                    stack.push_async_callback(compressor.close)
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
                compressor=compressor,
            )
            board = await stack.enter_async_context(Board(engine))
            app = create_app(engine, keys, board, vllm_metrics=metrics_compat == "vllm")
            told = _told_to_stop()
            http_door = await stack.enter_async_context(HttpServer(app, host, port, tls))
            grpc_door = None
            if grpc:
                grpc_door = await stack.enter_async_context(GrpcServer(engine, keys, host, grpc_port, tls))
            _banner(engine, http_door, grpc_door, with_key=bool(keys))
            # While it drains nothing is restored: workers that are told to stop as well let running answers end.
            async with supervised(cluster):
                await told.wait()
            await _drain(engine, drain_timeout)

    run(main())


def _check_exposure(host: str, *, with_key: bool, with_tls: bool) -> None:
    """Raises InvalidArgument for doors that other hosts reach without TLS or without a key."""
    if (with_key and with_tls) or is_loopback(f"[{host}]:0" if ":" in host else f"{host}:0"):
        return
    missing = [
        what
        for what, there in (
            ("a certificate with --ssl-certfile and --ssl-keyfile", with_tls),
            ("API keys with --api-key-file", with_key),
        )
        if not there
    ]
    raise InvalidArgument(
        f"--host {host} can be reached from other hosts: give {' and '.join(missing)}, listen on 127.0.0.1, or accept "
        "that with --insecure",
        field="--host",
    )


def _told_to_stop() -> asyncio.Event:
    """Set by SIGTERM and Ctrl-C. A second one ends the process at once, and the workers end with it."""
    told = asyncio.Event()

    def stop(number: int) -> None:
        if told.is_set():
            os._exit(128 + number)
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return told


async def _drain(engine: Engine, seconds: float) -> None:
    load = engine.load
    console.print(f"shutting down: {load.running + load.waiting} requests to finish; once more ends them at once")
    if not await engine.drain(seconds):
        console.print(f"{engine.load.running} requests did not finish within {seconds:g} s")


def _banner(engine: Engine, http_door: HttpServer, grpc_door: GrpcServer | None, *, with_key: bool) -> None:
    """Where everything is, and a line to try."""
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
    url, grpc = http_door.url, None
    console.print(f"{engine.name} at {url}/v1, {engine.max_model_len} tokens of context", markup=False)
    console.print(f"a page to talk with it and watch it at {url}/", markup=False)
    if grpc_door is not None:
        grpc = grpc_door.address
        console.print(f"gRPC at {grpc}", markup=False)
    key = " -H 'authorization: Bearer KEY'" if with_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    # As it stands, so that it can be copied: the console would break the line.
    print(
        f"curl {url}/v1/chat/completions -H 'content-type: application/json'{key} -d '{body}'",
        file=sys.stderr,
        flush=True,
    )
    log.info("serve.ready", url=url, grpc=grpc, model=engine.name)
