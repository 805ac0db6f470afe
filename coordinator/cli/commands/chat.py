"""`flashsplit chat`: a conversation in the terminal, with a running server or with workers of its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
from click.core import ParameterSource

from coordinator.cli.command import Command, log_options
from coordinator.cli.http_client import ClientOptions
from coordinator.cli.option_groups import Flag, group_options, with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.generation import GenerationConfigOptions
from coordinator.cli.options.model import OptionalModelOptions
from coordinator.cli.options.prefix import PrefixOptions
from coordinator.cli.options.sampling import SamplingFlags
from coordinator.cli.started_model import start_model
from coordinator.cli.terminal.chat import Chat
from coordinator.cli.terminal.history import history_path
from coordinator.cli.terminal.speakers import AnswerSettings, LocalSpeaker, RemoteSpeaker, Speaker
from coordinator.engine.engine import Engine
from coordinator.text.model_files import ModelFiles, read_model_files
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationOptions:
    """How the model is asked to answer, whoever answers."""

    system: Annotated[str | None, Flag("A system message.", metavar="TEXT")] = None
    sampling: Annotated[SamplingParams, SamplingFlags("temperature", "top_p", "seed", as_clients=True)]
    max_tokens: Annotated[
        int | None,
        Flag("Most tokens of an answer.  [default: the server's, or what the context leaves]", type=click.IntRange(1)),
    ] = None
    no_speculation: Annotated[bool, Flag("Decode one token a step, even with a draft loaded.")] = False
    no_history: Annotated[bool, Flag("Don't remember questions in the state directory.")] = False

    def settings(self) -> AnswerSettings:
        """Return how to answer, as speakers take it."""
        return AnswerSettings(self.sampling, self.max_tokens, speculate=not self.no_speculation)


@click.command(cls=Command, epilog=_EPILOG)
@with_options
async def chat(
    client: ClientOptions,
    model: OptionalModelOptions,
    workers: ClusterOptions,
    prefix: PrefixOptions,
    defaults: GenerationConfigOptions,
    conversation: ConversationOptions,
) -> None:
    """Talk with a model: Markdown as it comes, and what each answer took.

    With --url, or nothing, a running server answers: flashsplit's, or any other with OpenAI's API. With --model, this
    command starts workers of its own, as flashsplit generate does with the same options, and ends them with the chat.
    """
    check_choice(click.get_current_context(), model.model)
    async with contextlib.AsyncExitStack() as stack:
        speaker: Speaker
        if model.model is None:
            server = await stack.enter_async_context(client.connect())
            speaker = RemoteSpeaker(server, await server.model())
        else:
            files = read_model_files(model.model, defaults.defaults(model.model))
            speaker = LocalSpeaker(await start_engine(stack, files, model, workers, prefix))
        history = None if conversation.no_history else history_path()
        await Chat(speaker, conversation.settings(), conversation.system, history).run()


def check_choice(context: click.Context, model: Path | None) -> None:
    """Raise InvalidArgument for options of the other way to chat, where they have no effect."""
    of_servers = {option.name for option in group_options(ClientOptions)}
    of_both = {"model", *(option.name for option in [*group_options(ConversationOptions), *log_options()])}
    for parameter in context.command.params:
        name = parameter.name or ""
        # What the environment says of servers is not meant for this command alone.
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE or name in of_both:
            continue
        flag = parameter.opts[0]
        if model is not None and name in of_servers:
            raise InvalidArgument(
                f"{flag} has no effect with --model, which starts workers of its own: leave out one of them", field=flag
            )
        if model is None and name not in of_servers:
            raise InvalidArgument(
                f"{flag} has no effect without --model: a running server has its own; leave it out", field=flag
            )


async def start_engine(
    stack: contextlib.AsyncExitStack,
    files: ModelFiles,
    model: OptionalModelOptions,
    workers: ClusterOptions,
    prefix: PrefixOptions,
) -> Engine:
    """Start workers that end with the stack, and return an engine for one request at a time over them.

    Raises InvalidArgument for a checkpoint that cannot chat.
    """
    if files.chat_template is None or files.tokenizer is None:
        raise InvalidArgument(
            f"{files.path} has no chat template: use flashsplit generate with --prompt for it", field="--model"
        )
    started = await stack.enter_async_context(start_model(files, model.draft, workers, prefix))
    return Engine(
        started.cluster,
        files,
        started.cache,
        name=files.name,
        max_running=1,
        max_waiting=0,
        prompt_lookup=model.prompt_lookup,
    )
