"""One measurement of speculative decoding: prompts through an engine, some at a time, with everything counted that a step does.

Counts what comes out of `Engine.step` and knows no drafter from inside, so that the engine's own figures can be checked against it.
Invariant: a drafter that remembers ended requests starts without memory, so no run knows the answers of an earlier one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from triblade.engine.engine import Engine
from triblade.engine.outputs import RequestOutput
from triblade.engine.request import Request
from triblade.llm import LLM
from triblade.sampling_params import SamplingParams
from triblade.spec.drafter import Draft, Drafter, DraftItem, DraftState, WarmsUp
from triblade.spec.suffix import SuffixDrafter

Tokens = list[int]
POSITIONS = 8  # of a draft that are counted one by one
TIMES_SAID, LONGEST_LOOP, LEAST_LOOP = 3, 64, 8  # tokens


@dataclass(frozen=True)
class Task:
    """A prompt and how many tokens its answer has."""

    prompt: Tokens
    max_tokens: int


class TimedDrafter:
    """A drafter with a clock."""

    def __init__(self, drafter: Drafter) -> None:
        # What earlier runs left in the shared text would be this run's answers.
        self.drafter = SuffixDrafter() if isinstance(drafter, SuffixDrafter) else drafter
        self.warm_up_steps = drafter.warm_up_steps if isinstance(drafter, WarmsUp) else 0
        self.seconds = 0.0

    def propose(self, items: Sequence[DraftItem]) -> list[Draft]:
        """See `Drafter`."""
        start = time.perf_counter()
        drafts = self.drafter.propose(items)
        self.seconds += time.perf_counter() - start
        return drafts

    def forget(self, request: DraftState) -> None:
        """See `Drafter`."""
        start = time.perf_counter()
        self.drafter.forget(request)
        self.seconds += time.perf_counter() - start


@dataclass
class Run:
    """What one pass over the tasks did. Decoding: steps without a token of a prompt."""

    seconds: float = 0.0
    tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    decode_rows: int = 0  # requests, summed over the steps
    drafter_seconds: float = 0.0
    drafted: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    accepted: list[int] = field(default_factory=lambda: [0] * POSITIONS)
    answers: dict[int, Tokens] = field(default_factory=dict)  # number of the task -> answer

    def count_step(self, seconds: float, is_decode: bool, outputs: Sequence[tuple[Request, RequestOutput]]) -> None:
        """Add a step."""
        new = sum(len(output.token_ids) for _, output in outputs)
        self.seconds += seconds
        self.tokens += new
        if is_decode:
            self.decode_seconds += seconds
            self.decode_tokens += new
            self.decode_rows += len(outputs)

    def count_draft(self, draft: Tokens, new: Tokens) -> None:
        """Compare a draft with the tokens that were committed."""
        accepted = next(
            (i for i, (d, t) in enumerate(zip(draft, new, strict=False)) if d != t), min(len(draft), len(new))
        )
        for position in range(min(len(draft), POSITIONS)):
            self.drafted[position] += 1
            self.accepted[position] += position < accepted


def run(llm: LLM, tasks: Sequence[Task], batch: int) -> Run:
    """Greedy answers to all tasks, `batch` at a time: the next one starts when one ends."""
    engine, found = llm.engine, Run()
    timed = None
    if engine.speculator is not None:
        engine.speculator.drafter = timed = TimedDrafter(_plain_drafter(engine.speculator.drafter))
    waiting = list(enumerate(tasks))[::-1]
    active: dict[Request, int] = {}
    while waiting or active:
        while waiting and len(active) < batch:
            number, task = waiting.pop()
            (request,) = engine.prepare(task.prompt, SamplingParams(temperature=0, max_tokens=task.max_tokens))
            engine.add([request])
            active[request] = number
        _step(engine, active, found)
    if timed is not None:
        found.drafter_seconds = timed.seconds
    engine.check_idle()
    return found


def _plain_drafter(drafter: Drafter) -> Drafter:
    return drafter.drafter if isinstance(drafter, TimedDrafter) else drafter


def _step(engine: Engine, active: dict[Request, int], found: Run) -> None:
    is_decode = all(request.output_token_ids for request in active)
    drafts = {request: request.draft_token_ids for request in active}
    start = time.perf_counter()
    outputs = engine.step()
    found.count_step(time.perf_counter() - start, is_decode, outputs)
    for request, output in outputs:
        found.count_draft(drafts[request], output.token_ids)
        if output.finished:
            found.answers[active.pop(request)] = list(request.output_token_ids)


def before_loop(tokens: Tokens) -> int:
    """Tokens until some stretch has been said three times in a row: small models end in loops, which are too easy to draft."""
    for end in range(1, len(tokens) + 1):
        for period in range(1, LONGEST_LOOP + 1):
            length = max(TIMES_SAID * period, LEAST_LOOP)
            piece = tokens[max(0, end - length) : end]
            if len(piece) == length and piece[period:] == piece[:-period]:
                return end
    return len(tokens)


def first_difference(tokens: Tokens, expected: Tokens) -> int | None:
    """Position of the first token that differs."""
    if tokens == expected:
        return None
    pairs = enumerate(zip(tokens, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(expected)))


def nats_behind(llm: LLM, prompt: Tokens, answer: Tokens, token: int) -> float:
    """How much less likely a token is than the best one after a prompt and the beginning of an answer, to the engine of `llm`.

    Log-probabilities are natural; a token that is not among the 20 best counts as infinitely unlikely.
    """
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    (completion,) = llm.generate([[*prompt, *answer]], params)[0]
    assert completion.logprobs is not None
    top = dict(completion.logprobs[0].top)
    return max(top.values()) - top.get(token, -math.inf)
