"""The tokenizer over small ones made here, and streams of every split against whole decodes."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from coordinator.text.tokenizer import (
    IncrementalDecoder,
    TextTooLong,
    Tokenizer,
    TokenizerError,
    special_tokens,
    stop_token_ids,
)
from tests.coordinator.text.other_threads import turns_of_another_thread

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "héllo wörld, naïve café — “quoted”",
    "今天天气很好，我们去公园吧。こんにちは世界",
    "emoji 😀😃 family 👩\u200d👩\u200d👧 flag 🇩🇪 done",
    "a genuine \ufffd sign, and two \ufffd\ufffd together",
]
UNSEEN = "Ωmega ≠ 한국어 🦜🦜 \ufffd\ufffd\ufffd end \ufffd"


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.add_tokens(["<tool>", " spaced token "])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzT,.世", "▁t", "▁th", "▁the", "he", "\ufffd"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def word_piece() -> tokenizers.Tokenizer:
    pieces = [
        "[UNK]",
        "[SEP]",
        "the",
        "fox",
        "##es",
        "##,",
        ",",
        ".",
        "n't",
        "世",
        "##界",
        "\ufffd",
    ]
    backend = tokenizers.Tokenizer(
        models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[SEP]"])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    backend = byte_fallback()
    backend.decoder = decoders.Metaspace()
    return backend


def suffixed() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "a", "b</w>", "c</w>", "\ufffd", "\ufffd</w>"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.BPEDecoder("</w>")
    return backend


def undecoded() -> tokenizers.Tokenizer:
    backend = byte_fallback()
    backend.decoder = None
    return backend


KINDS = [byte_level, byte_fallback, word_piece, metaspace, suffixed, undecoded]


@pytest.fixture(scope="module")
def level() -> Tokenizer:
    return Tokenizer(byte_level())


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    return Tokenizer(byte_fallback())


def write_json(directory: Path, **files: object) -> None:
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def stream(decoder: IncrementalDecoder, ids: Sequence[int], rng: random.Random) -> str:
    text, at = "", 0
    while at < len(ids):
        size = rng.choice([0, 1, 1, 1, 2, 3, 7])
        text += decoder.push(ids[at : at + size])
        at += size
    return text + decoder.finish()


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_random_ids_stream_as_they_decode(kind, skip: bool) -> None:
    """The pieces of any ids add up to their text, unknown and special ids included."""
    tokenizer = Tokenizer(kind())
    rng = random.Random(7)
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    few = rng.sample(range(tokenizer.vocab_size), 4)
    for _ in range(300):
        # Ids past the vocabulary come from models with padded embeddings.
        pool = rng.choice([range(tokenizer.vocab_size + 2), few])
        ids = rng.choices(pool, k=rng.randint(0, 120))
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert stream(decoder, ids, rng) == whole, ids


@pytest.mark.parametrize("kind", [byte_level, byte_fallback], ids=lambda kind: kind.__name__)
def test_random_bytes_stream_as_they_decode(kind) -> None:
    """The pieces of any bytes add up to their text, whether they are UTF-8 or not."""
    backend = kind()
    tokenizer = Tokenizer(backend)
    units = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = units if kind is byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    pool = [backend.token_to_id(name) for name in names]
    rng = random.Random(3)
    for _ in range(300):
        ids = rng.choices(pool, k=rng.randint(0, 100))
        assert stream(IncrementalDecoder(tokenizer), ids, rng) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", [*LINES, UNSEEN, " two  leading spaces", "", "\n\n"])
@pytest.mark.parametrize("kind", [byte_level, byte_fallback], ids=lambda kind: kind.__name__)
def test_text_survives_encoding_and_streaming(kind, text: str) -> None:
    """A text comes back from its ids, whole and in pieces."""
    tokenizer = Tokenizer(kind())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    for seed in range(20):
        assert stream(IncrementalDecoder(tokenizer), ids, random.Random(seed)) == text


@pytest.mark.parametrize("text", [*LINES, UNSEEN])
def test_byte_level_text_is_shown_as_soon_as_it_is_whole(level: Tokenizer, text: str) -> None:
    """Only the bytes of an unfinished character are held back."""
    decoder = IncrementalDecoder(level)
    ids = level.encode(text, add_special_tokens=False)
    shown = ""
    for count in range(1, len(ids) + 1):
        shown += decoder.push([ids[count - 1]])
        so_far = level.decode(ids[:count])
        assert shown == so_far.removesuffix("\ufffd")


def test_byte_fallback_characters_wait_for_the_end_of_their_run(fallback: Tokenizer) -> None:
    """A run of byte tokens is shown when it ends, as one bad byte spoils all of it."""
    decoder = IncrementalDecoder(fallback)
    parrot = [fallback.token_id(f"<0x{byte:02X}>") for byte in "🦜".encode()]
    assert [decoder.push([i]) for i in [*parrot, fallback.token_id("a")]] == ["", "", "", "", "🦜a"]
    # The library replaces every byte of a run that holds a bad one, so none may be shown early.
    assert [decoder.push([i]) for i in [*parrot, parrot[0]]] == [""] * 5
    assert decoder.finish() == "\ufffd" * 5


def test_only_the_leading_space_of_the_whole_text_goes(fallback: Tokenizer) -> None:
    """A stream drops the space that the whole text would lose, and no other."""
    decoder = IncrementalDecoder(fallback)
    the, bare = fallback.token_id("▁the"), fallback.token_id("▁")
    assert [decoder.push([i]) for i in (bare, the, the)] == ["", " the", " the"]
    assert decoder.finish() == ""
    assert decoder.push([the]) == "the"


def test_blank_text_does_not_pass_for_a_leading_space() -> None:
    """Spaces in the middle of a text stay, however many there are."""
    backend = byte_fallback()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 99, 0)])
    tokenizer = Tokenizer(backend)
    the, bare = tokenizer.token_id("▁the"), tokenizer.token_id("▁")
    ids = [the, *[bare] * 60, the]
    assert tokenizer.decode(ids) == "the" + " " * 61 + "the"
    assert stream(IncrementalDecoder(tokenizer), ids, random.Random(0)) == tokenizer.decode(ids)


def test_skipped_special_tokens_do_not_split_a_character(level: Tokenizer) -> None:
    """A special token between the bytes of a character leaves the character whole."""
    ids = level.encode("🦜", add_special_tokens=False)
    end = level.token_id("<|end|>")
    mixed = [part for i in ids for part in (i, end)]
    decoder = IncrementalDecoder(level)
    assert "".join(decoder.push([i]) for i in mixed) == "🦜"
    shown = IncrementalDecoder(level, skip_special_tokens=False)
    assert shown.push([end]) + shown.finish() == "<|end|>"


@pytest.mark.parametrize("text", ["the quick fox ", "\ufffd", "🦜"])
@pytest.mark.parametrize("kind", [byte_level, byte_fallback], ids=lambda kind: kind.__name__)
def test_cost_per_token_does_not_grow(kind, text: str) -> None:
    """The work for a token is the same at the end of a long stream as at its beginning."""
    seen: list[int] = []

    class Counting(Tokenizer):
        def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            seen.append(len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting(kind())
    ids = tokenizer.encode(text * 500, add_special_tokens=False)
    decoder = IncrementalDecoder(tokenizer)
    shown = "".join(decoder.push([i]) for i in ids) + decoder.finish()
    assert shown == text * 500
    assert sum(seen) <= 45 * len(ids)


def test_a_refused_push_takes_nothing(level: Tokenizer) -> None:
    """A bad id is named, and the stream is as it was."""
    decoder = IncrementalDecoder(level)
    with pytest.raises(TokenizerError, match="^token ids: -1 given; expected non-negative"):
        decoder.push([level.token_id("a"), -1])
    assert decoder.finish() == ""
    with pytest.raises(TokenizerError, match="^token ids: 1099511627776 given"):
        level.decode([5, 1 << 40])


def test_a_checkpoint_loads_without_training_limits(tmp_path: Path) -> None:
    """The truncation and the padding of a training run don't apply to prompts."""
    assert Tokenizer.from_checkpoint(tmp_path) is None
    backend = byte_fallback()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_checkpoint(tmp_path)
    assert tokenizer is not None
    plain = tokenizer.encode("the the the the the", add_special_tokens=False)
    assert plain == [tokenizer.token_id("▁the")] * 5
    assert tokenizer.encode("the", add_special_tokens=True) == [1, plain[0]]
    assert tokenizer.decode([1, plain[0], 2]) == "the"
    assert tokenizer.decode([1, plain[0], 2], skip_special_tokens=False) == "<s> the</s>"
    assert tokenizer.token_id("absent") is None
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_vocab_size_covers_gaps_between_ids() -> None:
    """The size of the vocabulary is one more than the largest id."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 9}, merges=[]))
    assert Tokenizer(backend).vocab_size == 10


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff\xfe", b'{"model": {"type": "X"}}'])
def test_a_corrupt_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    """The refusal names the file."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a usable tokenizer \(.+\); exp"):
        Tokenizer.from_checkpoint(tmp_path)


def test_a_lone_surrogate_is_refused(level: Tokenizer) -> None:
    """JSON can spell half of a surrogate pair, UTF-8 cannot."""
    with pytest.raises(TokenizerError, match=r"^text: 'ab\\ud800' cannot be written as UTF-8"):
        level.encode("ab\ud800", add_special_tokens=False)


def test_stop_tokens_come_from_every_file_once(tmp_path: Path) -> None:
    """Each of the settings files may name ids that end a text."""
    assert stop_token_ids(tmp_path) == ()
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    write_json(
        tmp_path,
        generation_config={"eos_token_id": [7, 8]},
        config={"eos_token_id": 8, "text_config": {"eos_token_id": [9, 7]}},
        tokenizer_config={"eos_token": {"content": "</s>", "special": True}},
    )
    assert stop_token_ids(tmp_path) == (7, 8, 9, 2)
    write_json(tmp_path, generation_config={"eos_token_id": None}, config={"text_config": None})
    assert stop_token_ids(tmp_path, Tokenizer(byte_fallback())) == (2,)
    write_json(tmp_path, tokenizer_config={"eos_token": "absent"})
    assert stop_token_ids(tmp_path) == ()
    (tmp_path / "tokenizer.json").unlink()
    assert stop_token_ids(tmp_path) == ()


@pytest.mark.parametrize("value", ["2", True, [2, None], -1, 2.0, {"id": 2}])
def test_a_bad_stop_token_is_named(tmp_path: Path, value: object) -> None:
    """The refusal names the file and the value."""
    write_json(tmp_path, config={"text_config": {"eos_token_id": value}})
    with pytest.raises(TokenizerError, match=r"config\.json: text_config: eos_token_id is "):
        stop_token_ids(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_corrupt_settings_file_is_named(tmp_path: Path, content: bytes) -> None:
    """The refusal names the file."""
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"generation_config\.json (is not JSON|must hold a JSON object)"):
        stop_token_ids(tmp_path)


def test_special_tokens_in_both_forms_and_from_the_older_file(tmp_path: Path) -> None:
    """A special token may be a text or an object, and old checkpoints keep them in a file of their own."""
    assert special_tokens(tmp_path) == {}
    write_json(
        tmp_path,
        special_tokens_map={"bos_token": {"content": "<s>"}, "eos_token": "old"},
        tokenizer_config={"eos_token": "</s>", "pad_token": None, "add_bos_token": True},
    )
    assert special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
    write_json(tmp_path, tokenizer_config={"eos_token": "</s>", "added_tokens_decoder": {}})
    assert special_tokens(tmp_path) == {"eos_token": "</s>"}


# --- long texts


def test_a_text_with_too_many_tokens(level: Tokenizer) -> None:
    """A little too long it is counted, much too long it is not; at the limit it is tokenised as ever."""
    text = "".join(LINES) * 200
    whole = level.encode(text, add_special_tokens=False)
    assert level.encode(text, add_special_tokens=False, most=len(whole)) == whole
    with pytest.raises(TextTooLong) as counted:
        level.encode(text, add_special_tokens=False, most=len(whole) - 1)
    assert (counted.value.token_count, counted.value.is_lower_bound) == (len(whole), False)
    for long_text in (text * 40, "\n" * 1_000_000, "x" * 1_000_000):
        with pytest.raises(TextTooLong) as told:
            level.encode(long_text, add_special_tokens=False, most=1000)
        assert told.value.is_lower_bound
        assert 1000 < told.value.token_count <= len(level.encode(long_text, add_special_tokens=False))


def test_other_threads_run_while_a_text_is_tokenised(level: Tokenizer) -> None:
    """The library's way of tokenising that keeps the interpreter to itself would give another thread no turn."""
    text = "".join(LINES) * 2000
    ids = level.encode(text, add_special_tokens=False)
    assert turns_of_another_thread(lambda: level.encode(text, add_special_tokens=False)) > 20
    assert turns_of_another_thread(lambda: level.decode(ids)) > 20
