"""One attempt to compute an answer on a chain of stages: prefill in chunks behind the longest kept prefix, then decode
steps until something ends the answer.

Each step goes down the chain once. What comes back is the tokens that it produced and, where it was asked for, the
draft's proposal for the next step. An answer that has begun on another chain is computed anew up to its last token.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

import structlog

from coordinator.answer import Answer, Phase, Piece
from coordinator.cluster.cluster import Cluster
from coordinator.engine.answer_state import AnswerState, Cached, missing_logprobs
from coordinator.engine.pause import Pause
from coordinator.engine.prefill_chunk import chunk_beside_others, chunk_for
from coordinator.engine.prompt_lookup import BLOCK_ROWS
from coordinator.engine.step_times import StageShare, StepTaken, batch_taken, block_share, sent_bytes, split_time
from coordinator.prefix.policy import chunks
from coordinator.prefix.run import PrefixRun
from services.errors import OUT_OF_MEMORY, InternalError, error_named
from services.messages.description import StepEngine
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    Forward,
    Proposal,
    SessionRest,
    SnapshotRestored,
    SnapshotSaved,
    StepKind,
    StepLimit,
)
from services.rpc.stage import StageSession

MOST_MORE_STEPS = 63
"""Most steps that the workers may take by themselves behind one. Half of them before their end they are allowed as many
anew, so that no step waits for the coordinator."""

MORE_STEPS = 15
"""The same where a draft's blocks may change and the workers, of a release before, cannot be told so meanwhile."""

FEWEST_AMONG_OTHERS, STEADY_S = 3, 0.05
"""Where other answers are decoded too a block that is too long is everybody's, and how long it should be follows from
how many answers there are: it is changed no sooner than so many seconds after the last change. Workers that cannot be
told take no more steps with draft tokens by themselves than take that long, but these few."""

READ_TOKENS = 4096
"""Tokens of a prompt that are prepared for looking up draft tokens at a time, which takes 3 ms."""

UNPROMISING = 2.0
"""How many times the root of the tokens that came since looking up was last worth it are the tokens that may come by
steps which follow by themselves, where those cannot be ended meanwhile: where texts begin to repeat themselves, that is
seen so much later. Where they can, as many may come as came."""

CHUNKS_IN_FLIGHT = 4
"""Prefill chunks that are sent ahead of their answers, so that the stages work on different chunks at once."""

REPLAY_ROWS, LONG_REPLAY_ROWS = 16, 64
"""Rows of a step that computes known tokens of an answer anew. They are verified like a block of a draft, so that each
has the bits that it had in a step of its own, wherever rows do not depend on others.

The longer ones take a third of the time off, and are for plain torch, where rounding depends on a step's rows in any
case. Batch-invariant sessions keep the number of rows that their products are made of, layers that are recurrent would
need memory for each row, and GPUs have captured steps of so few."""


def replay_rows(cluster: Cluster) -> int:
    """Return the rows of a step that computes known tokens anew on these stages."""
    targets = [worker.target for worker in cluster.workers]
    takes_long = all(
        target is not None and target.step_engine is StepEngine.TORCH and not target.is_recurrent for target in targets
    )
    return LONG_REPLAY_ROWS if takes_long and not cluster.exact else REPLAY_ROWS


def batch_row_counts(cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of rows with which these stages compute steps of several sessions; empty where it is any
    number on one of them, which then takes the longest, or each has its own."""
    counts = {() if worker.target is None else worker.target.batch_row_counts for worker in cluster.workers}
    return counts.pop() if len(counts) == 1 else ()


log = structlog.get_logger()


class ChainAttempt:
    """One attempt. Iterate over `pieces`, then read `answer`.

    answer: None until it is complete. opened: whether the chain took the session. produced: whether tokens were added
    to the answer. paused: whether it ended for a pause, and the next one goes on behind what the workers keep.
    """

    def __init__(
        self,
        state: AnswerState,
        cluster: Cluster,
        prefix: PrefixRun | None,
        on_step: Callable[[StepTaken], None],
        looked_up_at: float,
        pause: Pause,
        rest: SessionRest | None = None,
    ) -> None:
        """prefix: has looked for the longest kept prefix, from the time `looked_up_at` on. on_step: called with every
        answered step. pause: for which the attempt ends behind a step. rest: how the session's state rests where a
        stage is lost, and may rest from an attempt before; None where it does not."""
        self._state, self._cluster, self._prefix, self._on_step = state, cluster, prefix, on_step
        self._pause, self._rest = pause, rest
        self._held: tuple[int, ...] = ()
        """How many tokens each stage has computed in an attempt before, and need not compute again."""
        self._request, self._looked_up_at = state.request, looked_up_at
        self._chunk = self._request.prefill_chunk or chunk_for(cluster.workers)
        draft = cluster.draft
        self._replay_rows = replay_rows(cluster)
        self._draft_reach = 0 if draft is None else draft.max_position
        state.speculation.costs.compute_with(batch_row_counts(cluster))
        # All tokens that the session has committed or will, also those behind the answer's end.
        self._sequence: list[int] = [*self._request.prompt_ids, *state.token_ids]
        self._step = self._length = 0
        self._steers = cluster.workers[0].takes_step_limits
        """Whether what follows by itself can be changed meanwhile."""
        self._spares = all(worker.spares_blocks for worker in cluster.workers)
        """Whether a block may be asked for that is made only where enough of the step's own is accepted."""
        # How many steps the workers go on with by themselves, and how many draft tokens each of them proposes.
        self._following = self._proposing = 0
        self._last_step = -1
        """The last step that the workers were told to take by themselves."""
        self._changed_at = -math.inf
        """When it was changed last how many draft tokens they propose."""
        self._draft_tokens: tuple[int, ...] = ()
        """What the draft model proposes for the next step."""
        self._step_s = math.inf
        """How long the last decode step took."""
        self._reading_ns = 0
        """How long of that the draft model took to read the prompt."""
        self._promised, self._unpromising = False, 0
        """Whether draft tokens that are looked up were worth it at all, and how many tokens came since the last one
        behind which they were."""
        self._restored_at = self._run_at = self._prefilled_at = 0.0
        self.opened = self.produced = self.paused = False
        self.answer: Answer | None = None

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yield what is new of the answer. Raises the FlashsplitError that ended the attempt, if one did."""
        session: StageSession | None = await self._open()
        assert session is not None
        self.opened = True
        self._held = tuple(stage.held_length for stage in session.stages)
        if any(self._held):
            log.info("session.taken_up", request_id=self._request.request_id, held=self._held)
        try:
            events = session.events()
            async for piece in self._run(session, events):
                yield piece
            if self._prefix is not None and not self.paused:
                self._prefix.finish(session, events, functools.partial(self._committed, session, events))
                session = None
        finally:
            self._note_phases()
            if session is not None:
                await session.close()

    async def _open(self) -> StageSession:
        request, block_size = self._request, self._state.speculation.block_size
        length = len(request.prompt_ids)
        replayed = self._replay_rows if self._state.token_ids else 1
        lookup_rows = 1 if self._state.lookup is None else BLOCK_ROWS
        rest, restore = self._rest, None if self._prefix is None else self._prefix.restore()
        if rest is not None and restore is not None:
            rest = replace(rest, first_position=restore.length)
        return await self._cluster.open(
            request_id=request.request_id,
            max_length=length + request.max_tokens,
            max_rows=max(self._chunk, block_size, replayed, lookup_rows),
            block_rows=max(block_size, replayed, lookup_rows),
            prompt_length=length,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            speculate=block_size > 1,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            grammar=request.grammar,
            trace=request.trace,
            rest=rest,
        )

    async def _run(self, session: StageSession, events: AsyncIterator[Event]) -> AsyncIterator[Piece]:
        state = self._state
        started = self._run_at = time.monotonic()
        async for piece in self._prefill(session, events):
            self._prefilled_at = time.monotonic()
            yield piece
        if self.paused:
            return
        if state.token_ids:
            await self._replay(session, events)
            self._prefilled_at = self._prefilled_at or time.monotonic()
        state.prefill_s += self._prefilled_at - started
        while state.finish_reason is None:
            if self._pause.asked and not self._following:
                await self._hold(session, events)
                return
            async for piece in self._decode_step(session, events):
                yield piece
        if (piece_left := state.end()) is not None:
            yield piece_left
        hit = None if self._prefix is None else self._prefix.hit
        restored_ms = 0.0 if self._prefix is None else self._prefix.restored_ms
        cached = Cached()
        if hit is not None:
            restored = min(hit.length, len(self._request.prompt_ids))
            cached = Cached(restored, hit.source, hit.load_ms + restored_ms)
        self.answer = state.answer(session.stages, cached)

    def _note_phases(self) -> None:
        """Record when prefill and decode began and ended, as far as the attempt came."""
        now, phases = time.monotonic(), self._state.phases
        if self._run_at:
            phases.append(Phase("prefill", max(self._run_at, self._restored_at), self._prefilled_at or now))
        if self._prefilled_at:
            phases.append(Phase("decode", self._prefilled_at, now))

    # --- prefill

    async def _prefill(self, session: StageSession, events: AsyncIterator[Event]) -> AsyncIterator[Piece]:
        prompt, prefix, state = self._request.prompt_ids, self._prefix, self._state
        points = prefix.points if prefix is not None else ()
        restore = prefix.restore() if prefix is not None else None
        if restore is not None:
            await session.restore_snapshot(restore)
            self._length = restore.length
        self._length = max(self._length, min(self._held))
        if state.token_ids and self._length >= len(prompt):
            return
        # Where the whole prompt was restored there is nothing to compute: its logits give the first token.
        chunk, speculation = self._chunk, state.speculation
        speculation.unread = len(prompt) - self._length
        if self._request.prefill_chunk is None and speculation.costs.shared:
            drafts, answers = speculation.block_size > 1, speculation.costs.count
            chunk = chunk_beside_others(self._cluster.workers, len(prompt), answers, drafts=drafts)
        edges = (*points, *self._held)
        steps = chunks(len(prompt), edges, chunk, self._length) or [(len(prompt), len(prompt))]
        unanswered, answered, propose = 0, self._length, 0
        for first, end in steps:
            if self._pause.asked:
                for _ in range(unanswered):
                    answered = await self._computed(events, answered)
                self._length = answered
                await self._hold(session, events)
                return
            last = end == len(prompt)
            kind = StepKind.PREFILL if not last else StepKind.DECODE if first < end else StepKind.RESUME
            if last and not state.token_ids:
                propose = self._proposal_length()
            await session.forward(Forward(self._step, first, prompt[first:end], kind, propose))
            self._step += 1
            if end in points:
                await self._keep(session, end)
            await self._read_prompt(end)
            unanswered += 1
            while unanswered > (0 if last else CHUNKS_IN_FLIGHT):
                commit = await self._commit(events)
                unanswered -= 1
                self._report(StepKind.PREFILL, commit.length - answered, commit, split_time(commit, 0))
                if self._request.prompt_logprobs is not None:
                    piece = state.add_prompt(answered, prompt[answered : commit.length], commit)
                    # An attempt before may have told all of it.
                    if piece.prompt:
                        yield piece
                answered = commit.length
        self._length = commit.length
        if not state.token_ids:
            yield self._add(commit)
            if state.finish_reason is None:
                self._draft_tokens = await self._proposal(events, propose)

    async def _computed(self, events: AsyncIterator[Event], answered: int) -> int:
        """Wait for the answer to a step of the prompt, the first `answered` tokens of which are computed by then.
        Returns how many of them are with it."""
        commit = await self._commit(events)
        self._report(StepKind.PREFILL, commit.length - answered, commit, split_time(commit, 0))
        return commit.length

    async def _read_prompt(self, end: int) -> None:
        """Have what looks up draft tokens know the prompt up to there, while the workers compute."""
        lookup = self._state.lookup
        while lookup is not None and len(lookup) < end:
            lookup.read(self._request.prompt_ids[len(lookup) : min(end, len(lookup) + READ_TOKENS)])
            # Others' steps go on between two parts.
            await asyncio.sleep(0)

    async def _replay(self, session: StageSession, events: AsyncIterator[Event]) -> None:
        """Compute anew what the answer has behind the prompt, but for its last token, with which the next step begins.

        Where rounding has it that other tokens would follow, those that were told are taken.
        """
        known = [*self._request.prompt_ids, *self._state.token_ids]
        end, kind = len(known) - 1, StepKind.VERIFY
        while self._length < end:
            most = self._replay_rows if kind is StepKind.VERIFY else self._chunk
            edges = (self._length + most, end, *(held for held in self._held if held > self._length))
            rows = tuple(known[self._length : min(edges)])
            if kind is StepKind.VERIFY and len(rows) == 1:
                kind = StepKind.DECODE
            await session.forward(Forward(self._step, self._length, rows, kind))
            self._step += 1
            commit = await self._commit(events)
            self._report(StepKind.PREFILL, len(rows), commit, split_time(commit, 0))
            if commit.length < self._length + len(rows):
                kind = StepKind.PREFILL
            self._length = commit.length

    # --- decode

    async def _decode_step(self, session: StageSession, events: AsyncIterator[Event]) -> AsyncIterator[Piece]:
        state = self._state
        draft_tokens = self._draft_tokens[: state.remaining - 1]
        # A step ends where what is held does.
        looked_up = () if self._length < max(self._held) else self._looked_up()
        if looked_up:
            self._promised, self._unpromising = True, 0
        if self._following:
            # Steps that follow by themselves verify nothing that was looked up.
            await self._steer(session, ends=bool(looked_up))
            looked_up = ()
        elif state.speculation.rests:
            # It was proposed before the last step told that it is not worth its cost.
            draft_tokens = ()
        draft_tokens = looked_up or draft_tokens
        kind = StepKind.VERIFY if draft_tokens else StepKind.DECODE
        rows = (state.token_ids[-1], *draft_tokens)
        propose, sent_ns = self._proposing, time.monotonic_ns()
        if not self._following:
            if self._prefix is not None and self._prefix.checkpoint_due(self._length):
                await self._keep(session, self._length)
            propose = self._proposing = self._proposal_length(verifying=bool(draft_tokens), looked_up=len(looked_up))
            sent_ns = time.monotonic_ns()
            more = 0 if looked_up else self._more(len(draft_tokens), propose)
            self._last_step = self._step + more
            spares = self._spares and propose and draft_tokens and not looked_up and not more
            least = state.speculation.least_accepted(len(draft_tokens)) if spares else 0
            await session.forward(
                Forward(self._step, self._length, rows, kind, propose, more=more, least_accepted=least)
            )
        self._step += 1
        commit = await self._commit(events)
        stages = split_time(commit, time.monotonic_ns() - sent_ns)
        state.times.add(stages)
        self._length, self._following = commit.length, commit.more
        if self._steers:
            propose = commit.propose_tokens
        accepted = len(commit.token_ids) - 1 if draft_tokens else 0
        piece = self._add(commit)
        # What was accepted behind the answer's end is no part of the answer.
        accepted_here = min(accepted, len(piece.token_ids))
        state.accepted += accepted_here
        state.accepted_lookups += accepted_here if looked_up else 0
        yield piece
        drafted_ns, self._reading_ns = state.times.draft_ns, 0
        if state.finish_reason is None:
            self._draft_tokens = await self._proposal(events, propose)
        elapsed_ns = time.monotonic_ns() - sent_ns
        self._step_s = max(1e-9, elapsed_ns / 1e9)
        drafted_ns = state.times.draft_ns - drafted_ns
        # A prompt is read once, and not with every block.
        block_ns = drafted_ns - self._reading_ns
        state.speculation.observe(
            len(draft_tokens),
            accepted,
            (elapsed_ns - self._reading_ns) / 1e9,
            batch_taken(commit, block_ns) if state.speculation.costs.shared else None,
            looked_up=bool(looked_up),
            # Of steps that follow by themselves several may come at once, after times that say nothing of their parts.
            block_share=block_share(commit, block_ns),
            block_rows=1 + propose if propose else 0,
        )
        self._report(kind, len(rows), commit, stages, elapsed_ns, drafted_ns, looked_up=bool(looked_up))

    async def _hold(self, session: StageSession, events: AsyncIterator[Event]) -> None:
        """End the attempt for a pause, with the state kept from which the next one goes on; what scores a prompt cannot
        go on from one."""
        self.paused = True
        if self._prefix is None or self._request.prompt_logprobs is not None or not self._length:
            return
        await self._keep(session, self._length)
        while self._prefix.saving:
            await self._take(events)

    def _more(self, draft_tokens: int, propose: int) -> int:
        """Return how many steps may follow by themselves behind one with so many draft tokens, which asks for others.

        Those that cannot be changed meanwhile are of its kind, as planned ones are, and there are none where a text may
        end the answer, of which the workers know nothing.
        """
        speculation, steers = self._state.speculation, self._steers
        # Alone, the first blocks are judged one by one: a step that is sent costs less there than a poor block.
        is_judged_late = steers and speculation.costs.shared
        steady = speculation.planned_steps if is_judged_late else speculation.steady_steps
        if self._pause.asked or (self._request.stop_strings and not steers):
            return 0
        if bool(draft_tokens) != bool(propose) and (steady is not None or not steers):
            return 0
        if steers:
            # Each comes to a token at least.
            most = min(MOST_MORE_STEPS, self._state.remaining)
        elif propose:
            most = MORE_STEPS
            if speculation.costs.shared:
                most = min(most, max(FEWEST_AMONG_OTHERS, int(STEADY_S / self._step_s)))
        else:
            most = MORE_STEPS if speculation.block_size > 1 and steady is None else MOST_MORE_STEPS
        if steady is not None:
            most = min(most, steady - 1)
        if self._state.lookup is not None:
            # The longer looking up was of no use, the more steps may follow that verify nothing that was looked up.
            tokens = self._unpromising if steers else UNPROMISING * math.sqrt(self._unpromising)
            follow = int(tokens / speculation.expected_tokens)
            most = min(most, follow if self._promised else max(1, follow))
        return max(0, most)

    async def _steer(self, session: StageSession, *, ends: bool) -> None:
        """Have what follows by itself go on, change or end, where it is time to. ends: it is to end, as a step that is
        sent is worth more."""
        if not self._steers:
            return
        if ends or self._pause.asked or (self._prefix is not None and self._prefix.checkpoint_due(self._length)):
            if self._last_step > self._step:
                await self._limit(session, 0, self._proposing)
            return
        speculation, now = self._state.speculation, time.monotonic()
        propose, planned = self._proposal_length(), speculation.planned_steps
        if planned is not None and propose:
            # A try of the draft begins with a step that is sent.
            return
        switches = bool(propose) != bool(self._proposing)
        if propose != self._proposing and not switches and now - self._changed_at < STEADY_S:
            propose = self._proposing
        more, left = self._more(propose, propose), self._last_step - self._step
        ends_sooner = planned is not None and more < left
        if propose != self._proposing or ends_sooner or (more > left and 2 * left <= more):
            self._changed_at = self._changed_at if propose == self._proposing else now
            await self._limit(session, more, propose)

    async def _limit(self, session: StageSession, more: int, propose: int) -> None:
        """Have so many steps follow behind the next one, with so many draft tokens."""
        self._last_step, self._proposing = self._step + more, propose
        await session.limit_steps(StepLimit(self._last_step, propose))

    async def _committed(self, session: StageSession, events: AsyncIterator[Event]) -> tuple[int, ...]:
        """Return all tokens that the session has committed, once no step follows by itself any more: the workers know
        nothing of a text that ends an answer."""
        if self._following:
            await self._limit(session, 0, 0)
        while self._following:
            event = await self._next(events)
            if isinstance(event, Commit):
                self._sequence += event.token_ids
                self._length, self._following = event.length, event.more
        return tuple(self._sequence[: self._length])

    def _looked_up(self) -> tuple[int, ...]:
        """Return draft tokens for the next step that were looked up in the text, where they are worth more than those
        of the draft model."""
        lookup, most = self._state.lookup, min(BLOCK_ROWS, self._state.remaining) - 1
        if lookup is None or most < 1:
            return ()
        count = self._state.speculation.looked_up_tokens(lookup.survival(most))
        return lookup.draft_tokens(count) if count else ()

    async def _keep(self, session: StageSession, length: int) -> None:
        """Have the workers keep the state behind the first `length` tokens, which are all that is committed; not where
        a stage has computed no row of its own yet."""
        if length <= max(self._held):
            return
        if self._prefix is not None and (save := await self._prefix.save(tuple(self._sequence[:length]))) is not None:
            await session.save_snapshot(save)

    def _proposal_length(self, *, verifying: bool = False, looked_up: int = 0) -> int:
        """Return how many draft tokens to ask for; none beyond the context that the draft was made for. verifying: with
        a step that verifies some; looked_up: of which so many were looked up."""
        state = self._state
        count = state.speculation.draft_tokens(verifying=verifying and not looked_up)
        if state.lookup is not None and looked_up:
            # A block is of no use where the next step verifies what is looked up, too.
            count = count if state.speculation.asks_beside(state.lookup.survival(looked_up)) else 0
        if count and len(self._request.prompt_ids) + len(state.token_ids) + count >= self._draft_reach:
            state.speculation.switch_off(f"plain decode: the draft was made for {self._draft_reach} tokens")
            return 0
        return count

    def _add(self, commit: Commit) -> Piece:
        """Add a step's tokens to the answer, and return what is new of it."""
        self.produced = True
        self._sequence += commit.token_ids
        if self._state.lookup is not None:
            self._state.lookup.follow(commit.token_ids)
        self._unpromising += len(commit.token_ids)
        return self._state.add(commit)

    # --- events

    async def _commit(self, events: AsyncIterator[Event]) -> Commit:
        event = await self._next(events)
        while isinstance(event, Failure):
            event = await self._next(events)
        if not isinstance(event, Commit):
            raise InternalError(f"stage 0 answered {type(event).__name__} where a commit was due")
        if self._request.logprobs is not None and len(event.logprobs) != len(event.token_ids):
            raise missing_logprobs()
        return event

    async def _proposal(self, events: AsyncIterator[Event], count: int) -> tuple[int, ...]:
        if not count:
            return ()
        event = await self._next(events)
        while isinstance(event, Failure):
            event = await self._next(events)
        if not isinstance(event, Proposal):
            raise InternalError(f"stage 0 answered {type(event).__name__} where a proposal was due")
        self._state.times.draft_ns += event.elapsed_ns
        speculation = self._state.speculation
        if speculation.unread and event.token_ids:
            self._reading_ns = int(1e9 * speculation.observe_first_block(len(event.token_ids), event.elapsed_ns / 1e9))
        return event.token_ids

    async def _next(self, events: AsyncIterator[Event]) -> Event:
        """Return the next event but for those of snapshots. Errors as in `_take`."""
        while isinstance(event := await self._take(events), SnapshotSaved | SnapshotRestored):
            pass
        return event

    async def _take(self, events: AsyncIterator[Event]) -> Event:
        """Return the next event. What says of a snapshot is noted, and so is a lost draft; any other failure is
        raised."""
        event = await anext(events, None)
        if isinstance(event, SnapshotSaved | SnapshotRestored):
            if self._prefix is not None:
                self._prefix.record(event)
            if isinstance(event, SnapshotRestored):
                self._restored_at = time.monotonic()
                self._state.phases.append(Phase("restore", self._looked_up_at, self._restored_at))
        if event is None:
            raise InternalError("stage 0 ended the session without a reason")
        if isinstance(event, Failure):
            if event.reason is not FailureReason.DRAFT_LOST:
                raise error_named(
                    event.code,
                    event.message,
                    reason=event.cause if event.cause == OUT_OF_MEMORY else event.reason.name,
                    stage=event.location.stage,
                    host=event.location.host,
                    device=event.location.device,
                )
            self._state.speculation.lose_draft(event.message)
            self._cluster.report_lost_draft(event)
        return event

    def _report(
        self,
        kind: StepKind,
        rows: int,
        commit: Commit,
        stages: tuple[StageShare, ...],
        elapsed_ns: int = 0,
        draft_ns: int = 0,
        *,
        looked_up: bool = False,
    ) -> None:
        """Pass an answered step to who listens; the arguments are the fields of `StepTaken`."""
        kept = rows if kind is StepKind.PREFILL else len(commit.token_ids)
        name, sent = self._request.request_id, sent_bytes(commit, rows)
        self._on_step(StepTaken(name, kind, rows, kept, elapsed_ns, draft_ns, stages, sent, looked_up))
