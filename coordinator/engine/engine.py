"""The queue through which all requests go, whatever API they came by: as many run as may, the others wait in order.

Owns the count of what runs and waits. Knows nothing of protocols; a request is described in `answer.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from coordinator.answer import Answer, Phase, Piece, Request
from coordinator.cluster.cluster import Cluster
from coordinator.compression.compressor import Compressor
from coordinator.engine.batch_costs import BatchCosts
from coordinator.engine.generation import Generation
from coordinator.engine.pause import PAUSE_S
from coordinator.engine.request_checks import check_length, check_memory, session_tokens
from coordinator.engine.request_span import RequestSpan
from coordinator.engine.room import Place, Room
from coordinator.engine.step_times import StepTaken
from coordinator.prefix.cache import PrefixCache
from coordinator.text.model_files import ModelFiles
from services.errors import FlashsplitError, InvalidArgument, ResourceExhausted, Unavailable
from services.messages.compression import MAX_TOKENS
from services.telemetry.trace_context import current_call

RETRY_AFTER_S = 1
"""When a client that was turned away should try again."""

IDLE_S = 30.0
"""How long to wait for a moment in which nothing runs, before answers are to wait in their midst."""

_SETTLED_S = 0.1
"""Between two looks at whether prefixes are where they are to be kept."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How many requests run and wait now, and the most that may.

    set_aside: those of the running ones that wait for memory which the workers do not have now.
    """

    running: int
    waiting: int
    set_aside: int
    max_running: int
    max_waiting: int
    draining: bool


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that is over.

    answer: None where it ended without one. outcome: the finish reason of the answer, else why there is none.
    """

    request: Request
    answer: Answer | None
    outcome: str
    queued_s: float
    total_s: float


class Engine:
    """Answers requests on one cluster.

    name, aliases: what clients call the model. max_model_len: the most tokens of a prompt and its answer together.
    prompt_lookup: whether draft tokens are looked up in the text.
    listeners hear of every finished request, step_listeners of every step.
    """

    def __init__(
        self,
        cluster: Cluster,
        files: ModelFiles,
        prefixes: PrefixCache | None,
        *,
        name: str,
        aliases: tuple[str, ...] = (),
        max_model_len: int | None = None,
        max_running: int = 16,
        max_waiting: int = 64,
        compressor: Compressor | None = None,
        resume_timeout_s: float = 0.0,
        prompt_lookup: bool = False,
    ) -> None:
        """resume_timeout_s: how long an answer waits for a chain of stages that was lost; 0 to end with it, as is due
        where nobody brings it back. Raises InvalidArgument when max_model_len is beyond the model's own context."""
        self.cluster, self.files, self.prefixes, self.compressor = cluster, files, prefixes, compressor
        self.name, self.aliases, self.created = name, aliases, int(time.time())
        most = cluster.target.max_position
        if max_model_len is not None and not 2 <= max_model_len <= most:
            raise InvalidArgument(
                f"--max-model-len is {max_model_len}; it must be between 2 and the model's {most}",
                field="--max-model-len",
            )
        self.max_model_len = max_model_len or most
        self.prompt_lookup = prompt_lookup
        self._max_running, self._max_waiting = max_running, max_waiting
        self._turns = asyncio.Semaphore(max_running)
        self._room, self._costs = Room(), BatchCosts()
        self._running = self._waiting = 0
        self._draining, self._resume_timeout_s = False, resume_timeout_s
        self.listeners: list[Callable[[FinishedRequest], None]] = []
        self.step_listeners: list[Callable[[StepTaken], None]] = []
        self._idle, self._open, self._pausing = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._idle.set()
        self._open.set()

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        set_aside = self._room.set_aside
        return EngineLoad(self._running, self._waiting, set_aside, self._max_running, self._max_waiting, self._draining)

    @property
    def preemptions(self) -> int:
        """How often requests were set aside so far."""
        return self._room.preemptions

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens that a prompt may have as it comes; where there is a compressor it may become shorter."""
        return self.max_model_len if self.compressor is None else max(self.max_model_len, MAX_TOKENS)

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer together for which the workers have memory, too."""
        return min(self.max_model_len, session_tokens(self.cluster.workers) or self.max_model_len)

    @property
    def ready(self) -> bool:
        """Whether a request would be taken."""
        return not self._draining and self.cluster.alive

    def serves(self, model: str) -> bool:
        """Return whether clients call this model by that name."""
        return model in (self.name, *self.aliases)

    @contextlib.asynccontextmanager
    async def answering(self, request: Request, told: Sequence[Piece] = ()) -> AsyncIterator[Generation]:
        """Wait for the request's turn and give its generation; leaving the context ends that and frees the turn.

        told: what a process that has ended has told of the answer, behind which it goes on.

        Raises InvalidArgument for a request that cannot fit, ResourceExhausted when too many wait already, Unavailable
        while draining.
        """
        span = RequestSpan(request, self.name)
        request = replace(request, trace=span.trace)
        place = Place(self._room)
        generation = Generation(
            self.cluster,
            request,
            self.files.tokenizer,
            self.prefixes,
            self._pass_step,
            resume_timeout_s=self._resume_timeout_s,
            place=place,
            costs=self._costs,
            prompt_lookup=self.prompt_lookup,
            told=told,
        )
        check_length(request, self.max_model_len)
        check_memory(request, self.cluster.workers)
        arrived = started = time.monotonic()
        outcome = "refused"
        try:
            async with self._turn(place):
                started, outcome = time.monotonic(), "cancelled"
                try:
                    yield generation
                finally:
                    if (call := current_call()) is not None:
                        call.tokens.prompt += len(request.prompt_ids)
                        call.tokens.completion += generation.completion_tokens
            if generation.answer is not None:
                outcome = generation.answer.finish_reason
        except FlashsplitError as error:
            # What a client did wrong is one outcome, whatever it was: alerts leave it out.
            outcome = (error.code_name if isinstance(error, InvalidArgument) else error.reason).lower()
            raise
        finally:
            now = time.monotonic()
            span.end(generation.answer, outcome, [Phase("queue", arrived, started), *generation.phases])
            self._report(FinishedRequest(request, generation.answer, outcome, started - arrived, now - arrived))

    def _pass_step(self, step: StepTaken) -> None:
        for listener in self.step_listeners:
            listener(step)

    def _report(self, finished: FinishedRequest) -> None:
        """Log a finished request and pass it to the listeners."""
        stats = finished.answer.stats if finished.answer is not None else None
        figures = {} if stats is None else {
            "completion_tokens": stats.completion_tokens,
            "original_prompt_tokens": stats.original_prompt_tokens,
            "compress_ms": round(stats.compress_ms, 1),
            "cached_tokens": stats.cached_tokens,
            "cache_source": stats.cache_source,
            "restore_ms": round(stats.restore_ms, 1),
            "prefill_ms": round(stats.prefill_ms, 1),
            "decode_ms": round(stats.decode_ms, 1),
            "draft_ms": round(stats.draft_ms, 1),
            "acceptance_length": stats.acceptance_length,
            "resumed": stats.resumed,
        }  # fmt: skip
        log.info(
            "request.finished",
            request_id=finished.request.request_id,
            trace_id=finished.request.trace.trace_id,
            outcome=finished.outcome,
            prompt_tokens=len(finished.request.prompt_ids),
            queued_ms=round(finished.queued_s * 1e3, 1),
            total_ms=round(finished.total_s * 1e3, 1),
            **figures,
        )
        if stats is not None and self.compressor is not None:
            self.compressor.observe_prefill(stats.prompt_tokens - stats.cached_tokens, stats.prefill_ms / 1e3)
        for listener in self.listeners:
            listener(finished)

    async def check_room(self) -> None:
        """Check whether a request would be taken now, to run or to wait. Raises Unavailable while draining and where a
        worker is lost, ResourceExhausted when too many wait already."""
        if self._draining:
            raise Unavailable("the server is shutting down: ask another one", reason="DRAINING")
        if not self.cluster.alive:
            # An attempt to reach a dead worker would take seconds and end the same way.
            trouble = self.cluster.trouble or await self.cluster.explain(Unavailable("a worker has ended"))
            raise Unavailable(trouble.message, reason=trouble.reason)
        if self._turns.locked() and self._waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._running} requests run and {self._waiting} wait: try again in {RETRY_AFTER_S} s",
                reason="QUEUE_FULL",
                retry_after_s=RETRY_AFTER_S,
            )

    @contextlib.asynccontextmanager
    async def _turn(self, place: Place) -> AsyncIterator[None]:
        await self._open.wait()
        await self.check_room()
        self._idle.clear()
        self._waiting += 1
        try:
            try:
                await self._turns.acquire()
                try:
                    await self._room.enter(place)
                except BaseException:
                    self._turns.release()
                    raise
            finally:
                self._waiting -= 1
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1
                self._room.leave(place)
                self._turns.release()
        finally:
            if not self._running + self._waiting:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Wait until nothing runs, and have requests wait that come within the context.

        Where something runs for IDLE_S, all answers wait behind their next steps, as by `paused`; those that come to no
        end of a step by then go on and may lose their sessions, so that this is done only where they would be resumed.
        Prefixes in memory outlast that layers move within the context.
        """
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(IDLE_S if self._resume_timeout_s else None):
                    await self._settled()
            except TimeoutError:
                await stack.enter_async_context(self.paused(PAUSE_S))
            else:
                self._open.clear()
                stack.callback(self._open.set)
            if self.prefixes is not None:
                await stack.enter_async_context(self.prefixes.carried())
            yield

    async def _settled(self) -> None:
        """Wait until nothing runs, and prefixes are where they are to be kept."""
        while not self._idle.is_set() or (self.prefixes is not None and self.prefixes.pending):
            await self._idle.wait()
            await asyncio.sleep(_SETTLED_S)

    @contextlib.asynccontextmanager
    async def paused(self, timeout_s: float) -> AsyncIterator[int]:
        """Have all answers wait within the context, behind their next steps, and requests that come. Gives how many go
        on nevertheless, as `Pause.held` does."""
        async with self._pausing:
            self._open.clear()
            try:
                async with self._room.pause.held(timeout_s) as going_on:
                    yield going_on
            finally:
                self._open.set()

    async def drain(self, seconds: float) -> bool:
        """Take no new request and wait for the others; return whether all of them ended in time."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()
