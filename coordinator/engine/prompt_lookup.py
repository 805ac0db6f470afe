"""Draft tokens without a model: what followed where the last tokens stood before, in the prompt or in the answer.

An answer that edits a given text, fills in a form or repeats itself copies long runs of it. Such a run is found by its
last tokens, as a compressor finds one (hash chains, RFC 1951, section 4): the places of every three tokens in a row are
linked from the latest to the first, and the place with the longest match is followed.

Behind a changed line none of its last tokens stood before. So where a long match ends, the tokens around the place that
was left are looked at by themselves, and there the last two tokens, the last one, or none are enough: where a word was
put in place of another, and where lines were put in or left out, the text goes on at that place, or a little before or
behind it.

It costs no device anything, so that what it would have proposed is compared with every token that comes, whether it was
verified or not. It never changes which tokens come out, only when they do.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

BLOCK_ROWS = 16
"""Rows of the longest block, one known token and the draft tokens."""

SHORTEST_MATCH = 3
"""How many of the last tokens must have stood together before."""

LONGEST_MATCH = 64
"""Tokens to which a match is compared: the longest one is the best, and beyond that all are."""

PLACES = 16
"""How many earlier places of the last tokens are compared, the latest first."""

LONG_MATCH = 16
"""Behind a match of so many tokens that ends, the text is looked for around the place where it was left."""

BEFORE, BEHIND = 32, 64
"""How many tokens around that place are looked at."""

CHANGED_TOKENS = 32
"""How many tokens of the answer may come until the text goes on around that place."""

_FIRST_SHARES = (0.4, 0.6, 0.8, 0.9, 0.95)
"""How often the token behind a match is taken to come again, before it was seen: of matches of 3, 4, 8, 16 and 32
tokens and more."""

_FIRST_NEAR_SHARES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
"""The same of matches around a place that was left, of none, 1, 2, 3, 4 and 8 tokens and more."""

_FIRST_WEIGHT, _MOST_WEIGHT = 4.0, 64.0
"""How many tokens seen such a guess weighs, and the most that all of them weigh: older ones count less."""


class PromptLookup:
    """The tokens of one request, and where the last of them stood before."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._latest: dict[int, int] = {}
        """The place behind the latest run of each `SHORTEST_MATCH` tokens."""
        self._earlier = array("i")
        """By the place behind a run, that behind the same run before; -1 where there is none."""
        self._place = self._matched = 0
        """The place of the token that should come next, and how many tokens before it are those that came last; 0 and
        0 without a match."""
        self._is_near = False
        """Whether the match is one around a place that was left."""
        self._left: int | None = None
        """Where a long match was left: the place of the token that should have come."""
        self._left_at = 0
        """How many tokens were known then."""
        self._shares, self._near_shares = _Shares(_FIRST_SHARES), _Shares(_FIRST_NEAR_SHARES)

    def __len__(self) -> int:
        """How many tokens are known."""
        return len(self._tokens)

    def read(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the prompt."""
        for token in token_ids:
            self._add(token)
        self._find()

    def follow(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the answer, and learn how often the ones that should have come did."""
        for token in token_ids:
            place, matched = self._place, self._matched
            right = place > 0 and self._tokens[place] == token
            if place:
                shares, kind = self._kind(matched)
                shares.learn(kind, right=right)
            self._add(token)
            if right:
                self._place, self._matched = place + 1, min(matched + 1, LONGEST_MATCH)
                continue
            if matched >= (SHORTEST_MATCH if self._is_near else LONG_MATCH):
                self._left, self._left_at = place, len(self._tokens)
            self._find()

    def draft_tokens(self, count: int) -> tuple[int, ...]:
        """Return the next tokens if the text goes on as it did before: `count` of them, or none."""
        if not self._place:
            return ()
        found: list[int] = []
        for place in range(self._place, self._place + count):
            # Behind the last known token, a text that repeats itself goes on with what was just proposed.
            found.append(self._tokens[place] if place < len(self._tokens) else found[place - len(self._tokens)])
        return tuple(found)

    def survival(self, count: int) -> list[float]:
        """Return how likely each of so many draft tokens is right where those before it are."""
        if not self._place:
            return []
        kinds = map(self._kind, range(self._matched, self._matched + count))
        return [shares.share(kind) for shares, kind in kinds]

    def _add(self, token: int) -> None:
        tokens = self._tokens
        tokens.append(token)
        end = len(tokens)
        if end < SHORTEST_MATCH:
            self._earlier.append(-1)
            return
        run = _run_at(tokens, end)
        self._earlier.append(self._latest.get(run, -1))
        self._latest[run] = end

    def _find(self) -> None:
        """Look for the earlier place whose tokens before it are the most of those that came last."""
        end = len(self._tokens)
        self._place, self._matched, self._is_near = 0, 0, False
        place = self._earlier[end - 1] if end else -1
        for _ in range(PLACES):
            if place < 0:
                break
            matched = self._matched_at(place, SHORTEST_MATCH)
            if matched > self._matched:
                self._place, self._matched = place, matched
            place = self._earlier[place - 1]
        if self._left is not None:
            self._find_near(self._left)

    def _find_near(self, left: int) -> None:
        """Take a place around the one that was left, if it has as long a match: of those, the nearest one."""
        end = len(self._tokens)
        if end - self._left_at > CHANGED_TOKENS:
            self._left = None
            return
        # Without any match, the last token may have come in place of the one that should have.
        best = (0, 0, left + 1)
        for place in range(max(1, left - BEFORE), min(left + BEHIND, end)):
            if self._tokens[place - 1] == self._tokens[end - 1]:
                best = max(best, (self._matched_at(place, 1), -abs(place - left), place))
        matched, _, place = best
        if matched >= self._matched and place < end:
            self._place, self._matched, self._is_near = place, matched, True

    def _matched_at(self, place: int, matched: int) -> int:
        """Return how many tokens before a place are those that came last; `matched` of them are known to be."""
        tokens, end = self._tokens, len(self._tokens)
        while matched < min(place, LONGEST_MATCH) and tokens[place - matched - 1] == tokens[end - matched - 1]:
            matched += 1
        return matched

    def _kind(self, matched: int) -> tuple[_Shares, int]:
        """Return where it is learnt how often the token behind a match of so many tokens comes again."""
        if not self._is_near:
            return self._shares, min(max(0, matched.bit_length() - 2), len(_FIRST_SHARES) - 1)
        return self._near_shares, min(matched, matched.bit_length() + 1, len(_FIRST_NEAR_SHARES) - 1)


class _Shares:
    """How often tokens behind matches came again, by the kind of match."""

    def __init__(self, first: Sequence[float]) -> None:
        self._right = [share * _FIRST_WEIGHT for share in first]
        self._seen = [_FIRST_WEIGHT] * len(first)

    def learn(self, kind: int, *, right: bool) -> None:
        """Add a token behind a match of a kind, and whether it was the one that should have come."""
        if self._seen[kind] >= _MOST_WEIGHT:
            self._right[kind] /= 2
            self._seen[kind] /= 2
        self._right[kind] += right
        self._seen[kind] += 1

    def share(self, kind: int) -> float:
        """Return the share of those that came."""
        return self._right[kind] / self._seen[kind]


def _run_at(tokens: Sequence[int], end: int) -> int:
    """Return one number for the `SHORTEST_MATCH` tokens before a place; token ids are below 2^31."""
    return tokens[end - 3] << 62 | tokens[end - 2] << 31 | tokens[end - 1]
