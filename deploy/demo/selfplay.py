"""Batched generation by the target, for the draft to learn from and for measuring.

All rows advance together, one position a step: inside its prompt a row is fed the prompt, behind
it the row's own choice. So nothing has to be prefilled and every step has the same shape; on a
GPU the whole step is one CUDA graph.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model import Block, Target

CHECK_EVERY = 32


@dataclass
class Texts:
    """Token rows; a row's own greedy text is ``ids[start : end + 1]`` (end: last token)."""

    ids: Tensor
    start: Tensor
    end: Tensor

    @staticmethod
    def join(parts: list["Texts"]) -> "Texts":
        return Texts(
            torch.cat([part.ids for part in parts]),
            torch.cat([part.start for part in parts]),
            torch.cat([part.end for part in parts]),
        )

    def select(self, keep: Tensor) -> "Texts":
        return Texts(self.ids[keep], self.start[keep], self.end[keep])


def block_step(block: Block, x: Tensor, cache: tuple[Tensor, Tensor], position: Tensor) -> Tensor:
    return block.step(x, cache, position)


class Generator:
    """Greedy text for many prompts at once, optionally after a few sampled tokens."""

    def __init__(self, target: Target, rows: int, length: int, stops: tuple[int, ...]) -> None:
        self.target, self.rows, self.length = target.eval(), rows, length
        head = target.head
        self.stops = torch.tensor(stops, device=head.device)
        self.caches = [block.mixer.cache(rows, length, head) for block in target.model.blocks]
        self.ids = torch.zeros(rows, length, dtype=torch.long, device=head.device)
        self.prompt_end = torch.ones(rows, dtype=torch.long, device=head.device)
        self.greedy_from = torch.ones_like(self.prompt_end)
        self.end = torch.zeros_like(self.prompt_end)
        self.done = torch.zeros(rows, dtype=torch.bool, device=head.device)
        self.position = torch.zeros(1, dtype=torch.long, device=head.device)
        # Logits in bfloat16 would tie too often to tell which token is the best.
        self.head = head.float()
        self.block_step = torch.compile(block_step, dynamic=False) if head.is_cuda else block_step
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def _step(self) -> None:
        token = self.ids.index_select(1, self.position)[:, 0]
        x = self.target.model.embed_tokens(token)
        for block, cache in zip(self.target.model.blocks, self.caches, strict=True):
            x = self.block_step(block, x, cache, self.position)
        logits = self.target.model.norm(x).float() @ self.head.T
        noise = -torch.log(torch.empty_like(logits).exponential_())
        following = self.position + 1
        greedy = following >= self.greedy_from
        noise = noise.masked_fill(greedy[:, None], 0.0)
        chosen = (logits + noise).argmax(-1)
        given = self.ids.index_select(1, following)[:, 0]
        chosen = torch.where((following < self.prompt_end) | self.done, given, chosen)
        self.ids.index_copy_(1, following, chosen[:, None])
        self.end.copy_(torch.where(self.done, self.end, following.expand_as(self.end)))
        stopped = torch.isin(chosen, self.stops) & (following >= self.prompt_end)
        self.done.logical_or_(stopped)
        self.position.add_(1)

    def _capture(self) -> None:
        """Warm up on a side stream, as capturing demands; ``_reset`` undoes what that changed."""
        self._reset()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()

    def _reset(self) -> None:
        for cache in self.caches:
            for tensor in cache:
                tensor.zero_()
        for tensor in (self.end, self.done, self.position):
            tensor.zero_()

    def run(self, prompts: list[list[int]], greedy_after: list[int] | None = None, limit: int = 0) -> Texts:
        """Continue every prompt to a stop token or to ``limit`` positions."""
        if len(prompts) > self.rows:
            raise ValueError(f"{len(prompts)} prompts do not fit into {self.rows} rows")
        limit = min(limit or self.length, self.length)
        used = len(prompts)
        prompts = [prompt[: limit - 2] for prompt in prompts] + [[0]] * (self.rows - used)
        after = (greedy_after or [0] * used) + [0] * (self.rows - used)
        ends = torch.tensor([len(prompt) for prompt in prompts])
        rows = torch.zeros(self.rows, self.length, dtype=torch.long)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        if self.ids.is_cuda and self.graph is None:
            self._capture()
        self._reset()
        self.ids.copy_(rows)
        self.prompt_end.copy_(ends)
        self.greedy_from.copy_(ends + torch.tensor(after))
        self.done[used:] = True
        for step in range(limit - 1):
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()
            if step % CHECK_EVERY == 0 and bool(self.done.all()):
                break
        return Texts(
            self.ids[:used, :limit].clone(),
            self.greedy_from[:used].clone(),
            self.end[:used].clone(),
        )
