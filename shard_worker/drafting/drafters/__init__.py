"""Draft kinds, one module each, found by name: what a kind must offer to be served is written down here.

A new kind is one new module in this package, and one of the same name in `services.model.drafts` that reads its
config.json. The protocols know no kind and no family of targets; nothing outside a kind's own module (and its kernels'
runner) names its classes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from services.model.drafts import DraftConfig, check_draft_kind
from shard_worker.cache.page_pool import PagePool
from shard_worker.cache.prefix_state import StateView, TensorGroup
from shard_worker.device.devices import Device
from shard_worker.drafting.choosers import Chooser
from shard_worker.drafting.draft_head import DraftHead
from shard_worker.model.features import Features
from shard_worker.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from shard_worker.model.kernels.step_parameters import StepParameters


class DraftState(Protocol):
    """One session's context on a draft's device."""

    length: int
    """Tokens whose features the draft has taken."""
    batch_invariant_rows: int | None
    """How many rows every product of plain torch multiplies, so that the session's draft tokens are the same to the
    last bit whatever sessions are computed with it; None where they need not be."""

    @property
    def size_bytes(self) -> int:
        """Memory that the context takes by now."""

    @property
    def shortest(self) -> int:
        """The fewest tokens that it can be cut to."""

    def views(self) -> Sequence[StateView]:
        """One view for each group of `Draft.state_groups`, in that order."""


class DraftRunner(Protocol):
    """A draft's kernels on a GPU, for one head: for one session a call, or for several.

    `append` and `propose` are complete steps. A caller that completes the step parameters on the device uses the other
    methods: it fills `appending` and `proposing`, puts the known tokens into `known_tokens` and their embeddings into
    `known_rows`, and launches.
    """

    @property
    def device(self) -> Device:
        """Where it computes."""

    @property
    def appending(self) -> StepParameters:
        """Step parameters of taking features."""

    @property
    def proposing(self) -> StepParameters:
        """Step parameters of a proposal."""

    @property
    def known_rows(self) -> torch.Tensor:
        """Where the embedding of each block's known token belongs, [sessions, hidden]: one for each of a call."""

    @property
    def known_tokens(self) -> torch.Tensor:
        """Where each block's known token itself belongs, int64 [sessions]."""

    def takes(
        self, states: Sequence[Any], before: Sequence[int], appended: Sequence[int], draft_tokens: Sequence[int]
    ) -> bool:
        """Say whether so many rows of features of each session, and blocks of so many draft tokens behind them, can be
        computed by these kernels. before: rows that may come before those."""

    def prepare(self, mask_row: torch.Tensor, embedding: torch.Tensor | None = None) -> None:
        """Compile and capture everything. mask_row: the mask token's embedding, [hidden].

        embedding: the target's, [vocab, hidden] on the draft's device, where blocks may be issued ahead.
        """

    def append(self, states: Sequence[Any], counts: Sequence[int], mixed: torch.Tensor) -> None:
        """Take the features of committed rows, as `Draft.append`: `Draft.mix` of them, [n, hidden]."""

    def propose(
        self, states: Sequence[Any], embedded: torch.Tensor, draft_tokens: Sequence[int], known: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Return each session's draft tokens. known: the token before each session's; the other arguments are as in
        `Draft.propose`."""

    def send_append_parameters(self, states: Sequence[Any], counts: Sequence[int], behind: Sequence[int]) -> None:
        """Send to the device where the next rows of each context go, one session's behind the other's. None instead of
        a state: its rows go nowhere. behind: rows that may yet count before them."""

    def send_block_parameters(self, states: Sequence[Any], draft_tokens: Sequence[int], behind: Sequence[int]) -> None:
        """Send to the device where each session's block goes; 0 draft tokens, or None instead of a state: it has none.

        behind: rows that may yet count before it.
        """

    def launch_append(self, mixed: torch.Tensor) -> None:
        """Queue taking the rows that `appending` names, of `mixed` [n, hidden] in any element type."""

    def launch_blocks(self) -> torch.Tensor:
        """Queue the blocks that `proposing` names: int64 [n + 1], one behind the other.

        Behind the place of each one's first row stand its draft tokens.
        """

    def blocks_of(self, tokens: Sequence[int], draft_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Return each session's draft tokens, of what `launch_blocks` gave; a block that was cut short has fewer.

        draft_tokens: how many each session was to have; 0 where it has no block.
        """


class Draft(Protocol):
    """A loaded draft. Its states are what its own `allocate` returns, and no other draft's."""

    @property
    def config(self) -> DraftConfig:
        """Its shape and what it reads of the target."""

    @property
    def device(self) -> Device:
        """Where its weights and its sessions' states are."""

    @property
    def dtype(self) -> torch.dtype:
        """The element type that it computes in."""

    @property
    def fingerprint(self) -> str:
        """The checkpoint's identity, which both ends of a session must name alike."""

    @property
    def weight_bytes(self) -> int:
        """Memory that its weights take."""

    def allocate(self, max_length: int, batch_invariant_rows: int | None = None) -> DraftState:
        """Return the empty state of a session of up to `max_length` tokens.

        batch_invariant_rows: as in `DraftState`.
        """

    def state_groups(self) -> tuple[TensorGroup, ...]:
        """Say what a snapshot of a prefix holds of this draft."""

    def mix(self, features: Features) -> torch.Tensor:
        """Return the sum of n rows' features behind `fc`, [n, hidden], on the draft's device and in its dtype."""

    def append(self, states: Sequence[Any], counts: Sequence[int], features: Features) -> None:
        """Take the features of the committed rows that follow each session's context.

        counts: how many rows each has, one session's behind the other's. All states have the same number of
        batch-invariant rows, or none has one.
        """

    def propose(self, states: Sequence[Any], embedded: torch.Tensor, draft_tokens: Sequence[int]) -> torch.Tensor:
        """Return the hidden rows of all draft tokens behind each session's context, normed for lm_head, [n, hidden].

        embedded: the target's embedding rows of each session's known token, at the position after its context, and last
        that of the mask token: [sessions + 1, hidden]. draft_tokens: how many each session is proposed, one session's
        behind the other's. The states are left as they were; their batch-invariant rows are as in `append`.
        """

    @property
    def own_head(self) -> DraftHead | None:
        """What turns its hidden rows into tokens; None where that is the target's lm_head."""

    @property
    def chooser(self) -> Chooser | None:
        """What chooses tokens by the logits of either; None where another worker makes logits and chooses."""

    @property
    def has_kernels(self) -> bool:
        """Whether `make_runner` can be called: the kind has kernels, and they run this draft on its device."""

    def make_runner(self, head: DraftHead, *, graphs: bool, sessions: int | None = None) -> DraftRunner:
        """Return a runner for a head of the draft's device and dtype.

        graphs: as CUDA graphs. sessions: the most of a call; None for calls of one session alone.
        """


class DraftKind(Protocol):
    """The functions of a module of this package."""

    def read_fc(self, checkpoint: Checkpoint) -> tuple[DraftConfig, torch.Tensor]:
        """Read what a target stage needs: the config, and `fc` [hidden, N * hidden] over N captured blocks."""

    def load(
        self,
        checkpoint: Checkpoint,
        device: Device,
        dtype: str | None,
        on_progress: Callable[[int, int], None],
        pool: PagePool | None = None,
        *,
        projected: bool = False,
    ) -> Draft:
        """Load a draft. dtype: None keeps the checkpoint's own. on_progress: called with bytes read and bytes in all.
        pool: where its sessions' pages come from, None for one without a bound. projected: whether its hidden rows go
        to the target's lm_head in another worker, unless it has one of its own: that worker then has the chooser.

        Raises InvalidArgument for missing, unknown or mis-shaped tensors, and what reading its config.json
        raises.
        """

    def load_chooser(self, checkpoint: Checkpoint, device: Device, dtype: str) -> Chooser:
        """Load what chooses tokens alone, for hidden rows that come from another worker. Raises as `load`."""


def drafter_of(checkpoint: Checkpoint) -> DraftKind:
    """Return the draft kind of a checkpoint. Raises Unimplemented, listing the known kinds, for another kind."""
    name = check_draft_kind(checkpoint.config, checkpoint.directory)
    return cast(DraftKind, importlib.import_module(f"{__name__}.{name}"))
