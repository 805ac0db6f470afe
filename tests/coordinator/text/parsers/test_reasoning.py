"""The split between thinking and content, at every cut of the text."""

import pytest

from coordinator.text.parsers.collected import collect
from coordinator.text.parsers.events import ContentDelta, ReasoningDelta
from coordinator.text.parsers.reasoning import Opening, ReasoningParser, opening_of
from tests.coordinator.text.parsers.reading import read

CASES = [
    # text, whether the prompt opened the tag, reasoning, content
    ("", False, "", ""),
    ("", True, "", ""),
    ("Hi.", False, "", "Hi."),
    ("\n\n Hi.\n", False, "", "\n\n Hi.\n"),
    ("<think>\nHm.\n</think>\n\nHi.", False, "Hm.", "Hi."),
    ("\n<think>\nHm.\n</think>\n\nHi.", False, "Hm.", "Hi."),
    ("Hm.\n</think>\n\nHi.", True, "Hm.", "Hi."),
    ("<think>\n\n</think>\n\nHi.", False, "", "Hi."),
    ("\n</think>\n\nHi.", True, "", "Hi."),
    ("<think></think>", False, "", ""),
    ("<think>Hm.</think>Hi.", False, "Hm.", "Hi."),
    ("<think>\n a\n\n b \n\n</think>\n\n  Hi.\n", False, " a\n\n b ", "  Hi.\n"),
    ("<think>\nnever\nended\n", False, "never\nended\n", ""),
    ("never ended </thin", True, "never ended </thin", ""),
    ("</thin<</think>x", True, "</thin<", "x"),
    ("<think>a <think> b</think>c</think>d", False, "a <think> b", "c</think>d"),
    ("The tag <think> opens</think>.", False, "", "The tag <think> opens</think>."),
    ("<thinking>", False, "", "<thinking>"),
    ("<thin", False, "", "<thin"),
    ("<think>ü🎉</think>語", False, "ü🎉", "語"),
]


@pytest.mark.parametrize(("text", "inside", "reasoning", "content"), CASES)
def test_at_every_cut(text: str, inside: bool, reasoning: str, content: str) -> None:
    """Reasoning and content are the same wherever the text is cut."""
    for pieces in [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]:
        found = collect(read(ReasoningParser(inside=inside), pieces))
        assert (found.reasoning, found.content) == (reasoning, content), pieces


def test_all_is_content_when_switched_off() -> None:
    """A model that doesn't think writes tags as ordinary text."""
    text = "<think>\nHm.\n</think>\n\nHi."
    assert read(ReasoningParser(enabled=False), list(text)) == [ContentDelta(text)]
    assert read(ReasoningParser(enabled=False, inside=True), list(text)) == [ContentDelta(text)]


def test_only_what_may_be_a_tag_is_held_back() -> None:
    """All other text comes at once."""
    parser = ReasoningParser()
    assert parser.push("<think>\nab\n") == [ReasoningDelta("ab")]
    assert parser.push("c</thi") == [ReasoningDelta("\nc")]
    assert parser.push("s") == [ReasoningDelta("</this")]
    assert parser.push("</think>\n") == []
    assert parser.push("\nx <think>") == [ContentDelta("x <think>")]
    assert parser.finish() == []


USER = "<|im_start|>user\nWhat does <think> do?<|im_end|>\n"


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        (USER + "<|im_start|>assistant\n", Opening.UNDECIDED),
        (USER + "<|im_start|>assistant\n<think>\n", Opening.INSIDE),
        (USER + "<|im_start|>assistant\n<think>\n\n</think>\n\n", Opening.CLOSED),
        (USER + "<|im_start|>assistant\n<think>\nLet me see, </thin", Opening.INSIDE),
        (USER + "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nIt", Opening.CLOSED),
        ("<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes<|im_end|>\n" + USER, Opening.UNDECIDED),
        ("<think>\n", Opening.INSIDE),
        ("", Opening.UNDECIDED),
    ],
)
def test_the_prompt_tells_how_thinking_is_left(prompt: str, opening: Opening) -> None:
    """The last turn of a prompt says whether thinking is open, closed or up to the model."""
    assert opening_of(prompt) is opening
    assert opening_of(prompt[-60:]) is opening


def test_another_familys_turns() -> None:
    """Tags in front of the last turn belong to the history."""
    prompt = "[user] <think>? [assistant]"
    assert opening_of(prompt) is Opening.INSIDE
    assert opening_of(prompt, turn_tokens=["[assistant]"]) is Opening.UNDECIDED
