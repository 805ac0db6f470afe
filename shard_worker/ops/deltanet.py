"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464) and its causal convolution, with state writes that can wait.

State S is [heads, key_dim, value_dim] in float32. One token: `S ← e^g S;  u = β (v - Sᵀk);  S ← S + k uᵀ;  o = Sᵀq`.
Over a block the corrected values u of all rows come from one triangular solve, and the state after c of its rows is
`e^{G_c} S + Σ_{j≤c} e^{G_c - G_j} k_j u_jᵀ` with G the running sum of g. So a verify keeps S, k, u and G, and
committing any c rows later is one product, without the target's weights. Where a row must come out the same in any
block, `block_by_steps` makes one after the other from a copy of the state, and `commit_by_steps` repeats what it did.
"""

from __future__ import annotations

import torch

CHUNK_ROWS = 64
"""Rows that are computed as one block at most."""


def causal_conv(window: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """Return the depthwise causal convolution over time, float32 [..., n, channels].

    window: [..., t - 1 + n, channels], the t - 1 inputs before the rows and the n rows; taps: float32 [t, channels].
    """
    rows = window.shape[-2] - taps.shape[0] + 1
    window = window.float()
    out = window[..., :rows, :] * taps[0]
    for tap in range(1, taps.shape[0]):
        out.addcmul_(window[..., tap : tap + rows, :], taps[tap])
    return out


def step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one row; the state is updated in place.

    q, k: [heads, 1, key_dim]; v: [heads, 1, value_dim]; decay (e^g), beta: [heads, 1]; all float32. `heads` may run
    over several sessions, here and in all other functions. Returns o and the corrected value u, [heads, 1, value_dim]
    each.
    """
    state.mul_(decay[..., None])
    u = torch.baddbmm(v, k, state, alpha=-1).mul_(beta[..., None])
    state.baddbmm_(k.transpose(1, 2), u)
    return torch.bmm(q, state), u


def block_by_steps(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `block` does row by row, each to the bits that `step` gives it.

    decay: each row's e^g, [heads, n]. Returns o, and the corrected values u, which `commit_by_steps` needs.
    """
    state = state.clone()
    results = []
    for row in range(q.shape[1]):
        at = slice(row, row + 1)
        results.append(step(state, q[:, at], k[:, at], v[:, at], decay[:, at], beta[:, at]))
    out, u = (torch.cat(rows, 1) for rows in zip(*results, strict=True))
    return out, u


def commit_by_steps(state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, decay: torch.Tensor) -> None:
    """Do what `commit` does, to the bits that `step` gives the state. decay: [heads, c], each row's e^g."""
    for row in range(k.shape[1]):
        at = slice(row, row + 1)
        state.mul_(decay[:, at, None])
        state.baddbmm_(k[:, at].transpose(1, 2), u[:, at])


def block(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run up to CHUNK_ROWS rows at once; the state is read, not written.

    log_decay: each row's g. Shapes as in `step`, with n rows in place of 1. Returns o [heads, n, value_dim], and what
    `commit` needs: the corrected values u [heads, n, value_dim] and the running decay G [heads, n].
    """
    rows = q.shape[1]
    running = log_decay.cumsum(-1)
    decay = running.exp()[..., None]
    # Above the diagonal the difference is positive and exp may overflow; tril_ writes zeros there, whatever it finds.
    between = (running[:, :, None] - running[:, None, :]).exp_().tril_()
    # Keys and queries read the state and the block's keys in one product each.
    both = torch.cat((k, q), 1)
    from_state = torch.bmm(both, state).mul_(torch.cat((decay, decay), 1))
    k_keys, q_keys = torch.bmm(both, k.transpose(1, 2)).split_with_sizes((rows, rows), 1)
    u = (v - from_state[:, :rows]).mul_(beta[..., None])
    # Below the diagonal: how much of row j's correction row i already sees. The solve takes the diagonal as 1 and does
    # not read what is above it.
    coupling = (k_keys * between).mul_(beta[..., None])
    u = torch.linalg.solve_triangular(coupling, u, upper=False, unitriangular=True)
    out = torch.baddbmm(from_state[:, rows:], q_keys * between, u)
    return out, u, running


def commit(state: torch.Tensor, k: torch.Tensor, u: torch.Tensor, running: torch.Tensor) -> None:
    """Advance the state in place by the first c rows of a `block`.

    state: [heads, key_dim, value_dim]; k: [heads, c, key_dim]; u: [heads, c, value_dim]; running: [heads, c]. `heads`
    may run over several layers at once.
    """
    last = running[:, -1:]
    weighted = k * (last - running).exp_()[..., None]
    state.mul_(last.exp()[..., None])
    state.baddbmm_(weighted.transpose(1, 2), u)


def prefill(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Run any number of rows, all of which count, and return o; the state is updated in place. Shapes as in `block`."""
    parts = []
    for first in range(0, q.shape[1], CHUNK_ROWS):
        rows = slice(first, first + CHUNK_ROWS)
        keys = k[:, rows]
        out, u, running = block(state, q[:, rows], keys, v[:, rows], log_decay[:, rows], beta[:, rows])
        commit(state, keys, u, running)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
