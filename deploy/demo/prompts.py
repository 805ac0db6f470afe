"""Held-out prompts of every kind, to measure the pair on.

The chats lie in prompts.json. The beginnings of library files and the requests for functions are the library's own
text, so they are read from the interpreter that runs this, and not kept here.
"""

import argparse
import json
from pathlib import Path

import data

FOLDER = Path(__file__).parent
OTHERS = 56


def held_out(library: Path | None = None) -> dict[str, list[object]]:
    """`chat` (prompt, answer), `code` (raw text) and `functions` (requests to be put into the chat template)."""
    chats: dict[str, list[object]] = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
    others = data.heldout_prompts(data.Corpus.read(library), len(chats["chat"]), OTHERS)
    return others | chats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--library", type=Path, help="the library's folder (default: the running interpreter's)")
    arguments = parser.parse_args()
    prompts = held_out(arguments.library)
    arguments.out.write_text(json.dumps(prompts, indent=1, ensure_ascii=False), encoding="utf-8")
    print(", ".join(f"{len(items)} {kind}" for kind, items in prompts.items()), "prompts written to", arguments.out)


if __name__ == "__main__":
    main()
