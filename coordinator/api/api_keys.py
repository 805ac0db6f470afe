"""API keys for clients, over HTTP and gRPC alike. Which calls need one is for each API to say."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from services.errors import FlashsplitError, InvalidArgument, Unauthenticated
from services.reread import Reread, constant

_OWNER = b"flashsplit owner of answers"


class ApiKeys:
    """The keys of which a client has to show one, those of a file at each moment. Only digests are kept in memory."""

    def __init__(self, keys: Iterable[str], file: Path | None = None) -> None:
        """keys: further ones than those of the file, empty ones do not count.

        Raises InvalidArgument for a file that cannot be read or holds no key.
        """
        given = [_digest(key) for key in keys if key]
        if file is None:
            self._digests = constant(given)
        else:
            self._digests = Reread([file], lambda: [*given, *map(_digest, _read_keys(file))])

    def __bool__(self) -> bool:
        return bool(self._digests.content)

    def check(self, authorization: str, x_api_key: str) -> str:
        """Check a call's headers of these names, each "" where the call lacks it; a key may be in either.

        Returns whose call it is: a digest of the key, "" where none is needed.
        Raises Unauthenticated when none of them holds one of the keys.
        """
        digests = self._digests.content
        if not digests:
            return ""
        scheme, _, bearer = authorization.partition(" ")
        key = bearer.strip() if scheme.lower() == "bearer" else x_api_key
        digest = _digest(key)
        # All digests are compared, each in constant time, so that the time taken tells nothing of the keys.
        if not sum(hmac.compare_digest(digest, known) for known in digests):
            raise _refusal(key)
        # It may be written down, where it must not tell what is compared here.
        return hashlib.sha256(_OWNER + digest).hexdigest()


def _read_keys(file: Path) -> list[str]:
    """Return the keys of a file with one key a line, in which # begins a comment."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"--api-key-file {file} cannot be read: {error}", field="--api-key-file") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InvalidArgument(f"--api-key-file {file} holds no key: write one a line", field="--api-key-file")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _refusal(key: str) -> FlashsplitError:
    why = "the API key is not one of this server's" if key else "an API key is missing"
    return Unauthenticated(f"{why}: send it as Authorization: Bearer KEY or x-api-key", reason="INVALID_API_KEY")
