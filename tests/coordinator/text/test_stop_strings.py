"""Stop strings against their plain definition: join all text, cut where the earliest one starts."""

import random
import time
from collections.abc import Sequence

import pytest

from coordinator.text.stop_strings import StopStringError, StopStrings


def naive(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    starts = [start for start in (text.find(stop) for stop in stops) if start >= 0]
    return (text[: min(starts)], True) if starts else (text, False)


def stream(chunks: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    shown = "".join(matcher.push(chunk)[0] for chunk in chunks) + matcher.finish()
    return shown, matcher.stopped


def split(text: str, rng: random.Random) -> list[str]:
    chunks = []
    while text:
        size = rng.randint(0, 5)
        chunks.append(text[:size])
        text = text[size:]
    return chunks


@pytest.mark.parametrize("alphabet", ["ab", "abc", "a\n😀"])
def test_any_split_gives_the_naive_cut(alphabet: str) -> None:
    """However text is cut into pieces, it ends where a search in the whole text finds the first stop string."""
    rng = random.Random(alphabet)
    for _ in range(3000):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 25)))
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(0, 4))]
        assert stream(split(text, rng), stops) == naive(text, stops), (text, stops)


def test_nothing_is_held_that_cannot_begin_a_stop_string() -> None:
    """Text that cannot be part of a stop string is shown at once."""
    rng = random.Random(1)
    for _ in range(1000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        matcher = StopStrings(stops)
        seen = shown = ""
        for char in rng.choices("ab", k=20):
            seen += char
            piece, stopped = matcher.push(char)
            shown += piece
            if stopped or naive(seen, stops)[1]:
                break
            held = seen[len(shown) :]
            tails = [seen[start:] for start in range(len(seen))]
            longest = next((t for t in tails if any(s.startswith(t) for s in stops)), "")
            assert held == longest


def test_text_before_the_match_is_shown_and_all_else_is_dropped() -> None:
    """Nothing of a stop string or behind it is shown."""
    matcher = StopStrings(["\n\nUser:", "END"])
    assert matcher.push("Hello\n") == ("Hello", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("ed E") == ("\n\nUsed ", False)
    assert matcher.push("ND and more") == ("", True)
    assert matcher.push("still more") == ("", True)
    assert matcher.finish() == ""
    assert matcher.stopped


def test_finish_gives_back_what_was_held() -> None:
    """The beginning of a stop string that came to nothing is text."""
    matcher = StopStrings(["stop"])
    assert matcher.push("do not sto") == ("do not ", False)
    assert matcher.finish() == "sto"
    assert not matcher.stopped
    assert matcher.push("p") == ("p", False)


def test_an_overlapping_match_waits_for_the_earlier_one() -> None:
    """The stop string that begins first wins, as soon as it is known whether it is whole."""
    matcher = StopStrings(["bc", "abcd"])
    assert matcher.push("xabc") == ("x", False)
    assert matcher.push("d") == ("", True)

    matcher = StopStrings(["bc", "abcd"])
    assert matcher.push("xabc") == ("x", False)
    assert matcher.push("e") == ("a", True)

    matcher = StopStrings(["bc", "abcd"])
    assert matcher.push("xabc") == ("x", False)
    assert matcher.finish() == "a"
    assert matcher.stopped


def test_without_stop_strings_text_passes_through() -> None:
    """Nothing is held back then."""
    matcher = StopStrings([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.finish() == ""


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], r"stop\[0\]: '' given; expected a non-empty string"),
        (["a", 3], r"stop\[1\]: 3 given; expected a non-empty string"),
        ("END", r"stop: 'END' is a string; expected a list of strings"),
    ],
)
def test_useless_stop_strings_are_refused(stops: Sequence[str], message: str) -> None:
    """Empty ones, ones that are no text and a bare text are refused by name."""
    with pytest.raises(StopStringError, match=f"^{message}$"):
        StopStrings(stops)


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    """The time for a character doesn't depend on the length of the stop strings."""
    # Every character extends a partial match; comparing tails would take minutes here.
    matcher = StopStrings(["a" * 50_000 + "b"])
    begun = time.process_time()
    for _ in range(200):
        assert matcher.push("a" * 500)[1] is False
    assert matcher.finish() == "a" * 50_000
    assert time.process_time() - begun < 5
