"""InferenceService, the gRPC API for clients: the port, the servicer and the remote client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from flashsplit.inference.v1 import inference_pb2 as pb, inference_pb2_grpc as pb_grpc, server_pb2
from services.errors import (
    Cancelled,
    DeadlineExceeded,
    FlashsplitError,
    InternalError,
    InvalidArgument,
    Unavailable,
    answering,
    for_clients,
    rpc_failures_as_errors,
)
from services.messages.inference_frames import (
    conversation_from_message,
    conversation_to_message,
    event_from_message,
    event_to_message,
    given,
    info_from_message,
    info_to_message,
    load_from_message,
    model_from_message,
    request_from_message,
    request_to_message,
    token_ids_from_message,
)
from services.messages.inference_types import (
    AnswerEvent,
    Conversation,
    Delta,
    GenerateRequest,
    Model,
    ServerInfo,
    ServerLoad,
)
from services.net.client_server import CLIENT_TIMEOUT_S
from services.rpc.running_calls import HEADER, RunningCalls, request_id_of, traceparents_of, within_deadline
from services.telemetry import trace_context
from services.telemetry.logs import access_log
from services.telemetry.trace_context import Call, calling
from services.text_threads import on_text_thread

T = TypeVar("T")

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

SHORT_BYTES = 4 << 10
"""Messages up to this size are converted at once, which takes less time than a thread's answer."""

CALL_TIMEOUT_S = 30.0
"""Time limit of calls that a server answers at once."""

log = structlog.get_logger()


class InferencePort(Protocol):
    """A served model, here or elsewhere. Methods raise NotFound for the name of a model that is not served."""

    def answer(self, request: GenerateRequest, request_id: str) -> AsyncGenerator[AnswerEvent]:
        """Answer with Started, Deltas and Finished; closing the generator ends the work.

        Raises InvalidArgument naming the field, ResourceExhausted when too many wait, Unavailable while draining.
        """

    async def models(self) -> tuple[Model, ...]:
        """Return the models that are served."""

    async def info(self) -> ServerInfo:
        """Return what the server says of itself."""

    async def load(self) -> ServerLoad:
        """Return how busy the server is."""

    async def tokenize(
        self, prompt: str | Conversation, *, add_special_tokens: bool = True, model: str | None = None
    ) -> tuple[int, ...]:
        """Return the prompt's tokens. Raises InvalidArgument when the model has no tokenizer or no chat template."""

    async def detokenize(
        self, token_ids: tuple[int, ...], *, skip_special_tokens: bool = False, model: str | None = None
    ) -> str:
        """Return the tokens' text. Raises InvalidArgument when the model has no tokenizer."""


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """Serves a port over gRPC, and knows which answers run under which request id."""

    def __init__(
        self, port: InferencePort, *, access_log: bool = True, client_timeout_s: float = CLIENT_TIMEOUT_S
    ) -> None:
        """access_log: whether each answered call has a line in the log. client_timeout_s: an answer ends whose client
        takes nothing for so long."""
        self._port, self._running, self._access_log = port, RunningCalls(), access_log
        self._client_timeout_s = client_timeout_s

    def register(self, server: grpc.aio.Server) -> str:
        """Add the service to a server and return its name."""
        pb_grpc.add_InferenceServiceServicer_to_server(self, server)
        return SERVICE

    async def end_all(self) -> None:
        """End all answers that run with the error that the server is shutting down."""
        await self._running.end_all(Unavailable("the server is shutting down: ask another one", reason="DRAINING"))

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Continue a text or tokens. See `inference.proto`."""
        await self._answer(request, pb.GenerateResponse, context)

    async def Chat(self, request: pb.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        """Answer with a chat's next message. See `inference.proto`."""
        await self._answer(request, pb.ChatResponse, context)

    async def ListModels(self, _: pb.ListModelsRequest, context: grpc.aio.ServicerContext) -> pb.ListModelsResponse:
        """List the models that are served. See `inference.proto`."""
        async with answering(context):
            models = await self._port.models()
            return pb.ListModelsResponse(models=[server_pb2.Model(**asdict(model)) for model in models])
        raise AssertionError("answering() always ends the call")

    async def GetServerInfo(
        self, _: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        """Tell what the server says of itself. See `inference.proto`."""
        async with answering(context):
            return pb.GetServerInfoResponse(server=info_to_message(await self._port.info()))
        raise AssertionError("answering() always ends the call")

    async def GetLoad(self, _: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        """Tell how busy the server is. See `inference.proto`."""
        async with answering(context):
            return pb.GetLoadResponse(load=server_pb2.Load(**asdict(await self._port.load())))
        raise AssertionError("answering() always ends the call")

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """End a request that waits or runs. See `inference.proto`."""
        async with answering(context):
            aborted = Cancelled("the request was aborted", reason="REQUEST_ABORTED")
            await self._running.end(request.request_id, aborted)
            return pb.AbortResponse()
        raise AssertionError("answering() always ends the call")

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """Turn a text or a chat into tokens. See `inference.proto`."""
        async with answering(context), within_deadline(context):
            prompt: str | Conversation = request.text
            if request.WhichOneof("prompt") == "conversation":
                prompt = await _converted(conversation_from_message, request.conversation)
            elif request.WhichOneof("prompt") is None:
                raise InvalidArgument("prompt is missing: give text or conversation", field="prompt")
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            tokens = await self._port.tokenize(prompt, add_special_tokens=special, model=given(request, "model"))
            return pb.TokenizeResponse(token_ids=tokens)
        raise AssertionError("answering() always ends the call")

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Turn tokens into text. See `inference.proto`."""
        async with answering(context), within_deadline(context):
            text = await self._port.detokenize(
                token_ids_from_message(request.token_ids),
                skip_special_tokens=request.skip_special_tokens,
                model=given(request, "model"),
            )
            return pb.DetokenizeResponse(text=text)
        raise AssertionError("answering() always ends the call")

    async def _write(self, context: grpc.aio.ServicerContext, message: Any) -> None:
        """Send a message. Raises DeadlineExceeded where the client leaves what was sent before untaken for too long."""
        try:
            async with asyncio.timeout(self._client_timeout_s) as limit:
                await context.write(message)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the client took nothing of the answer for {self._client_timeout_s:g} s: read faster, or start the "
                "server with a longer --client-timeout",
                reason="CLIENT_TIMEOUT",
            ) from error

    async def _answer(
        self, request: pb.GenerateRequest | pb.ChatRequest, response: type[Any], context: grpc.aio.ServicerContext
    ) -> None:
        started, request_id, status = time.monotonic(), None, "CANCELLED"
        call: Call | None = None
        try:
            async with answering(context):
                request_id = request_id_of(context)
                # Sent apart from the first write: after a write with metadata that is cut short no status could follow.
                await context.send_initial_metadata(())
                try:
                    with calling(request_id, traceparents_of(context)) as call:
                        async with self._running.named(request_id), within_deadline(context):
                            events = self._port.answer(await _converted(request_from_message, request), request_id)
                            async with contextlib.aclosing(events):
                                async for event in events:
                                    await self._write(context, await _message_of(event, response()))
                    status = "OK"
                except FlashsplitError as error:
                    status = error.code_name
                    if isinstance(error, Unavailable | DeadlineExceeded | InternalError):
                        log.warning("grpc.failed", why=error.message, request_id=request_id)
                    raise for_clients(error.located(request_id=request_id)) from error
        finally:
            (access_log.info if self._access_log else log.debug)(
                "grpc.request",
                request_id=request_id,
                trace_id=call.trace.trace_id if call is not None else None,
                method=request.DESCRIPTOR.name.removesuffix("Request"),
                status=status,
                prompt_tokens=call.tokens.prompt if call is not None else 0,
                completion_tokens=call.tokens.completion if call is not None else 0,
                ms=round((time.monotonic() - started) * 1e3, 1),
            )


async def _converted(convert: Callable[[Any], T], message: Any) -> T:
    """Return what a message stands for; a large one is converted on a thread, as it would hold up other calls."""
    size = message.ByteSize()
    return convert(message) if size <= SHORT_BYTES else await on_text_thread(size, convert, message)


async def _message_of(event: AnswerEvent, response: T) -> T:
    """Return an event as a message; one with a prompt's log-probabilities, which are many, is made on a thread."""
    if isinstance(event, Delta) and event.prompt:
        return await asyncio.to_thread(event_to_message, event, response)
    return event_to_message(event, response)


class RemoteInference:
    """An `InferencePort` of a server elsewhere, over a channel; `abort` comes on top."""

    def __init__(self, channel: grpc.aio.Channel, address: str, *, api_key: str | None = None) -> None:
        self._stub = pb_grpc.InferenceServiceStub(channel)
        self._address = address
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)

    async def answer(
        self,
        request: GenerateRequest,
        request_id: str | None = None,
        *,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> AsyncGenerator[AnswerEvent]:
        """See `InferencePort`. request_id: None leaves the id to the server. timeout_s: limits the whole answer."""
        message = request_to_message(request)
        method = self._stub.Chat if isinstance(message, pb.ChatRequest) else self._stub.Generate
        headers = {HEADER: request_id, trace_context.HEADER: traceparent}
        given_headers = ((key, value) for key, value in headers.items() if value is not None)
        call = method(message, timeout=timeout_s, metadata=(*self._metadata, *given_headers))
        try:
            with rpc_failures_as_errors(address=self._address):
                async for response in call:
                    event = event_from_message(response)
                    if event is not None:
                        yield event
        finally:
            call.cancel()

    async def models(self) -> tuple[Model, ...]:
        """See `InferencePort`."""
        response = await self._call(self._stub.ListModels, pb.ListModelsRequest())
        return tuple(model_from_message(model) for model in response.models)

    async def info(self) -> ServerInfo:
        """See `InferencePort`."""
        return info_from_message((await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest())).server)

    async def load(self) -> ServerLoad:
        """See `InferencePort`."""
        return load_from_message((await self._call(self._stub.GetLoad, pb.GetLoadRequest())).load)

    async def abort(self, request_id: str) -> None:
        """End a request that waits or runs. Raises NotFound where there is none of that id."""
        await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id))

    async def tokenize(
        self, prompt: str | Conversation, *, add_special_tokens: bool = True, model: str | None = None
    ) -> tuple[int, ...]:
        """See `InferencePort`."""
        request = pb.TokenizeRequest(add_special_tokens=add_special_tokens, model=model)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.conversation.CopyFrom(conversation_to_message(prompt))
        return tuple((await self._call(self._stub.Tokenize, request)).token_ids)

    async def detokenize(
        self, token_ids: tuple[int, ...], *, skip_special_tokens: bool = False, model: str | None = None
    ) -> str:
        """See `InferencePort`."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens, model=model)
        return (await self._call(self._stub.Detokenize, request)).text

    async def _call(self, method: Any, request: Any) -> Any:
        with rpc_failures_as_errors(address=self._address):
            return await method(request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
