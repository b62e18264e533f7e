"""What models write for triblade itself: text to calibrate on, long texts that show repetition, text to align a head to.

All of it goes through the engine, so that it is what would be served. Knows nothing of what the text is used for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from triblade.config import AlignConfig
from triblade.console import progress
from triblade.files import written_whole
from triblade.llm import LLM
from triblade.ops.select import select_device
from triblade.sampling_params import SamplingParams
from triblade.spec.align.run import AlignReport, align
from triblade.spec.align.writer import Writer

AT_ONCE = 32  # samples in one batch


def write_own_text(llm: LLM, samples: int, length: int, path: Path) -> None:
    """Let a model write text to calibrate on: a JSON list of `samples` lists of `length` token ids.

    Each begins with BOS, or a random token where there is none, and goes on as the model would at temperature 1, past every end.
    """
    random_ids = random.Random(0)
    tokenizer = llm.tokenizer
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompts = [[*start, random_ids.randrange(tokenizer.vocab_size)] for _ in range(samples)]
    written = []
    with progress("writing calibration text", samples * length, unit="tokens") as advance:
        for begin in range(0, samples, AT_ONCE):
            batch = prompts[begin : begin + AT_ONCE]
            params = SamplingParams(max_tokens=length - len(batch[0]), temperature=1.0, seed=begin, ignore_eos=True)
            for prompt, (completion,) in zip(batch, llm.generate(batch, params), strict=True):
                written.append([*prompt, *completion.token_ids])
                advance(length)
    with written_whole(path) as part:
        part.write_text(json.dumps(written), encoding="utf-8")


def long_texts(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The greedy continuation of each prompt, past every end, as token ids."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    texts: list[list[int]] = []
    with progress("writing long texts", len(prompts) * max_tokens, unit="tokens") as advance:
        for begin in range(0, len(prompts), AT_ONCE):
            batch = prompts[begin : begin + AT_ONCE]
            texts += [completion.token_ids for (completion,) in llm.generate(batch, params)]
            advance(len(batch) * max_tokens)
    return texts


class EngineWriter:
    """Text for an alignment, written as the target is served: with its kernels, quantized weights included.

    Args:
        llm: the target.
    """

    at_once = AT_ONCE

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __call__(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, temperatures: Sequence[float], seed: int
    ) -> list[list[int]]:
        """See `spec.align.writer.Writer`."""
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed + index)
            for index, temperature in enumerate(temperatures)
        ]
        return [completion.token_ids for (completion,) in self._llm.generate(prompts, params)]


def align_head(config: AlignConfig) -> AlignReport:
    """Train a head; on a CPU the engine writes the text, elsewhere the model in lock step, which is faster there."""
    device, _ = select_device(config.device)

    def make_writer() -> Writer:
        return EngineWriter(LLM(config.engine))

    return align(config, make_writer if device.type == "cpu" else None)
