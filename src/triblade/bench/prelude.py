"""What comes before the measured requests: how the target cuts our words into tokens, and requests that warm it up.

Both go through the driver, as everything does, and leave no record.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from triblade.bench.dataset import Conversation, Turn
from triblade.bench.driver import Driver
from triblade.bench.metrics import Record
from triblade.bench.target import Target
from triblade.bench.workload import WordText, conversations
from triblade.config import BenchConfig
from triblade.errors import BenchError

MEASURED_WORDS = 200


async def tokens_per_word(target: Target, config: BenchConfig) -> float:
    """Prompt tokens of many words less those of one, per word; what a template adds falls out.

    Raises:
        BenchError: the target does not answer.
    """
    one, many = [await _prompt_tokens(target, config, words) for words in (1, 1 + MEASURED_WORDS)]
    return (many - one) / MEASURED_WORDS if many > one else 1.0  # a server that counts nothing says 0 twice


async def warm_up(target: Target, config: BenchConfig, text: WordText) -> None:
    """Send requests like those to come, with other prompts, all at once."""
    if config.warmup_requests:
        workload = "fixed" if config.workload == "replay" else config.workload
        other = replace(_closed(config, config.warmup_requests), workload=workload, dataset=None)
        prompts = conversations(other, text, stream="warm-up")
        await _send(target, other, itertools.islice(prompts, config.warmup_requests))


async def _prompt_tokens(target: Target, config: BenchConfig, words: int) -> int:
    only = Conversation((Turn(WordText()(random.Random(0), words), 1),))
    (record,) = await _send(target, _closed(config, 1), iter([only]))
    if not record.is_good:
        raise BenchError(f"{target.name} does not answer: {record.error or 'an empty answer'}")
    return record.prompt_tokens


async def _send(target: Target, config: BenchConfig, prompts: Iterator[Conversation]) -> list[Record]:
    driver = Driver(target, config)
    await driver.run(prompts, config.num_requests)
    return driver.records


def _closed(config: BenchConfig, requests: int) -> BenchConfig:
    """So many requests at once, one each."""
    return replace(
        config,
        num_requests=requests,
        concurrency=requests,
        arrivals="poisson",
        request_rate=None,
        ramp_to_rate=None,
        spawn_rate=None,
        duration_s=None,
    )
