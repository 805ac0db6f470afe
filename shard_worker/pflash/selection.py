"""Which chunks of a prompt are kept: its head and tail, where its end's own words stand, and the best scored ones.

It works on token ids and numbers alone, and never changes the order of what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

CHUNK_TOKENS = 32
"""Tokens of a chunk, which is kept or left out as a whole."""

HEAD_CHUNKS, TAIL_CHUNKS = 8, 24
"""Chunks at the beginning and at the end of a prompt that are kept whatever their scores."""

MIN_TOKENS = 9
"""Shorter prompts are kept whole."""

NGRAM = 4
"""Tokens of a piece of the prompt's end that is looked for in the rest."""

QUERY_TOKENS = 96
"""Tokens at the end of the prompt whose n-grams are looked for in the rest."""


def normalised_ratio(ratio: float) -> float:
    """Return the ratio, limited to 0 … 1; NaN becomes 1, which keeps everything."""
    return min(max(ratio, 0.0), 1.0) if ratio == ratio else 1.0


def keep_count(chunks: int, ratio: float) -> int:
    """Return how many of so many chunks a ratio keeps: at least one."""
    return min(chunks, max(1, int(chunks * normalised_ratio(ratio))))


def select_chunks(scores: Sequence[float], token_ids: Sequence[int], ratio: float) -> list[int]:
    """Return the numbers of the chunks to keep, ascending. scores: one for each chunk."""
    chunks = len(scores)
    count = keep_count(chunks, ratio)
    kept = set(forced_chunks(chunks, count))
    for group in (anchor_chunks(token_ids), sorted(range(chunks), key=lambda chunk: (-scores[chunk], chunk))):
        for chunk in group:
            if len(kept) >= count:
                break
            kept.add(chunk)
    return sorted(kept)


def kept_ranges(chunks: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Return the half-open token ranges of chunks in ascending order, neighbours merged. length: the prompt's."""
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        first, last = chunk * CHUNK_TOKENS, min((chunk + 1) * CHUNK_TOKENS, length)
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))
    return ranges


def forced_chunks(chunks: int, count: int) -> list[int]:
    """Return the chunks of head and tail, at most `count` of them.

    Where there is no room for both they are scaled down together; the tail, where the question stands, rounds up.
    """
    head, tail = HEAD_CHUNKS, TAIL_CHUNKS
    if head + tail > count:
        head = HEAD_CHUNKS * count // (HEAD_CHUNKS + TAIL_CHUNKS)
        tail = count - head
    return sorted({*range(min(head, chunks)), *range(max(0, chunks - tail), chunks)})


def anchor_chunks(token_ids: Sequence[int]) -> list[int]:
    """Return the chunks around the places where an n-gram of the prompt's end stands in the rest, rarest n-grams first.

    An n-gram with too many places says nothing of where to look, and is left out.
    """
    chunks = -(-len(token_ids) // CHUNK_TOKENS)
    radius, max_places = (2, 8) if chunks < 1024 else (4, 16) if chunks < 2048 else (8, 32)
    body = max(0, len(token_ids) - QUERY_TOKENS)
    query_grams = {tuple(token_ids[i : i + NGRAM]) for i in range(body, len(token_ids) - NGRAM + 1)}
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(body - NGRAM + 1):
        gram = tuple(token_ids[start : start + NGRAM])
        if gram in query_grams:
            places.setdefault(gram, []).append(start // CHUNK_TOKENS)
    anchors: list[int] = []
    for gram in sorted(places, key=lambda gram: (len(places[gram]), places[gram], gram)):
        if len(places[gram]) <= max_places:
            for centre in places[gram]:
                anchors += sorted(range(max(0, centre - radius), min(chunks, centre + radius + 1)),
                                key=lambda chunk: (abs(chunk - centre), chunk))  # fmt: skip
    return list(dict.fromkeys(anchors))
