"""One answer: prefill in chunks behind the longest kept prefix, then decode steps until something ends the answer.

Each step goes down the chain once. What comes back is the tokens that it produced and, where it was asked for, the
draft's proposal for the next step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from coordinator.answer import Answer, Compression, Phase, Piece, Request, StageStats, Stats
from coordinator.cluster.cluster import Cluster
from coordinator.engine.prefill_chunk import chunk_for
from coordinator.engine.request_checks import check_request
from coordinator.engine.speculation import Speculation
from coordinator.engine.step_times import StageShare, StepTaken, StepTimes, sent_bytes, split_time
from coordinator.prefix.cache import PrefixCache
from coordinator.prefix.policy import chunks
from coordinator.prefix.run import PrefixRun
from coordinator.text.text_stream import TextStream
from coordinator.text.tokenizer import Tokenizer
from services.errors import FlashsplitError, InternalError, NotFound, error_named
from services.messages.inference_types import PromptToken
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    Forward,
    Proposal,
    SnapshotRestored,
    SnapshotSaved,
    StepKind,
    TokenLogprobs,
)
from services.rpc.stage import StageSession

MORE_STEPS = 15
"""Most steps that the workers may take by themselves behind one that was sent."""

CHUNKS_IN_FLIGHT = 4
"""Prefill chunks that are sent ahead of their answers, so that the stages work on different chunks at once."""


class Generation:
    """The answer to one request. Iterate over `pieces`, then read `answer`.

    phases: when the request restored, prefilled and decoded, as far as it came. answer: None until it is complete.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: Request,
        tokenizer: Tokenizer | None,
        prefixes: PrefixCache | None = None,
        on_step: Callable[[StepTaken], None] = lambda step: None,
    ) -> None:
        """on_step is called with every answered step. Raises InvalidArgument for a request that does not fit."""
        check_request(request, cluster, tokenizer)
        self._cluster, self._request, self._on_step = cluster, request, on_step
        self._text = TextStream(
            tokenizer,
            request.stop_strings,
            min_tokens=request.sampling.min_tokens or 0,
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
        )
        self._prefixes = prefixes
        self._prefix: PrefixRun | None = None
        self._speculation = Speculation(1)
        self._draft_reach = 0
        self._chunk = request.prefill_chunk or chunk_for(cluster.workers)
        self._times = StepTimes()
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt: list[PromptToken] = []
        # All tokens that the session has committed or will, also those behind the answer's end.
        self._sequence: list[int] = list(request.prompt_ids)
        self._finish_reason: str | None = None
        self._step = self._length = 0
        # How many steps the workers go on with by themselves, and how many draft tokens each of them proposes.
        self._following = self._proposing = 0
        self._draft_tokens: tuple[int, ...] = ()
        self._accepted = 0
        self._prefill_s = self._decode_s = 0.0
        self._looked_up_at = self._restored_at = self._run_at = 0.0
        self.phases: list[Phase] = []
        self.answer: Answer | None = None

    @property
    def completion_tokens(self) -> int:
        """How many tokens the answer has so far."""
        return len(self._token_ids)

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yield the answer piece by piece. Raises the FlashsplitError that ended it, if one did."""
        try:
            await self._begin()
            try:
                async with contextlib.aclosing(self._attempt()) as pieces:
                    async for piece in pieces:
                        yield piece
            except NotFound:
                # A worker no longer keeps the prefix to be restored, and no token has been produced yet: start cold.
                if self._prefix is None or self._prefix.hit is None or self._token_ids:
                    raise
                self._prefix.forget_hit()
                self._step = self._length = self._following = 0
                self.phases.clear()
                async with contextlib.aclosing(self._attempt()) as pieces:
                    async for piece in pieces:
                        yield piece
        except FlashsplitError as error:
            raise await self._cluster.explain(error) from error

    async def _begin(self) -> None:
        """Choose what the answer begins with: the draft as it is now that the request's turn has come, and the longest
        kept prefix; a prompt that is scored is computed from its first token on."""
        request, draft = self._request, self._cluster.draft if self._request.speculate else None
        if draft is not None:
            self._speculation, self._draft_reach = Speculation(draft.block_size), draft.max_position
        elif request.speculate and self._cluster.draft_worker is not None:
            self._speculation.lose_draft("its worker is gone")
        self._looked_up_at = time.monotonic()
        if self._prefixes is not None:
            self._prefix = PrefixRun(
                self._prefixes, request.prompt_ids, request.boundaries, with_draft=draft is not None
            )
            if request.prompt_logprobs is None:
                await self._prefix.begin()

    async def _attempt(self) -> AsyncGenerator[Piece]:
        session: StageSession | None = await self._open()
        try:
            assert session is not None
            events = session.events()
            async for piece in self._run(session, events):
                yield piece
            if self._prefix is not None:
                self._prefix.finish(session, events, tuple(self._sequence[: self._length]))
                session = None
        finally:
            self._note_phases()
            if session is not None:
                await session.close()

    async def _open(self) -> StageSession:
        request = self._request
        length = len(request.prompt_ids)
        return await self._cluster.open(
            request_id=request.request_id,
            max_length=length + request.max_tokens,
            max_rows=max(self._chunk, self._speculation.block_size),
            block_rows=self._speculation.block_size,
            prompt_length=length,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            speculate=self._speculation.block_size > 1,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            grammar=request.grammar,
            trace=request.trace,
        )

    async def _run(self, session: StageSession, events: AsyncIterator[Event]) -> AsyncIterator[Piece]:
        started = self._run_at = time.monotonic()
        async for piece in self._prefill(session, events):
            self._prefill_s = time.monotonic() - started
            yield piece
        first_token_at = time.monotonic()
        while self._finish_reason is None:
            async for piece in self._decode_step(session, events):
                self._decode_s = time.monotonic() - first_token_at
                yield piece
        text, stopped = self._text.finish()
        if stopped:
            self._finish_reason = "stop"
        if text:
            yield Piece((), text)
        logprobs = tuple(self._logprobs) if self._request.logprobs is not None else None
        self.answer = Answer(
            tuple(self._token_ids),
            self._text.text,
            self._finish_reason,
            self._stats(session),
            logprobs,
            self._text.stop_string,
            tuple(self._prompt) if self._request.prompt_logprobs is not None else None,
        )

    def _note_phases(self) -> None:
        """Record when prefill and decode began and ended, as far as the request came."""
        now = time.monotonic()
        first_token_at = self._run_at + self._prefill_s if self._prefill_s else now
        if self._run_at:
            self.phases.append(Phase("prefill", max(self._run_at, self._restored_at), first_token_at))
        if self._prefill_s:
            self.phases.append(Phase("decode", first_token_at, now))

    # --- prefill

    async def _prefill(self, session: StageSession, events: AsyncIterator[Event]) -> AsyncIterator[Piece]:
        prompt, prefix = self._request.prompt_ids, self._prefix
        points = prefix.points if prefix is not None else ()
        restore = prefix.restore() if prefix is not None else None
        if restore is not None:
            await session.restore_snapshot(restore)
            self._length = restore.length
        # Where the whole prompt was restored there is nothing to compute: its logits give the first token.
        steps = chunks(len(prompt), points, self._chunk, self._length) or [(len(prompt), len(prompt))]
        unanswered, answered = 0, self._length
        for first, end in steps:
            last = end == len(prompt)
            kind = StepKind.PREFILL if not last else StepKind.DECODE if first < end else StepKind.RESUME
            propose = self._proposal_length() if last else 0
            await session.forward(Forward(self._step, first, prompt[first:end], kind, propose))
            self._step += 1
            if end in points:
                await self._keep(session, end)
            unanswered += 1
            while unanswered > (0 if last else CHUNKS_IN_FLIGHT):
                commit = await self._commit(events)
                unanswered -= 1
                self._report(StepKind.PREFILL, commit.length - answered, commit, split_time(commit, 0))
                if self._request.prompt_logprobs is not None:
                    yield self._add_prompt(prompt[answered : commit.length], commit)
                answered = commit.length
        self._length = commit.length
        yield self._add(commit)
        if self._finish_reason is None:
            self._draft_tokens = await self._proposal(events, propose)

    # --- decode

    async def _decode_step(self, session: StageSession, events: AsyncIterator[Event]) -> AsyncIterator[Piece]:
        remaining = self._request.max_tokens - len(self._token_ids)
        draft_tokens = self._draft_tokens[: remaining - 1]
        kind = StepKind.VERIFY if draft_tokens else StepKind.DECODE
        rows = (self._token_ids[-1], *draft_tokens)
        propose, sent_ns = self._proposing, time.monotonic_ns()
        if not self._following:
            if self._prefix is not None and self._prefix.checkpoint_due(self._length):
                await self._keep(session, self._length)
            propose = self._proposing = self._proposal_length()
            sent_ns = time.monotonic_ns()
            more = self._more(remaining, max(len(draft_tokens), propose))
            await session.forward(Forward(self._step, self._length, rows, kind, propose, more=more))
        self._step += 1
        commit = await self._commit(events)
        stages = split_time(commit, time.monotonic_ns() - sent_ns)
        self._times.add(stages)
        self._length, self._following = commit.length, commit.more
        accepted = len(commit.token_ids) - 1 if draft_tokens else 0
        piece = self._add(commit)
        # What was accepted behind the answer's end is no part of the answer.
        self._accepted += min(accepted, len(piece.token_ids))
        yield piece
        drafted_ns = self._times.draft_ns
        if self._finish_reason is None:
            self._draft_tokens = await self._proposal(events, propose)
        elapsed_ns = time.monotonic_ns() - sent_ns
        self._speculation.observe(len(draft_tokens), accepted, elapsed_ns / 1e9)
        self._report(kind, len(rows), commit, stages, elapsed_ns, self._times.draft_ns - drafted_ns)

    def _more(self, remaining: int, draft_tokens: int) -> int:
        """Return how many steps may follow by themselves.

        They all lie within the answer; there are none where a length is being measured or a text may end the answer.
        """
        if self._request.stop_strings or not self._speculation.steady:
            return 0
        return max(0, min(MORE_STEPS, remaining // (draft_tokens + 1) - 1))

    async def _keep(self, session: StageSession, length: int) -> None:
        """Have the workers keep the state behind the first `length` tokens, which are all that is committed."""
        if self._prefix is not None and (save := await self._prefix.save(tuple(self._sequence[:length]))) is not None:
            await session.save_snapshot(save)

    def _proposal_length(self) -> int:
        """Return how many draft tokens to ask for; none beyond the context that the draft was made for."""
        count = self._speculation.draft_tokens()
        if count and len(self._request.prompt_ids) + len(self._token_ids) + count >= self._draft_reach:
            self._speculation.switch_off(f"plain decode: the draft was made for {self._draft_reach} tokens")
            return 0
        return count

    async def _commit(self, events: AsyncIterator[Event]) -> Commit:
        event = await self._next(events)
        while isinstance(event, Failure):
            event = await self._next(events)
        if not isinstance(event, Commit):
            raise InternalError(f"stage 0 answered {type(event).__name__} where a commit was due")
        if self._request.logprobs is not None and len(event.logprobs) != len(event.token_ids):
            raise _untold()
        self._sequence += event.token_ids
        return event

    async def _proposal(self, events: AsyncIterator[Event], count: int) -> tuple[int, ...]:
        if not count:
            return ()
        event = await self._next(events)
        while isinstance(event, Failure):
            event = await self._next(events)
        if not isinstance(event, Proposal):
            raise InternalError(f"stage 0 answered {type(event).__name__} where a proposal was due")
        self._times.draft_ns += event.elapsed_ns
        return event.token_ids

    async def _next(self, events: AsyncIterator[Event]) -> Event:
        """Return the next event but for those of snapshots. A lost draft is noted; any other failure is raised."""
        event = await anext(events, None)
        while isinstance(event, SnapshotSaved | SnapshotRestored):
            if self._prefix is not None:
                self._prefix.record(event)
            if isinstance(event, SnapshotRestored):
                self._restored_at = time.monotonic()
                self.phases.append(Phase("restore", self._looked_up_at, self._restored_at))
            event = await anext(events, None)
        if event is None:
            raise InternalError("stage 0 ended the session without a reason")
        if isinstance(event, Failure):
            if event.reason is not FailureReason.DRAFT_LOST:
                raise error_named(
                    event.code,
                    event.message,
                    reason=event.reason.name,
                    stage=event.location.stage,
                    host=event.location.host,
                    device=event.location.device,
                )
            self._speculation.lose_draft(event.message)
            self._cluster.report_lost_draft(event)
        return event

    # --- results

    def _add_prompt(self, token_ids: tuple[int, ...], commit: Commit) -> Piece:
        """Add a prefill step's tokens, with their log-probabilities, to those of the prompt, and return them."""
        first = [] if self._prompt else [None]
        logprobs = [*first, *commit.prompt_logprobs]
        if len(logprobs) != len(token_ids):
            raise _untold()
        added = tuple(map(PromptToken, token_ids, logprobs))
        self._prompt += added
        return Piece((), prompt=added)

    def _add(self, commit: Commit) -> Piece:
        """Add a step's tokens to the answer, one by one, up to the one that ends it, and return them as a piece."""
        texts: list[str] = []
        added: list[int] = []
        for token_id in commit.token_ids[: self._request.max_tokens - len(self._token_ids)]:
            added.append(token_id)
            self._token_ids.append(token_id)
            if token_id in self._request.stop_token_ids:
                if self._request.include_stop:
                    texts.append(self._text.push(token_id)[0])
                self._finish_reason = "stop"
                break
            text, stopped = self._text.push(token_id)
            texts.append(text)
            if stopped:
                self._finish_reason = "stop"
                break
        if self._finish_reason is None and len(self._token_ids) == self._request.max_tokens:
            self._finish_reason = "length"
        logprobs = commit.logprobs[: len(added)]
        self._logprobs += logprobs
        return Piece(tuple(added), "".join(texts), logprobs)

    def _report(
        self,
        kind: StepKind,
        rows: int,
        commit: Commit,
        stages: tuple[StageShare, ...],
        elapsed_ns: int = 0,
        draft_ns: int = 0,
    ) -> None:
        """Pass an answered step to who listens; the arguments are the fields of `StepTaken`."""
        kept = rows if kind is StepKind.PREFILL else len(commit.token_ids)
        name, sent = self._request.request_id, sent_bytes(commit, rows)
        self._on_step(StepTaken(name, kind, rows, kept, elapsed_ns, draft_ns, stages, sent))

    def _stats(self, session: StageSession) -> Stats:
        speculation, times = self._speculation, self._times
        zeros = [0] * len(session.stages)
        stages = tuple(
            StageStats(
                address=stage.location.address,
                device=stage.location.device,
                first_layer=stage.layers.first,
                last_layer=stage.layers.last,
                forward_ms=forward_ns / 1e6,
                wire_ms=wire_ns / 1e6,
            )
            for stage, forward_ns, wire_ns in zip(
                session.stages, times.forward_ns or zeros, times.wire_ns or zeros, strict=True
            )
        )
        decoded = max(0, len(self._token_ids) - 1)
        compressed = self._request.compression or Compression()
        hit = self._prefix.hit if self._prefix is not None else None
        restored_ms = self._prefix.restored_ms if self._prefix is not None else 0.0
        return Stats(
            prompt_tokens=len(self._request.prompt_ids),
            cached_tokens=0 if hit is None else hit.length,
            cache_source=None if hit is None else hit.source,
            restore_ms=0.0 if hit is None else hit.load_ms + restored_ms,
            completion_tokens=len(self._token_ids),
            prefill_ms=self._prefill_s * 1e3,
            decode_ms=self._decode_s * 1e3,
            decode_tokens_per_s=decoded / self._decode_s if self._decode_s else 0.0,
            steps=speculation.steps,
            draft_tokens=speculation.offered,
            accepted_tokens=self._accepted,
            acceptance_length=speculation.acceptance_length,
            draft_ms=times.draft_ns / 1e6,
            stages=stages,
            notes=(*(() if compressed.note is None else (compressed.note,)), *speculation.notes),
            draft_lost=speculation.draft_lost,
            original_prompt_tokens=compressed.original_tokens,
            compress_ms=compressed.elapsed_ms,
        )


def _untold() -> InternalError:
    return InternalError("the last stage told no log-probabilities: install the same flashsplit on all hosts")


async def generate(
    cluster: Cluster,
    request: Request,
    tokenizer: Tokenizer | None,
    show: Callable[[Piece], None] = lambda piece: None,
    prefixes: PrefixCache | None = None,
) -> Answer:
    """Return the whole answer; `show` gets its pieces as they come. Raises what `Generation` raises."""
    generation = Generation(cluster, request, tokenizer, prefixes)
    async for piece in generation.pieces():
        show(piece)
    assert generation.answer is not None
    return generation.answer
