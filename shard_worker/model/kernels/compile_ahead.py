"""Kernels that a worker will launch are compiled side by side, before the first launch of each would compile it alone.

Triton compiles a kernel where it is launched first, on one core, in half a second to some; a stage launches 40 to 80.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
import torch
import triton
from triton.compiler import ASTSource

from shard_worker.device.graph_capture import capture_graph
from shard_worker.model.kernels.matmul import arrivals

log = structlog.get_logger()


def compile_together(launches: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compile all kernels that these functions launch on a device, which is the current one, by one thread for each
    core that this process may use; launch nothing.

    A graph is captured of the functions, and thrown away: what they return is useless, and what they launch never runs.
    Triton finds the compiled kernels in its cache on disk as each is launched. An error is only logged, whether in a
    function or in a kernel: nothing more is lost than time, and the launch itself will raise it.
    """
    # Kept between launches, so it must not be made where nothing runs.
    arrivals(device)
    noted: dict[object, Callable[[], object]] = {}
    with _noting_compilations(noted):
        try:
            # Of an empty graph torch would warn.
            capture_graph(lambda: [torch.zeros(1, device=device), *(launch() for launch in launches)])
        except Exception as error:
            _log_failure(error)
    if not noted:
        return
    log.info("kernels.compiling", kernels=len(noted))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for compiling in [pool.submit(compile_one) for compile_one in noted.values()]:
            if (failure := compiling.exception()) is not None:
                _log_failure(failure)


def _log_failure(error: BaseException) -> None:
    log.debug("kernels.not_compiled_ahead", error=f"{type(error).__name__}: {error}"[:500])


@contextlib.contextmanager
def _noting_compilations(noted: dict[object, Callable[[], object]]) -> Iterator[None]:
    """Have Triton leave kernels of this thread that are not compiled out, and note for each what compiles it."""
    target, thread = triton.runtime.driver.active.get_current_target(), threading.get_ident()

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        if threading.get_ident() != thread:
            return False
        function = fn.jit_function
        options = options_from_json(json.loads(compile["specialization_data"])["options"])
        [attributes] = compile["configs"]
        source = ASTSource(function, compile["signature"], compile["constants"], attributes)
        noted[function, compile["key"]] = lambda: triton.compile(source, target=target, options=options)
        return True

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


def options_from_json(value: Any) -> Any:
    """Return options of Triton's that were written as JSON as they were: with tuples in place of lists, of which there
    are none among them."""
    if isinstance(value, list):
        return tuple(map(options_from_json, value))
    if isinstance(value, dict):
        return {name: options_from_json(one) for name, one in value.items()}
    return value
