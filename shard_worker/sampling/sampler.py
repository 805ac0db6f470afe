"""Choosing tokens from logits on the last stage: the request's processors, then argmax or a draw (`drawing.py`).

The random numbers for a position depend on seed and position alone. A draft token is accepted exactly when it equals
the token that is drawn with them. This is speculative sampling (Leviathan et al. 2023, Chen et al. 2023) for a draft
that puts all its mass on one token: accept it with probability p(token), else draw from the rest. Moreover it makes a
seeded answer independent of draft, split and block length.
"""

from __future__ import annotations

from collections.abc import Sequence, Set as AbstractSet

import torch

from services.messages.sampling import SamplingParams
from shard_worker.ops.largest import largest
from shard_worker.sampling.drawing import Draw, draw, finite
from shard_worker.sampling.grammar import GrammarState
from shard_worker.sampling.masks import TokenMasks


class Sampler:
    """Chooses the tokens of one request. It owns the token counts that penalties need, the forbidden tokens and the
    grammar's state.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_length: int,
        vocab_size: int,
        device: torch.device,
        grammar: GrammarState | None = None,
        stop_token_ids: AbstractSet[int] = frozenset(),
    ) -> None:
        """prompt_length: tokens before the output, which presence and frequency penalties leave out. vocab_size:
        columns of the logits. device: where the logits are. stop_token_ids: the tokens that end the output."""
        self._sampling, self._prompt_length, self._device, self._grammar = sampling, prompt_length, device, grammar
        self._masks = TokenMasks(sampling, stop_token_ids, prompt_length, vocab_size, device)
        self._bias: torch.Tensor | None = None
        if sampling.logit_bias:
            self._bias = torch.zeros(vocab_size, device=device)
            tokens = torch.tensor(list(sampling.logit_bias), device=device)
            self._bias[tokens] = torch.tensor(list(sampling.logit_bias.values()), device=device)
        penalties = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        # [2, vocab]: how often each token occurs among all so far, and among those of the output.
        self._counts: torch.Tensor | None = None
        if any(penalty is not None for penalty in penalties):
            self._counts = torch.zeros(2, vocab_size, device=device)
        self._always_processes = self._bias is not None or self._counts is not None or grammar is not None
        self._chooses_largest = not sampling.temperature

    @property
    def is_greedy(self) -> bool:
        """Whether the chosen tokens are the argmax of the unprocessed logits."""
        return self._chooses_largest and not self._is_processing

    @property
    def _is_processing(self) -> bool:
        """Whether bias, penalties, a grammar or masks change the logits."""
        return self._always_processes or self._masks.active

    def draws(self, rows: int, first_drawn: int) -> list[Draw] | None:
        """Return how the tokens behind some rows are drawn, the first of which stands at `first_drawn`; None where they
        are not, or where more than the logits' own rows counts."""
        if self._chooses_largest or self._is_processing:
            return None
        return [Draw(self._sampling, first_drawn + row) for row in range(rows)]

    def observe(self, token_ids: Sequence[int], first_position: int) -> None:
        """Count committed tokens, the first of which stands at `first_position`.

        Raises InvalidArgument for a token that the grammar does not allow.
        """
        if self._grammar is not None:
            self._grammar.observe(token_ids, first_position)
        self._masks.observe(token_ids, first_position)
        if self._counts is None or not token_ids:
            return
        tokens = torch.tensor(token_ids, device=self._device)
        ones = torch.ones(len(token_ids), device=self._device)
        self._counts[0].index_add_(0, tokens, ones)
        outputs = max(0, self._prompt_length - first_position)
        self._counts[1].index_add_(0, tokens[outputs:], ones[outputs:])

    def choose(
        self,
        logits: torch.Tensor,
        token_ids: Sequence[int],
        first_position: int,
    ) -> list[int]:
        """Return one token after each of a step's last n rows; after fewer where the grammar or what is forbidden says
        that the rows from some row on cannot count.

        logits: [n, vocab]. token_ids: the tokens of all rows of the step (at least n), not yet observed, from
        `first_position` on; none for the one row of logits behind all that was observed. Raises InvalidArgument and
        ResourceExhausted as `GrammarState.allowed` and `TokenMasks.apply` do.
        """
        rows = len(logits)
        first_drawn = first_position + len(token_ids) - rows + 1
        logits = self.adjusted(logits, token_ids, first_position)
        if self._grammar is not None:
            allowed = self._grammar.allowed(token_ids, first_position, rows)
            logits = logits[: len(allowed)].masked_fill(~allowed, float("-inf"))
        if self._masks.active:
            logits = self._masks.apply(logits, token_ids, first_position, rows)
        if not self._sampling.temperature:
            return largest(logits).tolist()
        return finite(draw(logits, [Draw(self._sampling, first_drawn + row) for row in range(len(logits))]))

    def adjusted(self, logits: torch.Tensor, token_ids: Sequence[int], first_position: int) -> torch.Tensor:
        """Return the logits after bias and penalties, each row by the tokens before it; arguments as in `choose`."""
        if self._bias is not None:
            logits = logits.float() + self._bias
        if self._counts is not None:
            history = self._history(len(logits), token_ids, first_position)
            logits = self._penalised(logits.float(), history)
        return logits

    def _history(self, rows: int, token_ids: Sequence[int], first_position: int) -> torch.Tensor:
        """Return the token counts for each row, the draft tokens before it included: [n or 1, 2, vocab]."""
        assert self._counts is not None
        if not token_ids:
            return self._counts[None]
        tokens = torch.tensor(token_ids, device=self._device)
        is_output = torch.arange(len(token_ids), device=self._device) >= self._prompt_length - first_position
        before = len(token_ids) - rows
        counts = self._counts.clone()
        ones = torch.ones(before, device=self._device)
        counts[0].index_add_(0, tokens[:before], ones)
        counts[1].index_add_(0, tokens[:before], is_output[:before].float())
        added = torch.zeros(rows, *counts.shape, device=self._device)
        index = torch.arange(rows, device=self._device)
        added[index, 0, tokens[before:]] = 1.0
        added[index, 1, tokens[before:]] = is_output[before:].float()
        return counts + added.cumsum(0)

    def _penalised(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        if sampling.repetition_penalty is not None:
            penalty = sampling.repetition_penalty
            scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(counts[:, 0] > 0, scaled, logits)
        if sampling.presence_penalty is not None:
            logits = logits - sampling.presence_penalty * (counts[:, 1] > 0)
        if sampling.frequency_penalty is not None:
            logits = logits - sampling.frequency_penalty * counts[:, 1]
        return logits
