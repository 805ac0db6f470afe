"""Log-probabilities of produced tokens against transformers' log-softmax, over any split, draft and kind of step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from services.errors import InvalidArgument
from services.messages.sampling import SamplingParams
from services.messages.steps import StepKind, TokenLogprobs
from shard_worker.sampling.logprobs import token_logprobs
from tests.combinations import covering
from tests.reference import target
from tests.shard_worker.chain import BLOCK, Client, MakeChain
from tests.shard_worker.tiny import Tiny

COUNT = 30
SPLITS = [(name, cuts) for name in ("qwen3", "qwen3_5") for cuts in ((), (3,))]
# Two correct float32 implementations differ by a few 1e-4 in these logits.
CLOSE = 1e-3


async def run(
    client: Client, prompt: Sequence[int], *, propose: int = 0, resume: bool = False
) -> tuple[list[int], list[TokenLogprobs]]:
    """Return the next tokens and their log-probabilities, plainly or by verifying draft tokens."""
    if resume:
        commit, draft_tokens = await client.resume(propose)
    else:
        await client.prefill(prompt[:-1])
        commit, draft_tokens = await client.step(StepKind.DECODE, prompt[-1:], propose)
    tokens, logprobs = list(commit.token_ids), list(commit.logprobs)
    while len(tokens) < COUNT:
        kind = StepKind.VERIFY if draft_tokens else StepKind.DECODE
        commit, draft_tokens = await client.step(kind, [tokens[-1], *draft_tokens], propose)
        assert len(commit.logprobs) == len(commit.token_ids)
        tokens += commit.token_ids
        logprobs += commit.logprobs
    return tokens[:COUNT], logprobs[:COUNT]


def check(
    tiny: Tiny, name: str, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> None:
    """Every number is the reference's, and the alternatives are the most probable tokens in falling order."""
    rows = target.logits(tiny.model(name), [*prompt, *tokens[:-1]])[len(prompt) - 1 :].log_softmax(-1)
    for row, token, own in zip(rows, tokens, logprobs, strict=True):
        assert own.logprob == pytest.approx(float(row[token]), abs=CLOSE)
        assert len(set(own.top_token_ids)) == len(own.top_token_ids)
        assert list(own.top_logprobs) == sorted(own.top_logprobs, reverse=True)
        assert own.top_logprobs == pytest.approx(row.topk(len(own.top_logprobs)).values.tolist(), abs=CLOSE)
        assert own.top_logprobs == pytest.approx(row[list(own.top_token_ids)].tolist(), abs=CLOSE)


@pytest.mark.parametrize(("name", "cuts"), SPLITS)
async def test_numbers_are_the_references(tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...]) -> None:
    """Greedy: the first token's behind the prompt, each decode's, every accepted row's of a verify."""
    prompt, expected = tiny.clear_prompt(name, 12, COUNT)
    for propose in (0, BLOCK - 1):
        async with make_chain(name, cuts, True).session(logprobs=5) as client:
            tokens, logprobs = await run(client, prompt, propose=propose)
        assert tokens == expected
        check(tiny, name, prompt, tokens, logprobs)


@pytest.mark.parametrize(("name", "cuts"), SPLITS)
async def test_accepted_draft_tokens_have_them_too(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...]
) -> None:
    """A verify whose draft tokens are all accepted has log-probabilities for each of them and for the token behind."""
    prompt, expected = tiny.clear_prompt(name, 12, COUNT)
    async with make_chain(name, cuts).session(logprobs=3) as client:
        await client.prefill(prompt[:-1])
        first, _ = await client.step(StepKind.DECODE, prompt[-1:])
        block, _ = await client.step(StepKind.VERIFY, expected[:BLOCK])

    tokens = [*first.token_ids, *block.token_ids]
    assert tokens == expected[: BLOCK + 1]
    check(tiny, name, prompt, tokens, [*first.logprobs, *block.logprobs])


@pytest.mark.parametrize(
    ("name", "cuts", "propose"), covering([(*split, propose) for propose in (BLOCK - 1, 0) for split in SPLITS], 1)
)
async def test_processors_are_not_counted_in(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...], propose: int
) -> None:
    """Whatever changes the sampling distribution, the numbers are the model's own, and none is impossible."""
    prompt, _ = tiny.clear_prompt(name, 12, COUNT)
    sampling = SamplingParams({3: 4.0}, 1.3, 0.5, 0.25, temperature=1.7, top_k=40, top_p=0.9, min_p=0.01, seed=11)
    async with make_chain(name, cuts, True).session(
        logprobs=20, sampling=sampling, prompt_length=len(prompt)
    ) as client:
        tokens, logprobs = await run(client, prompt, propose=propose)
    check(tiny, name, prompt, tokens, logprobs)
    # A sampled token is not always among the most probable.
    assert any(token not in own.top_token_ids[:1] for token, own in zip(tokens, logprobs, strict=True))


@pytest.mark.parametrize(("name", "cuts"), SPLITS)
async def test_resumed_sessions_have_the_same(
    tiny: Tiny, make_chain: MakeChain, name: str, cuts: tuple[int, ...]
) -> None:
    """Behind a restored prompt the first token's numbers come from the kept logits."""
    prompt, expected = tiny.clear_prompt(name, 12, COUNT)
    chain = make_chain(name, cuts)
    async with chain.session() as client:
        await client.prefill(prompt)
        await client.save("prompt")
    async with chain.session(logprobs=2) as client:
        await client.restore("prompt", prompt)
        tokens, logprobs = await run(client, prompt, resume=True)
    chain.free_snapshots()
    assert tokens == expected
    check(tiny, name, prompt, tokens, logprobs)


async def test_off_and_none_beside(tiny: Tiny, make_chain: MakeChain) -> None:
    """They come where they are asked for; asked for no alternatives, each token has its own number alone."""
    prompt, _ = tiny.clear_prompt("qwen3", 12, COUNT)
    async with make_chain("qwen3", (3,)).session() as client:
        commit, _ = await client.step(StepKind.DECODE, prompt)
        assert (len(commit.token_ids), commit.logprobs) == (1, ())
    async with make_chain("qwen3", (3,)).session(logprobs=0) as client:
        commit, _ = await client.step(StepKind.PREFILL, prompt[:4])
        assert commit.logprobs == ()
        commit, _ = await client.step(StepKind.DECODE, prompt[4:])
        [logprob] = commit.logprobs
        assert (logprob.top_token_ids, logprob.top_logprobs) == ((), ())


def test_small_vocabularies_and_bfloat16() -> None:
    """More alternatives than tokens give all of them; the softmax of bfloat16 logits is a float32 one."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.5, -20.0]], dtype=torch.bfloat16)
    first, second = token_logprobs(logits, [2, 0], 20)
    exact = logits.double().log_softmax(-1)
    assert first.top_token_ids == (2, 1, 0)
    assert first.top_logprobs == pytest.approx(exact[0, [2, 1, 0]].tolist(), abs=1e-6)
    assert second.logprob == pytest.approx(float(exact[1, 0]), abs=1e-6)


def test_logits_that_are_not_finite_are_refused() -> None:
    """Instead of numbers that are none."""
    with pytest.raises(InvalidArgument, match="the logits are not finite"):
        token_logprobs(torch.tensor([[0.0, float("nan")]]), [0], 1)
