"""What the last stage makes of a step: which tokens it produces, which of its rows count. Runs on the device thread.

Owns a session's sampler and the row that counts last. Knows nothing of the chain or of how answers travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from services.messages.steps import Forward, OpenSession, StepKind, TokenLogprobs
from shard_worker.model.features import Features
from shard_worker.sampling.acceptance import accept
from shard_worker.sampling.last_row import LastRow
from shard_worker.sampling.logprobs import token_logprobs
from shard_worker.sampling.sampler import Sampler
from shard_worker.stage.stage import Stage, StageState
from shard_worker.stage.step_graph import StepOutput

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import Ahead


@dataclass(frozen=True, slots=True)
class Produced:
    """What the last stage made of a step: tokens, their log-probabilities where asked for, features of all rows.

    counted: the stage has been told already which rows count.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    features: Features
    forward_ns: int
    counted: bool


class Verifier:
    """Of one session. ahead: where its draft sits beside and can be asked before the host knows the outcome."""

    def __init__(self, stage: Stage, sampler: Sampler, request: OpenSession, ahead: Ahead | None) -> None:
        self._stage, self._sampler, self._request, self._ahead = stage, sampler, request, ahead
        self._batch_invariant_rows = stage.batch_invariant_rows(request.batch_invariant_rows)
        self.last = LastRow(stage.head, self._batch_invariant_rows)

    def observe(self, token_ids: Sequence[int]) -> None:
        """A prefix was taken up. Raises InvalidArgument as `Sampler.observe` does."""
        self._sampler.observe(token_ids, 0)

    def decide(
        self,
        forward: Forward,
        state: StageState,
        output: StepOutput,
        features: Features,
        started_ns: int,
        meanwhile: Callable[[], None],
        then: Callable[[tuple[int, ...]], None],
    ) -> Produced:
        """After the step's forward, which began at `started_ns`. meanwhile: called where nothing but the likeliest
        token is still needed of it, before that is waited for; then: with its tokens as soon as they are known.

        Errors as in `Sampler.choose`.
        """
        tokens, kind = forward.token_ids, forward.kind
        ahead = self._may_go_ahead(forward, output, features)
        produced: list[int] = []
        logprobs: tuple[TokenLogprobs, ...] = ()
        if ahead is not None:
            assert output.argmax is not None
            assert features.total is not None
            produced = ahead.issue(
                state.caches[-1],
                output.argmax,
                features.total,
                forward.propose_tokens,
                uncommitted=kind is StepKind.VERIFY,
            )
        elif kind is not StepKind.PREFILL:
            if kind is StepKind.DECODE:
                self._keep(output, len(tokens))
                if output.on_host is not None and self._is_greedy:
                    meanwhile()
            produced, logprobs = self._choose(forward, output)
        elapsed_ns = time.monotonic_ns() - started_ns
        then(tuple(produced))
        counted = len(produced) if kind is StepKind.VERIFY else len(tokens)
        if kind is not StepKind.RESUME:
            self._sampler.observe(tokens[:counted], forward.base_position)
            if kind is not StepKind.DECODE or ahead is not None:
                self._keep(output, counted)
        if ahead is not None and kind is StepKind.VERIFY:
            state.length, state.pending = state.length + counted, 0
        return Produced(tuple(produced), logprobs, features, elapsed_ns, ahead is not None)

    @property
    def _is_greedy(self) -> bool:
        """Whether nothing else of the logits is wanted."""
        return self._sampler.is_greedy and self._request.logprobs is None

    def _keep(self, output: StepOutput, counted: int) -> None:
        # A copy: a view would hold all rows of a prefill, and a step's are overwritten by the next.
        self.last.hidden = output.hidden[counted - 1 : counted].clone()

    def _choose(self, forward: Forward, output: StepOutput) -> tuple[list[int], tuple[TokenLogprobs, ...]]:
        head, tokens, kind = self._stage.head, forward.token_ids, forward.kind
        assert head is not None
        rows = slice(None) if kind is StepKind.VERIFY else slice(-1, None)
        argmax: torch.Tensor | None = None
        if kind is StepKind.RESUME:
            logits = self.last.logits()
        elif output.logits is not None and output.on_host is not None:
            logits = output.logits[rows]
            if self._sampler.is_greedy:
                argmax = output.on_host.tensor[rows]
                output.on_host.wait()
        else:
            logits = head.logits(output.hidden[rows], self._batch_invariant_rows)
        chosen = self._sampler.choose(logits, tokens, forward.base_position, argmax)
        draft_tokens = tokens[1:] if kind is StepKind.VERIFY else ()
        produced = accept(draft_tokens, chosen, self._request.stop_token_ids)
        if self._request.logprobs is None:
            return produced, ()
        return produced, token_logprobs(logits[: len(produced)], produced, self._request.logprobs)

    def _may_go_ahead(self, forward: Forward, output: StepOutput, features: Features) -> Ahead | None:
        """Where a block can be issued before the tokens are known: for the likeliest ones, of a step by kernels."""
        ahead = self._ahead
        if (
            ahead is None
            or not forward.propose_tokens
            or forward.kind not in (StepKind.DECODE, StepKind.VERIFY)
            or output.argmax is None
            or features.total is None
            or not self._is_greedy
            or not ahead.takes(len(forward.token_ids))
        ):
            return None
        return ahead
