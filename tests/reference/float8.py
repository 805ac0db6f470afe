"""8-bit floats (e4m3fn) restated from their definition, in float64, and a transformers run that keeps keys and values
in them.

Nothing here shares code with the project, nor with torch's own type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.reference.target import with_cache

Doubles = npt.NDArray[np.float64]


def value(code: int) -> float:
    """What a byte means: sign, 4 bits of exponent (bias 7), 3 of mantissa; exponent 0 is subnormal; no infinities."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return float("nan") if code & 127 == 127 else -size if code & 128 else size


SIZES = np.array([value(code) for code in range(127)])
"""What is not negative, in order; the place is the code."""


def nearest(numbers: npt.ArrayLike) -> npt.NDArray[np.uint8]:
    """The code of the nearest number for each, of two as near the one with an even code; the largest beyond it."""
    given = np.asarray(numbers, dtype=np.float64)
    size = np.minimum(np.abs(given), SIZES[-1])
    above = np.searchsorted(SIZES, size).clip(1, len(SIZES) - 1)
    below = above - 1
    to_above, to_below = SIZES[above] - size, size - SIZES[below]
    code = np.where((to_above < to_below) | ((to_above == to_below) & (above % 2 == 0)), above, below)
    return (code + 128 * np.signbit(given)).astype(np.uint8)


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """The nearest numbers, in the tensor's own type."""
    codes = nearest(tensor.double().numpy())
    values = np.where(codes & 128, -SIZES[codes & 127], SIZES[codes & 127])
    return torch.from_numpy(values).to(tensor.dtype)


class Float8Cache(DynamicCache):
    """Keys and values are rounded as they come, so that every row sees its own so too."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(rounded(key_states), rounded(value_states), *args, **kwargs)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [n, V] of one pass; row i predicts the token after ids[i]."""
    cache = Float8Cache(config=model.config)
    return model(input_ids=torch.tensor([list(ids)]), **with_cache(model, cache)).logits[0]
