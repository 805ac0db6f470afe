"""What a kept prefix depends on besides its tokens: states of one lineage can stand in for each other.

A state depends on weights, tokenizer, chat template, element types and draft, and not on the checkpoint's path, its
files' times, the split or the longest context.
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

VERSION = 1
"""The version of what kept tensors mean: raise it when a release computes or lays all of them out differently."""

WINDOWS = "windows"
"""Which rows sliding layers keep: those that the next row sees."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a kept state depends on besides its tokens.

    model: the target's fingerprint. dtype: the element type of its weights. text: a hash of tokenizer and chat
    template. draft and draft_dtype: None for states without the draft's part. kv_dtype: the element type of the
    target's keys and values; None where it is dtype. kept_rows: WINDOWS where layers of the target slide; None where
    all rows are kept.
    """

    model: str
    dtype: str
    text: str
    draft: str | None
    draft_dtype: str | None
    kv_dtype: str | None = None
    kept_rows: str | None = None

    @property
    def key(self) -> str:
        """The lineage's name: 32 hex digits."""
        words = json.dumps({"version": VERSION, **self.as_json()}, sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()[:32]

    def as_json(self) -> dict[str, str | None]:
        """Return the fields; kv_dtype and kept_rows are left out where they are None, as releases before them did."""
        fields = asdict(self)
        for name in ("kv_dtype", "kept_rows"):
            if fields[name] is None:
                del fields[name]
        return fields

    def snapshot_id(self, token_ids: Sequence[int]) -> str:
        """Return the name of the state behind these tokens: 40 hex digits of a hash over lineage and tokens."""
        digest = self.digest()
        digest.update(as_bytes(token_ids))
        return self.name_of(digest)

    def digest(self) -> hashlib._Hash:
        """Return the hash of the lineage, to which `as_bytes` of tokens is to be added."""
        return hashlib.sha256(self.key.encode())

    @staticmethod
    def name_of(digest: hashlib._Hash) -> str:
        """Return the name of the state behind the tokens that a hash has taken; it may take more later."""
        return digest.hexdigest()[:40]


def as_bytes(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian 32-bit numbers."""
    numbers = array.array("I", token_ids)
    assert numbers.itemsize == 4
    return numbers.tobytes()
