"""What holds where a request says nothing, as flags: where the defaults come from, and others in their places."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import click

from coordinator.cli.option_groups import Flag
from coordinator.text.generation_defaults import (
    FROM_MODEL,
    GenerationDefaults,
    parse_default_sampling,
    read_generation_defaults,
)

_SECTION = "Generation defaults"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfigOptions:
    """Where the defaults of sampling parameters and max_tokens come from."""

    section: ClassVar = _SECTION

    generation_config: Annotated[
        str,
        Flag(
            "The generation_config.json whose sampling parameters, do_sample (false is greedy) and max_new_tokens hold "
            "where nothing else is said: that of the model's directory (auto), none (vllm), or another file or folder.",
            metavar="auto|vllm|PATH",
        ),
    ] = FROM_MODEL

    def defaults(self, model: Path) -> GenerationDefaults:
        """Return the defaults for a model's directory. Raises what `read_generation_defaults` raises."""
        return read_generation_defaults(model, self.generation_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaultsOptions(GenerationConfigOptions):
    """How requests are answered that don't say how tokens are chosen or how long the answer may become."""

    section: ClassVar = _SECTION

    default_sampling: Annotated[
        str | None,
        Flag(
            "Sampling parameters in place of those of generation_config.json, like temperature=0.6,top_k=20; requests "
            "that say something else have that.",
            metavar="KEY=VALUE[,KEY=VALUE…]",
        ),
    ] = None
    default_max_tokens: Annotated[
        int | None,
        Flag(
            "Most tokens of an answer whose request sets no limit; to plain prompts they are never more than 16.  "
            "[default: generation_config.json's max_new_tokens, else what the context leaves]",
            type=click.IntRange(1),
            metavar="N",
        ),
    ] = None

    def defaults(self, model: Path) -> GenerationDefaults:
        """Return the defaults for a model's directory.

        Raises what `read_generation_defaults` and `parse_default_sampling` raise.
        """
        sampling = parse_default_sampling(self.default_sampling or "")
        return GenerationConfigOptions.defaults(self, model).overridden(sampling, self.default_max_tokens)
