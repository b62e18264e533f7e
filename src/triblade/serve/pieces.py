"""The pieces of a chat message, in the order in which they are told: text, reasoning, the beginning of a call, its arguments.

A streamed answer sends a delta per piece; an answer in one body is the same pieces joined. Knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

PieceKind = Literal["content", "reasoning_content", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of one message.

    Attributes:
        kind: what `text` is; of a call, its name.
        text: never empty.
        call: number of the call in the message.
        call_id: of a call that begins.
    """

    kind: PieceKind
    text: str
    call: int = 0
    call_id: str = ""

    def delta(self) -> dict[str, Any]:
        """What a stream sends: id, type and name once, arguments piece by piece."""
        if self.kind == "call":
            function = {"name": self.text, "arguments": ""}
            return {"tool_calls": [{"index": self.call, "id": self.call_id, "type": "function", "function": function}]}
        if self.kind == "arguments":
            return {"tool_calls": [{"index": self.call, "function": {"arguments": self.text}}]}
        return {self.kind: self.text}


@dataclass(slots=True)
class Message:
    """The pieces of one choice, joined."""

    texts: dict[str, list[str]] = field(default_factory=lambda: {"content": [], "reasoning_content": []})
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Append pieces."""
        for piece in pieces:
            if piece.kind == "call":
                function = {"name": piece.text, "arguments": ""}
                self.calls.append({"id": piece.call_id, "type": "function", "function": function})
            elif piece.kind == "arguments":
                self.calls[piece.call]["function"]["arguments"] += piece.text
            else:
                self.texts[piece.kind].append(piece.text)

    def as_json(self) -> dict[str, Any]:
        """The message as the OpenAI API has it: no content beside calls is null; calls and reasoning only where there are some."""
        content, reasoning = ("".join(texts) for texts in self.texts.values())
        said: str | None = None if self.calls and not content else content
        message: dict[str, Any] = {"role": "assistant", "content": said, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message
