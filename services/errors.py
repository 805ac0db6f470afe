"""The exceptions of the project and the one table that maps them to gRPC status codes and back.

Every error that may cross a process boundary is a `FlashsplitError`. It carries a sentence for people and, for
programs, a reason and the place it speaks of; both travel as `google.rpc.ErrorInfo`.

    FlashsplitError
    ├── InvalidArgument      the caller sent something that makes no sense
    ├── Unauthenticated      the caller did not show the cluster's token
    ├── NotFound             what was named does not exist
    ├── AlreadyExists        what was to be new is there
    ├── FailedPrecondition   right in itself, wrong for the state or model at hand
    ├── ResourceExhausted    no room left
    ├── Unavailable          a worker is gone, loading or draining
    ├── DeadlineExceeded     no answer in time
    ├── Cancelled            ended because somebody asked for it
    ├── DataLoss             bytes do not match their digest
    ├── Unimplemented        this build or family cannot do it
    └── InternalError        our fault
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Mapping

import grpc
import structlog
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "flashsplit"

# Texts may quote what a caller sent; they travel in HTTP/2 headers, whose size is limited.
_MAX_TEXT = 2000

log = structlog.get_logger()


class FlashsplitError(Exception):
    """An error of this project: a sentence for people, and for programs a reason and the place it speaks of.

    reason: a word in capitals, by default the name of the status code. where: stage, host, device, field … as far as
    they are known.
    """

    code = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, reason: str | None = None, **where: object) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.code.name
        self.where = {key: str(value) for key, value in where.items() if value is not None}

    def __str__(self) -> str:
        # The name of the part that failed may have been put before the message since.
        return self.message

    @property
    def code_name(self) -> str:
        """Name of the gRPC status code, e.g. "UNAVAILABLE"."""
        return self.code.name

    def copied(self) -> FlashsplitError:
        """Return an error that says the same, for one of many who each add their own place to it."""
        return type(self)(self.message, reason=self.reason, **self.where)

    def located(self, **where: object) -> FlashsplitError:
        """Add places that the raiser did not know, and return the error; those that it did know stay."""
        for key, value in where.items():
            if value is not None:
                self.where.setdefault(key, str(value))
        return self


class InvalidArgument(FlashsplitError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class Unauthenticated(FlashsplitError):
    code = grpc.StatusCode.UNAUTHENTICATED


class NotFound(FlashsplitError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(FlashsplitError):
    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(FlashsplitError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(FlashsplitError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(FlashsplitError):
    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(FlashsplitError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(FlashsplitError):
    code = grpc.StatusCode.CANCELLED


class DataLoss(FlashsplitError):
    code = grpc.StatusCode.DATA_LOSS


class Unimplemented(FlashsplitError):
    code = grpc.StatusCode.UNIMPLEMENTED


class InternalError(FlashsplitError):
    code = grpc.StatusCode.INTERNAL


_BY_CODE: Mapping[grpc.StatusCode, type[FlashsplitError]] = {
    kind.code: kind for kind in FlashsplitError.__subclasses__()
}
_BY_NAME = {code.name: kind for code, kind in _BY_CODE.items()}
_STREAM_REMOVED = "Stream removed"
"""What gRPC says of a stream whose connection broke, before the cause in brackets."""


def error_named(code_name: str, message: str, *, reason: str | None = None, **where: object) -> FlashsplitError:
    """Return the exception for the name of a status code; an `InternalError` for a name that the table lacks."""
    return _BY_NAME.get(code_name, InternalError)(message, reason=reason).located(**where)


OUT_OF_MEMORY = "OUT_OF_MEMORY"
"""The reason of the error where a device has no memory for a session's next rows."""

CLOSED = "closed"
"""The word for how a session ends that its caller closes."""

CANCELLED = "cancelled"
"""The word for how a session ends whose stream its caller cancels, or whose caller is gone."""

LEFT = "left"
"""The word for how a session ends that may be taken up here: a stage before this one was lost."""


def ending(error: BaseException | None) -> str:
    """Return what ended a session, in a word: CLOSED, "cancelled" by its caller, or the error's reason.

    A stage that ends its session while it waits for the stage below cancels the stream there: behind the first stage
    both words mean that nothing was wrong.
    """
    if error is None:
        return CLOSED
    if isinstance(error, FlashsplitError):
        return error.reason.lower()
    # gRPC raises errors of its own where a stream is gone.
    is_stream_gone = isinstance(error, asyncio.CancelledError | grpc.aio.BaseError)
    return CANCELLED if is_stream_gone else InternalError.code.name.lower()


_SOCKET = re.compile(r"(?:the worker at )?unix:[^\s,:;()\[\]]+")


def without_sockets(text: str) -> str:
    """Return a text for clients: where workers of this host listen is nothing that they are told."""
    return _SOCKET.sub("a local worker", text)


def for_clients(error: FlashsplitError) -> FlashsplitError:
    """Return an error as clients get it, who are not told where workers of this host listen."""
    where = {key: without_sockets(value) for key, value in error.where.items()}
    return error_named(error.code_name, without_sockets(error.message), reason=error.reason, **where)


def to_status(error: FlashsplitError) -> grpc.Status:
    """Return the rich gRPC status of an exception; very long texts are cut."""
    code, _ = error.code.value
    status = status_pb2.Status(code=code, message=_cut(error.message))
    metadata = {key: _cut(value) for key, value in error.where.items()}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))
    if "retry_after_s" in error.where:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(float(error.where["retry_after_s"]) * 1000))
        status.details.add().Pack(retry)
    return rpc_status.to_status(status)


def from_rpc_error(error: grpc.RpcError, **where: object) -> FlashsplitError:
    """Return the exception behind a failed call; `where` adds the places that the other side did not name."""
    code, text = error.code(), error.details() or "no details"
    kind = _BY_CODE.get(code, InternalError)
    info = _error_info(error)
    if info is not None:
        remote = kind(text, reason=info.reason)
        remote.where.update(info.metadata)
        return remote.located(**where)
    # This side did not cancel the call: a server stops and cuts its running calls. And gRPC at times has streams whose
    # connection broke end as UNKNOWN (its issue 34076).
    if kind is Cancelled or (code is grpc.StatusCode.UNKNOWN and text.startswith(_STREAM_REMOVED)):
        kind = Unavailable
    if kind is Unavailable:
        place = where.get("address", "the worker")
        text = f"{place} does not answer: {text}"
    return kind(text).located(**where)


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    try:
        status = rpc_status.from_call(error)
    except Exception:
        # Details that cannot be read, or contradict the status, say nothing; code and text remain.
        return None
    info = error_details_pb2.ErrorInfo()
    if status is None or not any(detail.Unpack(info) for detail in status.details):
        return None
    return info


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


@contextlib.asynccontextmanager
async def answering(context: grpc.aio.ServicerContext, **where: object) -> AsyncIterator[None]:
    """Turn an exception of the block into the call's status; the details of an unexpected one stay out of the answer.

    Raises what `context.abort_with_status` raises, which ends the call.
    """
    try:
        yield
    except grpc.aio.BaseError:
        # gRPC's own: the stream is over, nobody is left to tell.
        raise
    except FlashsplitError as error:
        await context.abort_with_status(to_status(error.located(**where)))
    except Exception:
        log.exception("call.failed", **where)
        failure = InternalError("internal error: the log has the details").located(**where)
        await context.abort_with_status(to_status(failure))


def rpc_failures_as_errors(**where: object) -> _RpcFailures:
    """Return a context manager that raises a failed call of its block as the `FlashsplitError` behind it."""
    return _RpcFailures(where)


class _RpcFailures(contextlib.AbstractContextManager[None]):
    def __init__(self, where: Mapping[str, object]) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, grpc.RpcError):
            raise from_rpc_error(error, **self._where) from error
