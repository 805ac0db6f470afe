"""An answer whose chain is lost on the way goes on with the same tokens when the chain is back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from coordinator.answer import Answer, Piece
from coordinator.engine import generation
from coordinator.engine.generation import MOST_RESUMPTIONS, Generation
from services.errors import FlashsplitError, InternalError, ResourceExhausted, Unavailable
from services.messages.description import StepEngine
from services.messages.steps import Failure, FailureReason, StepKind
from tests.coordinator.fakes import PLACE, Script, ScriptedCluster, byte_tokenizer, request, says

TOKENIZER = byte_tokenizer()
TEXT = "the quick brown fox jumps over the lazy dog"
BROKEN = Failure(FailureReason.LINK_BROKEN, "stage 1: nobody is there", PLACE, "UNAVAILABLE")


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_LOOK_S", 0.001)


class Once(dict[int, FlashsplitError | Failure]):
    """Failures of steps, each of which only the first session meets that comes to its step."""

    def get(self, key: int, default: Any = None) -> Any:
        return self.pop(key, default)


async def answered(cluster: Any, *, resume_timeout_s: float = 10, **fields: Any) -> tuple[list[Piece], Answer]:
    """All pieces of an answer, and the answer."""
    answering = Generation(cluster, request(**fields), TOKENIZER, resume_timeout_s=resume_timeout_s)
    pieces = [piece async for piece in answering.pieces()]
    assert answering.answer is not None
    return pieces, answering.answer


@pytest.mark.parametrize("block_size", [0, 4])
@pytest.mark.parametrize("lost_at", [0, 1, 3, 7])
async def test_an_answer_goes_on_behind_its_last_token(lost_at: int, block_size: int) -> None:
    """Each token comes once, and the second chain computes those that are known as blocks, before it goes on."""
    cluster = ScriptedCluster(Script(says(TEXT), failures=Once({lost_at: BROKEN})), block_size=block_size)
    pieces, answer = await answered(cluster, prompt="hi there", logprobs=1)
    [first, second] = cluster.sessions
    assert first.closed
    assert (answer.text, answer.token_ids, answer.stats.resumed) == (TEXT, says(TEXT), 1)
    assert tuple(token for piece in pieces for token in piece.token_ids) == says(TEXT)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    prompt, replayed, *_ = second.forwards
    assert bytes(prompt.token_ids) == b"hi there"
    if lost_at == 7 and not block_size:
        # Seven tokens were told, of which the last begins the next step.
        assert (replayed.kind, bytes(replayed.token_ids)) == (StepKind.VERIFY, b"the qu")


@pytest.mark.parametrize(
    ("held", "bounds"),
    [
        ((13, 0), [0, 8, 13, 14]),
        ((5, 0), [0, 5, 8, 14]),
        ((14, 14), [14]),
        ((15, 9), [9, 14]),
        ((0, 0), [0, 8, 14]),
    ],
)
async def test_what_stages_hold_is_not_gone_through_again(held: tuple[int, ...], bounds: list[int]) -> None:
    """The next attempt begins where the first stage ends that knows the least, and each step ends where what a stage
    holds does. It says which session it is, and all tokens that are known."""
    script = Script(says(TEXT), failures=Once({7: BROKEN}), held=held)
    cluster = ScriptedCluster(script)
    _, answer = await answered(cluster, prompt="hi there")
    assert answer.text == TEXT
    [first, second] = cluster.sessions
    rests = [session.opening["rest"] for session in (first, second)]
    assert [rest.token_ids for rest in rests] == [(), tuple(b"hi there" + b"the qui")]
    assert rests[0].session_id == rests[1].session_id
    assert [rest.rest_ms for rest in rests] == [10_000, 10_000]
    begun = [forward.base_position for forward in second.forwards if forward.base_position <= 14]
    assert begun == bounds


async def test_no_draft_tokens_are_looked_up_where_a_stage_is_further() -> None:
    """The row of the last token is computed there, and a step ends behind it."""
    text, prompt = says("abcabcabcabcabcabc"), b"hi there"
    script = Script(text, failures=Once({7: BROKEN}))
    cluster = ScriptedCluster(script)
    answering = Generation(
        cast(Any, cluster), request(prompt="hi there"), TOKENIZER, resume_timeout_s=10, prompt_lookup=True
    )
    tokens: list[int] = []
    async for piece in answering.pieces():
        tokens += piece.token_ids
        if len(cluster.sessions) == 1:
            script.held = (len(prompt) + len(tokens), 0)
    assert tuple(tokens) == text
    assert script.held is not None
    [held, _] = script.held
    steps = [(one.base_position, one.base_position + len(one.token_ids)) for one in cluster.session.forwards]
    assert (held - 1, held) in steps
    assert any(end - base > 1 for base, end in steps if base >= held)


@pytest.mark.parametrize(("resume_timeout_s", "scored"), [(0, None), (10, 1)])
async def test_what_cannot_be_taken_up_does_not_rest(resume_timeout_s: float, scored: int | None) -> None:
    cluster = ScriptedCluster()
    await answered(cluster, resume_timeout_s=resume_timeout_s, prompt_logprobs=scored)
    assert cluster.session.opening["rest"] is None


async def test_tokens_that_were_told_stay() -> None:
    """Where the second chain would have said something else, what was told is taken, and the answer goes on behind."""
    cluster = ScriptedCluster(Script(says(TEXT), failures=Once({25: BROKEN})))
    answering = Generation(cast(Any, cluster), request(), TOKENIZER, resume_timeout_s=10)
    tokens: list[int] = []
    async for piece in answering.pieces():
        tokens += piece.token_ids
        if len(tokens) == 25:
            cluster.script.answer = (*says(TEXT)[:5], ord("!"), *says(TEXT)[6:])
    assert bytes(tokens[:-1]).decode() == TEXT
    kinds = [forward.kind for forward in cluster.session.forwards[:4]]
    assert kinds == [StepKind.DECODE, StepKind.VERIFY, StepKind.PREFILL, StepKind.DECODE]


async def test_a_scored_prompt_is_told_once() -> None:
    """Log-probabilities of a prompt's tokens that came before the chain was lost do not come again."""
    script = Script(says("hello"), failures=Once({2: BROKEN}))
    _, answer = await answered(ScriptedCluster(script), prompt="abcdefgh", prefill_chunk=2, prompt_logprobs=1)
    assert answer.prompt is not None
    assert bytes(token.token_id for token in answer.prompt) == b"abcdefgh"
    assert (answer.text, answer.stats.resumed) == ("hello", 1)


async def test_it_waits_until_the_chain_is_back() -> None:
    """Nothing is opened on a chain that is not whole."""
    cluster = ScriptedCluster(Script(says(TEXT), failures=Once({3: BROKEN})))
    answering = Generation(cast(Any, cluster), request(), TOKENIZER, resume_timeout_s=10)
    pieces = answering.pieces()
    for _ in range(3):
        await anext(pieces)
    cluster.alive = False
    going_on = asyncio.ensure_future(anext(pieces))
    await asyncio.sleep(0.05)
    assert len(cluster.sessions) == 1
    assert not going_on.done()
    cluster.alive = True
    assert (await going_on).token_ids == (TEXT.encode()[3],)
    assert len(cluster.sessions) == 2
    await pieces.aclose()


@pytest.mark.parametrize(
    ("error", "timeout_s"),
    [
        (InternalError("internal error: the log has the details"), 10),
        (ResourceExhausted("the device has no memory left"), 10),
        (BROKEN, 0),
    ],
)
async def test_what_is_no_lost_chain_ends_the_answer(error: FlashsplitError | Failure, timeout_s: float) -> None:
    """At once; and so does a lost chain where answers are not to wait."""
    cluster = ScriptedCluster(Script(says(TEXT), failures={2: error}))
    with pytest.raises(FlashsplitError) as raised:
        await answered(cluster, resume_timeout_s=timeout_s)
    assert raised.value.message == error.message
    assert len(cluster.sessions) == 1


async def test_it_does_not_wait_for_ever() -> None:
    """The error says how long it has waited, and by which option."""
    cluster = ScriptedCluster(Script(says(TEXT), open_error=Unavailable("stage 1 has ended")))
    cluster.alive = False
    with pytest.raises(Unavailable, match=r"stage 1 has ended; the answer has waited 0.05 s .*--resume-timeout"):
        await answered(cluster, resume_timeout_s=0.05)
    # One that is there and takes no sessions is asked until then.
    cluster.alive = True
    with pytest.raises(Unavailable, match="--resume-timeout"):
        await answered(cluster, resume_timeout_s=0.05)


async def test_what_ends_every_chain_is_given_up() -> None:
    """A request at whose step each chain ends is not taken up again and again."""
    cluster = ScriptedCluster(Script(says(TEXT), failures={0: BROKEN}))
    with pytest.raises(Unavailable, match="nobody is there"):
        await answered(cluster)
    assert len(cluster.sessions) == 1 + MOST_RESUMPTIONS


@pytest.mark.parametrize("stop", [(), ("jumps",), ("lazy dog and",)])
@pytest.mark.parametrize("block_size", [0, 4])
async def test_an_answer_of_a_process_that_has_ended(stop: tuple[str, ...], block_size: int) -> None:
    """Wherever that came to: behind each piece the answer goes on, with the same pieces together and the same end, by
    whole pieces, stop strings that had begun and text that was held back; a complete one is not computed."""
    fields: dict[str, Any] = {"stop_strings": stop, "logprobs": 1}
    told, whole = await answered(ScriptedCluster(Script(says(TEXT))), **fields)
    for count in range(1, len(told) + 1):
        cluster: Any = ScriptedCluster(Script(says(TEXT)), block_size=block_size)
        going_on = Generation(cluster, request(**fields), TOKENIZER, prompt_lookup=True, told=told[:count])
        rest = [piece async for piece in going_on.pieces()]
        pieces = [*told[:count], *rest]
        assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
        assert "".join(piece.text for piece in pieces) == whole.text
        answer = going_on.answer
        assert answer is not None
        assert (answer.token_ids, answer.text, answer.logprobs) == (whole.token_ids, whole.text, whole.logprobs)
        assert (answer.finish_reason, answer.stop_string) == (whole.finish_reason, whole.stop_string)
        assert answer.stats.resumed == 1
        is_complete = sum(len(piece.token_ids) for piece in told[:count]) == len(whole.token_ids)
        assert len(cluster.sessions) == (0 if is_complete else 1)


@pytest.mark.parametrize(
    ("fields", "exact", "rows"),
    [
        ({}, False, [64, 16]),
        ({}, True, [16] * 5),
        ({"is_recurrent": True}, False, [16] * 5),
        ({"step_engine": StepEngine.KERNELS}, False, [16] * 5),
    ],
    ids=["plain torch", "exact", "recurrent", "kernels"],
)
async def test_how_many_known_tokens_are_computed_a_step(fields: dict[str, Any], exact: bool, rows: list[int]) -> None:
    """Long steps where rounding depends on their rows in any case, and no memory is needed for each row."""
    said = says(TEXT * 3)
    cluster = ScriptedCluster(Script(said, failures=Once({81: BROKEN})))
    [worker] = cluster.workers
    assert worker.target is not None
    cluster.workers = (replace(worker, target=replace(worker.target, **fields)),)
    cluster.exact = exact
    _, answer = await answered(cluster, prompt="hi there", max_tokens=len(said))
    assert answer.token_ids == said
    _, second = cluster.sessions
    replayed = [len(forward.token_ids) for forward in second.forwards if forward.kind is StepKind.VERIFY]
    assert replayed == rows
    assert second.opening["block_rows"] == max(rows)
