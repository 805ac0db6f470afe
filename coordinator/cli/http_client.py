"""A running server as a client sees it: the options that name it, requests, streams, and errors in one sentence.

It owns the connection. It knows the paths of the HTTP API, nothing of what is behind them.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import click
import httpx2

from coordinator.cli.option_groups import Flag
from coordinator.status.report import DRAIN_PATH, Drained, Status
from services.addresses import is_loopback
from services.errors import FlashsplitError, InvalidArgument, Unauthenticated, Unavailable, error_named

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S, ANSWER_S = 5.0, 15.0

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Which running server a command talks with, and how the two know each other."""

    url: Annotated[
        str | None,
        Flag(
            f"Where the server is; also FLASHSPLIT_URL.  [default: {DEFAULT_URL}]",
            metavar="URL",
            envvar="FLASHSPLIT_URL",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        Flag(
            "The key that the server asks for; better in FLASHSPLIT_API_KEY.",
            metavar="KEY",
            envvar="FLASHSPLIT_API_KEY",
        ),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        Flag(
            "Who must have signed the server's certificate.  [default: whom the system trusts]",
            type=_FILE,
            metavar="FILE",
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None, Flag("This client's certificate, if one is asked for.", type=_FILE, metavar="FILE")
    ] = None
    ssl_keyfile: Annotated[Path | None, Flag("The certificate's key.", type=_FILE, metavar="FILE")] = None

    def connect(self) -> RemoteServer:
        """Return the server, not yet connected.

        Raises InvalidArgument for what is no URL and for files that cannot be used.
        """
        return RemoteServer(server_url(self.url or DEFAULT_URL), self.api_key, self._tls())

    def _tls(self) -> ssl.SSLContext:
        """Return how certificates are checked and shown. Raises InvalidArgument for files that cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ssl_ca_certs)
            if self.ssl_certfile is not None:
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"--ssl-ca-certs, --ssl-certfile or --ssl-keyfile cannot be used: {error}", field="--ssl-certfile"
            ) from error
        return context


def server_url(text: str) -> str:
    """Return a URL without what people copy along with it: the last slash and /v1.

    Raises InvalidArgument for what is no URL.
    """
    url = text.strip().rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = httpx2.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidArgument(f"--url {text!r} must be like {DEFAULT_URL} or https://host.lan:8000", field="--url")
    return url


class RemoteServer:
    """A connection to a server, open while it is entered as a context.

    Whatever goes wrong is raised as a FlashsplitError: Unavailable where nobody answers, Unauthenticated for a missing
    or wrong key, else what the server said.
    """

    def __init__(self, url: str, key: str | None, tls: ssl.SSLContext) -> None:
        self.url, self._with_key = url, key is not None
        host = httpx2.URL(url).host
        self._http = httpx2.AsyncClient(
            base_url=url,
            headers={} if key is None else {"authorization": f"Bearer {key}"},
            verify=tls,
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            # A proxy for the way out has nothing to do with a server on this host.
            trust_env=not is_loopback(f"[{host}]:0" if ":" in host else f"{host}:0"),
        )

    async def __aenter__(self) -> RemoteServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def status(self) -> Status:
        """Return how the server and its workers are. Raises Unavailable for a server that cannot tell."""
        try:
            return Status.model_validate_json(await self._get("/v1/status"))
        except ValueError as error:
            raise Unavailable(f"{self.url} is no flashsplit server of this version: it tells no status") from error

    async def drain(self, worker: str, to: str) -> Drained:
        """Have another worker take the place of one, however long that takes. Raises what the server says against it,
        and Unavailable for a server that cannot."""
        body = {"worker": worker, "to": to}
        try:
            reply = await self._http.post(DRAIN_PATH, json=body, timeout=httpx2.Timeout(None, connect=CONNECT_S))
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        if reply.is_error:
            raise self._refusal(reply)
        return Drained.model_validate_json(reply.content)

    async def model(self) -> str:
        """Return the name of the first model that it serves."""
        try:
            return str(json.loads(await self._get("/v1/models"))["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable(f"{self.url} is no server of OpenAI's API: it names no model") from error

    async def chat(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of a streamed chat completion. Closing the generator ends the request."""
        try:
            async with self._http.sse(
                "/v1/chat/completions", method="POST", json=body, timeout=httpx2.Timeout(None, connect=CONNECT_S)
            ) as events:
                reply = events.response
                if reply.is_error:
                    await reply.aread()
                    raise self._refusal(reply)
                async for event in events:
                    # Servers also send events without data, to keep a connection open or to set when to try again.
                    if event.data in ("", "[DONE]"):
                        continue
                    chunk = json.loads(event.data)
                    if "error" in chunk:
                        raise Unavailable(str(chunk["error"]["message"]))
                    yield chunk
        except (httpx2.SSEError, ValueError, LookupError, TypeError) as error:
            raise Unavailable(f"{self.url} sent what is no chat completion") from error
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error

    async def _get(self, path: str) -> bytes:
        """Return the body of an answer."""
        try:
            reply = await self._http.get(path)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from error
        if reply.is_error:
            raise self._refusal(reply)
        return reply.content

    def _unreachable(self, error: httpx2.HTTPError) -> FlashsplitError:
        """Return what a failed connection means, and what to change."""
        if "certificate verify failed" in str(error):
            return Unavailable(
                f"the certificate of {self.url} is not trusted ({error}): name who signed it in --ssl-ca-certs"
            )
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return Unavailable(
                f"no server answers at {self.url}: start one with flashsplit serve, or correct --url",
                reason="SERVER_UNREACHABLE",
            )
        return Unavailable(f"the connection to {self.url} was lost: {error or type(error).__name__}")

    def _refusal(self, reply: httpx2.Response) -> FlashsplitError:
        """Return the error that an answer reports."""
        if reply.status_code == 401:
            why = "does not know that API key" if self._with_key else "wants an API key"
            return Unauthenticated(f"{self.url} {why}: give it in FLASHSPLIT_API_KEY or with --api-key")
        try:
            message = str(reply.json()["error"]["message"])
        except (ValueError, LookupError, TypeError):
            message = f"{self.url} answered {reply.status_code} {reply.reason_phrase} to {reply.url.path}"
        kind = "INVALID_ARGUMENT" if reply.status_code in (400, 404, 413, 422) else "UNAVAILABLE"
        return error_named(kind, message)
