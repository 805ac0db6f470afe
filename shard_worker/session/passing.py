"""A step that was computed on one stage, on its way to the host and to the next stage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.messages.steps import Forward
from shard_worker.device.dtypes import Leaving
from shard_worker.drafting.link import slices_of


@dataclass(frozen=True, slots=True)
class Passing:
    """indices: of the features, as they travel. leaving: the activation, then the features."""

    forward: Forward
    indices: Sequence[int | None]
    leaving: Leaving
    started_ns: int

    @property
    def there(self) -> bool:
        """Whether `wait` will not."""
        return self.leaving.there

    def wait(self) -> tuple[Forward, int]:
        """From any thread: the step as the next stage gets it, and how many nanoseconds it took."""
        self.leaving.wait()
        return self.kept(self.announced()), self.elapsed_ns

    def announced(self) -> Forward:
        """The step as the next stage gets it. Its activation is there behind `leaving.wait_first`, all of it behind
        `leaving.wait`; the activation only until the next step."""
        activation, *features = self.leaving.views()
        pieces = slices_of(self.indices, features, self.forward.base_position)
        return replace(self.forward, activation=activation, features=tuple(pieces))

    def kept(self, passed: Forward) -> Forward:
        """The same, for longer."""
        return passed.kept() if self.leaving.lent else passed

    @property
    def elapsed_ns(self) -> int:
        return time.monotonic_ns() - self.started_ns
