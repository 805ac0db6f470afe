"""`flashsplit serve`: the model for clients of OpenAI's and Anthropic's APIs and of gRPC, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from dataclasses import replace

import click
import structlog

from coordinator.api.grpc.server import GrpcServer
from coordinator.api.http.app import create_app
from coordinator.api.http.loading import UntilLoaded
from coordinator.api.http.reply_forms import new_answers
from coordinator.api.http.server import HttpServer
from coordinator.cli.command import Command
from coordinator.cli.console import console
from coordinator.cli.option_groups import with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.compression import CompressionOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.generation import GenerationDefaultsOptions
from coordinator.cli.options.model import ModelOptions
from coordinator.cli.options.prefix import PrefixOptions
from coordinator.cli.options.server import AccessOptions, ListenOptions, ServiceOptions
from coordinator.cli.options.standby import StandbyOptions
from coordinator.cli.started_model import start_model
from coordinator.cluster.supervisor import supervised
from coordinator.engine.engine import Engine
from coordinator.engine.handover import Handover
from coordinator.journal.directory import Journal
from coordinator.status.board import Board
from coordinator.text.model_files import read_model_files
from services.reread import read_again_on_hangup

SWITCH_S = 0.001
"""How long a thread that reads a large body may keep the interpreter from the event loop; Python's default is five
times that, and to answer one request the loop must come by it several times."""

log = structlog.get_logger()


@click.command(cls=Command, context_settings={"auto_envvar_prefix": "FLASHSPLIT"})
@with_options
@config_option
async def serve(
    model: ModelOptions,
    workers: ClusterOptions,
    standby: StandbyOptions,
    prefix: PrefixOptions,
    compression: CompressionOptions,
    listen: ListenOptions,
    access: AccessOptions,
    service: ServiceOptions,
    defaults: GenerationDefaultsOptions,
) -> None:
    """Serve a model to clients of OpenAI's and Anthropic's HTTP APIs, and over gRPC.

    \b
      flashsplit serve --model DIR --draft DIR --target-devices cuda:0,hip:0
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
           -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    Every flag can also be set as an environment variable (FLASHSPLIT_PORT for --port) or in --config. SIGTERM and
    Ctrl-C let running answers finish and refuse new ones; a second signal ends everything at once. Certificates, lists
    of revoked ones, API keys and the cluster token are read again when their files change; SIGHUP reads them at once,
    and the log's level if that stands in a file. Files that cannot be used are logged, and the old ones stay.
    """
    read_again_on_hangup()
    keys, tls = access.load(listen.host)
    read = read_model_files(model.model, defaults.defaults(model.model))
    files = replace(read, tool_call_format=service.tool_call_parser, reasoning_format=service.reasoning_parser)
    async with contextlib.AsyncExitStack() as stack:
        # So is a journal that cannot be written.
        journal = None if service.journal is None else stack.enter_context(contextlib.closing(Journal(service.journal)))
        # A port that is taken is told before anything is loaded.
        door = UntilLoaded()
        http_server = await stack.enter_async_context(
            HttpServer(door, listen.host, listen.port, tls, client_timeout_s=service.client_timeout)
        )
        grpc_server = None
        if listen.grpc:
            grpc_server = await stack.enter_async_context(
                GrpcServer(
                    keys,
                    listen.host,
                    listen.grpc_port,
                    tls,
                    access_log=service.access_log,
                    client_timeout_s=service.client_timeout,
                )
            )
        started = await stack.enter_async_context(
            start_model(files, model.draft, workers, prefix, compression, standby=standby)
        )
        names = service.names or (files.name,)
        engine = Engine(
            started.cluster,
            files,
            started.cache,
            name=names[0],
            aliases=names[1:],
            max_model_len=service.max_model_len,
            max_running=service.max_concurrent_requests,
            max_waiting=service.max_waiting_requests,
            compressor=started.compressor,
            resume_timeout_s=service.resume_timeout if service.resume else 0.0,
            prompt_lookup=model.prompt_lookup,
        )
        board = await stack.enter_async_context(Board(engine))
        answers = new_answers(engine, journal, keep_s=service.keep_answers)
        stop = _stop_signal()
        # Both stop before the workers do.
        door.app = create_app(
            engine,
            keys,
            board,
            vllm_metrics=service.metrics_compat == "vllm",
            access_log=service.access_log,
            cors_origins=access.origins,
            client_timeout_s=service.client_timeout,
            hosts=access.hosts(listen.host, tls),
            answers=await stack.enter_async_context(answers),
        )
        stack.push_async_callback(http_server.stop)
        if grpc_server is not None:
            await grpc_server.serve(engine)
            stack.push_async_callback(grpc_server.stop)
        _stay_prompt()
        _print_banner(engine, http_server, grpc_server, with_key=bool(keys))
        # While it drains nothing is restored: workers that are told to stop as well let running answers end.
        supervision = supervised(started.cluster, replace_after_s=service.replace_after, quiet=engine.quiet)
        async with supervision, Handover(engine).kept():
            await stop.wait()
        await _drain(engine, service.drain_timeout)


def _stay_prompt() -> None:
    """Keep what goes on beside the event loop from holding it up for long."""
    sys.setswitchinterval(SWITCH_S)
    # What is there now stays; to look through it with each collection would take a tenth of a second.
    gc.collect()
    gc.freeze()


def _stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM and Ctrl-C set. A second one ends the process at once, and the workers with it."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        """Set the event, or end the process where it is set already."""
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _drain(engine: Engine, seconds: float) -> None:
    """Let running requests finish for so long, and say what becomes of them."""
    load = engine.load
    console.print(f"shutting down: {load.running + load.waiting} requests to finish; once more ends them at once")
    if not await engine.drain(seconds):
        console.print(f"{engine.load.running} requests did not finish within {seconds:g} s")


def _print_banner(engine: Engine, http_server: HttpServer, grpc_server: GrpcServer | None, *, with_key: bool) -> None:
    """Say on stderr where the stages and the servers are, with a command line to try."""
    for index, worker in enumerate(engine.cluster.workers):
        target = worker.target
        assert target is not None
        beside = target.host_weight_bytes
        console.print(
            f"stage {index}: layers {target.layers} on {worker.device} of {worker.host}, "
            f"{target.weight_bytes / 2**30:.2f} GiB"
            + (f", and {beside / 2**30:.2f} GiB of experts in its host's memory" if beside else ""),
            markup=False,
        )
    if engine.cluster.draft is not None:
        console.print(f"draft: blocks of {engine.cluster.draft.block_size}", markup=False)
    if engine.prompt_lookup:
        console.print("draft tokens are looked up in the text", markup=False)
    url, grpc = http_server.url, None
    console.print(f"{engine.name} at {url}/v1, {engine.max_model_len} tokens of context", markup=False)
    defaults, most = engine.files.defaults, engine.max_model_len
    sampling = ", ".join(f"{name} {value:g}" for name, value in defaults.numbers().items())
    console.print(
        f"unless a request says otherwise: {sampling}, answers of up to {defaults.answer_tokens(most, chat=True)} "
        f"tokens, to plain prompts {defaults.answer_tokens(most, chat=False)}",
        markup=False,
    )
    console.print(f"a page to talk with it and watch it at {url}/", markup=False)
    if grpc_server is not None:
        grpc = grpc_server.address
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
