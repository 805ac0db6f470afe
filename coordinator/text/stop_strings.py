"""Cuts a stream of text at the first stop string that a request asked for.

Owns, for one answer, the text that may still turn out to begin a stop string.
Knows nothing of tokens, of where the text comes from or of how an answer is reported.
"""

from collections.abc import Sequence

from services.errors import InvalidArgument


class StopStringError(InvalidArgument):
    """A stop string that cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, field="stop")


class StopStrings:
    """Passes text through until a stop string appears, across any split of the text.

    The cut is where the earliest stop string of the whole text starts, however the text was
    split. Where stop strings overlap (`"abcd"` and `"bc"`), a complete later one waits until
    the earlier one is either complete or impossible; the text shown is the same either way.

    Raises StopStringError when a stop string is empty or not a string, or one bare string was given.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # A bare string is a sequence of strings too, and would stop at each of its characters.
        if isinstance(stops, str):
            raise StopStringError(f"stop: {stops!r} is a string; expected a list of strings")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise StopStringError(f"stop[{index}]: {stop!r} given; expected a non-empty string")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._cut: int | None = None  # where in _held the earliest complete match starts
        self._stopped = False
        self.met: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text; `finish` can be what decides it."""
        return self._stopped

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text; return what is safe to show now, and whether a stop string was met.

        Once stopped, everything further is dropped.
        """
        if self._stopped:
            return "", True
        if not self._matchers:
            return text, False
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            self._advance(buffer[end - 1], end)
            if self._cut is not None and end - self._longest_prefix() >= self._cut:
                return self._stop(buffer), True
        safe = len(buffer) - self._longest_prefix()
        self._held = buffer[safe:]
        if self._cut is not None:
            self._cut -= safe
        return buffer[:safe], False

    def finish(self) -> str:
        """Return the text still held back, now that no more can come.

        If that text holds a complete stop string that was waiting for an earlier one, the text is
        cut there and `stopped` becomes true.
        """
        if self._cut is not None:
            return self._stop(self._held)
        rest, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return rest

    def _advance(self, char: str, end: int) -> None:
        for matcher in self._matchers:
            if matcher.feed(char):
                start = end - len(matcher.stop)
                self._cut = start if self._cut is None else min(self._cut, start)

    def _longest_prefix(self) -> int:
        """How many of the last characters could begin a stop string, or are a whole one."""
        return max(matcher.matched for matcher in self._matchers)

    def _stop(self, buffer: str) -> str:
        shown = buffer[: self._cut]
        self.met = next(matcher.stop for matcher in self._matchers if buffer.startswith(matcher.stop, self._cut))
        self._held, self._cut, self._stopped = "", None, True
        return shown


class _Matcher:
    """Looks for one stop string, one character at a time, by Knuth, Morris and Pratt's method.

    A request chooses its stop strings, so the time per character must not depend on their length.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # length of the longest prefix of `stop` that ends the text so far
        # _fallback[n]: the longest proper prefix of stop[:n + 1] that is also its suffix
        self._fallback = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length - 1]
            if stop[index] == stop[length]:
                length += 1
            self._fallback[index] = length

    def feed(self, char: str) -> bool:
        """Take one character; tell whether it completes the stop string."""
        if self.matched == len(self.stop):
            self.matched = self._fallback[-1]
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched - 1]
        if self.stop[self.matched] == char:
            self.matched += 1
        return self.matched == len(self.stop)
