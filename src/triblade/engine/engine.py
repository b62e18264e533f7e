"""The engine: schedule -> execute -> update, over the requests it was given.

Not thread-safe but for `prepare`, which validates and builds requests without touching any state; whoever owns the thread calls
`add`, `abort` and `step`. Invariant: every request that was added ends in exactly one output with a finish reason, and its
blocks are free then.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from triblade.engine.admission import Admission
from triblade.engine.block_pool import BlockPool
from triblade.engine.client import EngineLoad
from triblade.engine.detokenizer import OutputStream
from triblade.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from triblade.engine.pooling import PromptVectors
from triblade.engine.request import Request
from triblade.engine.runner import ModelRunner, StepResult
from triblade.engine.scheduler import ScheduledRequest, Scheduler
from triblade.engine.speculation import Speculator
from triblade.errors import RequestError
from triblade.models.loader import OpenModel
from triblade.sampling_params import SamplingParams, StructuredOutputs
from triblade.spec.constraint import TokenConstraint
from triblade.spec.record import SpeculationCounts
from triblade.spec.sampler import child_seed

log = logging.getLogger(__name__)

NOT_FINITE = "the model's logits are not finite; try --dtype bfloat16"

# The form and the tokens that may end it -> a fresh constraint for every choice. May take seconds; from any thread.
CompileConstraint = Callable[[StructuredOutputs, frozenset[int]], Callable[[], TokenConstraint]]


class Engine:
    """One model serving many requests.

    Args:
        model: tokenizer and end tokens.
        runner: computes steps.
        scheduler: decides them.
        context_length: prompt and output together, at most.
        max_logprobs: most alternatives a request may ask for.
        seed: the seeds of requests without one are derived from it, in order of arrival; None takes a fresh one.

    Attributes:
        speculator: proposes tokens between steps; None, as at the beginning, decodes plainly.
        compile: makes constraints of requests that ask for a form; None refuses them.
    """

    def __init__(
        self,
        model: OpenModel,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        context_length: int,
        max_logprobs: int = 20,
        seed: int | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = model.tokenizer
        self.runner = runner
        self.scheduler = scheduler
        self.context_length = context_length
        self.max_logprobs = max_logprobs
        self.speculator: Speculator | None = None
        self.compile: CompileConstraint | None = None
        self._seed = secrets.randbits(64) if seed is None else seed
        self._numbers = itertools.count()
        self._streams: dict[Request, OutputStream] = {}
        self._prompt_logprobs: dict[Request, dict[int, TokenLogprobs]] = {}
        self._vectors = PromptVectors()
        self._counters = dict.fromkeys(("prompt", "computed", "cached", "generated", "steps"), 0)

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.pool

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def admission(self) -> Admission:
        """What every request must keep to."""
        return Admission(
            vocab_size=self.model.vocab_size,
            context_length=self.context_length,
            kv_tokens=self.pool.num_blocks * self.scheduler.block_size,
            max_logprobs=self.max_logprobs,
        )

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """Check a client request and make its `params.n` requests. Safe to call from any thread.

        Raises:
            RequestError: an empty prompt, an id outside the vocabulary, or a form that cannot be had.
            ContextLengthError: prompt and `max_tokens` exceed the context length or the whole KV cache.
        """
        prompt = list(prompt_token_ids)
        max_tokens = self.admission.check(prompt, params)
        ends = frozenset() if params.ignore_eos else self.model.eos_token_ids
        bad_words = self._bad_words(params)
        stops = ends | set(params.stop_token_ids)
        constrain = self._constrain(params.structured_outputs, stops)
        now = time.monotonic()
        requests: list[Request] = []
        for index, number in zip(range(params.n), self._numbers, strict=False):
            request = Request(
                request_id=request_id or f"request-{number}",
                number=number,
                index=index,
                prompt_token_ids=prompt,
                params=params,
                seed=child_seed(self._seed, number) if params.seed is None else child_seed(params.seed, index),
                max_tokens=max_tokens,
                stop_token_ids=stops,
                bad_words_ids=bad_words,
                constraint=constrain(),
                priority=priority,
                leader=requests[0] if requests else None,
                arrival_s=now,
            )
            requests.append(request)
        return requests

    def _constrain(self, form: StructuredOutputs | None, stops: frozenset[int]) -> Callable[[], TokenConstraint | None]:
        """What makes the constraint of each choice."""
        if form is None:
            return lambda: None
        if self.compile is None:
            raise RequestError("this engine gives no output a form", param="structured_outputs")
        return self.compile(form, stops)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue what `prepare` made."""
        for request in requests:
            self._streams[request] = OutputStream(self.tokenizer, request.params, request.prompt_token_ids)
            self.scheduler.add(request)
            if request.index == 0:
                self._counters["prompt"] += request.num_prompt_tokens

    def abort(self, requests: Iterable[Request]) -> list[tuple[Request, RequestOutput]]:
        """End requests wherever they are; those that ended already give no output."""
        return [(r, self._finish(r, FinishReason.ABORT)) for r in requests if not r.is_finished]

    def let_go(self, request: Request) -> None:
        """Take the blocks of a request that keeps them, which ends where it has not ended yet."""
        self.abort([request])
        self.scheduler.release(request)
        if self.speculator is not None:
            self.speculator.forget(request)

    def fail(self, reason: str) -> list[tuple[Request, RequestOutput]]:
        """End every running request after a fault, so that waiting ones get their chance."""
        return [(r, self._finish(r, FinishReason.ERROR, reason)) for r in self.scheduler.running[:]]

    def step(self) -> list[tuple[Request, RequestOutput]]:
        """Compute one step; returns what is new for each request it touched."""
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        outputs = [(r, self._finish(r, FinishReason.LENGTH)) for r in scheduled.starved]
        if scheduled:
            results = self.runner.execute(scheduled.scheduled)
            outputs += self._update(results)
            if self.speculator is not None:
                self.speculator.after_step(results, time.perf_counter() - start)
        return outputs

    def load(self) -> EngineLoad:
        """A snapshot for metrics; reads only numbers, from any thread."""
        return EngineLoad(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self.scheduler.receiving),
            num_kv_blocks=self.pool.num_blocks,
            num_free_kv_blocks=self.pool.num_free,
            num_preemptions=self.scheduler.num_preemptions,
            num_prompt_tokens=self._counters["prompt"],
            num_computed_prompt_tokens=self._counters["computed"],
            num_cached_prompt_tokens=self._counters["cached"],
            num_generated_tokens=self._counters["generated"],
            num_steps=self._counters["steps"],
            speculation=SpeculationCounts() if self.speculator is None else self.speculator.counts.snapshot(),
        )

    def check_idle(self) -> None:
        """Assert that nothing leaked once no request is left."""
        left = len(self._streams) + len(self._prompt_logprobs) + len(self._vectors)
        assert left == 0, "an ended request left state behind"
        self.pool.check()

    def _update(self, results: list[StepResult]) -> list[tuple[Request, RequestOutput]]:
        now = time.monotonic()
        self._counters["steps"] += 1
        outputs = []
        for result in results:
            self._count_prompt(result.item, now)
            output = self._commit(result)
            if output is not None:
                outputs.append((result.request, output))
        return outputs

    def _commit(self, result: StepResult) -> RequestOutput | None:
        """Append new tokens one by one until the request ends, then let the scheduler keep what is behind them.

        What was accepted beyond the end is dropped as if it had never been drafted. None while the prompt is incomplete.
        """
        request = result.request
        self._note_prompt(result)
        if not result.item.samples:
            self.scheduler.update(result.item)
            return None
        if not result.is_finite:
            return self._finish(request, FinishReason.ERROR, NOT_FINITE)
        output = self._output(request)
        if request.params.pooling is not None:
            output.embedding = self._vectors.vector(request)
            if output.embedding is None:
                return self._finish(request, FinishReason.ERROR, NOT_FINITE)
        reason = FinishReason.LENGTH if request.max_tokens == 0 else None
        for token, logprobs in zip(result.token_ids, result.logprobs, strict=True):
            reason = self._append(request, token, logprobs, output)
            if reason is not None:
                break
        self.scheduler.update(result.item, min(result.num_accepted_tokens, len(output.token_ids)))
        if self.speculator is not None and output.token_ids:
            self.speculator.note(result, len(output.token_ids), is_last=reason is not None)
        if reason is not None:
            self._end(request, reason, output)
        output.num_output_tokens = len(request.output_token_ids)
        return output

    def _append(
        self, request: Request, token: int, logprobs: TokenLogprobs | None, output: RequestOutput
    ) -> FinishReason | None:
        """Commit a token and add it and its text to the output; the reason if the request ends with it."""
        request.append(token)
        output.token_ids.append(token)
        if logprobs is not None:
            output.logprobs = [*(output.logprobs or []), logprobs]
        self._counters["generated"] += 1
        is_stop_token = token in request.stop_token_ids
        if not is_stop_token or request.params.include_stop_str_in_output:
            delta = self._streams[request].append([token])
            output.text += delta.text
            if delta.stop_string is not None:
                output.stop_reason = delta.stop_string
                return FinishReason.STOP
        if is_stop_token:
            output.stop_reason = token if token in request.params.stop_token_ids else None
            return FinishReason.STOP
        if request.constraint is not None and (reason := _constrained_end(request.constraint, token, output)):
            return reason
        if len(request.output_token_ids) >= request.max_tokens or request.num_tokens >= self.context_length:
            return FinishReason.LENGTH
        return None

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """End a request outside a commit."""
        output = self._output(request)
        output.error = error
        self._end(request, reason, output)
        return output

    def _end(self, request: Request, reason: FinishReason, output: RequestOutput) -> None:
        """The only way a request ends: its last text, its reason, its blocks."""
        output.text += self._streams.pop(request).flush()
        output.finish_reason = request.finish_reason = reason
        output.speculation = request.speculation
        self._prompt_logprobs.pop(request, None)
        self._vectors.forget(request)
        if self.speculator is not None and not request.keeps_blocks:
            self.speculator.forget(request)
        self.scheduler.finish(request)

    def _output(self, request: Request) -> RequestOutput:
        first = not request.output_token_ids
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            queue_time_s=_queue_time_s(request),
            prompt_logprobs=self._all_prompt_logprobs(request) if first else None,
        )

    def _note_prompt(self, result: StepResult) -> None:
        """Keep a chunk's prompt log-probabilities, and its part of the prompt's vector, until the prompt is complete."""
        if result.pooled is not None:
            self._vectors.add(result.request, result.item.start, result.pooled)
        if result.prompt_logprobs:
            self._prompt_logprobs.setdefault(result.request, {}).update(result.prompt_logprobs)

    def _all_prompt_logprobs(self, request: Request) -> list[TokenLogprobs | None] | None:
        if request.params.prompt_logprobs is None:
            return None
        found = self._prompt_logprobs.get(request, {})
        return [found.get(position) for position in range(request.num_prompt_tokens)]

    def _count_prompt(self, item: ScheduledRequest, now: float) -> None:
        """Counters of a request's first schedule and of its prompt tokens."""
        request = item.request
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
            if request.index == 0:
                self._counters["cached"] += request.num_cached_tokens
        self._counters["computed"] += max(0, min(item.start + item.num_tokens, request.num_prompt_tokens) - item.start)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word, at the start of a text and after a space."""
        variants = [variant for word in params.bad_words for variant in (word, f" {word.lstrip()}")]
        encoded = (tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in variants)
        return tuple(dict.fromkeys(ids for ids in encoded if ids))


def _constrained_end(constraint: TokenConstraint, token: int, output: RequestOutput) -> FinishReason | None:
    """Move a constraint behind a committed token; the reason if nothing may or can follow."""
    if constraint.fault is not None or not constraint.accept(token):
        output.error = constraint.fault or "a token was not allowed"
        return FinishReason.ERROR
    return FinishReason.STOP if constraint.is_exhausted else None


def _queue_time_s(request: Request) -> float | None:
    return None if request.first_scheduled_s is None else request.first_scheduled_s - request.arrival_s
