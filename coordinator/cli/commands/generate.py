"""`flashsplit generate`: one prompt, one answer, streamed to stdout."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from coordinator.answer import Answer, Piece, Request
from coordinator.cli.command import Command
from coordinator.cli.console import console
from coordinator.cli.option_groups import Flag, with_options
from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cli.options.compression import CompressionOptions
from coordinator.cli.options.config import config_option
from coordinator.cli.options.generation import GenerationConfigOptions
from coordinator.cli.options.model import ModelOptions
from coordinator.cli.options.prefix import PrefixOptions
from coordinator.cli.options.sampling import SamplingFlags
from coordinator.cli.started_model import start_model
from coordinator.compression.compressor import Compressor
from coordinator.compression.prompts import shorten_chat, shorten_text
from coordinator.engine import generation
from coordinator.text.model_files import ModelFiles, read_model_files
from coordinator.text.prompt import Prompt, chat_prompt, text_prompt
from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams

_EPILOG = """Examples:

\b
  flashsplit generate --model DIR --prompt "Once upon a time"
  flashsplit generate --model DIR --draft DIR --chat --prompt "What is 17 * 4?" \\
      --target-devices cuda:0,hip:0 --target-layer-split 0.3,0.7
  flashsplit generate --model DIR --prompt-ids 1,2,3 --max-tokens 8 --json --target-devices cpu,10.0.0.7:7001
"""


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A prompt, and the messages that it was made of, if it was."""

    prompt: Prompt
    messages: tuple[Mapping[str, str], ...] = ()

    async def shorten(self, compressor: Compressor | None, request_id: str, files: ModelFiles) -> Prompt:
        """Return the prompt that is computed: a shorter one where a compressor has found what can be left out."""
        if compressor is None:
            return self.prompt
        common = compressor, compressor.settings, request_id, files, self.prompt
        return await (shorten_chat(*common, self.messages) if self.messages else shorten_text(*common))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is asked: texts, files of texts, or token ids."""

    prompts: Annotated[
        tuple[str, ...],
        Flag(
            "The prompt. Given several times, they are answered one after the other, and what they begin with in "
            "common is computed once.",
            "--prompt",
            metavar="TEXT",
        ),
    ] = ()
    prompt_files: Annotated[
        tuple[Path, ...],
        Flag(
            "Read the prompt from a file; may be given several times.",
            "--prompt-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
        ),
    ] = ()
    prompt_ids: Annotated[str | None, Flag("The prompt as token ids; needs no tokenizer.", metavar="ID[,ID…]")] = None
    chat: Annotated[bool, Flag("Put the prompt into the checkpoint's chat template as a user message.")] = False
    system: Annotated[str | None, Flag("With --chat: a system message.", metavar="TEXT")] = None

    def read(self, files: ModelFiles) -> list[PromptSource]:
        """Return the prompts from whichever of the three options was given.

        Raises InvalidArgument for none or several of them, and for what cannot be read.
        """
        sources = [option for option in (self.prompts, self.prompt_files, self.prompt_ids) if option]
        if len(sources) != 1:
            raise InvalidArgument("give exactly one of --prompt, --prompt-file and --prompt-ids", field="--prompt")
        if self.system is not None and not self.chat:
            raise InvalidArgument("--system has no effect without --chat", field="--system")
        if self.prompt_ids:
            if self.chat:
                raise InvalidArgument("--chat needs text: use --prompt or --prompt-file with it", field="--chat")
            try:
                return [PromptSource(Prompt(tuple(int(part) for part in self.prompt_ids.split(","))))]
            except ValueError:
                raise InvalidArgument(
                    f"--prompt-ids {self.prompt_ids!r} must be whole numbers joined by commas", field="--prompt-ids"
                ) from None
        texts = self.prompts or [_read_text(path) for path in self.prompt_files]
        if not self.chat:
            return [PromptSource(text_prompt(files, text)) for text in texts]
        before = [{"role": "system", "content": self.system}] if self.system is not None else []
        chats = [[*before, {"role": "user", "content": text}] for text in texts]
        return [PromptSource(chat_prompt(files, messages), tuple(messages)) for messages in chats]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How long an answer may become, what ends it, and how it is computed."""

    max_tokens: Annotated[
        int | None,
        Flag(
            "Most tokens to produce.  [default: generation_config.json's max_new_tokens, else with --chat what the "
            "context leaves; without --chat 16]",
            type=click.IntRange(1),
        ),
    ] = None
    stops: Annotated[
        tuple[str, ...], Flag("End before this text; may be given several times.", "--stop", metavar="STR")
    ] = ()
    no_speculation: Annotated[bool, Flag("Decode one token a step, even with a draft loaded.")] = False
    ignore_eos: Annotated[bool, Flag("Don't end at the model's end-of-sequence tokens.")] = False
    prefill_chunk: Annotated[
        int | None,
        Flag(
            "Prompt tokens a step.  [default: 512, between GPUs with room 1024]",
            type=click.IntRange(1, 8192),
            metavar="N",
        ),
    ] = None

    def request(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, files: ModelFiles, *, context: int, chat: bool
    ) -> Request:
        """Return the request for an answer to a prompt.

        context: most tokens of both together. chat: whether the prompt is a conversation.
        """
        # A prompt that leaves no room is refused where all requests are checked.
        longest = files.defaults.answer_tokens(max(1, context - len(prompt.token_ids)), chat=chat)
        return Request(
            request_id=request_id,
            prompt_ids=prompt.token_ids,
            boundaries=prompt.boundaries,
            compression=prompt.compression,
            max_tokens=longest if self.max_tokens is None else self.max_tokens,
            sampling=sampling,
            stop_token_ids=frozenset() if self.ignore_eos else files.stop_token_ids,
            stop_strings=self.stops,
            speculate=not self.no_speculation,
            prefill_chunk=self.prefill_chunk,
            chat=chat,
        )


@click.command(cls=Command, epilog=_EPILOG)
@with_options
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming text.")
async def generate(
    model: ModelOptions,
    workers: ClusterOptions,
    prefix: PrefixOptions,
    compression: CompressionOptions,
    question: PromptOptions,
    sampling: Annotated[SamplingParams, SamplingFlags()],
    defaults: GenerationConfigOptions,
    answering: AnswerOptions,
    as_json: bool,
) -> None:
    """Answer one prompt with a model that is split over worker processes.

    Text streams to stdout, figures go to stderr; --json prints one object with token_ids, text, finish_reason and
    stats instead. With --draft, DFlash proposes blocks of tokens and the model verifies them: the answer is the same,
    only sooner.
    """
    files = read_model_files(model.model, defaults.defaults(model.model))
    completed = sampling.completed(files.defaults.sampling)
    sources = question.read(files)

    def show(piece: Piece) -> None:
        """Write a piece of the answer, unless the whole is printed at the end."""
        if not as_json:
            stream(piece.text if files.tokenizer is not None else ids_as_text(piece.token_ids))

    # A single prompt has nobody to leave its state to, unless that goes to disk.
    keep = len(sources) > 1 or prefix.store.flag is not None
    async with start_model(files, model.draft, workers, prefix, compression, keep_prefixes=keep) as started:
        context = started.cluster.target.max_position
        for source in sources:
            request_id = secrets.token_hex(8)
            prompt = await source.shorten(started.compressor, request_id, files)
            request = answering.request(request_id, prompt, completed, files, context=context, chat=question.chat)
            answer = await generation.generate(
                started.cluster,
                request,
                files.tokenizer,
                show,
                started.cache,
                prompt_lookup=model.prompt_lookup,
            )
            if as_json:
                print(json.dumps(answer.as_json(), ensure_ascii=False), flush=True)
            else:
                print()
                console.print(summary(answer), style="dim", soft_wrap=True, markup=False)
        if started.cache is not None and started.cache.pending:
            with console.status("writing prefixes to disk"):
                await started.cache.close()


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises InvalidArgument where it isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"--prompt-file {path} is not UTF-8 text: {error}", field="--prompt-file") from error


def stream(text: str) -> None:
    """Write a piece of the answer to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def ids_as_text(token_ids: tuple[int, ...]) -> str:
    """Return token ids as text, for a checkpoint without a tokenizer."""
    return "".join(f"{token_id} " for token_id in token_ids)


def summary(answer: Answer) -> str:
    """Return what an answer took, as one line."""
    stats = answer.stats
    parts = [
        f"{stats.completion_tokens} tokens ({answer.finish_reason})",
        *(
            [
                f"prompt of {stats.original_prompt_tokens} tokens made {stats.prompt_tokens} in "
                f"{stats.compress_ms:.0f} ms"
            ]
            if stats.original_prompt_tokens is not None
            else []
        ),
        f"prefill {stats.prefill_ms:.0f} ms",
        *(
            [
                f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens from {stats.cache_source} in "
                f"{stats.restore_ms:.0f} ms"
            ]
            if stats.cached_tokens
            else []
        ),
        f"decode {stats.decode_tokens_per_s:.1f} tokens/s",
    ]
    if stats.acceptance_length is not None:
        parts.append(f"{stats.acceptance_length:.2f} tokens a verify")
    return " · ".join([*parts, *stats.notes])
