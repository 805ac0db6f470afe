"""`flashsplit chat`: a conversation in the terminal, with a running server or with workers of its own."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
from click.core import ParameterSource

from coordinator.cli.console import LoadBars
from coordinator.cli.http_client import ServerOptions, server_options
from coordinator.cli.options import PlacementOptions, PrefixOptions, model_options, placement_options, prefix_options
from coordinator.cli.running import run
from coordinator.cli.sampling_options import sampling_options
from coordinator.cli.store_options import chosen_store
from coordinator.cli.terminal.chat import Chat
from coordinator.cli.terminal.history import history_path
from coordinator.cli.terminal.speakers import AnswerOptions, LocalSpeaker, RemoteSpeaker, Speaker
from coordinator.engine.engine import Engine
from coordinator.text.model_files import read_model_files
from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams

_EPILOG = """Examples:

\b
  flashsplit chat                                        # with the server on this host
  flashsplit chat --url https://host.lan:8000 --system "Answer in one sentence."
  flashsplit chat --model DIR --draft DIR --target-devices cuda:0,hip:0
  echo "What is 17 * 4?" | flashsplit chat               # one question a line

In the chat, /help lists what can be typed. Ctrl-C stops an answer, Ctrl-D ends the chat.
"""

_EITHER = ("url", "api_key", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_BOTH = ("model", "system", "temperature", "top_p", "max_tokens", "seed", "no_speculation", "no_history")


@click.command(epilog=_EPILOG)
@server_options
@model_options(required=False)
@placement_options
@prefix_options
@click.option("--system", metavar="TEXT", help="A system message.")
@sampling_options("temperature", "top_p", "seed", as_clients=True)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="Most tokens of an answer.  [default: as servers have it, 2048]"
)
@click.option("--no-speculation", is_flag=True, help="Plain decode, even with a draft loaded.")
@click.option("--no-history", is_flag=True, help="Don't remember questions in the state directory.")
@click.pass_context
def chat(
    context: click.Context,
    /,
    url: str | None,
    api_key: str | None,
    ssl_ca_certs: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    model: Path | None,
    draft: Path | None,
    system: str | None,
    sampling: SamplingParams,
    max_tokens: int | None,
    no_speculation: bool,
    no_history: bool,
    prefix_cache: bool,
    prefix_cache_bytes: str | None,
    kv_cache_dir: str | None,
    kv_cache_url: str | None,
    kv_cache_budget: str,
    kv_cache_min_tokens: int,
    **placement: str | int | None,
) -> None:
    """Talk with a model: Markdown as it comes, and what each answer took.

    With --url, or nothing, a running server answers: flashsplit's, or any other with OpenAI's API. With --model, this
    command starts workers of its own, as flashsplit generate does with the same options, and ends them with the chat.
    """
    answers = AnswerOptions(sampling, max_tokens, speculate=not no_speculation)

    async def main() -> None:
        check_choice(context, model)
        async with contextlib.AsyncExitStack() as stack:
            speaker: Speaker
            if model is None:
                server = ServerOptions(url, api_key, ssl_ca_certs, ssl_certfile, ssl_keyfile).connect()
                await stack.enter_async_context(server)
                speaker = RemoteSpeaker(server, await server.model())
            else:
                store = chosen_store(kv_cache_dir, kv_cache_url)
                keeping = PrefixOptions(prefix_cache, prefix_cache_bytes, store, kv_cache_budget, kv_cache_min_tokens)
                options = PlacementOptions(**placement)  # type: ignore[arg-type]
                engine = await start_engine(stack, model, draft, options, keeping)
                speaker = LocalSpeaker(engine)
            await Chat(speaker, answers, system, None if no_history else history_path()).run()

    run(main())


def check_choice(context: click.Context, model: Path | None) -> None:
    """Raises InvalidArgument for options of the other way to chat: they would have no effect."""
    for parameter in context.command.params:
        name = parameter.name or ""
        # What the environment says of servers is not meant for this command alone.
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE or name in _BOTH:
            continue
        flag = parameter.opts[0]
        if model is not None and name in _EITHER:
            raise InvalidArgument(
                f"{flag} has no effect with --model, which starts workers of its own: leave out one of them", field=flag
            )
        if model is None and name not in _EITHER:
            raise InvalidArgument(
                f"{flag} has no effect without --model: a running server has its own; leave it out", field=flag
            )


async def start_engine(
    stack: contextlib.AsyncExitStack, model: Path, draft: Path | None, options: PlacementOptions, keeping: PrefixOptions
) -> Engine:
    """Workers that end with the stack. Raises InvalidArgument for a checkpoint that cannot chat."""
    files = read_model_files(model)
    if files.chat_template is None or files.tokenizer is None:
        raise InvalidArgument(
            f"{model} has no chat template: use flashsplit generate with --prompt for it", field="--model"
        )
    with LoadBars() as bars:
        cluster = options.cluster(files, draft, bars, prefix_cache_bytes=keeping.worker_bytes)
        await stack.enter_async_context(cluster)
    cache = keeping.open(cluster, files)
    if cache is not None:
        await stack.enter_async_context(cache)
    return Engine(cluster, files, cache, name=model.absolute().name, max_running=1, max_waiting=0)
