"""A mixture of experts: each row goes through the few SwiGLUs that a router chooses for it, and maybe a shared one.

Rows are sorted by expert, so that each expert's weights are read once a step, and a row's parts are summed up by the
experts' numbers, in float32: a row comes out the same whatever rows are computed with it, as far as products keep to
that. Experts in the host's memory come first in that order: rows go there, their sum comes back once a layer, and what
experts on the GPU make of them is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from services.model.config import Activation, ClampedSwiGlu, ModelConfig
from services.model.layers.experts import sizes
from shard_worker.model.layer_weights import ExpertsTogether, ExpertsWeights, LayerTensors, MlpWeights
from shard_worker.model.layers import swiglu
from shard_worker.model.rows import PLAIN, Rows
from shard_worker.weights.cpu_codes import matmul_each
from shard_worker.weights.weight import DenseWeight, Weight, concatenate

_ROWS_AT_A_TIME = 1024
"""So many rows of several experts have their gates computed at once, and are added, on a CPU, where operators on a few
rows each would take longer than the products."""


def pack(config: ModelConfig, layer: int, tensors: LayerTensors) -> ExpertsWeights:
    """Return the weights with one matrix for gate and up of each expert."""
    shape, matrices, vectors = sizes(config), tensors.matrices, tensors.vectors
    router = matrices[f"{shape.router}.weight"]

    gate_ups, downs = _InOneTensor(shape.count), _InOneTensor(shape.count)

    def routed(number: int) -> MlpWeights:
        # Most experts wait: only those that rows are sent to are unpacked, for the product.
        own = expert(f"{shape.prefix}{number}.", unpacked=False)
        if tensors.experts_in_host:
            return own
        return replace(own, gate_up=gate_ups.add(own.gate_up), down=downs.add(own.down))

    def expert(start: str, *, unpacked: bool) -> MlpWeights:
        gate, up, down = (matrices[f"{start}{part}_proj.weight"] for part in ("gate", "up", "down"))
        of_gate, of_up, of_down = (vectors.get(f"{start}{part}_proj.bias") for part in ("gate", "up", "down"))
        of_both = None if of_gate is None or of_up is None else torch.cat([of_gate, of_up])
        gate_up, down = (one.prepared(unpacked=unpacked) for one in (concatenate([gate, up]), down))
        return MlpWeights(gate_up, down, of_both, of_down, shape.clamped or config.activation)

    has_shared = shape.shared_size is not None
    weights = ExpertsWeights(
        router=router.prepared(),
        experts=tuple(map(routed, range(shape.count))),
        chosen=shape.chosen,
        normalised=shape.normalised,
        shared=expert(f"{shape.shared}.", unpacked=True) if has_shared else None,
        shared_gate=matrices[f"{shape.shared}_gate.weight"].prepared() if has_shared and shape.shared_gated else None,
        router_bias=vectors[f"{shape.router}.bias"].float() if shape.biased else None,
        sigmoid=shape.sigmoid,
        choice_bias=None if shape.sigmoid is None else vectors[shape.sigmoid.bias].float(),
        in_host=tensors.experts_in_host,
    )
    gate = shape.clamped or config.activation
    return replace(weights, together=_together(weights, router, gate_ups.whole, downs.whole, gate))


def _together(
    weights: ExpertsWeights,
    router: Weight,
    gate_up: Weight | None,
    down: Weight | None,
    activation: Activation | ClampedSwiGlu,
) -> ExpertsTogether | None:
    """Return the matrices of all experts below each other, where they can stand so as they are multiplied by.

    router: as it was loaded. gate_up, down: None where they cannot. activation: of all experts.
    """
    gate = weights.shared_gate
    if gate_up is None or down is None or not isinstance(router, DenseWeight):
        return None
    if gate is not None and not isinstance(gate, DenseWeight):
        return None
    scores = router.tensor if gate is None else torch.cat([router.tensor, gate.tensor.float()])
    biases = (
        _joined([expert.gate_up_bias for expert in weights.experts]),
        _joined([expert.down_bias for expert in weights.experts]),
    )
    clamped = activation if isinstance(activation, ClampedSwiGlu) else None
    return ExpertsTogether(scores, gate_up, down, *biases, clamped, activation is Activation.GELU_TANH)


def _joined(biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the biases of all parts' rows; None where they have none."""
    given = [bias for bias in biases if bias is not None]
    return torch.cat(given) if given else None


class _InOneTensor:
    """Matrices of one shape that come one after the other, put below each other where all have one form: so they are in
    memory once."""

    def __init__(self, count: int) -> None:
        """count: how many will come."""
        self._count, self._added = count, 0
        self._room: Weight | None = None
        self._unlike = False

    def add(self, weight: Weight) -> Weight:
        """Return the next one where it is to be, which is this one where it cannot be put below others."""
        if self._added == 0:
            self._room = weight.room_for(self._count)
        moved = None if self._room is None else weight.moved_into(self._room, self._added)
        self._added += 1
        self._unlike |= moved is None
        return moved or weight

    @property
    def whole(self) -> Weight | None:
        """All of them as one matrix, each with the rows of `Weight.room_for`; None where they are not of one form."""
        return None if self._unlike else self._room


def run(
    weights: ExpertsWeights,
    x: torch.Tensor,
    rows: Rows | None = None,
    residual: torch.Tensor | None = None,
    *,
    routed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what rows x [n, hidden] become, [n, hidden].

    rows, residual: as of `FeedForward.run`. routed: what the router sees of the rows, None for x.
    """
    fixed_rows = None if rows is None else rows.batch_invariant_rows
    mixture = None if rows is None else rows.operations.mixture
    seen = x if routed is None else routed
    if mixture is not None and weights.together is not None:
        return mixture(weights, x, seen, None if weights.shared is None else swiglu.run(weights.shared, x, rows))
    each: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor] = (
        _at_once if rows is None else rows.each
    )
    scores = weights.router.matmul(seen.float(), weights.router_bias, fixed_rows)
    shares, chosen = _chosen(weights, each, scores)
    if weights.normalised:
        shares = each(_normalised, shares)
    if weights.sigmoid is not None:
        shares = shares * weights.sigmoid.scale
    if weights.scales is not None:
        shares = shares * weights.scales[chosen]
    shares = shares.to(x.dtype)
    if weights.in_host:
        mixed, shared = _with_host(weights, x, shares, chosen, rows)
    else:
        mixed = _sum(x, _parts(weights, 0, x, _sorted(shares, chosen, len(weights.experts)), rows))
        shared = _shared(weights, x, rows)
    return mixed.to(x.dtype) if shared is None else mixed.to(x.dtype) + shared


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Rows on their way through experts, sorted by expert; an expert's rows stay in their order.

    row_of: which row each is, int64 [n * chosen]. share_of: its share, [n * chosen, 1]. counts: rows of each expert.
    """

    row_of: torch.Tensor
    share_of: torch.Tensor
    counts: list[int]


def _sorted(shares: torch.Tensor, chosen: torch.Tensor, experts: int, counts: list[int] | None = None) -> _Sorted:
    """Return the rows whose shares of experts and whose experts' numbers these are, [n, chosen] each.

    experts: how many there are. counts: rows of each, where they are known already.
    """
    if counts is None:
        counts = torch.bincount(chosen.flatten(), minlength=experts).tolist()
    order = chosen.flatten().argsort(stable=True)
    return _Sorted(order // chosen.shape[1], shares.flatten()[order, None], counts)


def _parts(
    weights: ExpertsWeights,
    first: int,
    x: torch.Tensor,
    routed: _Sorted,
    rows: Rows | None,
    last: int | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what experts [first, last) make of the rows sent to them: which rows these are, int64 [m], and that times
    their shares, float32 [m, hidden]. last: None for all from the first on."""
    fixed_rows = None if rows is None else rows.batch_invariant_rows
    for run, own in _runs(weights.experts, routed.counts, first, last, 1 if x.is_cuda else _ROWS_AT_A_TIME):
        row_of = routed.row_of[own]
        gate_up = [(expert.gate_up, expert.gate_up_bias, count) for expert, count in run]
        down = [(expert.down, expert.down_bias, count) for expert, count in run]
        hidden = swiglu.gated(run[0][0], matmul_each(gate_up, x[row_of], fixed_rows), rows)
        yield row_of, matmul_each(down, hidden, fixed_rows).float() * routed.share_of[own].float()


def _runs(
    experts: Sequence[MlpWeights], counts: Sequence[int], first: int, last: int | None, most: int
) -> Iterator[tuple[list[tuple[MlpWeights, int]], slice]]:
    """Yield runs of experts [first, last) that rows are sent to, each with how many, and where these are among the
    sorted ones. A run ends with the expert that brings it to `most` rows."""
    begin = end = sum(counts[:first])
    run: list[tuple[MlpWeights, int]] = []
    for expert, count in zip(experts[first:last], counts[first:last], strict=True):
        if count:
            run.append((expert, count))
            end += count
        if end - begin >= most:
            yield run, slice(begin, end)
            begin, run = end, []
    if run:
        yield run, slice(begin, end)


def _sum(
    x: torch.Tensor, parts: Iterable[tuple[torch.Tensor, torch.Tensor]], before: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of the parts of each row of x [n, hidden], in their order, float32 [n, hidden].

    before: the sum of those that come before these; it is added to. A CPU adds rows in their order, a GPU in none, so
    that a row must not be twice in one part there.
    """
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if before is None else before
    for row_of, part in parts:
        mixed.index_add_(0, row_of, part)
    return mixed


def _with_host(
    weights: ExpertsWeights, x: torch.Tensor, shares: torch.Tensor, chosen: torch.Tensor, rows: Rows | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what rows [n, hidden] become in all routed experts, float32, and what `_shared` returns.

    A GPU computes its own part while the CPU computes that of the host.
    """
    experts, in_host = len(weights.experts), weights.in_host
    x_there, shares_there, chosen_there = x.cpu(), shares.cpu(), chosen.cpu()
    there = _sorted(shares_there, chosen_there, experts)
    here = []
    if in_host < experts:
        here = [*_parts(weights, in_host, x, _sorted(shares, chosen, experts, there.counts), rows)]
    shared = _shared(weights, x, rows)
    # Not what suits the GPU.
    plain = None if rows is None else replace(rows, operations=PLAIN)
    mixed = _sum(x_there, _parts(weights, 0, x_there, there, plain, in_host))
    return _sum(x, here, mixed.to(x.device)), shared


def _shared(weights: ExpertsWeights, x: torch.Tensor, rows: Rows | None) -> torch.Tensor | None:
    """Return what rows [n, hidden] become in the expert that all go through, times their share of it; None without
    one."""
    if weights.shared is None:
        return None
    shared = swiglu.run(weights.shared, x, rows)
    if weights.shared_gate is None:
        return shared
    gates = weights.shared_gate.matmul(x, None, None if rows is None else rows.batch_invariant_rows)
    return (torch.sigmoid(gates) if rows is None else rows.each(torch.sigmoid, gates)) * shared


def _chosen(
    weights: ExpertsWeights,
    each: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor],
    scores: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the shares of each row's experts and their numbers, [n, chosen] each, for a router's scores."""
    if weights.sigmoid is None or weights.choice_bias is None:
        shares, chosen = each(_probabilities, scores).topk(weights.chosen, -1)
        return shares, chosen
    cap = weights.sigmoid.cap
    if cap is not None:
        scores = each(lambda own: torch.tanh(own / cap) * cap, scores)
    shares = each(torch.sigmoid, scores)
    chosen = (shares + weights.choice_bias).topk(weights.chosen, -1).indices
    return shares.gather(-1, chosen), chosen


def _at_once(work: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    return work(tensor)


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1)


def _normalised(shares: torch.Tensor) -> torch.Tensor:
    return shares / shares.sum(-1, keepdim=True)
