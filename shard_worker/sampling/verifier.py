"""Deciding on the last stage what a step produces and how many of its rows count; runs on the device thread.

It owns a session's sampler and the last row that counts. It must not know the chain or how answers travel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from services.messages.steps import Forward, OpenSession, StepKind, TokenLogprobs
from services.records import record
from shard_worker.device.dtypes import OnHost
from shard_worker.model.features import Features
from shard_worker.sampling.acceptance import accept
from shard_worker.sampling.drawing import NOT_FINITE, Draw, finite, queue_draws, runs_by_kernels
from shard_worker.sampling.last_row import LastRow
from shard_worker.sampling.logprobs import prompt_logprobs, token_logprobs
from shard_worker.sampling.sampler import Sampler
from shard_worker.stage.stage import Stage, StageState
from shard_worker.stage.step_graph import StepOutput, StepPart

if TYPE_CHECKING:
    from shard_worker.drafting.ahead import Ahead, IssuedBlock


@record(frozen=True, slots=True)
class ComputedStep:
    """A step whose rows went through the stage.

    output: what the stage made of them. features: those of this stage and the stages before it, for the draft.
    started_ns: when computing began, by `time.monotonic_ns`. sessions, rows: how many there were in it. proposing: how
    many of the sessions ask for draft tokens behind it. issued: its outcome and the draft's block behind it, where they
    were queued with the step. drawn: the tokens that `Verifier.draws` told of, as `draw` returns them, where those of
    several sessions were drawn together. ended_ns: when its results were there; None where nobody has waited for them
    yet.
    """

    forward: Forward
    output: StepOutput | StepPart
    features: Features
    started_ns: int
    sessions: int
    rows: int
    proposing: int
    issued: IssuedBlock | None = None
    drawn: list[int] | None = None
    ended_ns: int | None = None

    @property
    def alone(self) -> bool:
        """Whether no other session's rows were in it."""
        return self.sessions == 1

    @property
    def can_be_followed_ahead(self) -> bool:
        """Whether what follows may be queued on the device before the step's outcome is known: not behind rows of other
        sessions, or of a prompt."""
        forward = self.forward
        return self.alone and (forward.kind is StepKind.VERIFY or len(forward.token_ids) == 1)


@record(frozen=True, slots=True)
class StepOutcome:
    """What a step produced on the last stage.

    token_ids: the tokens, none after a prefill. logprobs: one for each of them where the request asked for them, else
    none. prompt_logprobs, batch_sessions, batch_rows, batch_proposing: as in `Commit`. features: those of all rows of
    the step. forward_ns: how long it took. issued: the draft's block behind the step, where it was queued with it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    features: Features
    forward_ns: int
    issued: IssuedBlock | None
    batch_sessions: int
    batch_rows: int
    batch_proposing: int


class Verifier:
    """Decides the steps of one session.

    last: the last row that counts, from which a step after a restored prefix begins.
    """

    def __init__(self, stage: Stage, sampler: Sampler, request: OpenSession, ahead: Ahead | None) -> None:
        """ahead: lets the draft begin before the host knows what the step produced; None where it cannot."""
        self._stage, self._sampler, self._request, self._ahead = stage, sampler, request, ahead
        self._batch_invariant_rows = stage.batch_invariant_rows(request.batch_invariant_rows)
        self.last = LastRow(stage.head, self._batch_invariant_rows)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Count the tokens of a prefix from which the session begins. Errors as in `Sampler.observe`."""
        self._sampler.observe(token_ids, 0)

    def decide(
        self,
        step: ComputedStep,
        state: StageState,
        meanwhile: Callable[[], None],
        then: Callable[[tuple[int, ...]], None],
    ) -> StepOutcome:
        """Decide what a step produces, and remember its last row that counts.

        state: the session's memory. meanwhile: called, before the device is waited for, where nothing but the argmax is
        still needed of it. then: called with the produced tokens as soon as they are known. Errors as in
        `Sampler.choose`, and for log-probabilities as `token_logprobs` does.
        """
        forward, output, features = step.forward, step.output, step.features
        # Before the last row is another one, and before anything of the output can be overwritten.
        of_prompt, alternatives = tuple[TokenLogprobs, ...](), self._request.prompt_logprobs
        if alternatives is not None:
            of_prompt = self._prompt_logprobs(forward, output, alternatives)
        tokens, kind = forward.token_ids, forward.kind
        issued = step.issued
        if issued is None and self._ahead is not None:
            issued = self._issue(self._ahead, step, state)
        produced: list[int] = []
        logprobs: tuple[TokenLogprobs, ...] = ()
        if issued is not None:
            produced = issued.produced()
            if kind is StepKind.PREFILL:
                produced = []
        elif kind is not StepKind.PREFILL:
            if kind is StepKind.DECODE:
                self._remember_last(step, len(tokens))
                if step.can_be_followed_ahead and output.on_host is not None:
                    drawing = self._queue_draw(step)
                    if drawing is not None or self._is_greedy:
                        meanwhile()
                    if drawing is not None:
                        step = replace(step, drawn=drawing.wait().tolist())
            produced, logprobs = self._choose(step)
        ended_ns = step.ended_ns if issued is None else issued.decided_ns
        elapsed_ns = (time.monotonic_ns() if ended_ns is None else ended_ns) - step.started_ns
        committed_rows = len(produced) if kind is StepKind.VERIFY else len(tokens)
        if issued is not None and kind is StepKind.VERIFY:
            # Before a step may begin behind it.
            state.length, state.pending, state.ahead = state.length + committed_rows, state.ahead, 0
        then(tuple(produced))
        if kind is not StepKind.RESUME:
            self._sampler.observe(tokens[:committed_rows], forward.base_position)
            if kind is not StepKind.DECODE or issued is not None:
                self._remember_last(step, committed_rows)
        return StepOutcome(
            tuple(produced),
            logprobs,
            of_prompt,
            features,
            elapsed_ns,
            issued,
            batch_sessions=step.sessions,
            batch_rows=step.rows,
            batch_proposing=step.proposing,
        )

    def draws(self, forward: Forward) -> list[Draw] | None:
        """Return how the tokens behind the last rows of a step that comes next are drawn; None where it comes to none,
        or they depend on more than the logits of these rows."""
        if forward.kind not in (StepKind.DECODE, StepKind.VERIFY):
            return None
        rows = len(forward.token_ids) if forward.kind is StepKind.VERIFY else 1
        return self._sampler.draws(rows, forward.base_position + len(forward.token_ids) - rows + 1)

    def draws_with_step(self, forward: Forward) -> list[Draw] | None:
        """Return the same where nothing but these tokens is needed of the step's logits, so that they can be drawn with
        it; None otherwise."""
        asked = self._request
        return self.draws(forward) if asked.logprobs is None and asked.prompt_logprobs is None else None

    def _queue_draw(self, step: ComputedStep) -> OnHost | None:
        """Queue drawing the token behind a lone step's row, None where that is not all that is needed of its logits."""
        logits, draws = step.output.logits, self.draws_with_step(step.forward)
        if draws is None or logits is None or not runs_by_kernels(logits.device):
            return None
        return OnHost.of(queue_draws(logits[-1:], draws))

    def token_ahead(self, output: StepPart, drawn: list[int] | None) -> int | None:
        """Return the token that `decide` will come to for a single row, None where more is to be done for it. drawn: as
        of `ComputedStep`."""
        if drawn is not None:
            return None if NOT_FINITE in drawn else drawn[-1]
        argmax = output.argmax_on_host() if self._sampler.is_greedy else None
        return None if argmax is None else argmax[-1]

    @property
    def needs_argmax_alone(self) -> bool:
        """Whether nothing is asked for that takes more of a step than the most probable token of each row."""
        return self._is_greedy and self._request.prompt_logprobs is None

    def needs_no_logits(self, forward: Forward) -> bool:
        """Whether nothing of the step's logits is needed: no token comes of rows of a prompt, however it is chosen."""
        is_prompt = forward.kind is StepKind.PREFILL and self._request.prompt_logprobs is None
        return is_prompt or self.needs_argmax_alone

    def is_decided_on_device(self, forward: Forward) -> bool:
        """Return whether the device can decide by itself which rows of such a step count and what they produce."""
        if forward.kind is StepKind.PREFILL:
            return True
        return self.needs_argmax_alone and forward.kind is not StepKind.RESUME

    @property
    def _is_greedy(self) -> bool:
        """Whether nothing but the argmax of the logits is needed."""
        return self._sampler.is_greedy and self._request.logprobs is None

    def _remember_last(self, step: ComputedStep, committed_rows: int) -> None:
        output = step.output
        if isinstance(output, StepPart) and not step.alone:
            # The few rows of several sessions stay theirs, and hardly one of them is asked for.
            self.last.remember(output.hidden_row(committed_rows - 1))
        else:
            # A view would hold all rows of a prefill, and those of a lone step are overwritten by the next.
            last = output.hidden[committed_rows - 1 : committed_rows].clone()
            self.last.remember(lambda: last)

    def _prompt_logprobs(
        self, forward: Forward, output: StepOutput | StepPart, alternatives: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return the log-probabilities of those of the step's own tokens that are part of the prompt, but for its first
        token, before which there is no row. alternatives: as of `prompt_logprobs`."""
        head = self._stage.head
        tokens = forward.token_ids[: max(0, self._request.prompt_length - forward.base_position)]
        if not tokens or forward.kind is StepKind.VERIFY:
            return ()
        assert head is not None
        last = self.last.hidden
        rows = output.hidden[: len(tokens) - 1]
        if last is None:
            tokens = tokens[1:]
        else:
            rows = torch.cat([last, rows])
        return prompt_logprobs(head, rows, tokens, alternatives)

    def _choose(self, step: ComputedStep) -> tuple[list[int], tuple[TokenLogprobs, ...]]:
        forward, output, head = step.forward, step.output, self._stage.head
        tokens, kind = forward.token_ids, forward.kind
        assert head is not None
        rows = slice(None) if kind is StepKind.VERIFY else slice(-1, None)
        draft_tokens = tokens[1:] if kind is StepKind.VERIFY else ()
        stop_tokens, chosen = self._request.stop_token_ids, None
        if step.drawn is not None:
            chosen = finite(step.drawn)
        elif self._sampler.is_greedy and kind is not StepKind.RESUME:
            argmax = output.argmax_on_host()
            chosen = None if argmax is None else argmax[rows]
        if chosen is not None and self._request.logprobs is None:
            return accept(draft_tokens, self._synthetic(forward, chosen), stop_tokens), ()
        if kind is StepKind.RESUME:
            logits = self.last.logits()
        elif output.logits is not None:
            logits = output.logits[rows]
        else:
            logits = head.logits(output.hidden[rows], self._batch_invariant_rows)
        if chosen is None:
            chosen = self._sampler.choose(logits, tokens, forward.base_position)
        produced = accept(draft_tokens, self._synthetic(forward, chosen), stop_tokens)
        if self._request.logprobs is None:
            return produced, ()
        return produced, token_logprobs(logits[: len(produced)], produced, self._request.logprobs)

    def _synthetic(self, forward: Forward, chosen: list[int]) -> list[int]:
        """Return what the target chose behind the rows of a verify, which while measuring may be chance."""
        synthetic = None if self._stage.head is None else self._stage.head.synthetic
        if synthetic is None or forward.kind is not StepKind.VERIFY:
            return chosen
        return synthetic.choose(forward.token_ids, forward.base_position, chosen)

    def _issue(self, ahead: Ahead, step: ComputedStep, state: StageState) -> IssuedBlock | None:
        """Let the draft begin before the tokens are known, where that can be done: behind greedy steps that kernels
        run."""
        forward, output, features = step.forward, step.output, step.features
        if (
            not step.can_be_followed_ahead
            or not forward.propose_tokens
            or not self.is_decided_on_device(forward)
            or output.argmax is None
            or features.total is None
            or not ahead.takes(len(forward.token_ids))
        ):
            return None
        return ahead.issue(
            state.caches[-1],
            output.argmax,
            features.total,
            forward.propose_tokens,
            uncommitted=forward.kind is StepKind.VERIFY,
        )
