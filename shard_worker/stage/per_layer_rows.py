"""Per-layer embeddings of the steps that kernels run: looked up on the host, sent along with each step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shard_worker.model.per_layer import PerLayerInputs


class PerLayerRows:
    """What the rows of a step bring to each layer by themselves. The table stays in the host's mapped files: only the
    rows of a step's tokens go to the device, by page-locked twins of memory there, as its parameters do."""

    def __init__(self, inputs: PerLayerInputs, like: torch.Tensor, *, embedded: bool, twins: int = 1) -> None:
        """like: as many rows [rows, hidden] as a step may have. embedded: the device looks up the rows' embeddings
        itself; they are sent otherwise. twins: how many steps may be launched at a time."""
        self._inputs = inputs
        projection = inputs.projection
        widths = (projection.rows,) if embedded else (projection.rows, projection.columns)
        self._tensors = [like.new_zeros((len(like), width)) for width in widths]
        self._twins = [
            [torch.zeros_like(one, device="cpu", pin_memory=like.device.type != "cpu") for one in self._tensors]
            for _ in range(twins)
        ]

    def fill(self, first_row: int, token_ids: Sequence[int], turn: int = 0) -> None:
        """Look up what tokens have, from the step's row `first_row` on; to be called when a twin's last copy has left.

        turn: which of the twins.
        """
        ids, rows = torch.tensor(tuple(token_ids), dtype=torch.int64), slice(first_row, first_row + len(token_ids))
        own, *embedded = self._twins[turn]
        own[rows] = self._inputs.table.lookup(ids)[:, self._inputs.columns].to(own.dtype)
        for one in embedded:
            one[rows] = self._inputs.embedding.lookup(ids).to(one.dtype)

    def send(self, rows: int, turn: int = 0) -> None:
        """Queue the copy of a step's first rows to the device; in the graph of a step of one session this is a node."""
        for tensor, twin in zip(self._tensors, self._twins[turn], strict=True):
            tensor[:rows].copy_(twin[:rows], non_blocking=True)

    def inputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queue what makes the inputs of all layers, [layers, n, size], of rows that were sent.

        hidden: the rows [n, hidden] that enter the layers: their embeddings, where the device looked these up.
        """
        from shard_worker.model.kernels.per_layer import make_inputs

        own, *embedded = (one[: len(hidden)] for one in self._tensors)
        return make_inputs(self._inputs, embedded[0] if embedded else hidden, own)
