"""What every model family must do, against transformers in float32. One call is one property of one checkpoint."""

from __future__ import annotations

import torch

from tests.reference import target
from tests.shard_worker.tiny import Tiny, ids, unsplit

TOLERANCE = {"rtol": 0.0, "atol": 5e-4}
"""Two correct float32 implementations differ by about 1e-4 in logits of this size; the closest wrong one by 1e-2."""


def check_steps(tiny: Tiny, name: str) -> None:
    """Prefill, then single steps, then a block of rows give the logits of one uncached pass."""
    tokens = ids(50 + 20 + 16)
    expected = target.logits(tiny.model(name), tokens)
    run = unsplit(tiny.path(name))

    rows = [run(tokens[:50]), *(run([token]) for token in tokens[50:70]), run.verify(tokens[70:])]

    torch.testing.assert_close(torch.cat(rows), expected, **TOLERANCE)


def check_commits(tiny: Tiny, name: str) -> None:
    """Whatever number of a verify's rows is committed, what follows is what follows those tokens alone."""
    prompt, block, after = ids(9, seed=1), ids(6, seed=2), ids(5, seed=4)
    for count in range(1, len(block) + 1):
        kept = [*prompt, *block[:count]]
        expected = target.logits(tiny.model(name), [*kept, *after, *after])[len(kept) :]
        run = unsplit(tiny.path(name))
        run(prompt)
        run.verify(block)
        run.commit(count)

        single = [run([token]) for token in after]
        again = run.verify(after)

        assert run.length == len(kept) + len(after)
        torch.testing.assert_close(torch.cat([*single, again]), expected, **TOLERANCE)


def check_chunks(tiny: Tiny, name: str) -> None:
    """Prefilling in chunks of any size is prefilling at once."""
    tokens = ids(130)
    expected = target.logits(tiny.model(name), tokens)
    # One by one the first tokens alone: the others would go the same way.
    for size, count in ((1, 30), (7, 130), (64, 130), (130, 130)):
        run = unsplit(tiny.path(name))

        rows = torch.cat([run(tokens[first : min(first + size, count)]) for first in range(0, count, size)])

        torch.testing.assert_close(rows, expected[:count], **TOLERANCE)
