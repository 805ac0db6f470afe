"""The sampling parameters: the one place that says what each is called, means, accepts and has as its default.

The messages of both contracts, the fields of the HTTP APIs and the flags of the command line are derived from
`SamplingParams`, whose fields carry a `Parameter`. To add one, add it here, to `Sampling` of `stage.proto` and of
`generation.proto`, and heed it in `shard_worker/sampling/sampler.py`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_args, get_type_hints

from flashsplit.inference.v1 import generation_pb2
from flashsplit.shard.v1 import stage_pb2
from services.errors import InvalidArgument

MAX_TEMPERATURE = 100
"""Highest temperature that a client may ask for."""

MAX_ADDED_TO_LOGITS = 1e6
"""Largest bias, and largest penalty for each occurrence: far above any logit, far below where float32 ends."""

MAX_SEED = 2**64 - 1

M = TypeVar("M", stage_pb2.Sampling, generation_pb2.Sampling)


@dataclass(frozen=True, slots=True)
class Range:
    """The finite numbers from `ge` or above `gt`, up to `le` or below `lt`; None leaves that side open.

    words: how a refusal says what would be accepted, after "it must be".
    """

    words: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def holds(self, value: float) -> bool:
        """Return whether a number lies in the range."""
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def bounds(self) -> dict[str, float]:
        """Return the sides that are bounded, by name."""
        sides = {"ge": self.ge, "gt": self.gt, "le": self.le, "lt": self.lt}
        return {name: bound for name, bound in sides.items() if bound is not None}


_ADDED = Range(
    f"from {-MAX_ADDED_TO_LOGITS:g} to {MAX_ADDED_TO_LOGITS:g}", ge=-MAX_ADDED_TO_LOGITS, le=MAX_ADDED_TO_LOGITS
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is known of one number among the sampling parameters.

    kind: int or float. help: what --help says of it. accepted: what a worker takes. http: what a body of the HTTP APIs
    may say. default: what holds where neither a client nor the model's own defaults give it; None leaves its processor
    off. off: the values by which a client switches the processor off.
    """

    name: str
    kind: type[int] | type[float]
    help: str
    accepted: Range
    http: Range
    default: float | None = None
    off: tuple[float, ...] = ()

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return f"--{self.name.replace('_', '-')}"


def _number(help: str, accepted: Range, http: Range, **more: Any) -> Any:
    """Return a dataclass field for an optional number; its name and kind are those of the field."""
    return field(default=None, metadata={"help": help, "accepted": accepted, "http": http, **more})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. The processors run in the order of the fields; what forbids tokens, which stands behind
    the seed, comes in front of the temperature.

    None means "not given" in every place. A client's request gets the APIs' defaults from `completed`; on a worker
    whatever is not given is off: without a temperature, as with 0, the answer is greedy. The seed keys counter-based
    random numbers: the number for a position depends on seed and position alone, so split, draft and block length
    cannot change a seeded answer; a worker takes 0 for a seed that is not given.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """What is added to the logit of each of these tokens."""
    repetition_penalty: float | None = _number(
        "Divide the logits of tokens in prompt and output by this; above 1 discourages them.",
        accepted=Range("from 0.001 to 1000", ge=1e-3, le=1e3),
        http=Range(ge=1e-3, le=1e3),
        off=(1,),
    )
    presence_penalty: float | None = _number(
        "Lower the logits of tokens in the output by this much.",
        accepted=_ADDED,
        http=Range(ge=-1000, le=1000),
        off=(0,),
    )
    frequency_penalty: float | None = _number(
        "Lower the logits of tokens in the output by this much for each time they occur there.",
        accepted=_ADDED,
        http=Range(ge=-1000, le=1000),
        off=(0,),
    )
    temperature: float | None = _number(
        "0 is greedy.",
        accepted=Range("at least 0", ge=0),
        http=Range(ge=0, le=MAX_TEMPERATURE),
        default=1.0,  # OpenAI's; greedy has to be asked for.
    )
    top_k: int | None = _number(
        "Keep the K most probable tokens.",
        accepted=Range("at least 1", ge=1),
        http=Range(ge=-1, le=2**31 - 1),
        off=(0, -1),
    )
    top_p: float | None = _number(
        "Keep the smallest set of tokens with this mass.",
        accepted=Range("above 0 and at most 1", gt=0, le=1),
        http=Range(gt=0, le=1),
        off=(1,),
    )
    min_p: float | None = _number(
        "Drop tokens below this share of the most probable one's probability.",
        accepted=Range("between 0 and 1", ge=0, le=1),
        http=Range(ge=0, le=1),
        off=(0,),
    )
    seed: int | None = _number(
        "Same seed, same answer, whatever the split or the draft.  [default: random]",
        accepted=Range(f"from 0 to {MAX_SEED}", ge=0, le=MAX_SEED),
        http=Range(ge=-(2**63), lt=2**64),
    )

    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be chosen; none for all of them."""
    bad_words: tuple[str, ...] = ()
    """Words that the output must not have, as clients give them; to a worker they go as `bad_token_sequences`."""
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    """The last token of each must not follow the others of it in the output."""
    min_tokens: int | None = _number(
        "Let no stop token end the answer before it has this many tokens.",
        accepted=Range("at least 0", ge=0),
        http=Range(ge=0, le=2**31 - 1),
        off=(0,),
    )

    def numbers(self) -> dict[str, float]:
        """Return the numbers that are given, by name."""
        values = {parameter.name: getattr(self, parameter.name) for parameter in PARAMETERS}
        return {name: value for name, value in values.items() if value is not None}

    def seeded(self) -> SamplingParams:
        """Return the same with a random seed where none is given."""
        return replace(self, seed=secrets.randbits(64)) if self.seed is None else self

    def completed(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """Return what an API makes of a client's parameters: defaults for those not given, a random seed if need be.

        defaults: those that come before the parameters' own; only its numbers count, and not its seed. A processor
        whose value changes nothing is switched off. Raises InvalidArgument as `check_sampling`, for a temperature above
        MAX_TEMPERATURE and for biases of what cannot be a token id.
        """
        values: dict[str, Any] = {}
        for parameter in PARAMETERS:
            value = getattr(self, parameter.name)
            if value is None and defaults is not None and parameter.name != "seed":
                value = getattr(defaults, parameter.name)
            value = parameter.default if value is None else value
            values[parameter.name] = None if value in parameter.off else value
        # NaN is left to check_sampling.
        if values["temperature"] > MAX_TEMPERATURE:
            raise _refusal("temperature", values["temperature"], f"from 0 to {MAX_TEMPERATURE}")
        foreign = [token for token in self.logit_bias if not 0 <= token < 2**31]
        if foreign:
            raise InvalidArgument(f"logit_bias has the key {foreign[0]}; keys are token ids", field="logit_bias")
        seed = self.seeded().seed or 0
        # HTTP clients may give a negative one.
        completed = replace(self, **{**values, "seed": seed % 2**64})
        check_sampling(completed)
        return completed


def _parameters() -> tuple[Parameter, ...]:
    hints = get_type_hints(SamplingParams)
    numbers = [entry for entry in fields(SamplingParams) if entry.metadata]
    return tuple(Parameter(entry.name, get_args(hints[entry.name])[0], **entry.metadata) for entry in numbers)


PARAMETERS: tuple[Parameter, ...] = _parameters()
"""All parameters that are numbers, in the order of their processors."""


def check_sampling(sampling: SamplingParams) -> None:
    """Raises InvalidArgument naming the parameter, its value and what would be accepted."""
    for parameter in PARAMETERS:
        value = getattr(sampling, parameter.name)
        if value is not None and not parameter.accepted.holds(value):
            raise _refusal(parameter.name, value, parameter.accepted.words)
    if not all(sampling.bad_token_sequences):
        raise InvalidArgument("bad_token_sequences has an empty one; each has at least one token", field="bad_words")
    for token, bias in sampling.logit_bias.items():
        if not _ADDED.holds(bias):
            raise _refusal(f"logit_bias[{token}]", bias, _ADDED.words)


def _refusal(name: str, value: float, accepted: str) -> InvalidArgument:
    return InvalidArgument(f"{name} is {value}; it must be {accepted}", field=name)


def sampling_to_message(sampling: SamplingParams, message: type[M]) -> M:
    """Return the parameters as the `Sampling` message of either contract; what is not given stays absent there."""
    known = message.DESCRIPTOR.fields_by_name
    values = {entry.name: getattr(sampling, entry.name) for entry in fields(sampling) if entry.name in known}
    return message(**values | {"bad_token_sequences": [{"ids": ids} for ids in sampling.bad_token_sequences]})


def sampling_from_message(message: stage_pb2.Sampling | generation_pb2.Sampling) -> SamplingParams:
    """Return the parameters in a `Sampling` message of either contract, not yet checked.

    A number whose field cannot tell absent from 0 (`temperature` and `seed` of `stage.proto`) is not given where it
    is 0, which means the same to a worker.
    """
    values = {descriptor.name: value for descriptor, value in message.ListFields()}
    values["logit_bias"] = dict(values.get("logit_bias", {}))
    for name in ("allowed_token_ids", "bad_words"):
        values[name] = tuple(values.get(name, ()))
    values["bad_token_sequences"] = tuple(tuple(entry.ids) for entry in values.get("bad_token_sequences", ()))
    return SamplingParams(**values)
