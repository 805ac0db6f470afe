"""Muon for the matrices of the layers, AdamW for everything else, both following one schedule."""

from collections import defaultdict

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.775, 2.0315)

# Tables of a vector for each token: matrices by their shape only.
TABLES = ("embed_tokens.weight", "codebook")


def orthogonalize(stack: Tensor) -> Tensor:
    """Push the singular values of a stack of matrices towards one (Newton-Schulz)."""
    x = stack.bfloat16() if stack.is_cuda else stack
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(stack.dtype)


class Muon:
    """Momentum whose steps are orthogonalised; matrices of one shape are handled as one stack.

    Steps are scaled to the size that AdamW's would have, so one learning rate suits both.
    """

    def __init__(self, matrices: list[nn.Parameter], momentum: float, decay: float) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        self.groups = list(by_shape.values())
        self.buffers = [torch.zeros_like(torch.stack(list(group))) for group in self.groups]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            gradients = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            buffer.lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp(buffer, self.momentum))
            size = 0.2 * max(update.shape[-2:]) ** 0.5
            weights: list[Tensor] = [*group]
            torch._foreach_mul_(weights, 1 - rate * self.decay)
            torch._foreach_add_(weights, list(update.unbind(0)), alpha=-rate * size)


class Optimizer:
    """Both halves behind one ``step``; the caller says how far the run is, from 0 to 1."""

    def __init__(self, module: nn.Module, rate: float, decay: float, skip: str = "") -> None:
        chosen = [(n, p) for n, p in module.named_parameters() if not skip or skip not in n]
        is_matrix = {name: p.ndim == 2 and min(p.shape) >= 32 and not name.endswith(TABLES) for name, p in chosen}
        self.parameters = [p for _, p in chosen]
        self.muon = Muon([p for n, p in chosen if is_matrix[n]], momentum=0.95, decay=decay)
        others = [p for n, p in chosen if not is_matrix[n]]
        self.adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda)
        self.rate = rate

    def step(self, progress: float, warmup: float = 0.02, cooldown: float = 0.6) -> None:
        """Trapezoid: a short rise, a plateau, then a straight line down to nothing."""
        rate = self.rate * min(1.0, progress / warmup, (1 - progress) / cooldown)
        rate = max(rate, 1e-3 * self.rate)
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.muon.step(rate)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
