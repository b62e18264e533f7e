"""What a load test asks for: conversations, made from a seed or read from a file.

A conversation is a list of user turns; answers come from whoever is measured. Text is made of common words, so that any tokenizer
can serve it without being known here: `WordText` is told how many tokens a word has. Pure: no tensor, no network. The same seed
gives the same conversations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from triblade.bench.dataset import Conversation, Turn, read_conversations
from triblade.config import BenchConfig
from triblade.errors import ConfigError

# Common words that most tokenizers keep whole, of mixed length.
_VOCABULARY = """
time year people way day man thing woman life child world school state family student group country problem hand part place
case week company system program question work government number night point home water room mother area money story fact month
lot right study book eye job word business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea body information back parent face others level office door health person art
war history party result change morning reason research girl guy moment air teacher force education
"""
WORDS = tuple(_VOCABULARY.split())
CLOSING_QUESTION = "In a few sentences: what is the text above about, and what follows from it?"


@dataclass(frozen=True, slots=True)
class WordText:
    """Makes text of about so many tokens.

    Args:
        tokens_per_word: of this vocabulary, with the tokenizer of whoever is measured.
    """

    tokens_per_word: float = 1.0

    def __call__(self, rng: random.Random, tokens: float) -> str:
        """Random words of about `tokens` tokens."""
        return " ".join(rng.choices(WORDS, k=max(1, round(tokens / self.tokens_per_word))))


def conversations(config: BenchConfig, text: WordText, stream: str = "") -> Iterator[Conversation]:
    """Conversations without end (a file's begin again from the start), the same for the same seed.

    Args:
        stream: another name gives other ones.

    Raises:
        ConfigError: the dataset cannot be read or has nothing to send.
    """
    if config.dataset is not None:
        found = read_conversations(config.dataset, config.output_tokens, text)
        if not found:
            raise ConfigError(f"nothing to send in the dataset: {config.dataset}", param="dataset")
        if config.arrivals != "trace":
            return itertools.cycle(found)
        if any(conversation.arrival_s is None for conversation in found):
            raise ConfigError(f"not every record has a timestamp: {config.dataset}", param="arrivals")
        return iter(sorted(found, key=lambda conversation: conversation.arrival_s or 0.0))
    return _made(_MAKERS[config.workload], config, text, stream)


Maker = Callable[[BenchConfig, WordText, random.Random], Conversation]


def _made(make: Maker, config: BenchConfig, text: WordText, stream: str) -> Iterator[Conversation]:
    for number in itertools.count():
        yield make(config, text, random.Random(f"{config.seed}/{stream}/{number}"))


def _fixed(config: BenchConfig, text: WordText, rng: random.Random) -> Conversation:
    return Conversation((Turn(text(rng, config.prompt_tokens), config.output_tokens),))


def _random(config: BenchConfig, text: WordText, rng: random.Random) -> Conversation:
    low, high = 1 - config.length_spread, 1 + config.length_spread
    prompt, output = (tokens * rng.uniform(low, high) for tokens in (config.prompt_tokens, config.output_tokens))
    return Conversation((Turn(text(rng, prompt), max(1, round(output))),))


def _shared_prefix(config: BenchConfig, text: WordText, rng: random.Random) -> Conversation:
    prefix = text(random.Random(f"{config.seed}/prefix/{rng.randrange(config.num_prefixes)}"), config.prefix_tokens)
    return Conversation((Turn(text(rng, config.prompt_tokens), config.output_tokens),), system=prefix)


def _chat(config: BenchConfig, text: WordText, rng: random.Random) -> Conversation:
    turns = [Turn(text(rng, config.prompt_tokens), config.output_tokens) for _ in range(config.turns)]
    return Conversation(tuple(turns))


def _document(config: BenchConfig, text: WordText, rng: random.Random) -> Conversation:
    """A long text in paragraphs, then a question about it."""
    paragraph = min(120.0, config.prompt_tokens)
    count = max(1, round(config.prompt_tokens / paragraph))
    paragraphs = [text(rng, paragraph).capitalize() + "." for _ in range(count)]
    return Conversation((Turn("\n\n".join([*paragraphs, CLOSING_QUESTION]), config.output_tokens),))


_MAKERS: dict[str, Maker] = {
    "fixed": _fixed,
    "random": _random,
    "shared-prefix": _shared_prefix,
    "chat": _chat,
    "document": _document,
}
