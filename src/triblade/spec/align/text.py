"""Conversations for training: prompts from a file or from the model itself, answers from the model as it is served.

From nothing: the chat template up to the beginning of the user's turn, which an instruct model then writes itself (Magpie, Xu et
al. 2024, section 2.1), most often behind a few first words. A model without a template just writes. Answers are greedy and sampled
in turn, because both are served. One call makes one shard, from its number alone, so that shards can be made again. Knows no files
but the prompts.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from triblade.errors import ConfigError, RequestError
from triblade.models.tokenizer import Tokenizer
from triblade.spec.align.openings import beginnings
from triblade.spec.align.writer import Writer

USER_TOKENS = 128
USER_TEMPERATURES = (0.8, 1.0)
ANSWER_TEMPERATURES = (0.0, 0.8)
LONGEST_PERIOD = 64  # tokens of a loop that is noticed
LOOP_TOKENS = 48  # a repetition is cut after as many tokens, and after two rounds
_PROMPT_KEYS = ("prompt", "text", "question", "instruction")

Prompt = Sequence[Mapping[str, Any]]  # messages


@dataclass(frozen=True, slots=True)
class Conversation:
    """Tokens, of which those from `first` on are the answer."""

    token_ids: list[int]
    first: int
    is_greedy: bool


class TextSource:
    """Makes shards of conversations.

    Args:
        tokenizer: of the target.
        end_token_ids: tokens that end an answer.
        prompts: from a file; None: the model writes them.
        most_tokens: of a prompt, and of an answer.
        seed: of everything drawn.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_token_ids: frozenset[int],
        prompts: Sequence[Prompt] | None,
        most_tokens: tuple[int, int],
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._end = end_token_ids
        self._prompts = prompts
        self._prompt_tokens, self._answer_tokens = most_tokens
        self._seed = seed

    def shard(self, number: int, count: int, write: Writer) -> list[Conversation]:
        """About `count` conversations; fewer where the model wrote no usable prompt or said one twice."""
        seed = shard_seed(self._seed, number)
        prompts = self._written(count, write, seed) if self._prompts is None else self._given(number, count)
        temperatures = [ANSWER_TEMPERATURES[i // 2 % len(ANSWER_TEMPERATURES)] for i in range(len(prompts))]
        answers = write(prompts, self._answer_tokens, temperatures, seed + 1) if prompts else []
        found = []
        for prompt, answer, temperature in zip(prompts, answers, temperatures, strict=True):
            whole = answer if answer and answer[-1] in self._end else without_loop(answer)
            found.append(Conversation([*prompt, *whole], len(prompt), temperature == 0.0))
        return found

    def _given(self, number: int, count: int) -> list[list[int]]:
        assert self._prompts is not None
        start = number * count % len(self._prompts)
        chosen = islice(cycle(self._prompts), start, start + count)
        return [self._tokenizer.encode_chat(messages) for messages in chosen]

    def _written(self, count: int, write: Writer, seed: int) -> list[list[int]]:
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None or not user_beginning(tokenizer, ""):
            bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
            numbers = random.Random(seed)
            return [[*bos, numbers.randrange(tokenizer.vocab_size)] for _ in range(count)]
        openings = beginnings(tokenizer, count, seed)
        temperatures = [USER_TEMPERATURES[i // 4 % len(USER_TEMPERATURES)] for i in range(count)]
        turns = write([user_beginning(tokenizer, words) for words in openings], USER_TOKENS, temperatures, seed)
        pairs = [
            (opening, turn) for opening, turn in zip(openings, turns, strict=True) if turn and turn[-1] in self._end
        ]
        texts = [(opening + tokenizer.decode(turn[:-1])).strip() for opening, turn in pairs]
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in dict.fromkeys(texts) if text]
        return [prompt for prompt in prompts if len(prompt) <= self._prompt_tokens]


def shard_seed(seed: int, number: int) -> int:
    """A seed that shares nothing with those of other shards."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:6], "little")


def user_beginning(tokenizer: Tokenizer, words: str) -> list[int]:
    """Token ids of the chat template up to and including the user's first words."""
    message = {"role": "user", "content": words}
    text = tokenizer.render_chat([message], continue_final_message=True, add_generation_prompt=False)
    return tokenizer.encode(text, add_special_tokens=False)


def without_loop(ids: list[int]) -> list[int]:
    """The text up to where it has only been repeating itself for a while; as it is, if it never does."""
    shortest = len(ids)
    for period in range(1, min(LONGEST_PERIOD, len(ids) // 3) + 1):
        enough, run = max(2 * period, LOOP_TOKENS), 0
        if ids[-period:] != ids[-2 * period : -period]:
            continue  # a loop that was left again is no loop
        for position in range(len(ids) - 1, period - 1, -1):
            if ids[position] != ids[position - period]:
                break
            run += 1
        if run > enough:
            shortest = min(shortest, len(ids) - run + enough)
    return ids[:shortest]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from a file: one per line, or JSON lines that hold a string, messages, or an object with either.

    Raises:
        ConfigError: the file cannot be read or holds no prompt; the message has the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts: {path}: {error}", param="prompts") from error
    parse = _record if path.suffix == ".jsonl" else lambda line, _: [{"role": "user", "content": line.strip()}]
    prompts = [parse(line, f"{path}: line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompt", hint="one per line, or JSON lines", param="prompts")
    return prompts


def check_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, most_tokens: int) -> list[Prompt]:
    """The prompts that leave room for an answer.

    Raises:
        ConfigError: the model's template refuses one, or none is short enough.
    """
    try:
        short = [prompt for prompt in prompts if len(tokenizer.encode_chat(prompt)) <= most_tokens]
    except RequestError as error:
        raise ConfigError(f"a prompt cannot be used: {error.message}", hint=error.hint, param="prompts") from error
    if not short:
        raise ConfigError(f"every prompt has more than {most_tokens} tokens", param="prompts")
    return short


def _record(line: str, place: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}", param="prompts") from error
    if isinstance(record, Mapping):
        keys = [key for key in ("messages", *_PROMPT_KEYS) if record.get(key)]
        record = record[keys[0]] if keys else None
    if isinstance(record, str) and record.strip():
        return [{"role": "user", "content": record.strip()}]
    if isinstance(record, list) and record:
        return _until_user(record, place)
    hint = f"a string, a list of messages, or an object with messages or one of: {', '.join(_PROMPT_KEYS)}"
    raise ConfigError(f"{place} is not a prompt", hint=hint, param="prompts")


def _until_user(messages: list[Any], place: str) -> Prompt:
    """The messages up to the last one of the user."""
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    if "user" not in roles:
        raise ConfigError(f"{place} has no message of a user", param="prompts")
    return messages[: len(roles) - roles[::-1].index("user")]
