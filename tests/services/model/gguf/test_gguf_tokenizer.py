"""Tokenizers out of a GGUF file's metadata, against those that the metadata was made of."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, strategies as st
from tokenizers import models, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from services.errors import DataLoss, FlashsplitError, Unimplemented
from services.model.gguf import tokenizer as gguf_tokenizer
from services.model.text_files import GENERATION_CONFIG, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, find_text_file
from tests.reference.gguf_files import add_tokenizer

DEMO = Path(__file__).resolve().parents[4] / "deploy" / "demo" / "target"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PIECES = (
    *(*SPECIAL, "<think>", " the", "The ", "don't", "WE'LL", "12345", "\r\n", "\n\n", "  ", "\t", "...", "a_b", "x=1;"),
    *("größe", "ｈ", "é", "e\u0301", "नमस्ते", "你好", "🙂"),
)
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES)).map("".join))


@functools.cache
def trained(kind: type[Any]) -> tokenizers.Tokenizer:
    """A tokenizer of Qwen's kind, its few merges trained on a little text."""
    backend = kind(vocab={}, merges=[]).backend_tokenizer
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer, learner.normalizer = backend.pre_tokenizer, backend.normalizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator([Path(__file__).read_text(encoding="utf-8"), "größer नमस्ते 你好 12 123"] * 3, trainer)
    learnt = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learnt["merges"]]
    made: tokenizers.Tokenizer = kind(vocab=learnt["vocab"], merges=merges).backend_tokenizer
    made.add_special_tokens(SPECIAL)
    made.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    return made


def write(path: Path, tokenizer: tokenizers.Tokenizer, pre: str, settings: dict[str, Any] | None = None) -> Path:
    """Write a GGUF file that has nothing but a tokenizer. Returns its path."""
    folder = path.with_suffix("")
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    writer = gguf.GGUFWriter(path, "qwen3")
    add_tokenizer(writer, folder, tokenizer.get_vocab_size() + 5, pre)
    writer.add_eos_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")
    writer.add_float32("general.sampling.temp", 0.6)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KINDS = {"qwen2": Qwen2Tokenizer, "qwen35": Qwen3_5Tokenizer, "starcoder": None}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]]:
    """By the name of the rule the original tokenizer, and the one that is read out of a file."""
    folder = tmp_path_factory.mktemp("tokenizers")
    found = {}
    for pre, kind in KINDS.items():
        original = trained(kind) if kind else tokenizers.Tokenizer.from_file(str(DEMO / TOKENIZER))
        file = find_text_file(write(folder / f"{pre}.gguf", original, pre), TOKENIZER)
        assert file is not None
        found[pre] = original, tokenizers.Tokenizer.from_buffer(file.content)
    return found


@pytest.mark.parametrize("pre", KINDS)
@given(text=TEXTS)
def test_text_is_cut_as_by_the_original(
    pairs: dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]], pre: str, text: str
) -> None:
    original, made = pairs[pre]
    ids = original.encode(text).ids
    assert made.encode(text).ids == ids
    for skip in (True, False):
        assert made.decode(ids, skip_special_tokens=skip) == original.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("pre", KINDS)
def test_the_vocabulary_is_the_originals(
    pairs: dict[str, tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]], pre: str
) -> None:
    original, made = pairs[pre]
    assert made.get_vocab(with_added_tokens=True) == original.get_vocab(with_added_tokens=True)
    special = {number for number, token in original.get_added_tokens_decoder().items() if token.special}
    assert {number for number, token in made.get_added_tokens_decoder().items() if token.special} == special


def test_rules_are_those_of_transformers() -> None:
    compared = 0
    for name, rule in gguf_tokenizer._RULES.items():
        if name in GGUF_PRE_TOKENIZER_SPLITS:
            assert rule.splitters[0]["pattern"]["Regex"] == GGUF_PRE_TOKENIZER_SPLITS[name], name
            compared += 1
    assert compared >= 6


def test_the_first_token_is_added_where_the_file_asks(tmp_path: Path) -> None:
    backend = trained(Qwen2Tokenizer)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    backend.save(str(tmp_path / "tokenizer.json"))
    add_tokenizer(writer, tmp_path, 0, "llama-bpe")
    (tmp_path / "tokenizer.json").unlink()
    writer.add_bos_token_id(backend.token_to_id("<|im_start|>"))
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = find_text_file(path, TOKENIZER)
    assert file is not None
    made = tokenizers.Tokenizer.from_buffer(file.content)
    assert made.encode("x").tokens == ["<|im_start|>", "x"]
    assert made.encode("x", add_special_tokens=False).tokens == ["x"]


def test_settings_beside_a_file_win_key_by_key(tmp_path: Path) -> None:
    settings = {"chat_template": "{{ messages }}"}
    path = write(tmp_path / "model.gguf", trained(Qwen2Tokenizer), "qwen2", settings)

    def settings_of(name: str) -> dict[str, Any]:
        file = find_text_file(path, name)
        assert file is not None
        return file.json_object()

    assert settings_of(TOKENIZER_CONFIG) == {
        "eos_token": "<|im_end|>",
        "chat_template": [
            {"name": "default", "template": "{{ messages }}"},
            {"name": "tool_use", "template": "{{ tools }}"},
        ],
    }
    ends = [trained(Qwen2Tokenizer).token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert settings_of(GENERATION_CONFIG) == {"eos_token_id": ends, "temperature": 0.6, "top_k": 20}
    assert find_text_file(path, TEMPLATE) is None

    (tmp_path / GENERATION_CONFIG).write_text('{"temperature": 0.5}')
    (tmp_path / TOKENIZER_CONFIG).write_text('{"eos_token": "<|endoftext|>"}')
    (tmp_path / TEMPLATE).write_text("beside")
    (tmp_path / TOKENIZER).write_text("{}")
    assert settings_of(GENERATION_CONFIG) == {"eos_token_id": ends, "temperature": 0.5, "top_k": 20}
    assert settings_of(TOKENIZER_CONFIG)["eos_token"] == "<|endoftext|>"
    assert "chat_template" in settings_of(TOKENIZER_CONFIG)
    assert settings_of(TOKENIZER) == {}
    template = find_text_file(path, TEMPLATE)
    assert template is not None
    assert template.content == b"beside"


@pytest.mark.parametrize(
    ("add", "error", "reason"),
    [
        (lambda writer: writer.add_tokenizer_model("t5"), Unimplemented, "put the model's tokenizer.json beside it"),
        (
            lambda writer: (writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("poro-chat")),
            Unimplemented,
            "tokenizer.ggml.pre 'poro-chat' is not supported: known are .*qwen2",
        ),
        (
            lambda writer: (
                writer.add_tokenizer_model("gpt2"),
                writer.add_tokenizer_pre("qwen2"),
                writer.add_token_list(["a", "b"]),
                writer.add_token_types([1]),
            ),
            DataLoss,
            "tokenizer.ggml.token_type has 1 entries for 2 tokens",
        ),
        (
            lambda writer: (
                writer.add_tokenizer_model("gpt2"),
                writer.add_tokenizer_pre("qwen2"),
                writer.add_token_list(["a", "b"]),
                writer.add_token_merges(["ab"]),
            ),
            DataLoss,
            "merges has 'ab'; it must be two tokens",
        ),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, add: Any, error: type[FlashsplitError], reason: str) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(error, match=reason):
        find_text_file(path, TOKENIZER)
