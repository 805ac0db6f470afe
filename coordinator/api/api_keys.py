"""API keys for clients, over HTTP and gRPC alike. Which calls need one is for each API to say."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from services.errors import FlashsplitError, InvalidArgument, Unauthenticated


class ApiKeys:
    """The keys of which a client has to show one. Only their digests are kept in memory."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str, x_api_key: str) -> None:
        """Check a call's headers of these names, each "" where the call lacks it; a key may be in either.

        Raises Unauthenticated when none of them holds one of the keys.
        """
        if not self._digests:
            return
        scheme, _, bearer = authorization.partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else x_api_key
        digest = _digest(key)
        # All digests are compared, each in constant time, so that the time taken tells nothing of the keys.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise _refusal(key)


def read_keys(keys: Iterable[str], file: Path | None) -> list[str]:
    """Return the keys of the command line and of a file with one key a line, in which # begins a comment.

    Raises InvalidArgument for a file that cannot be read or holds no key.
    """
    collected = [key for key in keys if key]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"--api-key-file {file} cannot be read: {error}", field="--api-key-file") from error
        from_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not from_file:
            raise InvalidArgument(f"--api-key-file {file} holds no key: write one a line", field="--api-key-file")
        collected += from_file
    return collected


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _refusal(key: str) -> FlashsplitError:
    why = "the API key is not one of this server's" if key else "an API key is missing"
    return Unauthenticated(f"{why}: send it as Authorization: Bearer KEY or x-api-key", reason="INVALID_API_KEY")
