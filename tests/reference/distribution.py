"""Exact distribution of the first sampled tokens over a tiny vocabulary, and how to test against it.

Logits pass through bias, repetition penalty (prompt and generated tokens), presence and
frequency penalties (generated tokens only), temperature, top-k, top-p and min-p, in this
order, in float64. The joint distribution enumerates every prefix.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """Settings of one request; the defaults sample the plain softmax."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


def softmax(logits: Array) -> Array:
    """Probabilities; a logit of minus infinity gives exactly zero."""
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def penalised(logits: Array, prompt: Sequence[int], generated: Sequence[int], settings: Settings) -> Array:
    """Logits after the bias and the history-dependent penalties."""
    out = logits.copy()
    for token, bias in settings.logit_bias.items():
        out[token] += bias
    for token in {*prompt, *generated}:
        scale = settings.repetition_penalty
        out[token] = out[token] / scale if out[token] > 0 else out[token] * scale
    for token in set(generated):
        out[token] -= settings.presence_penalty
        out[token] -= settings.frequency_penalty * list(generated).count(token)
    return out


def next_token(logits: Any, prompt: Sequence[int], generated: Sequence[int], settings: Settings) -> Array:
    """Probabilities [V] of the next token; temperature 0 puts all mass on the argmax."""
    values = penalised(np.asarray(logits, dtype=np.float64), prompt, generated, settings)
    if settings.temperature == 0:
        return np.eye(len(values))[int(values.argmax())]
    values = values / settings.temperature
    if 0 < settings.top_k < len(values):
        # Ties with the k-th largest stay, as in transformers.
        values[values < np.sort(values)[-settings.top_k]] = -np.inf
    probs = softmax(values)
    if settings.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        mass_before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
        beyond = mass_before >= settings.top_p
        beyond[0] = False
        probs[order[beyond]] = 0.0
    if settings.min_p > 0:
        probs[probs < settings.min_p * probs.max()] = 0.0
    return np.asarray(probs / probs.sum(), dtype=np.float64)


def joint(
    next_logits: Callable[[list[int]], Any],
    prompt: Sequence[int],
    depth: int,
    settings: Settings | None = None,
) -> Array:
    """Joint probabilities [V**depth] of the first `depth` tokens after the prompt.

    `next_logits` maps a whole prefix (prompt and generated tokens) to logits [V]. The first
    token is the most significant digit of a cell's number. Impossible prefixes are not run.
    """
    settings = settings or Settings()
    masses = {(): 1.0}
    vocab = 0
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        for generated, mass in masses.items():
            if mass == 0:
                longer |= {(*generated, token): 0.0 for token in range(vocab)}
                continue
            probs = next_token(next_logits([*prompt, *generated]), prompt, generated, settings)
            vocab = len(probs)
            longer |= {(*generated, token): mass * p for token, p in enumerate(probs.tolist())}
        masses = longer
    out = np.zeros(vocab**depth)
    for generated, mass in masses.items():
        out[cell(generated, vocab)] = mass
    return out


def cell(tokens: Sequence[int], vocab: int) -> int:
    """Number of the cell that a token sequence falls in."""
    number = 0
    for token in tokens:
        number = number * vocab + token
    return number


def empirical(samples: Iterable[Sequence[int]], vocab: int, depth: int) -> Array:
    """Frequencies [V**depth] of the first `depth` tokens of the samples."""
    counts = np.zeros(vocab**depth)
    for sample in samples:
        counts[cell(sample[:depth], vocab)] += 1
    return counts / counts.sum()


def total_variation(a: Any, b: Any) -> float:
    """Half the L1 distance of two distributions."""
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).sum() / 2)


def sampling_bound(cells: int, draws: int, failure: float = 1e-6) -> float:
    """A distance that an honest sampler of the distribution exceeds with probability <= `failure`.

    The mean distance is at most half of sum_i sqrt(p_i (1 - p_i) / draws), which by
    Cauchy-Schwarz is at most sqrt((cells - 1) / draws) / 2. One draw moves the distance by at
    most 1 / draws, so McDiarmid's inequality adds sqrt(log(1 / failure) / (2 draws)). `cells`
    may be the number of cells of non-zero probability when no draw fell outside them.
    """
    mean = math.sqrt((cells - 1) / draws) / 2
    return mean + math.sqrt(math.log(1 / failure) / (2 * draws))
