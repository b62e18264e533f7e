"""The text of a choice as a message: reasoning first, then content and calls.

Puts the two readers one behind the other; an answer that may hold neither passes through untouched.
"""

from __future__ import annotations

from dataclasses import dataclass

from triblade.serve.pieces import Piece
from triblade.serve.reasoning import Markers, ReasoningReader
from triblade.serve.tools.reader import CallReader, CallReading


@dataclass(frozen=True, slots=True)
class Reading:
    """What the answers to a request may hold beside content.

    Attributes:
        calls: which calls; None for none.
        markers: around reasoning; None where it is not told apart.
        is_thinking: the prompt ends inside of reasoning.
    """

    calls: CallReading | None = None
    markers: Markers | None = None
    is_thinking: bool = False


PLAIN = Reading()


class MessageReader:
    """Reads one choice."""

    def __init__(self, reading: Reading) -> None:
        self._calls = None if reading.calls is None else CallReader(reading.calls)
        markers = reading.markers
        self._reasoning = None if markers is None else ReasoningReader(markers, is_open=reading.is_thinking)

    @property
    def has_calls(self) -> bool:
        """Whether a call was told."""
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside of reasoning."""
        return self._reasoning is not None and self._reasoning.is_inside

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        """The pieces that can be told now; with the last text, all that are left."""
        reasoning, said = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        if is_last and self._reasoning is not None:
            reasoning, said = (a + b for a, b in zip((reasoning, said), self._reasoning.finish(), strict=True))
        pieces = [Piece("reasoning_content", reasoning)] if reasoning else []
        if self._calls is None:
            return [*pieces, Piece("content", said)] if said else pieces
        pieces += self._calls.feed(said)
        return pieces + self._calls.finish() if is_last else pieces
