"""When prompts are compressed, and to what share of their tokens: parsed and brought into range once, before use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from services.errors import InvalidArgument
from services.messages.inference_types import CompressionMode, CompressionParams

RATIO_FLAG = "--prefill-keep-ratio"


@dataclass(frozen=True, slots=True)
class KeepCurve:
    """The share of a prompt to keep by its tokens: linear between ascending points, level beyond them."""

    points: tuple[tuple[int, float], ...]

    def ratio(self, tokens: int) -> float:
        """Return the share to keep of a prompt with so many tokens, from 0 to 1."""
        before = self.points[0]
        for point in self.points:
            if tokens <= point[0]:
                span = point[0] - before[0]
                return point[1] if not span else before[1] + (point[1] - before[1]) * (tokens - before[0]) / span
            before = point
        return before[1]


@dataclass(frozen=True, slots=True)
class CompressionSettings:
    """Whether prompts are compressed, and how much.

    threshold: from how many tokens on the mode AUTO compresses a prompt. keep: which share of it stays.
    """

    mode: CompressionMode = CompressionMode.AUTO
    threshold: int = 32_000
    keep: KeepCurve = KeepCurve(((0, 0.05),))

    def for_request(self, wish: CompressionParams) -> CompressionSettings:
        """Return the settings with what one request asks for. Raises InvalidArgument for a ratio that is no number."""
        changed = self if wish.mode is None else replace(self, mode=wish.mode)
        if wish.keep_ratio is None:
            return changed
        return replace(changed, keep=KeepCurve(((0, _ratio(wish.keep_ratio, "prefill_keep_ratio")),)))


def parse_keep(text: str) -> KeepCurve:
    """Parse a ratio, or TOKENS:RATIO pairs joined by commas; ratios outside of [0, 1] are brought into it.

    Raises InvalidArgument for anything else.
    """
    try:
        if ":" not in text:
            return KeepCurve(((0, _ratio(float(text), RATIO_FLAG)),))
        pairs = [part.split(":") for part in text.split(",")]
        points = tuple((int(tokens), _ratio(float(ratio), RATIO_FLAG)) for tokens, ratio in pairs)
    except ValueError:
        raise InvalidArgument(
            f"{RATIO_FLAG} {text!r} must be a number like 0.05, or TOKENS:RATIO pairs like 8000:0.3,64000:0.05",
            field=RATIO_FLAG,
        ) from None
    if any(point[0] >= after[0] for point, after in zip(points, points[1:], strict=False)) or points[0][0] < 0:
        raise InvalidArgument(f"{RATIO_FLAG} {text!r} must have its tokens ascending from 0", field=RATIO_FLAG)
    return KeepCurve(points)


def _ratio(value: float, field: str) -> float:
    if math.isnan(value):
        raise InvalidArgument(f"{field} is not a number; it must be from 0 to 1", field=field)
    return min(max(value, 0.0), 1.0)
