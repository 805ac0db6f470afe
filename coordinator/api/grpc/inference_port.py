"""The engine as the inference service sees it: requests in, events out, and what the server reports of itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from importlib import metadata

from coordinator.answer import Answer
from coordinator.api.engine_requests import (
    allowed_compression,
    check_model,
    compressed_text,
    make_request,
    max_counted_tokens,
    plain_prompt,
    render,
    template_chat,
    text_of,
)
from coordinator.engine.engine import Engine
from services.messages.inference_types import (
    AnswerEvent,
    CacheSource,
    Conversation,
    Delta,
    DraftPlace,
    Finished,
    FinishReason,
    GenerateRequest,
    Model,
    ServerInfo,
    ServerLoad,
    SpeculationFigures,
    StagePlace,
    Started,
    Timings,
    Usage,
)


class EnginePort:
    """An `InferencePort` that answers with an engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._began = engine, time.monotonic()

    async def answer(self, request: GenerateRequest, request_id: str) -> AsyncGenerator[AnswerEvent]:
        """See `InferencePort`."""
        engine = self._engine
        check_model(engine, request.model)
        chat = None
        compression = allowed_compression(request.compression, request.prompt_logprobs)
        if isinstance(request.prompt, Conversation):
            chat = await template_chat(request.prompt)
            prompt = await render(engine, chat, compression, structured=request.grammar is not None)
        else:
            prompt = await plain_prompt(engine, request.prompt)
            prompt = await compressed_text(engine, prompt, compression, structured=request.grammar is not None)
        prepared = await make_request(
            engine,
            prompt,
            request.sampling,
            request.stopping,
            prompt_field="prompt" if chat is None else "conversation",
            chat=chat is not None,
        )
        prepared = replace(
            prepared,
            request_id=request_id,
            speculate=request.speculate,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            grammar=request.grammar,
        )
        async with engine.answering(prepared) as generation:
            yield Started(request_id, len(prepared.prompt_ids))
            async with contextlib.aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    yield Delta(piece.token_ids, piece.text, piece.logprobs, piece.prompt)
        assert generation.answer is not None
        yield _finished(generation.answer)

    async def models(self) -> tuple[Model, ...]:
        """See `InferencePort`."""
        engine = self._engine
        return (Model(engine.name, engine.aliases, engine.max_model_len, engine.created),)

    async def info(self) -> ServerInfo:
        """See `InferencePort`."""
        cluster = self._engine.cluster
        stages = []
        for address, worker in zip(cluster.addresses, cluster.workers, strict=True):
            target = worker.target
            assert target is not None
            first, last = target.layers.first, target.layers.last
            stages.append(StagePlace(address, worker.host, worker.device, first, last, target.weight_bytes))
        draft, place = cluster.draft_worker, None
        if draft is not None and draft.draft is not None:
            address = cluster.snapshot_places(with_draft=True)[-1].address
            place = DraftPlace(address, draft.host, draft.device, draft.draft.block_size, draft.draft.weight_bytes)
        return ServerInfo(
            metadata.version("flashsplit"),
            (await self.models())[0],
            tuple(stages),
            place,
            self._engine.ready,
            time.monotonic() - self._began,
        )

    async def load(self) -> ServerLoad:
        """See `InferencePort`."""
        load = self._engine.load
        return ServerLoad(load.running, load.waiting, load.max_running, load.max_waiting, load.draining)

    async def tokenize(
        self, prompt: str | Conversation, *, add_special_tokens: bool = True, model: str | None = None
    ) -> tuple[int, ...]:
        """See `InferencePort`."""
        check_model(self._engine, model)
        most = max_counted_tokens(self._engine)
        if isinstance(prompt, Conversation):
            return (await render(self._engine, await template_chat(prompt), most=most)).token_ids
        return (await plain_prompt(self._engine, prompt, add_special_tokens=add_special_tokens, most=most)).token_ids

    async def detokenize(
        self, token_ids: tuple[int, ...], *, skip_special_tokens: bool = False, model: str | None = None
    ) -> str:
        """See `InferencePort`."""
        check_model(self._engine, model)
        return await text_of(self._engine, token_ids, "token_ids", skip_special_tokens=skip_special_tokens)


def _finished(answer: Answer) -> Finished:
    stats = answer.stats
    source = None if stats.cache_source is None else CacheSource(stats.cache_source)
    return Finished(
        FinishReason(answer.finish_reason),
        Usage(stats.prompt_tokens, stats.completion_tokens, stats.cached_tokens, source, stats.original_prompt_tokens),
        Timings(
            stats.prefill_ms,
            stats.restore_ms,
            stats.decode_ms,
            stats.decode_tokens_per_s,
            stats.draft_ms,
            stats.compress_ms,
            stats.resumed,
        ),
        SpeculationFigures(
            stats.steps,
            stats.draft_tokens,
            stats.accepted_tokens,
            stats.acceptance_length,
            stats.notes,
            stats.lookup_tokens,
            stats.accepted_lookup_tokens,
            stats.draft_steps,
            stats.lookup_steps,
        ),
    )
