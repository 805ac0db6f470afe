"""One answer from a scripted chain: its tokens and text, what ends it, speculation, prefixes and figures."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from coordinator.answer import Answer, Piece
from coordinator.engine.batch_costs import BatchCosts
from coordinator.engine.generation import Generation, generate
from coordinator.engine.step_times import StepTaken
from coordinator.prefix.cache import Hit, PrefixCache
from coordinator.prefix.policy import KeepPolicy
from services.errors import InternalError, InvalidArgument, Unavailable
from services.messages.description import DeviceDescription, StepEngine
from services.messages.steps import Failure, FailureReason, StepKind, TokenLogprobs
from tests.coordinator.fakes import END, PLACE, Script, ScriptedCluster, byte_tokenizer, request, says

TOKENIZER = byte_tokenizer()
LONG = says("the quick brown fox jumps over the lazy dog, and the dog sleeps on")


async def answered(cluster: Any, *, prefixes: PrefixCache | None = None, **fields: Any) -> tuple[list[Piece], Answer]:
    """All pieces of an answer, and the answer."""
    pieces: list[Piece] = []
    answer = await generate(cluster, request(**fields), TOKENIZER, pieces.append, prefixes)
    return pieces, answer


# --- tokens and text


async def test_pieces_add_up_to_the_answer() -> None:
    """What was streamed is the answer, and a stop token ends it without being shown."""
    pieces, answer = await answered(ScriptedCluster())
    assert (answer.text, answer.finish_reason) == ("hello", "stop")
    assert "".join(piece.text for piece in pieces) == "hello"
    assert tuple(token for piece in pieces for token in piece.token_ids) == answer.token_ids == says("hello")


async def test_the_session_is_opened_for_the_request() -> None:
    """The chain hears of the request's size and its stop tokens, and the session is closed behind the answer."""
    cluster = ScriptedCluster()
    await answered(cluster, prompt="hi there", max_tokens=10)
    opening = cluster.session.opening
    assert (opening["prompt_length"], opening["max_length"], opening["block_rows"]) == (8, 18, 1)
    assert opening["stop_token_ids"] == {END}
    assert not opening["speculate"]
    assert cluster.session.closed


async def test_max_tokens_ends_an_answer() -> None:
    """The reason is the length then, and exactly so many tokens came."""
    _, answer = await answered(ScriptedCluster(), max_tokens=3)
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("hel", "length", 3)


async def test_characters_are_shown_whole() -> None:
    """The bytes of a character come one by one, its text when the last one is there."""
    pieces, answer = await answered(ScriptedCluster(Script(says("né€"))))
    assert [piece.text for piece in pieces] == ["n", "", "é", "", "", "€", ""]
    assert answer.text == "né€"


async def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    """What was held back comes when nothing more can follow."""
    pieces, answer = await answered(ScriptedCluster(Script((*b"a\xe2\x82", END))))
    assert answer.text == "a\N{REPLACEMENT CHARACTER}"
    assert "".join(piece.text for piece in pieces) == answer.text


@pytest.mark.parametrize("block_size", [0, 4])
async def test_a_stop_string_across_tokens_cuts_the_text(block_size: int) -> None:
    """It ends the answer with the token that completes it, and nothing of it was ever shown."""
    pieces, answer = await answered(
        ScriptedCluster(Script(LONG), block_size=block_size), stop_strings=("fox j", "never said")
    )
    assert (answer.text, answer.finish_reason, answer.stop_string) == ("the quick brown ", "stop", "fox j")
    assert "".join(piece.text for piece in pieces) == answer.text
    assert bytes(answer.token_ids) == b"the quick brown fox j"


async def test_a_beginning_of_a_stop_string_is_shown_when_it_comes_to_nothing() -> None:
    """Text that could still become a stop string lags, and comes as soon as it cannot."""
    pieces, answer = await answered(ScriptedCluster(Script(says("abcabd"))), stop_strings=("abce",))
    assert answer.text == "abcabd"
    assert [piece.text for piece in pieces][:4] == ["", "", "", "abc"]


async def test_without_a_tokenizer_there_are_only_tokens() -> None:
    """A checkpoint without a tokenizer answers with ids and no text."""
    cluster: Any = ScriptedCluster()
    answer = await generate(cluster, request(), None)
    assert (answer.text, answer.token_ids) == (None, says("hello"))


async def test_log_probabilities_come_with_their_tokens() -> None:
    """One for each token, in the pieces and in the answer."""
    pieces, answer = await answered(ScriptedCluster(), logprobs=2)
    assert answer.logprobs is not None
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert [entry.top_token_ids for entry in answer.logprobs] == [(65, 66)] * len(answer.token_ids)


async def test_a_prompt_s_log_probabilities_come_first() -> None:
    """In a piece for each chunk, all but the first token with one; alone where no answer is wanted."""
    for max_tokens, text, drafted in ((64, "hello", 0), (0, "", 0), (0, "", 4)):
        cluster = ScriptedCluster(block_size=drafted)
        pieces, answer = await answered(
            cluster, prompt="abcde", prefill_chunk=2, prompt_logprobs=1, max_tokens=max_tokens
        )
        of_prompt = [piece.prompt for piece in pieces if piece.prompt]
        assert [piece.prompt for piece in pieces[:3]] == of_prompt
        assert [len(tokens) for tokens in of_prompt] == [2, 2, 1]
        assert not any(piece.text or piece.token_ids or piece.logprobs for piece in pieces[:3])
        assert answer.prompt == tuple(token for tokens in of_prompt for token in tokens)
        assert bytes(token.token_id for token in answer.prompt) == b"abcde"
        first, *others = answer.prompt
        assert first.logprobs is None
        assert {token.logprobs for token in others} == {TokenLogprobs(-0.5, (65,), (-0.5,), 3)}
        assert answer.text == text
        if not max_tokens:
            assert (answer.finish_reason, answer.token_ids, answer.stats.decode_tokens_per_s) == ("length", (), 0.0)
            assert cluster.session.opening["max_length"] == 5
    _, answer = await answered(ScriptedCluster())
    assert answer.prompt is None


async def test_a_kept_prefix_is_not_used_where_the_prompt_is_scored() -> None:
    """Its positions have no logits. It is kept all the same, for others, and nobody's is lost."""
    cluster: Any = ScriptedCluster()
    async with PrefixCache(cluster, "text", policy=KeepPolicy(min_tokens=4)) as prefixes:
        for wish, cached, saves in ((0, 0, 1), (None, 16, 0), (0, 0, 0)):
            fields: Any = {"prompt": "once upon a time", "prompt_logprobs": wish, "max_tokens": 0}
            _, answer = await answered(cluster, prefixes=prefixes, **fields)
            await prefixes.close()
            assert (answer.token_ids, answer.stats.cached_tokens) == ((), cached)
            assert (len(cluster.session.restores), len(cluster.session.saves)) == (cached // 16, saves)


# --- prefill


async def test_a_long_prompt_goes_down_in_chunks() -> None:
    """All chunks but the last are prefill; only the last produces a token."""
    cluster = ScriptedCluster()
    _, answer = await answered(cluster, prompt="x" * 25, prefill_chunk=10)
    assert answer.text == "hello"
    steps = [(step.base_position, len(step.token_ids), step.kind) for step in cluster.session.forwards[:3]]
    assert steps == [(0, 10, StepKind.PREFILL), (10, 10, StepKind.PREFILL), (20, 5, StepKind.DECODE)]
    assert [step.step for step in cluster.session.forwards] == list(range(len(cluster.session.forwards)))


@pytest.mark.parametrize(("others", "rows"), [(0, [200]), (1, [112, 88]), (39, [80, 80, 40]), (63, [64, 64, 64, 8])])
async def test_a_prompt_goes_down_in_short_chunks_beside_others(others: int, rows: list[int]) -> None:
    """Where these join the steps of other answers, as on a GPU: as many rows as fill them up."""
    cluster, costs = ScriptedCluster(), BatchCosts()
    for number in range(others):
        costs.join(number)
    [worker] = cluster.workers
    assert worker.target is not None
    target = replace(worker.target, step_engine=StepEngine.GRAPHS, state_trimmable=True)
    gpu = DeviceDescription("cuda:0", "", 80 * 10**9, 0)
    cluster.workers = (replace(worker, devices=(gpu,), target=target),)
    generation = Generation(cluster, request(prompt="x" * 200, max_tokens=1), TOKENIZER, costs=costs)
    async for _ in generation.pieces():
        pass
    assert [len(step.token_ids) for step in cluster.session.forwards] == rows


# --- speculation


async def test_accepted_draft_tokens_save_steps() -> None:
    """The answer is the plain one, in fewer steps, and the figures say so."""
    _, plain = await answered(ScriptedCluster(Script(LONG)), max_tokens=99)
    cluster = ScriptedCluster(Script(LONG), block_size=4)
    _, drafted = await answered(cluster, max_tokens=99)
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.steps < plain.stats.steps / 3
    assert drafted.stats.acceptance_length == 4.0
    # The last block reaches one token beyond the end.
    assert drafted.stats.accepted_tokens == drafted.stats.draft_tokens - 1 > 0
    assert drafted.stats.draft_ms > 0


async def test_rejected_draft_tokens_change_nothing() -> None:
    """A draft that is always wrong costs steps and no token."""
    _, answer = await answered(ScriptedCluster(Script(LONG, guess=lambda index: 7), block_size=4), max_tokens=99)
    assert answer.token_ids == LONG
    assert answer.stats.accepted_tokens == 0


@pytest.mark.parametrize("stop", ["t", "the q", "quick"])
async def test_draft_tokens_behind_the_end_were_not_accepted(stop: str) -> None:
    """Where a stop string cuts a block that was accepted whole, only what stands in the answer counts as accepted."""
    cluster = ScriptedCluster(Script(LONG), block_size=8)
    _, answer = await answered(cluster, max_tokens=99, stop_strings=(stop,))
    verified = sum(len(step.token_ids) - 1 for step in cluster.session.forwards if step.kind is StepKind.VERIFY)
    assert answer.stats.draft_tokens == verified
    # The prompt gives the first token, and each verify one that no draft proposed.
    assert answer.stats.accepted_tokens < len(answer.token_ids)
    assert answer.stats.accepted_tokens <= verified


async def test_no_draft_token_lies_beyond_the_answer() -> None:
    """A step never proposes more tokens than the answer may still have."""
    cluster = ScriptedCluster(Script(LONG), block_size=8)
    _, answer = await answered(cluster, max_tokens=6)
    assert (len(answer.token_ids), answer.finish_reason) == (6, "length")
    assert all(step.base_position + len(step.token_ids) <= 2 + 6 for step in cluster.session.forwards)


async def test_a_request_can_do_without_the_draft() -> None:
    """Then nobody is asked to propose anything."""
    cluster = ScriptedCluster(Script(LONG), block_size=8)
    _, answer = await answered(cluster, max_tokens=99, speculate=False)
    assert (answer.token_ids, answer.stats.acceptance_length) == (LONG, None)
    assert not any(step.propose_tokens for step in cluster.session.forwards)


async def test_a_lost_draft_is_noted_and_the_answer_goes_on() -> None:
    """The failure of the draft alone ends speculation, not the answer."""
    lost = Failure(FailureReason.DRAFT_LOST, "the draft's worker is gone", PLACE, "UNAVAILABLE")
    cluster = ScriptedCluster(Script(LONG, failures={2: lost}), block_size=4)
    _, answer = await answered(cluster, max_tokens=99)
    assert answer.token_ids == LONG
    assert answer.stats.notes == ("plain decode: the draft was lost (the draft's worker is gone)",)
    assert {step.kind for step in cluster.session.forwards[4:]} == {StepKind.DECODE}


# --- failures and refusals


async def test_a_stage_that_fails_is_named() -> None:
    """An in-band failure becomes the error that it reports, with its place; the session is closed."""
    broken = Failure(FailureReason.STAGE_FAILED, "out of memory", PLACE, "RESOURCE_EXHAUSTED")
    cluster = ScriptedCluster(Script(failures={1: broken}))
    with pytest.raises(Exception, match="out of memory") as failed:
        await answered(cluster)
    assert failed.value.code_name == "RESOURCE_EXHAUSTED"  # type: ignore[attr-defined]
    assert failed.value.where["host"] == "alpha"  # type: ignore[attr-defined]
    assert cluster.session.closed


async def test_a_broken_stream_ends_the_answer() -> None:
    """The error of the stream is raised and the session closed."""
    cluster = ScriptedCluster(Script(failures={2: Unavailable("the connection was lost")}))
    with pytest.raises(Unavailable, match="connection was lost"):
        await answered(cluster)
    assert cluster.session.closed


async def test_log_probabilities_that_don_t_come_are_an_error() -> None:
    """A last stage of another version must not pass for one that told them."""

    class Forgetful(ScriptedCluster):
        async def open(self, **opening: Any) -> Any:
            return await super().open(**{**opening, "logprobs": None, "prompt_logprobs": None})

    with pytest.raises(InternalError, match="no log-probabilities"):
        await answered(Forgetful(), logprobs=1)
    with pytest.raises(InternalError, match="told no log-probabilities"):
        await answered(Forgetful(), prompt_logprobs=1)


async def test_closing_the_generator_closes_the_session() -> None:
    """A client that goes frees the chain at once."""
    cluster: Any = ScriptedCluster(Script(LONG))
    generation = Generation(cluster, request(), TOKENIZER)
    async with contextlib.aclosing(generation.pieces()) as pieces:
        await anext(pieces)
    assert cluster.session.closed
    assert generation.answer is None


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": [5, 999]}, "prompt", "prompt token 999 is not in the model's vocabulary of 258"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; it must be at least 0"),
        ({"max_tokens": 4095}, "max_tokens", r"requested 4097 tokens \(2 in the prompt, 4095 in the completion"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs is -1"),
    ],
)
def test_requests_that_cannot_fit_are_refused(fields: dict[str, Any], field: str, text: str) -> None:
    """The field is named before any session is opened."""
    cluster: Any = ScriptedCluster()
    with pytest.raises(InvalidArgument, match=text) as refused:
        Generation(cluster, request(**fields), TOKENIZER)
    assert refused.value.where["field"] == field
    assert not cluster.sessions


def test_stop_strings_need_a_tokenizer() -> None:
    """Without text nothing could be compared with them."""
    cluster: Any = ScriptedCluster()
    with pytest.raises(InvalidArgument, match="stop strings need a tokenizer"):
        Generation(cluster, request(stop_strings=("x",)), None)


# --- kept prefixes


async def test_a_kept_prompt_is_restored_and_not_computed() -> None:
    """The second request begins from the first one's state, and its figures say how much and from where."""
    cluster: Any = ScriptedCluster()
    async with PrefixCache(cluster, "text", policy=KeepPolicy(min_tokens=4)) as prefixes:
        await answered(cluster, prompt="the same beginning", prefixes=prefixes)
        _, answer = await answered(cluster, prompt="the same beginning and more", prefixes=prefixes)
    assert answer.text == "hello"
    assert (answer.stats.cached_tokens, answer.stats.cache_source) == (18, "memory")
    assert answer.stats.restore_ms >= 2.0
    [restore] = cluster.session.restores
    assert restore.length == cluster.session.forwards[0].base_position == 18


async def test_a_prompt_that_is_kept_whole_resumes_at_its_end() -> None:
    """Nothing is computed for the first token: a resume step has no rows."""
    cluster: Any = ScriptedCluster()
    async with PrefixCache(cluster, "text", policy=KeepPolicy(min_tokens=4)) as prefixes:
        await answered(cluster, prompt="once upon a time", prefixes=prefixes)
        _, answer = await answered(cluster, prompt="once upon a time", prefixes=prefixes)
    first = cluster.session.forwards[0]
    assert (first.kind, first.token_ids, first.base_position) == (StepKind.RESUME, (), 16)
    assert answer.text == "hello"


async def test_the_end_of_an_answer_is_kept() -> None:
    """The next question of a chat begins behind the answer before it."""
    cluster: Any = ScriptedCluster()
    async with PrefixCache(cluster, "text", policy=KeepPolicy(min_tokens=4)) as prefixes:
        await answered(cluster, prompt="first question", prefixes=prefixes)
        await prefixes.close()
        _, answer = await answered(cluster, prompt="first questionhello, second question", prefixes=prefixes)
    assert answer.text == "hello"
    assert answer.stats.cached_tokens == len("first questionhello")


async def test_a_prefix_that_a_worker_has_lost_is_computed() -> None:
    """The request runs cold and its client sees nothing of it."""
    cluster: Any = ScriptedCluster()
    async with PrefixCache(cluster, "text", policy=KeepPolicy(min_tokens=4)) as prefixes:
        await answered(cluster, prompt="once upon a time", prefixes=prefixes)
        cluster.kept.clear()
        pieces, answer = await answered(cluster, prompt="once upon a time", prefixes=prefixes)
    assert len(cluster.sessions) == 3
    assert (answer.text, "".join(piece.text for piece in pieces)) == ("hello", "hello")
    assert (answer.stats.cached_tokens, answer.stats.cache_source) == (0, None)
    assert cluster.session.forwards[0].base_position == 0


async def test_a_draft_that_is_lost_while_a_prefix_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is opened without it, so that the last stage does not call a worker that is gone, and begins from
    what is kept for sessions without one."""
    cluster: Any = ScriptedCluster(block_size=4)
    async with PrefixCache(cluster, "text", policy=KeepPolicy(min_tokens=4)) as prefixes:
        await answered(cluster, prompt="once upon a time", prefixes=prefixes, speculate=False)
        await prefixes.close()
        find = prefixes.find

        async def find_meanwhile(token_ids: tuple[int, ...], **how: Any) -> Hit | None:
            found = await find(token_ids, **how)
            cluster.draft = None
            return found

        monkeypatch.setattr(prefixes, "find", find_meanwhile)
        _, answer = await answered(cluster, prompt="once upon a time", prefixes=prefixes)
    assert not cluster.session.opening["speculate"]
    assert answer.stats.cached_tokens == len("once upon a time")
    assert answer.stats.notes == ("plain decode: the draft was lost (its worker is gone)",)


# --- figures


async def test_every_step_is_reported() -> None:
    """Listeners hear of prefill and of each decode step: rows sent, rows kept."""
    cluster: Any = ScriptedCluster(Script(LONG), block_size=4)
    steps: list[StepTaken] = []
    generation = Generation(
        cluster, request(prompt="x" * 9, prefill_chunk=4, max_tokens=9), TOKENIZER, None, steps.append
    )
    async for _ in generation.pieces():
        pass
    assert [(step.kind, step.rows, step.kept) for step in steps] == [
        (StepKind.PREFILL, 4, 4),
        (StepKind.PREFILL, 4, 4),
        (StepKind.PREFILL, 1, 1),
        (StepKind.VERIFY, 4, 4),
        (StepKind.VERIFY, 4, 4),
    ]
    assert {step.request_id for step in steps} == {"r"}


async def test_figures_of_an_answer() -> None:
    """Tokens are counted, and the stages' times are those that their answers told."""
    _, answer = await answered(ScriptedCluster(), prompt="hi!")
    stats = answer.stats
    assert (stats.prompt_tokens, stats.completion_tokens, stats.steps) == (3, 6, 5)
    [stage] = stats.stages
    assert (stage.address, stage.first_layer, stage.last_layer) == ("alpha:7001", 0, 12)
    assert stage.forward_ms == pytest.approx(5 * 1e-3)
