"""Recorded traffic as conversations: ShareGPT, chat messages, plain prompts, Mooncake traces; JSON lists or JSON lines.

What a record is, is seen from its keys. A record that is none of them is an error that names its line, never left out silently.
Pure: no tensor, no network.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from triblade.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512  # tokens that one hash of a trace stands for
USER_ROLES = frozenset({"human", "user"})
SYSTEM_ROLES = frozenset({"system"})


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long the answer may become."""

    text: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """User turns in order; a turn is sent when the one before is answered."""

    turns: tuple[Turn, ...]
    system: str = ""
    arrival_s: float | None = None  # when a trace says that it came, from the trace's start


class TextMaker(Protocol):
    """Text of about so many tokens."""

    def __call__(self, rng: random.Random, tokens: float) -> str:
        """Random text."""
        ...


def read_conversations(path: Path, output_tokens: int, text: TextMaker) -> list[Conversation]:
    """All conversations of a file.

    Args:
        output_tokens: length of answers for which the record names none.
        text: makes the prompts of traces that hold only lengths.

    Raises:
        ConfigError: the file cannot be read, or a record is of no known form.
    """
    found = []
    for where, record in _records(path):
        conversation = _conversation(record, output_tokens, text)
        if conversation is None:
            raise ConfigError(
                f"{path}, {where}: no conversation",
                hint="records have conversations, messages, prompt, or a Mooncake trace's input_length and hash_ids",
                param="dataset",
            )
        if conversation.turns:
            found.append(conversation)
    start = min((c.arrival_s for c in found if c.arrival_s is not None), default=0.0)
    return [c if c.arrival_s is None else Conversation(c.turns, c.system, c.arrival_s - start) for c in found]


def _records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every record with the place it has in the file."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read dataset: {path}: {error}", param="dataset") from error
    if content.lstrip().startswith("["):
        for number, record in enumerate(_parse(path, "the file", content), 1):
            yield f"record {number}", _object(path, f"record {number}", record)
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield f"line {number}", _object(path, f"line {number}", _parse(path, f"line {number}", line))


def _parse(path: Path, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, {where}: not JSON: {error}", param="dataset") from error


def _object(path: Path, where: str, record: Any) -> Mapping[str, Any]:
    if not isinstance(record, dict):
        raise ConfigError(f"{path}, {where}: not an object: {type(record).__name__}", param="dataset")
    return record


def _conversation(record: Mapping[str, Any], output_tokens: int, text: TextMaker) -> Conversation | None:
    """The conversation of a record; one without turns is empty, None is not understood."""
    length = record.get("output_length", record.get("max_tokens", output_tokens))
    if not isinstance(length, int) or length < 1:
        return None
    if isinstance(record.get("conversations"), list):
        return _spoken(record["conversations"], "from", "value", length)
    if isinstance(record.get("messages"), list):
        return _spoken(record["messages"], "role", "content", length)
    if isinstance(record.get("prompt"), str):
        return Conversation((Turn(record["prompt"], length),))
    if isinstance(record.get("turns"), list) and all(isinstance(turn, str) for turn in record["turns"]):
        return Conversation(tuple(Turn(turn, length) for turn in record["turns"]))
    if isinstance(record.get("input_length"), int):
        return _traced(record, length, text)
    return None


def _spoken(said: Sequence[Any], who: str, what: str, length: int) -> Conversation | None:
    """The users' part of a conversation; what the assistant said then is not sent."""
    turns, system = [], ""
    for entry in said:
        if not isinstance(entry, dict) or not isinstance(entry.get(what), str):
            return None
        if entry.get(who) in SYSTEM_ROLES:
            system = entry[what]
        elif entry.get(who) in USER_ROLES:
            turns.append(Turn(entry[what], length))
    return Conversation(tuple(turns), system)


def _traced(record: Mapping[str, Any], length: int, text: TextMaker) -> Conversation | None:
    """A request of a Mooncake trace (timestamps in ms): equal hashes are equal blocks of text, so prefixes are shared."""
    hashes, stamp = record.get("hash_ids", []), record.get("timestamp")
    if not isinstance(hashes, list) or (stamp is not None and not isinstance(stamp, int | float)):
        return None
    left = record["input_length"]
    parts = []
    for position, identity in enumerate(hashes or [f"{stamp}/{left}"]):
        is_last = position + 1 == max(1, len(hashes))
        tokens = left if is_last else min(left, MOONCAKE_BLOCK_TOKENS)
        if tokens > 0:
            parts.append(text(random.Random(f"block {identity}"), tokens))
        left -= tokens
    return Conversation((Turn(" ".join(parts), length),), arrival_s=None if stamp is None else stamp / 1000)
