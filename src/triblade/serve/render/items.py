"""The pieces of a message as items of the Responses API, and the events that tell of them.

Knows no response around the items. Invariants: one item is open at a time, and items follow each other in the order of the pieces;
the text of an item is its deltas, joined.

    opened --> [part added --> delta ... --> text done --> part done] --> item done     (calls have no parts)
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from triblade.serve.pieces import Piece, PieceKind
from triblade.serve.render.base import Json

DONE_STATUS, CUT_STATUS = "completed", "incomplete"


@dataclass(frozen=True, slots=True)
class ItemKind:
    """How one kind of item is told.

    Attributes:
        prefix: of its id.
        event: the first part of the names of its deltas.
        field: what its text is called, in the item's part or in the item.
    """

    type: str
    prefix: str
    event: str
    field: str = "text"

    def part(self, text: str) -> Json | None:
        """The part that holds the text; None where the item itself does."""
        if self is CALL:
            return None
        own: Json = {"annotations": [], "logprobs": []} if self is MESSAGE else {}
        return {"type": self.event.removeprefix("response."), "text": text, **own}


MESSAGE = ItemKind("message", "msg", "response.output_text")
REASONING = ItemKind("reasoning", "rs", "response.reasoning_text")
CALL = ItemKind("function_call", "fc", "response.function_call_arguments", "arguments")
KINDS: dict[PieceKind, ItemKind] = {"content": MESSAGE, "reasoning_content": REASONING, "call": CALL, "arguments": CALL}


class ItemWriter:
    """Writes the items of one answer.

    Attributes:
        items: as the response shows them; the last one may be open.
    """

    def __init__(self) -> None:
        self.items: list[Json] = []
        self._kind: ItemKind | None = None  # of the open item
        self._texts: list[str] = []  # of the open item

    def add(self, pieces: Iterable[Piece]) -> Iterator[Json]:
        """The events of new pieces."""
        for piece in pieces:
            kind = KINDS[piece.kind]
            if piece.kind == "call" or kind is not self._kind:
                yield from self.close(DONE_STATUS)
                yield from self._open(kind, piece)
            if piece.kind != "call":
                self._texts.append(piece.text)
                yield self._event(f"{kind.event}.delta", delta=piece.text)

    def finish(self, status: str) -> Iterator[Json]:
        """The events behind the last piece; an answer without pieces is an empty message."""
        if not self.items:
            yield from self._open(MESSAGE, None)
        yield from self.close(status)

    def close(self, status: str) -> Iterator[Json]:
        """Close the open item, if there is one."""
        if self._kind is None:
            return
        kind, item, text = self._kind, self.items[-1], "".join(self._texts)
        yield self._event(f"{kind.event}.done", **{kind.field: text})
        part = kind.part(text)
        if part is None:
            item[kind.field] = text
        else:
            item["content"] = [part]
            yield self._event("response.content_part.done", part=part)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._kind = None

    def _open(self, kind: ItemKind, piece: Piece | None) -> Iterator[Json]:
        self._kind, self._texts = kind, []
        item: Json = {"id": f"{kind.prefix}_{uuid.uuid4().hex}", "type": kind.type, "status": "in_progress"}
        if kind is CALL and piece is not None:
            item |= {"call_id": piece.call_id, "name": piece.text, "arguments": ""}
        else:
            own: Json = {"role": "assistant"} if kind is MESSAGE else {"summary": []}
            item |= {"content": [], **own}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        part = kind.part("")
        if part is not None:
            yield self._event("response.content_part.added", part=part)

    def _event(self, name: str, **fields: Any) -> Json:
        """An event about the open item."""
        where: Json = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if self._kind is not CALL:
            where["content_index"] = 0
        if self._kind is MESSAGE and name.startswith(MESSAGE.event):
            where["logprobs"] = []
        if self._kind is CALL and name.endswith(".done"):
            where["name"] = self.items[-1]["name"]
        return {"type": name, **where, **fields}
