"""The logits behind a session's last committed token: computed from its hidden row when asked for, or restored."""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.errors import FailedPrecondition
from shard_worker.model.head import Head


class LastRow:
    """A `StateView` of the last stage's logits, [1, vocab]."""

    def __init__(self, head: Head | None, batch_invariant_rows: int | None = None) -> None:
        """head: None where only the place of the logits matters. batch_invariant_rows: as in `Head.logits`."""
        self._head, self._batch_invariant_rows = head, batch_invariant_rows
        self._restored: torch.Tensor | None = None
        self._rows: Callable[[], torch.Tensor] | None = None

    def remember(self, rows: Callable[[], torch.Tensor]) -> None:
        """Let the last row be what `rows` returns, [1, hidden], when it is asked for."""
        self._rows = rows

    @property
    def hidden(self) -> torch.Tensor | None:
        """The last row that counts, [1, hidden]; None before the first step."""
        return None if self._rows is None else self._rows()

    def logits(self) -> torch.Tensor:
        """Return the logits, [1, vocab].

        Raises FailedPrecondition where the session began from a shorter prefix than the snapshot's, which has none.
        """
        assert self._head is not None
        if (hidden := self.hidden) is not None:
            return self._head.logits(hidden, self._batch_invariant_rows)
        if self._restored is None:
            raise FailedPrecondition(
                "there are no logits behind a prefix that was cut: leave its last token to the first step",
                reason="SNAPSHOT_LENGTH",
                field="length",
            )
        return self._restored

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return the logits, whatever the positions; errors as in `logits`."""
        return self.logits()

    def write(self, tensor: torch.Tensor, first: int, last: int) -> None:
        """Take the logits of a snapshot, [1, vocab], for the first step of a session."""
        assert self._head is not None
        self._restored = tensor.to(self._head.weight.device, non_blocking=True)
