"""The page of the command line is what the programs say of themselves."""

from __future__ import annotations

import re

from docs.reference import PAGE, page


def test_the_page_is_current() -> None:
    """`python docs/reference.py` would write what is there."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run python docs/reference.py and commit what it writes"


def test_every_command_and_flag_is_on_it() -> None:
    """Commands as headings; a flag that several commands take in the same form stands once."""
    text = page()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[:4] == ["flashsplit", "flashsplit serve", "flashsplit generate", "flashsplit chat"]
    assert {"flashsplit cache prune", "flashsplit bench decode", "flashsplit-worker"} < set(headings)
    assert len(headings) == len(set(headings))
    assert text.count("`--target-devices ENTRY[,ENTRY…]`") == 1
    serve = text.partition("## flashsplit serve\n")[2].partition("\n## ")[0]
    assert "[placement options](#placement-options)" in serve
    assert "`--port INTEGER RANGE`: The port of HTTP; 0 takes a free one. [default: 8000" in serve
