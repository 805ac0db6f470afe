"""The scanner against Python's json: it agrees on what is JSON, and stops at the first character that can't be."""

import json
import random

import pytest

from coordinator.text.parsers.json_scanner import JsonScanner


def scan(text: str) -> tuple[int, bool]:
    """How many characters were accepted, and whether they are whole."""
    scanner = JsonScanner()
    position = 0
    opened = False
    while position < len(text):
        end = scanner.step(text, position)
        if end < 0:
            return position, False
        position = end
        opened = opened or scanner.depth > 0
    return position, opened and scanner.depth == 0


def is_json(text: str) -> bool:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def random_value(rng: random.Random, nesting: int = 3) -> object:
    kind = rng.randint(0, 8 if nesting else 5)
    if kind > 6:
        return [random_value(rng, nesting - 1) for _ in range(rng.randint(0, 3))]
    if kind > 5:
        return {random_text(rng): random_value(rng, nesting - 1) for _ in range(rng.randint(0, 3))}
    return [None, True, False, rng.randint(-99, 99), rng.uniform(-1e9, 1e-9), random_text(rng)][kind]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices('ab{}[],:"\\\n/\u00fc\U0001f389<>', k=rng.randint(0, 6)))


def test_all_json_is_accepted() -> None:
    """Whatever Python writes as JSON is followed to its end."""
    rng = random.Random(1)
    for _ in range(400):
        text = json.dumps([random_value(rng)], ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
        assert scan(text) == (len(text), True), text


def test_no_other_text_is_accepted() -> None:
    """Text with one character changed is accepted exactly where Python reads it as JSON."""
    rng = random.Random(2)
    broken = 0
    for _ in range(3000):
        text = json.dumps({"k": random_value(rng, 2)})
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", *'{}[],:"\\0-+.eE1u tn\n']) + text[at + rng.randint(0, 1) :]
        accepted, whole = scan(text)
        assert whole == is_json(text), text
        broken += not whole
    assert broken > 1000


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("[01]", 2),
        ("[1.]", 3),
        ("[.5]", 1),
        ("[+1]", 1),
        ("[-]", 2),
        ("[1e]", 3),
        ("[nul]", 4),
        ("[NaN]", 1),
        ("{a}", 1),
        ("{'a'}", 1),
        ('{"a" 1}', 5),
        ('{"a": 1,}', 8),
        ("[1,]", 3),
        ("[1}", 2),
        ('["\n"]', 2),
        ('["\\x"]', 3),
        ('["\\u12g4"]', 6),
        ("{}{", 2),
        ("[] ,", 3),
    ],
)
def test_the_mistake_is_known_at_once(text: str, accepted: int) -> None:
    """The scanner stops at the first character that cannot be part of JSON."""
    assert scan(text) == (accepted, False)


def test_nesting_has_no_limit() -> None:
    """A hundred thousand open arrays are no more trouble than one."""
    text = "[" * 100_000 + "]" * 100_000
    assert scan(text) == (len(text), True)
