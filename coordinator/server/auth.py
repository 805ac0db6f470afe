"""API keys for clients: who has none gets nothing but /health and the empty page."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from starlette.requests import Request

from coordinator.server.page_files import PREFIX
from services.errors import FlashsplitError, InvalidArgument, Unauthenticated

OPEN_PATHS = frozenset({"/health", "/"})


class ApiKeys:
    """Any of several keys opens the door. Only their digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, request: Request) -> None:
        """Raises Unauthenticated. Keys come as `Authorization: Bearer …` or `x-api-key`."""
        path = request.url.path
        if path not in OPEN_PATHS and not path.startswith(PREFIX):
            self.check_headers(request.headers.get("authorization", ""), request.headers.get("x-api-key", ""))

    def check_headers(self, authorization: str, x_api_key: str) -> None:
        """The same for a call that came by any protocol; empty for what it does not carry."""
        if not self._digests:
            return
        scheme, _, bearer = authorization.partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else x_api_key
        digest = _digest(given)
        # All are compared, each in constant time: how long it takes tells nothing.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise _refusal(given)


def read_keys(keys: Iterable[str], file: Path | None) -> list[str]:
    """Keys from the command line and from a file, one a line, # begins a comment.

    Raises InvalidArgument for an unreadable or empty file.
    """
    found = [key for key in keys if key]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"--api-key-file {file} cannot be read: {error}", field="--api-key-file") from error
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise InvalidArgument(f"--api-key-file {file} holds no key: write one a line", field="--api-key-file")
        found += from_file
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _refusal(given: str) -> FlashsplitError:
    why = "the API key is not one of this server's" if given else "an API key is missing"
    return Unauthenticated(f"{why}: send it as Authorization: Bearer KEY or x-api-key", reason="INVALID_API_KEY")
