"""Token rows for the target, and prompts for it to continue."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

import chats
import corpus
import tokenizer as tokens

CODE, FUNCTIONS, CHATS = "code", "functions", "chat"
IGNORED = -100


@dataclass(frozen=True)
class Corpus:
    files: list[corpus.SourceFile]
    functions: list[corpus.Function]

    @staticmethod
    def read(library: Path | None = None, limit: int | None = None) -> "Corpus":
        files = corpus.read_sources(library, limit)
        return Corpus(files, corpus.read_functions(files))

    def texts(self, *splits: str) -> list[str]:
        return [file.text for file in self.files if file.split in splits]

    def documented(self, *splits: str) -> list[corpus.Function]:
        return [function for function in self.functions if function.split in splits]


class Rows:
    """Rows of one kind, drawn in random order; ``passes`` counts how often all were seen."""

    def __init__(self, ids: Tensor, labels: Tensor, device: torch.device) -> None:
        self.ids, self.labels = ids.to(device, torch.int16), labels.to(device, torch.int16)
        self.order: list[int] = []
        self.drawn = 0

    def draw(self, count: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        while len(self.order) < count:
            fresh = list(range(len(self.ids)))
            rng.shuffle(fresh)
            self.order = fresh + self.order
        chosen = [self.order.pop() for _ in range(count)]
        self.drawn += count
        return self.ids[chosen].long(), self.labels[chosen].long()

    @property
    def passes(self) -> float:
        return self.drawn / len(self.ids)


def stream_rows(documents: list[list[int]], length: int, device: torch.device) -> Rows:
    """Source text, cut wherever a row is full; every token is to be predicted."""
    flat = torch.tensor([token for document in documents for token in document])
    count = (len(flat) - 1) // length
    ids = flat[: count * length].view(count, length)
    return Rows(ids, flat[1 : count * length + 1].view(count, length), device)


def chat_rows(
    documents: list[list[int]],
    length: int,
    header: list[int],
    marks: tuple[int, int],
    device: torch.device,
) -> Rows:
    """Whole chats from the start of each row; only what the assistant says is to be predicted.

    The last chat of a row is cut off there rather than continued in the next one, because an
    answer whose question is out of sight would teach guessing.
    """
    filler = documents[0]
    rows: list[list[int]] = [[]]
    for document in documents:
        if len(rows[-1]) > length:
            rows.append([])
        rows[-1].extend(document[: length + 1 - len(rows[-1])])
    rows[-1].extend((filler * (length // len(filler) + 2))[: length + 1 - len(rows[-1])])
    grid = torch.tensor(rows)
    labels = torch.where(_spoken(grid, header, marks), grid, IGNORED)
    return Rows(grid[:, :-1], labels[:, 1:], device)


def _spoken(grid: Tensor, header: list[int], marks: tuple[int, int]) -> Tensor:
    """True where the assistant's words stand, its end mark included."""
    begins, ends = grid == marks[0], grid == marks[1]
    place = torch.arange(grid.shape[1]).expand_as(grid)
    begin = torch.where(begins, place, -1).cummax(1).values
    speaker = grid.gather(1, (begin + 1).clamp(0, grid.shape[1] - 1))
    is_open = begins.cumsum(1) > ends.cumsum(1)
    inside = (place > begin + len(header)) & (begin >= 0)
    return inside & (speaker == header[0]) & (is_open | ends)


def code_prompts(data: Corpus, tokenizer: Tokenizer, count: int, rng: random.Random) -> list[list[int]]:
    """Beginnings and middles of files; files unknown to the target come up more often."""
    pools = [data.texts("prompts"), data.texts("train")]
    texts = [
        corpus.prefix(rng.choice(rng.choice(pools)), rng, 150, 900, anywhere=rng.random() < 0.5) for _ in range(count)
    ]
    return tokens.encode_all(tokenizer, texts)


def function_prompts(data: Corpus, tokenizer: Tokenizer, count: int, rng: random.Random) -> list[list[int]]:
    """Requests for functions that the target has seen, has not seen, and that nobody wrote."""
    seen, unseen = data.documented("train"), data.documented("prompts")
    texts = []
    for _ in range(count):
        kind = rng.random()
        first = rng.choice(seen if kind < 0.3 or not unseen else unseen)
        # A signature under a stranger's docstring cannot be answered from memory either.
        second = rng.choice(seen) if kind > 0.65 else first
        request = corpus.function_request(first.signature, second.docstring, rng)
        texts.append(chats.render_request(request))
    return tokens.encode_all(tokenizer, texts)


def chat_prompts(tokenizer: Tokenizer, count: int, rng: random.Random) -> list[list[int]]:
    texts = []
    for _ in range(count):
        messages = chats.conversation(rng)
        texts.append(chats.render(messages[:-1], reply=True))
    return tokens.encode_all(tokenizer, texts)


def heldout_prompts(data: Corpus, chat_count: int, count: int) -> dict[str, list[object]]:
    """Prompts of every kind; none of them was seen by target or draft."""
    rng = random.Random(20)
    pairs = chats.distinct(rng, chat_count, heldout=True)
    functions = rng.sample(data.documented("heldout"), min(count, len(data.documented("heldout"))))
    texts = data.texts("heldout")
    rng.shuffle(texts)
    return {
        "chat": [{"prompt": prompt, "answer": answer} for prompt, answer in pairs],
        "code": [corpus.prefix(text, rng, 300, 900, anywhere=False) for text in texts[:count]],
        "functions": [corpus.function_chat(function, rng)[0] for function in functions],
    }
