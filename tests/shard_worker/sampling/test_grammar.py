"""What a grammar allows: masks over the demo model's tokens, stop tokens, draft tokens, and grammars that are
refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from services.errors import FailedPrecondition, InvalidArgument
from services.layers import LayerRange
from services.messages.steps import Grammar, GrammarKind, OpenSession
from shard_worker.sampling.grammar import GrammarState
from shard_worker.sampling.grammar_compiler import GrammarCompiler
from tests.shard_worker.schemas import fits, random_schema

DEMO = Path(__file__).resolve().parents[3] / "deploy" / "demo" / "target"
CPU = torch.device("cpu")
VOCAB = 8192
EOS, START = 2, 1
STOPS = frozenset({EOS, 0})
SCHEMA, OBJECT, REGEX, LARK = GrammarKind


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(DEMO, {"eos_token_id": EOS}, VOCAB)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def state(compiler: GrammarCompiler, grammar: Grammar, stops: frozenset[int] = STOPS, prompt: int = 0) -> GrammarState:
    """Return the state of a grammar at the beginning of the output."""
    request = OpenSession("r", "f", 0, LayerRange(0, 1), (), 8, 8, 8, prompt, stop_token_ids=stops, grammar=grammar)
    return compiler.compile(grammar, request, CPU)


def legal(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero().squeeze(-1).tolist())


def now(grammar: GrammarState, position: int) -> set[int]:
    """Return what may stand at a position before which all is committed."""
    [mask] = grammar.allowed((), position, 1)
    return legal(mask)


# --- masks


@pytest.mark.parametrize("grammar", [Grammar(OBJECT), Grammar(SCHEMA, '{"type": "object"}')])
def test_json_may_be_laid_out_but_not_padded(
    grammar: Grammar, compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer
) -> None:
    """On one line or indented, as programs write it; blank lines and runs of spaces are no part of it."""

    def fits_all(text: str) -> bool:
        checked = state(compiler, grammar)
        for position, token in enumerate(tokenizer.encode(text, add_special_tokens=False).ids):
            if token not in now(checked, position):
                return False
            checked.observe([token], position)
        return True

    value = {"a": 1, "b": [1, {"c": None}]}
    for indent in (None, 1, 2, 4, "\t"):
        assert fits_all(json.dumps(value, indent=indent)), indent
    assert fits_all(json.dumps(value, indent=2).replace("\n", "\r\n"))
    assert fits_all(json.dumps(value, separators=(",", ":")))
    for text in ('{\n\n"a": 1}', '{"a":\n \n1}', '{"a":   1}', '\n{"a": 1}', '{"a": 1\n\n}'):
        assert not fits_all(text), text


def test_all_tokens_that_may_follow_and_no_other(compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer) -> None:
    """The mask has exactly those tokens whose texts begin a matching text of any length."""
    texts = {token: tokenizer.decode([token]) for token in range(VOCAB)}
    two = state(compiler, Grammar(REGEX, "[ab]{2}"))
    fitting = {token for token, text in texts.items() if text and set(text) <= {"a", "b"} and len(text) <= 2}
    assert now(two, 0) == fitting
    [letter] = [token for token, text in texts.items() if text == "a"]
    two.observe([letter], 0)
    assert now(two, 1) == {token for token in fitting if len(texts[token]) == 1}
    two.observe([letter], 1)
    assert now(two, 2) == STOPS


@pytest.mark.parametrize("stops", [frozenset({EOS}), frozenset({0, START, EOS}), frozenset({19, EOS})])
def test_stop_tokens_are_legal_exactly_where_it_is_complete(compiler: GrammarCompiler, stops: frozenset[int]) -> None:
    """The request's own stop tokens count, whatever the checkpoint's are; one that is text ends no incomplete
    output."""
    grammar = state(compiler, Grammar(REGEX, "[0-9]{2,3}"), stops)
    for position, token in enumerate((20, 21, 22)):
        assert (now(grammar, position) & stops == stops) is (position >= 2)
        assert not now(grammar, position) & stops or position >= 2
        assert not now(grammar, position) & (STOPS - stops)
        grammar.observe([token], position)
    assert now(grammar, 3) == stops
    grammar.observe([EOS], 3)
    # Who goes on behind the end gets more of it.
    assert now(grammar, 4) == stops


def test_without_stop_tokens_the_checkpoint_says_what_ends(compiler: GrammarCompiler) -> None:
    """Without stop tokens the checkpoint's end-of-sequence token counts; where it has none, the grammar is refused."""
    assert now(state(compiler, Grammar(REGEX, ""), frozenset()), 0) == {EOS}
    nested = GrammarCompiler(DEMO, {"text_config": {"eos_token_id": [0, VOCAB + 5]}}, VOCAB)
    assert now(state(nested, Grammar(REGEX, ""), frozenset()), 0) == {0}
    with pytest.raises(InvalidArgument, match="a grammar needs a token to end with") as refused:
        state(GrammarCompiler(DEMO, {}, VOCAB), Grammar(REGEX, "a"), frozenset())
    assert refused.value.where["field"] == "stop_token_ids"


def test_special_tokens_are_legal_only_where_they_are_named(compiler: GrammarCompiler) -> None:
    """A special token is allowed where the grammar names it, even one that is a stop token."""
    assert not now(state(compiler, Grammar(REGEX, "(?s:.*)")), 0) & {START, 3}
    named = state(compiler, Grammar(LARK, "start: <|im_start|> /[ab]/ <|im_end|>"))
    assert now(named, 0) == {START}
    named.observe([START, 68], 0)
    assert now(named, 2) == {EOS}
    named.observe([EOS], 2)
    assert now(named, 3) == STOPS


def test_the_prompt_is_not_looked_at(compiler: GrammarCompiler) -> None:
    """Tokens before prompt_length are passed over, alone or in one step with output."""
    grammar = state(compiler, Grammar(REGEX, "[0-9]x"), prompt=5)
    assert now(grammar, 0) == now(grammar, 5)
    grammar.observe([3, 3, 3], 0)
    [mask] = grammar.allowed([3, 3, 20], 3, 1)
    assert legal(mask) == {91}
    grammar.observe([3, 3, 20], 3)
    assert now(grammar, 6) == {91}


def test_forced_tokens_must_fit(compiler: GrammarCompiler) -> None:
    """A committed or known token that the grammar doesn't allow is refused, and nothing of it counts."""
    grammar = state(compiler, Grammar(REGEX, "[0-9]{2}"))
    for wrong in (68, EOS, START, VOCAB - 1):
        with pytest.raises(InvalidArgument, match=rf"token {wrong} does not fit the grammar behind the 1 before it"):
            grammar.allowed([20, wrong], 0, 1)
    grammar.observe([20], 0)
    with pytest.raises(InvalidArgument, match="does not fit the grammar"):
        grammar.observe([91], 1)
    assert 20 in now(grammar, 1)


def test_asking_commits_nothing(compiler: GrammarCompiler) -> None:
    """Asking for masks changes nothing, whether the known tokens go on or end the output."""
    grammar = state(compiler, Grammar(REGEX, "[0-9]{2}"))
    before = now(grammar, 0)
    for known in ([20, 21], [20, 21, EOS], [20, 21, EOS, 0]):
        [mask] = grammar.allowed(known, 0, 1)
        assert legal(mask) == STOPS
        assert now(grammar, 0) == before


# --- draft tokens


def test_rows_behind_wrong_draft_tokens_and_ends_are_left_out(compiler: GrammarCompiler) -> None:
    """Rows behind a wrong draft token or an end have no mask; those before are as they would be alone."""
    grammar = state(compiler, Grammar(REGEX, "[0-9]{2,3}"))
    for draft_tokens, rows in (
        ((21, 22), 3),
        ((68, 22), 1),
        ((21, 68), 2),
        ((21, EOS), 2),
        ((21, 22, 23), 3),
        ((EOS,), 1),
    ):
        masks = grammar.allowed([20, *draft_tokens], 0, 1 + len(draft_tokens))
        assert masks.shape == (rows, VOCAB)
        alone = state(compiler, Grammar(REGEX, "[0-9]{2,3}"))
        for position, token in enumerate([20, *draft_tokens][:rows]):
            alone.observe([token], position)
            assert legal(masks[position]) == now(alone, position + 1)
    assert 20 in now(grammar, 0)


@pytest.mark.parametrize("seed", range(4))
def test_random_schemas_random_tokens_random_draft_tokens(
    compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer, seed: int
) -> None:
    """Whatever legal tokens are drawn, the output fits its schema; masks of draft tokens' rows are those of plain
    ones."""
    rng = random.Random(seed)
    for _ in range(100):
        schema = random_schema(rng)
        grammar = Grammar(SCHEMA, json.dumps(schema, ensure_ascii=rng.random() < 0.5))
        plain, speculated = state(compiler, grammar), state(compiler, grammar)
        output: list[int] = []
        masks: list[set[int]] = []
        while not output or output[-1] not in STOPS:
            masks.append(now(plain, len(output)))
            ends = sorted(masks[-1] & STOPS)
            output.append(rng.choice(ends if ends and len(output) > 60 else sorted(masks[-1])))
            plain.observe(output[-1:], len(output) - 1)
            assert len(output) < 400
        value = json.loads(tokenizer.decode(output))
        assert fits(value, schema), (schema, value)

        at = 0
        while at < len(output) - 1:
            right = rng.randrange(8)
            draft_tokens = [*output[at + 1 : at + 1 + right], *rng.choices(range(VOCAB), k=rng.randrange(4))]
            rows = [legal(mask) for mask in speculated.allowed([output[at], *draft_tokens], at, 1 + len(draft_tokens))]
            true = min(right + 1, len(rows), len(masks) - at - 1)
            assert rows[:true] == masks[at + 1 : at + 1 + true]
            accepted = rng.randint(1, min(right + 1, len(output) - 1 - at))
            speculated.observe(output[at : at + accepted], at)
            at += accepted


# --- refused


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (SCHEMA, '{"type": "object"', "Expecting ',' delimiter"),
        (SCHEMA, '{}}], "max_tokens": 1, "x": [{"a": {}', "Extra data"),
        (SCHEMA, "[1]", "schema must be an object or boolean"),
        (SCHEMA, '{"type": "nope"}', "Invalid type: nope"),
        (SCHEMA, '{"not": {"type": "string"}}', 'Unimplemented keys: ["not"]'),
        (SCHEMA, '{"$ref": "#/nope"}', "Pointer '/nope' does not exist"),
        (SCHEMA, '{"$ref": "http://127.0.0.1:1/schema"}', "http://127.0.0.1:1/schema"),
        (SCHEMA, "false", "Unsatisfiable schema"),
        (SCHEMA, "[" * 100_000, "recursion"),
        (SCHEMA, '{"anyOf":[' * 300 + "{}" + "]}" * 300, "recursion limit"),
        (REGEX, "(", "unclosed group"),
        (REGEX, "(?=x)y", "look-around"),
        (LARK, "start: nowhere", 'unknown name: "nowhere"'),
        (LARK, "", "Empty grammar"),
    ],
)
def test_grammars_that_cannot_be_are_refused(
    compiler: GrammarCompiler, kind: GrammarKind, text: str, reason: str
) -> None:
    """The error names the field and has llguidance's reason in one line; the next grammar is compiled as ever."""
    with pytest.raises(InvalidArgument) as refused:
        state(compiler, Grammar(kind, text))
    assert refused.value.message.startswith(f"grammar.{kind} cannot be used: ")
    assert reason in refused.value.message
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 600
    assert refused.value.where["field"] == f"grammar.{kind}"
    assert now(state(compiler, Grammar(OBJECT)), 0)


def test_grammars_that_grow_without_bounds_are_refused(compiler: GrammarCompiler) -> None:
    """Small texts of large grammars end in a refusal within a second, not in memory."""
    choices = [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(5)]} for i in range(12)]
    with pytest.raises(InvalidArgument, match="schema too large"):
        state(compiler, Grammar(SCHEMA, json.dumps({"allOf": choices})))
    with pytest.raises(InvalidArgument, match="at most 262144 are taken"):
        state(compiler, Grammar(REGEX, "a" * 262145))


# --- tokenizers


def write_tokenizer(folder: Path, size: int) -> GrammarCompiler:
    """Write a tokenizer of the bytes a to z and one special token; return a compiler for logits of `size` columns."""
    vocab = {chr(97 + index): index for index in range(26)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    backend.enable_truncation(2)
    backend.enable_padding(length=5)
    backend.save(str(folder / "tokenizer.json"))
    return GrammarCompiler(folder, {}, size)


@pytest.mark.parametrize("size", [27, 28, 40, 64])
def test_logits_beyond_the_tokenizer_are_never_legal(tmp_path: Path, size: int) -> None:
    """In padded vocabularies, columns without a token are masked even where every text is allowed."""
    grammar = state(write_tokenizer(tmp_path, size), Grammar(REGEX, "(?s:.*)"), frozenset({26}))
    mask = grammar.allowed((), 0, 1)
    assert mask.shape == (1, size)
    assert legal(mask[0]) == set(range(27))


def test_tokens_beyond_the_logits_are_never_chosen(tmp_path: Path) -> None:
    """Tokens that the model does not have are left out; where nothing is left, the step is refused."""
    compiler = write_tokenizer(tmp_path, 20)
    assert now(state(compiler, Grammar(REGEX, "[a-z]{3}"), frozenset({0})), 0) == set(range(1, 20))
    with pytest.raises(InvalidArgument, match="no token of the model may follow the first 0 under the grammar"):
        now(state(compiler, Grammar(REGEX, "z"), frozenset({0})), 0)


def test_a_checkpoint_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    """A missing or broken tokenizer.json is refused by name; as soon as it is there it is used."""
    compiler = GrammarCompiler(tmp_path, {}, VOCAB)
    with pytest.raises(FailedPrecondition, match=r"tokenizer.json does not exist.*put the model's tokenizer.json"):
        state(compiler, Grammar(OBJECT))
    for text in ("", "[]", "{}", '{"model": {"vocab": 3}, "added_tokens": []}', '{"model":{"vocab":{"a":0}}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(FailedPrecondition, match="cannot be used for grammars"):
            state(compiler, Grammar(OBJECT))
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    assert now(state(compiler, Grammar(OBJECT)), 0)
    # Read once.
    (tmp_path / "tokenizer.json").unlink()
    assert now(state(compiler, Grammar(OBJECT)), 0)
