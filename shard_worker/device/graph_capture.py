"""CUDA graphs: what is launched once while a stream is captured, and replayed as often as it is wanted."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

T = TypeVar("T")


def capture_graph(launch: Callable[[], T], pool: _POOL_HANDLE | None = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of what `launch` launches on the current device, and what it returns; all that was queued there
    has ended by then.

    Kernels that it launches have to be compiled and loaded before, which a capture must not see. pool: where graphs
    that never run at once take their memory from together, as of `torch.cuda.graph_pool_handle`; None for a pool of
    this graph's own. Raises what `launch` raises, and RuntimeError for what cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with _no_garbage_collected(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        made = launch()
    return graph, made


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Have Python look for unreachable objects later.

    Among them may be what a stage that is gone had captured or pinned. Freeing that calls CUDA, which refuses it to a
    thread that is capturing, and refusing a destructor ends the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
