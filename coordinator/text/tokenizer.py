"""Text to token ids and back, for one checkpoint.

Owns the loaded tokenizer and, for each stream, the last few ids that its next text depends on.
Reads only a checkpoint's text-side files. Knows nothing of chats, stop strings, requests or of
the model that makes the ids.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from services.errors import InvalidArgument
from services.model.checkpoint_files import CONFIG
from services.model.text_files import (
    GENERATION_CONFIG,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TextFile,
    find_text_file,
)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A stream re-decodes at most this many ids, then goes on from the last few. The few must hold any
# unfinished character (at most three bytes, so three ids) and some text before it.
_WINDOW_LIMIT = 32
_WINDOW_KEPT = 8
# A text that may be too long is first counted in pieces of so many characters.
_PIECE = 32 << 10
# Where a piece is cut a token may be cut in two, so a count of pieces proves too long a text by this much more only.
_CERTAIN = 1.25
# From so many ids on, decoding takes long enough for other threads to be let run meanwhile.
_MANY_IDS = 4096

# One text is tokenised at a time, which the library cannot spread over its threads; it would warn of them at each fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizerError(InvalidArgument):
    """A checkpoint's tokenizer files, a text or an id that cannot be used."""


class TextTooLong(InvalidArgument):
    """A text has more tokens than are wanted. token_count: how many it has, or, where is_lower_bound, at least has."""

    def __init__(self, token_count: int, most: int, *, is_lower_bound: bool) -> None:
        least = "at least " if is_lower_bound else ""
        super().__init__(f"the text has {least}{token_count} tokens; at most {most} are taken")
        self.token_count, self.is_lower_bound = token_count, is_lower_bound


class Tokenizer:
    """A checkpoint's tokenizer; safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A saved tokenizer may carry the cut and the padding of its training run; a prompt must
        # get neither.
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._backend = backend
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._special_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._byte_ids = frozenset(token_id for token, token_id in vocabulary.items() if _is_byte_token(token))
        self._longest = max(map(len, vocabulary), default=1)

    @classmethod
    def from_checkpoint(cls, model: Path) -> Self | None:
        """Load the checkpoint's `tokenizer.json`, or return None when there is none.

        model: a directory or a GGUF file. Raises TokenizerError when the file cannot be read or is not a tokenizer, and
        what `find_text_file` raises.
        """
        file = find_text_file(model, TOKENIZER)
        return None if file is None else cls.from_file(file)

    @classmethod
    def from_file(cls, file: TextFile) -> Self:
        """Load a `tokenizer.json`. Raises TokenizerError when it is not a tokenizer."""
        try:
            backend = tokenizers.Tokenizer.from_buffer(file.content)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"{file.origin}: not a usable tokenizer ({error}); expected a file written by the tokenizers library"
            ) from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id, which counts any gaps between ids."""
        return self._vocab_size

    def token_id(self, token: str) -> int | None:
        """Return the id of exactly this token, or None when the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Return the text's ids; special tokens spelled out in the text become their ids.

        most: how many ids are wanted at most. Other threads run while a text is tokenised.

        Raises TextTooLong when there are more, without tokenising all of a text that is much longer; TokenizerError
        when the text holds a lone surrogate, which JSON can spell but UTF-8 cannot.
        """
        if most is not None:
            self.check_length(len(text), most)
            self._check_pieces(text, most)
        encoding = self._encoding(text, add_special_tokens=add_special_tokens)
        if most is not None and len(encoding) > most:
            raise TextTooLong(len(encoding), most, is_lower_bound=False)
        return encoding.ids

    def check_length(self, characters: int, most: int) -> None:
        """Raise TextTooLong for so many characters that `most` tokens cannot stand for them.

        A token stands for no more characters than it is written with. Those that stand for any unknown word, or take
        all blanks around them, do not count: a text of such length is no prompt.
        """
        least = characters // self._longest
        if least > most:
            raise TextTooLong(least, most, is_lower_bound=True)

    def _check_pieces(self, text: str, most: int) -> None:
        """Raise TextTooLong for a text that surely has more than `most` tokens; where they are few, it may have."""
        if len(text) <= 2 * most + _PIECE:
            return
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._encoding(text[start : start + _PIECE], add_special_tokens=False))
            if count > most * _CERTAIN:
                raise TextTooLong(count, most, is_lower_bound=True)

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the text's ids, and the half-open range of characters that each one stands for.

        Tokens that share a character, as bytes of it, have overlapping ranges. Special tokens are not added.

        Raises TokenizerError as `encode` does.
        """
        encoding = self._encoding(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            # The library's `encode` would keep the interpreter from all other threads.
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeError) as error:
            raise TokenizerError(
                f"text: {text[:40]!r} cannot be written as UTF-8; expected Unicode text without lone surrogates"
            ) from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the ids' text; bytes that are not UTF-8 show as U+FFFD, unknown ids as nothing.

        Raises TokenizerError when an id is negative or not an integer.
        """
        try:
            if len(ids) > _MANY_IDS:
                return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise _bad_ids(ids, error) from error

    def decode_known(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the ids' text as `decode`, but raise InvalidArgument naming the first id that stands for no token."""
        for index, token_id in enumerate(ids):
            if 0 <= token_id < 2**32 and self._backend.id_to_token(token_id) is None:
                raise InvalidArgument(
                    f"token {token_id} at index {index} is unknown: this model's tokenizer has "
                    f"{self._backend.get_vocab_size(with_added_tokens=True)} tokens"
                )
        return self.decode(ids, skip_special_tokens=skip_special_tokens)

    def _textual(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """Return the ids that `decode` would look at at all."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        try:
            return [i for i in ids if i not in hidden and self._backend.id_to_token(i) is not None]
        except (TypeError, OverflowError) as error:
            raise _bad_ids(ids, error) from error


class IncrementalDecoder:
    """Turns a growing list of ids into text that never has to be taken back.

    All pieces together equal `Tokenizer.decode` of all ids, and the work per id does not grow with
    the length of the stream. Text is held back while it ends in what may be an unfinished
    character. A run of byte-fallback tokens (`<0xE4>`) is held back until the run ends, because
    one bad byte anywhere in a run turns all of the run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._byte_run: list[int] = []
        self._shown = 0  # how many characters of the window's text were returned

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain, which may be empty.

        Raises TokenizerError when an id is negative or not an integer; nothing was taken.
        """
        textual = self._tokenizer._textual(ids, self._skip_special_tokens)
        settled = len(textual)
        while settled and textual[settled - 1] in self._tokenizer._byte_ids:
            settled -= 1
        if not settled:
            self._byte_run += textual
            return ""
        self._window += self._byte_run + textual[:settled]
        self._byte_run = textual[settled:]
        text = self._decode(self._window)
        # However many bytes of a character are there, they show as one U+FFFD. It may also be a
        # genuine one; the next id tells.
        certain = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        if len(self._window) > _WINDOW_LIMIT:
            self._shorten(pending=text[self._shown :])
        return piece

    def finish(self) -> str:
        """Return the text still held back and start over, ready for another stream."""
        piece = self._decode(self._window + self._byte_run)[self._shown :]
        self._window, self._byte_run, self._shown = [], [], 0
        return piece

    def _shorten(self, pending: str) -> None:
        window = self._window[-_WINDOW_KEPT:]
        text = self._decode(window)
        # Decoders treat the start of a text apart (a leading space goes), so some text that was
        # already shown must stay in front; otherwise a later id gets another try.
        if len(text) > len(pending) and text.endswith(pending):
            self._window = window
            self._shown = len(text) - len(pending)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def stop_token_ids(model: Path, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Return every id with which the checkpoint says that a text ends, each once.

    They come from `generation_config.json`, `config.json` (its `text_config` included) and
    the `eos_token` of `tokenizer_config.json`; any of the files may be missing. The checkpoint's
    own tokenizer is loaded to look the last one up unless it is passed in.

    Raises TokenizerError when one of the files is corrupt or holds an `eos_token_id` that is no id.
    """
    ids: list[int] = []
    for name in (GENERATION_CONFIG, CONFIG):
        config = read_settings(model, name)
        ids += _eos_ids(config, str(model / name))
        text_config = config.get("text_config")
        if isinstance(text_config, dict):
            ids += _eos_ids(text_config, f"{model / name}: text_config")
    eos_token = special_tokens(model).get("eos_token")
    if eos_token is not None:
        tokenizer = tokenizer or Tokenizer.from_checkpoint(model)
        eos_id = tokenizer.token_id(eos_token) if tokenizer else None
        ids += [] if eos_id is None else [eos_id]
    return tuple(dict.fromkeys(ids))


def special_tokens(model: Path) -> dict[str, str]:
    """Return the text of the checkpoint's named special tokens, such as `bos_token`.

    Raises TokenizerError when one of the checkpoint's tokenizer settings files is corrupt.
    """
    config = read_settings(model, TOKENIZER_CONFIG)
    sources = [config]
    if "added_tokens_decoder" not in config:
        # Checkpoints older than that field keep the tokens in a file of their own.
        sources.insert(0, read_settings(model, SPECIAL_TOKENS))
    tokens: dict[str, str] = {}
    for source in sources:
        for name, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
    return tokens


def read_settings(model: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's settings file, or an empty one when there is no such file.

    Raises TokenizerError when the file cannot be read, is not JSON or does not hold an object.
    """
    try:
        file = find_text_file(model, name)
        return {} if file is None else file.json_object()
    except InvalidArgument as error:
        raise TokenizerError(error.message) from error


def _eos_ids(config: dict[str, object], where: str) -> list[int]:
    value = config.get("eos_token_id")
    entries = [] if value is None else value if isinstance(value, list) else [value]
    # bool is an int to Python, but true is no token id.
    ids = [i for i in entries if isinstance(i, int) and not isinstance(i, bool) and i >= 0]
    if len(ids) < len(entries):
        raise TokenizerError(f"{where}: eos_token_id is {value!r}; expected a token id, a list of them or null")
    return ids


def _bad_ids(ids: Sequence[int], error: Exception) -> TokenizerError:
    wrong = [i for i in ids if not isinstance(i, int) or not 0 <= i < 2**32]
    shown = ", ".join(repr(i)[:40] for i in wrong[:10])
    return TokenizerError(f"token ids: {shown or error} given; expected non-negative integers")


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
