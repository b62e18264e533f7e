"""Finding stop strings in text that grows, and knowing how much of its end might still become one.

Knows no tokens. Invariant: text before the held tail can never become part of a match that is not complete yet, so
it may be shown at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where in the text which stop string stands."""

    start: int
    stop_string: str

    @property
    def end(self) -> int:
        return self.start + len(self.stop_string)


class StopStrings:
    """The stop strings of a request."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(dict.fromkeys(stop_strings))

    def __bool__(self) -> bool:
        return bool(self._stop_strings)

    def find(self, text: str, searched: int) -> StopMatch | None:
        """The match that begins first, the longest of several; only those ending behind `searched` characters count."""
        matches = []
        for stop_string in self._stop_strings:
            start = text.find(stop_string, max(0, searched - len(stop_string) + 1))
            if start >= 0:
                matches.append(StopMatch(start, stop_string))
        return min(matches, key=lambda match: (match.start, -match.end), default=None)

    def held_length(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins, without being complete."""
        return max((_overlap(text, stop_string) for stop_string in self._stop_strings), default=0)


def _overlap(text: str, stop_string: str) -> int:
    start = text.find(stop_string[0], max(0, len(text) - len(stop_string) + 1))
    while start >= 0:
        if stop_string.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop_string[0], start + 1)
    return 0
