"""What holds where a request says nothing: how tokens are chosen, and how long an answer may become.

It comes from the checkpoint's generation_config.json, as in vLLM. This is the one home of these defaults for all APIs
and for the command line; what stands in a request is not known here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.errors import InvalidArgument, NotFound
from services.messages.sampling import PARAMETERS, Parameter, SamplingParams
from services.model.checkpoint_files import read_json_object
from services.model.text_files import GENERATION_CONFIG, find_text_file

FROM_MODEL, IGNORED = "auto", "vllm"
"""Where `--generation-config` takes the defaults from besides a path, in vLLM's words: the checkpoint, or nowhere."""

PLAIN_PROMPT_TOKENS = 16
"""Most tokens of the answer to a plain prompt, as in OpenAI's API: a model need not end a text by itself."""

_PARAMETERS = {parameter.name: parameter for parameter in PARAMETERS if parameter.name not in ("seed", "min_tokens")}
"""What can have a default: a seed for all would make all answers alike, and how short one may be is the client's."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The defaults of a server or a command.

    sampling: what is not given here either is as `SamplingParams.completed` has it. max_tokens: the longest answer,
    None for what the context leaves.
    """

    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None

    def answer_tokens(self, room: int, *, chat: bool) -> int:
        """Return the most tokens of an answer whose request doesn't say how many.

        room: what the prompt leaves of the context. chat: whether the prompt is a conversation.
        """
        most = room if chat else min(room, PLAIN_PROMPT_TOKENS)
        return most if self.max_tokens is None else min(most, self.max_tokens)

    def numbers(self) -> dict[str, float]:
        """Return the sampling parameters in use by name, those that are switched off left out."""
        numbers = self.sampling.completed().numbers()
        return {name: value for name, value in numbers.items() if name in _PARAMETERS}

    def overridden(self, sampling: SamplingParams, max_tokens: int | None) -> GenerationDefaults:
        """Return the defaults with those in their places that are given here."""
        numbers: dict[str, Any] = sampling.numbers()
        return GenerationDefaults(
            replace(self.sampling, **numbers), self.max_tokens if max_tokens is None else max_tokens
        )


def read_generation_defaults(model: Path, source: str = FROM_MODEL) -> GenerationDefaults:
    """Return the defaults that a checkpoint comes with; do_sample false stands for temperature 0.

    source: FROM_MODEL, IGNORED, or the path of another generation_config.json or of its folder. Raises NotFound where
    that path has none, and InvalidArgument naming the file, the key, its value and what would be accepted.
    """
    if source == IGNORED:
        return GenerationDefaults()
    if source == FROM_MODEL:
        file = find_text_file(model, GENERATION_CONFIG)
        if file is None:
            return GenerationDefaults()
        try:
            path, settings = file.origin, file.json_object()
        except InvalidArgument as error:
            raise error.located(field="--generation-config") from None
    else:
        path, settings = _read_named(Path(source))
    max_tokens = settings.get("max_new_tokens")
    with _refusals(
        "--generation-config", f"{path}: ", f"; correct it, or leave the file out with --generation-config {IGNORED}"
    ):
        sampling = _sampling({name: settings[name] for name in _PARAMETERS if settings.get(name) is not None})
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise InvalidArgument(f"max_new_tokens is {max_tokens!r}; it must be a whole number above 0")
    greedy = settings.get("do_sample") is False
    return GenerationDefaults(replace(sampling, temperature=0.0) if greedy else sampling, max_tokens)


def _read_named(named: Path) -> tuple[str, dict[str, Any]]:
    """Return which file --generation-config names, itself or its folder, and what it holds."""
    path = named if named.is_file() else named / GENERATION_CONFIG
    try:
        return str(path), read_json_object(path, "--generation-config")
    except NotFound:
        raise NotFound(
            f"--generation-config is {str(named)!r}, and there is no such file, nor a folder with a "
            f"{GENERATION_CONFIG}: name one of them, {FROM_MODEL} for that of the model, or {IGNORED} for none",
            field="--generation-config",
        ) from None


def parse_default_sampling(text: str) -> SamplingParams:
    """Return what KEY=VALUE,… says. Raises InvalidArgument naming the pair at fault and what would be accepted."""
    values: dict[str, object] = {}
    with _refusals("--default-sampling", "--default-sampling: "):
        for pair in filter(None, text.split(",")):
            name, _, value = (part.strip() for part in pair.partition("="))
            if name not in _PARAMETERS:
                raise InvalidArgument(f"{pair!r} must be KEY=VALUE with a key out of {', '.join(_PARAMETERS)}")
            values[name] = value
            with contextlib.suppress(ValueError):
                values[name] = float(value)
        return _sampling(values)


def _sampling(values: dict[str, object]) -> SamplingParams:
    """Return the parameters of these values. Raises InvalidArgument for what no request might say either."""
    sampling = SamplingParams(**{name: _number(_PARAMETERS[name], value) for name, value in values.items()})
    sampling.completed()
    return sampling


def _number(parameter: Parameter, value: object) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        number = parameter.kind(value)
        if number == value:
            return number
    words = "a whole number" if parameter.kind is int else "a number"
    raise InvalidArgument(f"{parameter.name} is {value!r}; it must be {words}")


@contextlib.contextmanager
def _refusals(field: str, before: str, behind: str = "") -> Iterator[None]:
    """Have refusals in the block say where the values stand."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{before}{error.message}{behind}", field=field) from None
