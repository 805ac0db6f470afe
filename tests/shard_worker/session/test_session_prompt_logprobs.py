"""Log-probabilities of a prompt's own tokens against transformers, however the prompt and the chain are cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from services.messages.steps import StepKind, TokenLogprobs
from shard_worker.model.head import Head
from shard_worker.sampling import logprobs as module
from shard_worker.sampling.logprobs import prompt_logprobs, token_logprobs
from shard_worker.weights.weight import DenseWeight
from tests.reference import target
from tests.shard_worker.chain import BLOCK, Client, MakeChain
from tests.shard_worker.tiny import Tiny

# Two correct float32 implementations differ by a few 1e-4 in these logits.
CLOSE = 1e-3
LENGTH = 40
CUTS = [(LENGTH,), (1, LENGTH), (7, 8, 31, LENGTH), tuple(range(1, LENGTH + 1))]


async def scored(client: Client, prompt: Sequence[int], ends: Sequence[int], propose: int = 0) -> list[TokenLogprobs]:
    """What the steps of a prefill up to these positions say of the prompt; the last one decodes a token."""
    found: list[TokenLogprobs] = []
    for first, end in zip([0, *ends], ends, strict=False):
        kind = StepKind.DECODE if end == len(prompt) else StepKind.PREFILL
        commit, _ = await client.step(kind, prompt[first:end], propose if end == len(prompt) else 0)
        assert len(commit.prompt_logprobs) == end - first - (first == 0)
        found += commit.prompt_logprobs
    return found


def check(tiny: Tiny, name: str, prompt: Sequence[int], found: Sequence[TokenLogprobs], alternatives: int) -> None:
    """Every number is the reference's, and the alternatives are the most probable tokens in falling order."""
    rows = target.logits(tiny.model(name), prompt)[:-1].log_softmax(-1)
    for row, token, own in zip(rows, prompt[1:], found, strict=True):
        assert own.logprob == pytest.approx(float(row[token]), abs=CLOSE)
        assert own.top_logprobs == pytest.approx(row.topk(alternatives).values.tolist(), abs=CLOSE)
        assert own.top_logprobs == pytest.approx(row[list(own.top_token_ids)].tolist(), abs=CLOSE)
        # Near ties aside, which the numbers above cannot tell apart either.
        least, most = (int((row >= row[token] + step).sum()) for step in (CLOSE, -CLOSE))
        assert least <= own.rank <= most


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
async def test_numbers_are_the_references(tiny: Tiny, make_chain: MakeChain, name: str) -> None:
    """In any chunks, over any split, with a draft and without: and a split does not change a bit."""
    prompt, _ = tiny.clear_prompt(name, LENGTH, 4)
    for ends in CUTS:
        runs = []
        for cuts, drafted in (((), False), ((3,), False), ((1, 2), False), ((3,), True)):
            chain = make_chain(name, cuts, drafted)
            async with chain.session(prompt_logprobs=5, prompt_length=LENGTH) as client:
                runs.append(await scored(client, prompt, ends, BLOCK - 1 if drafted else 0))
        check(tiny, name, prompt, runs[0], 5)
        assert runs[1:] == runs[:-1]


async def test_they_end_with_the_prompt(tiny: Tiny, make_chain: MakeChain) -> None:
    """Steps behind the prompt say nothing of it, whatever their kind; one that goes beyond its end, only of its part.
    The answer's log-probabilities are asked for apart."""
    prompt, expected = tiny.clear_prompt("qwen3", 12, 30)
    chain = make_chain("qwen3", (3,), True)
    async with chain.session(prompt_logprobs=0, prompt_length=len(prompt), logprobs=1) as client:
        found = await scored(client, prompt, [5, len(prompt)], BLOCK - 1)
        assert {(entry.top_token_ids, entry.top_logprobs) for entry in found} == {((), ())}
        for kind, rows in ((StepKind.DECODE, expected[:1]), (StepKind.VERIFY, expected[1:4])):
            commit, _ = await client.step(kind, rows)
            assert commit.prompt_logprobs == ()
            assert len(commit.logprobs) == len(commit.token_ids) > 0
    async with chain.session(prompt_logprobs=2, prompt_length=len(prompt)) as client:
        commit, _ = await client.step(StepKind.PREFILL, [*prompt, *expected[:3]])
        check(tiny, "qwen3", prompt, commit.prompt_logprobs, 2)
    async with chain.session(logprobs=2, prompt_length=len(prompt)) as client:
        commit, _ = await client.step(StepKind.DECODE, prompt)
        assert (commit.prompt_logprobs, len(commit.logprobs)) == ((), 1)


async def test_processors_are_not_counted_in(tiny: Tiny, make_chain: MakeChain) -> None:
    """Whatever changes the sampling distribution, the numbers are the model's own, to the bit."""
    prompt, _ = tiny.clear_prompt("qwen3", 12, 4)
    sampling = SamplingParams({3: 4.0}, 1.3, 0.5, 0.25, temperature=1.7, top_k=40, top_p=0.9, min_p=0.01, seed=11)
    runs = []
    for params in (SamplingParams(), sampling):
        chain = make_chain("qwen3", (3,))
        async with chain.session(prompt_logprobs=20, prompt_length=12, sampling=params) as client:
            runs.append(await scored(client, prompt, [4, 12]))
    assert runs[0] == runs[1]
    check(tiny, "qwen3", prompt, runs[0], 20)


async def test_a_kept_prefix_has_none(tiny: Tiny, make_chain: MakeChain) -> None:
    """A session that asks for them cannot begin behind one, and is told so."""
    prompt, _ = tiny.clear_prompt("qwen3", 12, 4)
    chain = make_chain("qwen3", (3,))
    async with chain.session() as client:
        await client.prefill(prompt)
        await client.save("prompt")
    async with chain.session(prompt_logprobs=1, prompt_length=12) as client:
        with pytest.raises(InvalidArgument, match="a kept prefix has none: begin at the first token"):
            await client.restore("prompt", prompt)
    chain.free_snapshots()


# --- without a chain


@pytest.fixture
def head() -> Head:
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn((300, 16), generator=generator)
    return Head(torch.ones(16), DenseWeight(matrix).prepared(), 1e-6)


def test_logits_of_all_rows_are_never_there_at_once(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a slice follow from its bytes, and any prompt is read in such slices."""
    sizes = []
    whole = Head.logits

    def spied(self: Head, hidden: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        sizes.append(len(hidden))
        return whole(self, hidden, rows)

    hidden = torch.randn((200, 16), generator=torch.Generator().manual_seed(2))
    tokens = list(range(200))
    expected = token_logprobs(head.logits(hidden), tokens, 3)
    monkeypatch.setattr(Head, "logits", spied)
    for limit, rows in ((module.SLICE_BYTES, 64), (7 * 300 * 4, 7), (1, 1)):
        monkeypatch.setattr(module, "SLICE_BYTES", limit)
        sizes.clear()
        found = prompt_logprobs(head, hidden, tokens, 3)
        assert sizes == [rows] * -(-200 // rows)
        assert [entry.top_token_ids for entry in found] == [entry.top_token_ids for entry in expected]
        assert [entry.rank for entry in found] == [entry.rank for entry in expected]
        numbers, others = ([entry.logprob for entry in entries] for entries in (found, expected))
        assert numbers == pytest.approx(others, abs=1e-5)


def test_cutting_the_rows_does_not_change_a_bit(head: Head) -> None:
    """Rows that come one by one, in odd parts and all together."""
    hidden = torch.randn((150, 16), generator=torch.Generator().manual_seed(3))
    tokens = list(range(150))
    whole = prompt_logprobs(head, hidden, tokens, 4)
    for size in (1, 7, 64, 65):
        parts = range(0, 150, size)
        cut = [prompt_logprobs(head, hidden[at : at + size], tokens[at : at + size], 4) for at in parts]
        assert tuple(entry for part in cut for entry in part) == whole


def test_ranks_count_what_is_at_least_as_probable() -> None:
    """The most probable token has rank 1, and ties share the worst one."""
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]]).expand(4, 4)
    assert [entry.rank for entry in token_logprobs(logits, [0, 1, 2, 3], 0)] == [4, 1, 3, 3]
