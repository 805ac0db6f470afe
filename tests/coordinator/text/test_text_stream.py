"""The text of an answer token by token: what may be shown when, and what ends it."""

from __future__ import annotations

from coordinator.text.text_stream import TextStream
from tests.coordinator.fakes import END, byte_tokenizer

TOKENIZER = byte_tokenizer()


def shown(stream: TextStream, text: str | bytes) -> list[tuple[str, bool]]:
    """What each byte's token brings."""
    return [stream.push(byte) for byte in (text.encode() if isinstance(text, str) else text)]


def test_each_token_brings_its_text() -> None:
    """Without stop strings text comes as soon as its characters are whole."""
    stream = TextStream(TOKENIZER, ())
    assert shown(stream, "aé") == [("a", False), ("", False), ("é", False)]
    assert stream.finish() == ("", False)
    assert (stream.text, stream.stop_string) == ("aé", None)


def test_special_tokens_have_no_text() -> None:
    """The end of a turn is not shown."""
    stream = TextStream(TOKENIZER, ())
    assert [stream.push(ord("a")), stream.push(END), stream.push(ord("b"))] == [("a", False), ("", False), ("b", False)]
    assert stream.text == "ab"


def test_an_unfinished_character_comes_at_the_end() -> None:
    """When nothing more can follow, half a character shows as U+FFFD."""
    stream = TextStream(TOKENIZER, ())
    assert shown(stream, b"a\xf0\x9f") == [("a", False), ("", False), ("", False)]
    assert stream.finish() == ("\N{REPLACEMENT CHARACTER}", False)
    assert stream.text == "a\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_ends_the_text_in_front_of_it() -> None:
    """The token that completes it says so, and the text is cut where the stop string begins."""
    stream = TextStream(TOKENIZER, ("lo!",))
    assert shown(stream, "hello!") == [("h", False), ("e", False), ("", False), ("l", False), ("", False), ("", True)]
    assert (stream.text, stream.stop_string) == ("hel", "lo!")


def test_a_stop_string_of_characters_of_several_tokens() -> None:
    """It is met in text, however many tokens a character takes."""
    stream = TextStream(TOKENIZER, ("é€",))
    assert [stopped for _, stopped in shown(stream, "xé€")] == [False] * 5 + [True]
    assert stream.text == "x"


def test_what_only_looked_like_a_stop_string_comes_at_the_end() -> None:
    """Text that was held back for it belongs to the answer."""
    stream = TextStream(TOKENIZER, ("abcd",))
    assert shown(stream, "xabc") == [("x", False), ("", False), ("", False), ("", False)]
    assert stream.finish() == ("abc", False)
    assert (stream.text, stream.stop_string) == ("xabc", None)


def test_a_stop_string_that_ends_with_the_answer() -> None:
    """One that waited for a longer stop string is met when the answer ends."""
    stream = TextStream(TOKENIZER, ("abcd", "bc"))
    assert not any(stopped for _, stopped in shown(stream, "abc"))
    assert stream.finish() == ("a", True)
    assert (stream.text, stream.stop_string) == ("a", "bc")


def test_without_a_tokenizer_there_is_no_text() -> None:
    """Tokens of such a checkpoint mean nothing here."""
    stream = TextStream(None, ())
    assert (stream.push(5), stream.finish(), stream.text) == (("", False), ("", False), None)
