"""From the text of an answer, as it comes, to content and calls.

Knows no schema. Invariants: how the text is cut into pieces changes nothing; what is no call of a known tool comes back as content,
character by character, but for white space around calls. A call is told when it is complete, since what was told cannot be taken
back; where a grammar keeps calls well formed (`is_held`), its arguments are told as they come.

    text -- opener --> call -- { or [ --> JSON -- complete --> call -- anything else --> text
                          \\-- held: head --> arguments -- complete --> call
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from triblade.engine.stop_strings import StopStrings
from triblade.serve.pieces import Piece
from triblade.serve.tools.formats import ToolFormat

MAX_HEAD = 320  # characters of a bare name and what stands before its arguments
CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallReading:
    """What calls an answer may hold.

    Attributes:
        format: how they are written.
        names: of the tools that may be called.
        single: tell the first call only.
        is_held: a grammar keeps the calls well formed.
    """

    format: ToolFormat
    names: Sequence[str]
    single: bool = False
    is_held: bool = False


def call_head(format: ToolFormat, name: str) -> str:
    """How a call begins where a grammar writes it, up to its arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{format.arguments_key}": '


class JsonExtent:
    """Finds where a JSON object or list ends, in text that grows; does not look at anything but brackets and strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """The position behind the closing bracket in the next piece of text; None if it is not there yet."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return position + 1
        return None


class CallReader:
    """Reads one choice."""

    def __init__(self, reading: CallReading) -> None:
        self._reading = reading
        self._format = reading.format
        self._heads = {call_head(reading.format, name): name for name in reading.names}
        self._opener, self._closer = reading.format.opener.strip(), reading.format.closer.strip()
        self._openers = StopStrings([self._opener] if self._opener else [])
        self._glue = SPACE + reading.format.separator.strip() + ("[]" if reading.is_held else "")
        self._state: Callable[[], bool] = self._in_start
        self._text = ""  # came, not told yet
        self._seen = 0  # characters of it that `_extent` has seen
        self._passed = ""  # of a call's region, before `_text`: content if no call follows
        self._space = ""  # white space that is content if content follows
        self._is_behind_call = False  # and its closer did not come yet
        self._name: str | None = None
        self._extent = JsonExtent()
        self._pieces: list[Piece] = []
        self.num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        """What can be told now."""
        self._text += text
        while self._state():
            pass
        return self._told()

    def finish(self) -> list[Piece]:
        """What was held back, when nothing follows."""
        is_closed = not self._passed.strip(self._glue) and self.num_calls > 0
        self._content(("" if is_closed else self._passed) + self._take(len(self._text)))
        if self._space and not self.num_calls:
            self._pieces.append(Piece("content", self._space))
        return self._told()

    def _told(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _take(self, count: int) -> str:
        taken, self._text, self._seen = self._text[:count], self._text[count:], 0
        return taken

    def _content(self, text: str) -> None:
        """Tell text, but for white space at its end, which belongs to what follows."""
        said = (self._space + text).rstrip(SPACE)
        self._space = (self._space + text)[len(said) :]
        if said:
            self._pieces.append(Piece("content", said))

    def _in_start(self) -> bool:
        said = self._text.lstrip(SPACE)
        if not said:
            return False
        is_bare = (self._format.starts_bare or (self._reading.is_held and self._format.in_list)) and said[0] in "{["
        self._state = self._in_call if is_bare else self._in_text
        return True

    def _in_text(self) -> bool:
        at = self._text.find(self._opener) if self._opener else -1
        if at >= 0:
            self._content(self._take(at))
            self._passed = self._take(len(self._opener))
            self._state = self._in_call
            return True
        self._content(self._take(len(self._text) - self._openers.held_length(self._text)))
        return False

    def _in_call(self) -> bool:
        """Between the parts of a region of calls."""
        self._passed += self._take(len(self._text) - len(self._text.lstrip(self._glue)))
        if not self._text:
            return False
        if any(mark.startswith(self._text) and mark != self._text for mark in (self._opener, self._closer)):
            return False
        if self._is_behind_call and self._closer and self._text.startswith(self._closer):
            self._take(len(self._closer))
            self._passed, self._is_behind_call = "", False
        elif self._opener and self._text.startswith(self._opener):
            self._passed += self._take(len(self._opener))
        else:
            self._state = self._next()
        return True

    def _next(self) -> Callable[[], bool]:
        """What follows in a region of calls."""
        if self._text[0] in "{[":
            return self._in_head if self._reading.is_held else self._in_json
        return self._in_name if self._format.has_bare_names and self._opener in self._passed else self._give_up

    def _give_up(self) -> bool:
        """No call follows: what was passed is content."""
        self._content(self._passed)
        self._passed, self._is_behind_call = "", False
        self._state = self._in_text
        return True

    def _in_head(self) -> bool:
        """A call that a grammar writes, up to its arguments."""
        found = next((head for head in self._heads if self._text.startswith(head)), None)
        if found is not None:
            self._take(len(found))
            self._begin(self._heads[found])
            self._state = self._in_arguments
            return True
        if any(head.startswith(self._text) for head in self._heads):
            return False
        self._state = self._in_json
        return True

    def _in_arguments(self) -> bool:
        """Told as they come; the bracket behind them belongs to the call."""
        end = self._extent.end(self._text)
        self._argue(self._take(len(self._text) if end is None else end))
        if end is None:
            return False
        self._extent = JsonExtent()
        self._state = self._behind_arguments
        return True

    def _behind_arguments(self) -> bool:
        if not self._text:
            return False
        self._passed = self._take(1).replace("}", "")
        self._state = self._in_call
        return True

    def _in_json(self) -> bool:
        """A value that may be calls."""
        end = self._extent.end(self._text[self._seen :])
        if end is None:
            self._seen = len(self._text)
            return False
        raw = self._take(self._seen + end)
        calls = self._calls_in(raw)
        for name, arguments in calls:
            self._begin(name)
            self._argue(arguments)
        self._passed += "" if calls else raw
        self._extent, self._name = JsonExtent(), None
        self._state = self._in_call if calls else self._give_up
        return True

    def _in_name(self) -> bool:
        """`name{`, `name[ARGS]{` or `name[CALL_ID]id[ARGS]{`."""
        brace = self._text.find("{")
        if brace < 0 and len(self._text) <= MAX_HEAD:
            return False
        name = self._text[: max(0, brace)].partition("[")[0].strip()
        if name not in self._reading.names:
            self._state = self._give_up
            return True
        self._name = name
        self._passed += self._take(brace)
        self._state = self._in_json
        return True

    def _begin(self, name: str) -> None:
        self._space = self._passed = ""
        self._is_behind_call = True
        if not (self._reading.single and self.num_calls):
            self._pieces.append(Piece("call", name, self.num_calls, self._format.call_id()))
        self.num_calls += 1

    def _argue(self, text: str) -> None:
        if text and not (self._reading.single and self.num_calls > 1):
            self._pieces.append(Piece("arguments", text, self.num_calls - 1))

    def _calls_in(self, raw: str) -> list[tuple[str, str]]:
        """(name, arguments as JSON text) of each call in a JSON value; nothing if any part of it is something else."""
        value = _loads(raw)
        if self._name is not None:
            return [(self._name, json.dumps(value, ensure_ascii=False))] if isinstance(value, dict) else []
        found = [self._call_of(item) for item in (value if isinstance(value, list) else [value])]
        calls = [call for call in found if call is not None]
        return calls if len(calls) == len(found) else []

    def _call_of(self, item: Any) -> tuple[str, str] | None:
        if not isinstance(item, dict) or not item.keys() <= CALL_KEYS or item.get("name") not in self._reading.names:
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _loads(arguments)
        return (item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _loads(text: str) -> Any:
    """A JSON value; None for what is none, as null is no call either."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"not JSON: {constant}")
