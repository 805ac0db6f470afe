"""One answer, by as many attempts on a chain of stages as it takes: where a worker is lost on the way, or has no memory
left, the answer waits and goes on with the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import structlog

from coordinator.answer import Answer, Phase, Piece, Request
from coordinator.cluster.cluster import Cluster
from coordinator.engine.answer_state import AnswerState, Cached
from coordinator.engine.batch_costs import BatchCosts
from coordinator.engine.chain_attempt import ChainAttempt
from coordinator.engine.pause import Pause
from coordinator.engine.prompt_lookup import PromptLookup
from coordinator.engine.request_checks import check_request
from coordinator.engine.room import Place
from coordinator.engine.speculation import Speculation
from coordinator.engine.step_times import StepTaken
from coordinator.prefix.cache import PrefixCache
from coordinator.prefix.run import PrefixRun
from coordinator.text.tokenizer import Tokenizer
from services.errors import OUT_OF_MEMORY, FlashsplitError, NotFound, ResourceExhausted
from services.messages.steps import LONGEST_REST_MS, SessionRest

LOST_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
"""The codes of errors that say that a part of the chain was lost, and not that the request cannot be answered."""

RESUME_TIMEOUT_S = 120.0
"""How long an answer waits for a chain by default: a worker that loads a large model from a disk takes a minute."""

MOST_RESUMPTIONS = 3
"""How often an answer is taken up again without a new token in between: what it asks for may be what ends workers."""

_LOOK_S = 0.02
"""Between two looks at whether the chain is whole: a worker that stands by takes a tenth of a second."""

_NOTICED_S = 0.1
"""How long it may take until all know that a chain is lost which a session has just lost."""

log = structlog.get_logger()


class Generation:
    """The answer to one request. Iterate over `pieces`, then read `answer`.

    answer: None until it is complete.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: Request,
        tokenizer: Tokenizer | None,
        prefixes: PrefixCache | None = None,
        on_step: Callable[[StepTaken], None] = lambda step: None,
        *,
        resume_timeout_s: float = 0.0,
        place: Place | None = None,
        costs: BatchCosts | None = None,
        prompt_lookup: bool = False,
        draft_tokens: int | None = None,
        told: Sequence[Piece] = (),
    ) -> None:
        """on_step: called with every answered step. resume_timeout_s: how long the answer waits for a chain that was
        lost; 0 to end with it. place: among other answers, for which this one is set aside where the workers' memory
        ends; None to end then. costs: of draft tokens, measured with the other answers; None to measure them alone.
        prompt_lookup: whether draft tokens are looked up in the text too. draft_tokens: how many of the draft model's
        each step verifies whatever they bring, 0 to go without it; None to choose. told: what a process that has ended
        has told of the answer, behind which it goes on. Raises InvalidArgument for a request that does not fit."""
        check_request(request, cluster, tokenizer)
        self._cluster, self._request, self._prefixes, self._on_step = cluster, request, prefixes, on_step
        self._resume_timeout_s, self._place = resume_timeout_s, place
        self._draft_tokens = draft_tokens
        self._pause = Pause() if place is None else place.pause
        self._state = AnswerState(request, tokenizer)
        if prompt_lookup and request.speculate:
            self._state.lookup = PromptLookup()
        self._state.take_up(told)
        self._costs = BatchCosts() if costs is None else costs
        self._prefix: PrefixRun | None = None
        self._lost_at: float | None = None
        """When the chain was lost behind the last token that was added."""
        self._found_none = False
        """Whether the answer found no memory, and has no new token since."""
        self._resumptions = 0
        """How often the answer was taken up again behind it."""
        self._session_id: str | None = None
        """Names the sessions of all attempts to the workers; None before the first one."""
        self.answer: Answer | None = None

    @property
    def completion_tokens(self) -> int:
        """How many tokens the answer has so far."""
        return len(self._state.token_ids)

    @property
    def phases(self) -> list[Phase]:
        """When the request restored, prefilled and decoded, as far as it came."""
        return self._state.phases

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yield the answer piece by piece. Raises the FlashsplitError that ended it, if one did."""
        self._choose_draft()
        try:
            async with contextlib.aclosing(self._attempts()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            self._state.speculation.leave()

    async def _attempts(self) -> AsyncGenerator[Piece]:
        """Yield the answer piece by piece, by as many attempts as it takes."""
        if self._state.finish_reason is not None:
            # All of it was told by a process that has ended.
            if (piece_left := self._state.end()) is not None:
                yield piece_left
            self.answer = self._state.answer((), Cached())
            return
        looked_up_at = await self._look_up()
        while self.answer is None:
            attempt = ChainAttempt(
                self._state,
                self._cluster,
                self._prefix,
                self._step_taken,
                looked_up_at,
                self._pause,
                self._session_rest(),
            )
            try:
                async with self._pause.running(), contextlib.aclosing(attempt.pieces()) as pieces:
                    async for piece in pieces:
                        self._note_progress(attempt)
                        yield piece
                self.answer = attempt.answer
                if attempt.paused:
                    await self._wait_for_pause()
                    looked_up_at = await self._look_up()
            except FlashsplitError as error:
                if isinstance(error, NotFound) and self._begins_cold(attempt):
                    continue
                if not await self._stepped_aside(error):
                    await self._wait_for_chain(attempt, await self._cluster.explain(error))
                looked_up_at = await self._look_up()

    def _session_rest(self) -> SessionRest | None:
        """Return how the next attempt's state rests where it loses a stage; None where the answer ends then, or scores
        its prompt, for which all is computed."""
        request, rest_ms = self._request, min(int(self._resume_timeout_s * 1e3), LONGEST_REST_MS)
        if not rest_ms or request.prompt_logprobs is not None:
            return None
        is_first, self._session_id = self._session_id is None, self._session_id or secrets.token_urlsafe(24)
        known = () if is_first else (*request.prompt_ids, *self._state.token_ids)
        return SessionRest(self._session_id, rest_ms, known)

    def _choose_draft(self) -> None:
        """Take the draft as it is now that the request's turn has come."""
        asked = self._request.speculate and self._draft_tokens != 0
        draft = self._cluster.draft if asked else None
        if draft is not None:
            self._state.speculation = Speculation(
                draft.block_size, self._costs, self._draft_tokens, len(self._request.prompt_ids)
            )
        else:
            # Its prompt comes in short chunks beside others, and what is looked up costs rows as well.
            self._state.speculation = Speculation(1, self._costs)
        if draft is None and asked and self._cluster.draft_worker is not None:
            self._state.speculation.lose_draft("its worker is gone")

    async def _look_up(self) -> float:
        """Look for the longest kept prefix of the prompt and the answer so far, unless the prompt is scored, for which
        it is computed from its first token on. Returns when the look-up began."""
        began, request, state = time.monotonic(), self._request, self._state
        goes_on, is_known = self._prefix is not None, False
        self._note_lost_draft()
        while self._prefixes is not None and not is_known:
            with_draft = state.speculation.block_size > 1
            # The next step begins with the last token.
            told = tuple(state.token_ids[:-1])
            self._prefix = PrefixRun(
                self._prefixes, request.prompt_ids, request.boundaries, with_draft=with_draft, told=told
            )
            if request.prompt_logprobs is None:
                await self._prefix.begin(least_tokens=1 if goes_on else None)
            # Where it was lost meanwhile the last stage would call it for seconds.
            is_known = not self._note_lost_draft()
        return began

    def _note_lost_draft(self) -> bool:
        """Go on without the draft where its worker is lost, and return whether that is new."""
        is_lost = self._state.speculation.block_size > 1 and self._cluster.draft is None
        if is_lost:
            self._state.speculation.lose_draft("its worker is gone")
        return is_lost

    def _begins_cold(self, attempt: ChainAttempt) -> bool:
        """Return whether to begin at the first token, because a worker no longer keeps the prefix to be restored."""
        if self._prefix is None or self._prefix.hit is None or attempt.produced:
            return False
        self._prefix.forget_hit()
        self._state.phases.clear()
        return True

    async def _wait_for_pause(self) -> None:
        """Wait until the pause is over in which the answer was held."""
        began = time.monotonic()
        await self._pause.over()
        self._state.phases.append(Phase("paused", began, time.monotonic()))

    # --- memory that ends

    def _step_taken(self, step: StepTaken) -> None:
        """Pass a step on to who listens. Raises ResourceExhausted where the answer is to give way to an older one."""
        self._on_step(step)
        if self._place is not None and self._place.is_asked and self._state.finish_reason is None:
            raise ResourceExhausted("an answer that came before needs the memory", reason=OUT_OF_MEMORY)

    async def _stepped_aside(self, error: FlashsplitError) -> bool:
        """Return whether the answer has waited for memory, which the workers did not have for its next rows."""
        if self._place is None or error.reason != OUT_OF_MEMORY:
            return False
        names = {"request_id": self._request.request_id, "tokens": self.completion_tokens}
        log.info("request.set_aside", why=error.message, **names)
        began = time.monotonic()
        if not await self._place.step_aside():
            return False
        self._state.phases.append(Phase("set_aside", began, time.monotonic()))
        log.info("request.resumed", after_s=round(time.monotonic() - began, 3), **names)
        self._state.resumed += 1
        self._found_none = True
        return True

    def _note_progress(self, attempt: ChainAttempt) -> None:
        if self._found_none and attempt.produced and self._place is not None:
            self._found_none = False
            self._place.goes_on()

    # --- lost chains

    async def _wait_for_chain(self, attempt: ChainAttempt, error: FlashsplitError) -> None:
        """Wait until the chain is whole again. Raises the error that ended the attempt where the answer ends with it:
        it is no lost chain, or one that is not back in time or was lost again and again."""
        now = time.monotonic()
        if attempt.produced or self._lost_at is None:
            self._lost_at, self._resumptions = now, 0
        goes_on = self._resume_timeout_s and self._resumptions < MOST_RESUMPTIONS
        if not goes_on or error.code_name not in LOST_CODES:
            raise error
        names = {"request_id": self._request.request_id, "tokens": self.completion_tokens}
        if attempt.opened:
            log.warning("request.paused", why=error.message, **names)
        # A chain that is whole by then was lost by this session alone, or is whole again.
        while time.monotonic() - now <= _NOTICED_S and self._cluster.alive:
            await asyncio.sleep(_LOOK_S)
        while time.monotonic() - self._lost_at <= self._resume_timeout_s and not self._cluster.alive:
            await asyncio.sleep(_LOOK_S)
        if time.monotonic() - self._lost_at > self._resume_timeout_s:
            error.message += f"; the answer has waited {self._resume_timeout_s:g} s for it (--resume-timeout)"
            raise error
        if attempt.opened:
            self._resumptions += 1
            self._state.resumed += 1
            log.warning("request.resumed", after_s=round(time.monotonic() - self._lost_at, 3), **names)


async def generate(
    cluster: Cluster,
    request: Request,
    tokenizer: Tokenizer | None,
    show: Callable[[Piece], None] = lambda piece: None,
    prefixes: PrefixCache | None = None,
    *,
    prompt_lookup: bool = False,
    draft_tokens: int | None = None,
    costs: BatchCosts | None = None,
    on_step: Callable[[StepTaken], None] = lambda step: None,
) -> Answer:
    """Return the whole answer; `show` gets its pieces as they come. The other arguments are those of `Generation`, and
    so are the errors."""
    generation = Generation(
        cluster,
        request,
        tokenizer,
        prefixes,
        on_step,
        costs=costs,
        prompt_lookup=prompt_lookup,
        draft_tokens=draft_tokens,
    )
    async for piece in generation.pieces():
        show(piece)
    assert generation.answer is not None
    return generation.answer
