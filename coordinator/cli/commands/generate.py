"""`flashsplit generate`: one prompt, one answer, streamed to stdout."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from coordinator.answer import Answer, Piece, Request
from coordinator.cli.compression_options import CompressionOptions, compression_options
from coordinator.cli.console import LoadBars, console
from coordinator.cli.options import PlacementOptions, PrefixOptions, model_options, placement_options, prefix_options
from coordinator.cli.running import run
from coordinator.cli.sampling_options import sampling_options
from coordinator.cli.store_options import chosen_store
from coordinator.compression.compressor import Compressor
from coordinator.compression.prompts import shorten_chat, shorten_text
from coordinator.engine import generation
from coordinator.text.model_files import ModelFiles, read_model_files
from coordinator.text.prompt import Prompt, chat_prompt, text_prompt
from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams, check_sampling

_EPILOG = """Examples:

\b
  flashsplit generate --model DIR --prompt "Once upon a time"
  flashsplit generate --model DIR --draft DIR --chat --prompt "What is 17 * 4?" \\
      --target-devices cuda:0,hip:0 --target-layer-split 0.3,0.7
  flashsplit generate --model DIR --prompt-ids 1,2,3 --max-tokens 8 --json --target-devices cpu,10.0.0.7:7001
"""


@click.command(epilog=_EPILOG)
@model_options(required=True)
@placement_options
@prefix_options
@compression_options
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TEXT",
    help="The prompt. Given several times, they are answered one after the other, and what they begin with in common "
    "is computed once.",
)
@click.option(
    "--prompt-file",
    "prompt_files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Read the prompt from a file; may be given several times.",
)
@click.option("--prompt-ids", metavar="ID[,ID…]", help="The prompt as token ids; needs no tokenizer.")
@click.option("--chat", is_flag=True, help="Put the prompt into the checkpoint's chat template as a user message.")
@click.option("--system", metavar="TEXT", help="With --chat: a system message.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most tokens to produce.")
@sampling_options()
@click.option("--stop", "stops", multiple=True, metavar="STR", help="End before this text; may be given several times.")
@click.option("--no-speculation", is_flag=True, help="Plain decode, even with a draft loaded.")
@click.option("--ignore-eos", is_flag=True, help="Don't end at the model's end-of-sequence tokens.")
@click.option(
    "--prefill-chunk",
    type=click.IntRange(1, 8192),
    metavar="N",
    help="Prompt tokens a step.  [default: 512, between GPUs with room 1024]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of streaming text.")
def generate(
    model: Path,
    draft: Path | None,
    prompts: tuple[str, ...],
    prompt_files: tuple[Path, ...],
    prompt_ids: str | None,
    chat: bool,
    system: str | None,
    max_tokens: int,
    sampling: SamplingParams,
    stops: tuple[str, ...],
    no_speculation: bool,
    ignore_eos: bool,
    prefill_chunk: int | None,
    as_json: bool,
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
    """Answer one prompt with a model that is split over worker processes.

    Text streams to stdout, figures go to stderr; --json prints one object with token_ids, text, finish_reason and
    stats instead. With --draft, DFlash guesses blocks of tokens and the model verifies them: the answer is the same,
    only sooner.
    """

    async def main() -> None:
        store = chosen_store(kv_cache_dir, kv_cache_url)
        shortening = CompressionOptions(
            prefill_drafter, prefill_compression, prefill_threshold, prefill_keep_ratio, prefill_device
        )
        files = read_model_files(model)
        seeded = sampling.seeded()
        check_sampling(seeded)
        asked = read_prompts(files, prompts, prompt_files, prompt_ids, chat=chat, system=system)
        keeping = PrefixOptions(prefix_cache, prefix_cache_bytes, store, kv_cache_budget, kv_cache_min_tokens)

        def show(piece: Piece) -> None:
            if not as_json:
                stream(piece.text if files.tokenizer is not None else ids_as_text(piece.token_ids))

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
            # A single prompt has nobody to leave its state to, unless that goes to disk.
            cache = keeping.open(cluster, files) if len(asked) > 1 or store.given is not None else None
            if cache is not None:
                await stack.enter_async_context(cache)
            for one in asked:
                request_id = secrets.token_hex(8)
                prompt = await one.shortened(compressor, request_id, files)
                request = Request(
                    request_id=request_id,
                    prompt_ids=prompt.token_ids,
                    boundaries=prompt.boundaries,
                    compression=prompt.compression,
                    max_tokens=max_tokens,
                    sampling=seeded,
                    stop_token_ids=frozenset() if ignore_eos else files.stop_token_ids,
                    stop_strings=stops,
                    speculate=not no_speculation,
                    prefill_chunk=prefill_chunk,
                )
                answer = await generation.generate(cluster, request, files.tokenizer, show, cache)
                if as_json:
                    print(json.dumps(answer.as_json(), ensure_ascii=False), flush=True)
                else:
                    print()
                    console.print(summary(answer), style="dim", soft_wrap=True, markup=False)
            if cache is not None and cache.pending:
                with console.status("writing prefixes to disk"):
                    await cache.close()

    run(main())


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and the messages that it was made of, if it was."""

    prompt: Prompt
    messages: tuple[Mapping[str, str], ...] = ()

    async def shortened(self, compressor: Compressor | None, request_id: str, files: ModelFiles) -> Prompt:
        """As it is computed."""
        if compressor is None:
            return self.prompt
        common = compressor, compressor.settings, request_id, files, self.prompt
        return await (shorten_chat(*common, self.messages) if self.messages else shorten_text(*common))


def read_prompts(
    files: ModelFiles,
    prompts: tuple[str, ...],
    prompt_files: tuple[Path, ...],
    prompt_ids: str | None,
    *,
    chat: bool,
    system: str | None,
) -> list[Asked]:
    """The prompts from whichever of the three options was given. Raises InvalidArgument for none or several of them."""
    given = [option for option in (prompts, prompt_files, prompt_ids) if option]
    if len(given) != 1:
        raise InvalidArgument("give exactly one of --prompt, --prompt-file and --prompt-ids", field="--prompt")
    if system is not None and not chat:
        raise InvalidArgument("--system has no effect without --chat", field="--system")
    if prompt_ids:
        if chat:
            raise InvalidArgument("--chat needs text: use --prompt or --prompt-file with it", field="--chat")
        try:
            return [Asked(Prompt(tuple(int(part) for part in prompt_ids.split(","))))]
        except ValueError:
            raise InvalidArgument(
                f"--prompt-ids {prompt_ids!r} must be whole numbers joined by commas", field="--prompt-ids"
            ) from None
    texts = prompts or [_read_text(path) for path in prompt_files]
    if not chat:
        return [Asked(text_prompt(files, text)) for text in texts]
    before = [{"role": "system", "content": system}] if system is not None else []
    chats = [[*before, {"role": "user", "content": text}] for text in texts]
    return [Asked(chat_prompt(files, messages), tuple(messages)) for messages in chats]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"--prompt-file {path} is not UTF-8 text: {error}", field="--prompt-file") from error


def stream(text: str) -> None:
    """Stream a piece of the answer."""
    sys.stdout.write(text)
    sys.stdout.flush()


def ids_as_text(token_ids: tuple[int, ...]) -> str:
    return "".join(f"{token_id} " for token_id in token_ids)


def summary(answer: Answer) -> str:
    """One line of figures."""
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
