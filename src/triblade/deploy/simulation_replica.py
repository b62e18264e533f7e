"""One simulated replica: continuous batching, prompts in chunks, a prefix cache. Time passes from event to event, not step by step.

Between two events the batch does not change, so a run of equal steps is one stretch; a request that comes in the middle ends it at
the end of the step that is being computed. Memory is reserved for whole answers, so nothing is preempted. Knows no router.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from triblade.deploy.simulation_times import StepTimes
from triblade.deploy.simulation_traffic import SHARED, SimulatedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one replica."""

    chunk_tokens: int = 512
    max_running: int = 256
    kv_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        """Check what a caller may get wrong."""
        assert min(self.chunk_tokens, self.max_running, self.kv_tokens) > 0, self


@dataclass(eq=False, slots=True)
class _Prefill:
    """A prompt that is being computed."""

    request: SimulatedRequest
    left_tokens: int


class SimulatedReplica:
    """A replica.

    Args:
        times: of its steps.
        limits: of its batch and memory.
        only_prefill: requests end with their prompts.

    Attributes:
        next_s: when its stretch ends; infinite while it has nothing to do.
        version: of its stretch: an event of an older one is void.
        busy_s: how long it computed.
    """

    def __init__(self, times: StepTimes, limits: Limits, *, only_prefill: bool = False) -> None:
        self.next_s = math.inf
        self.version = 0
        self.busy_s = 0.0
        self._times, self._limits, self._only_prefill = times, limits, only_prefill
        self._waiting: deque[SimulatedRequest] = deque()
        self._prefilling: deque[_Prefill] = deque()
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []  # (step of its end, number, request)
        self._cache: OrderedDict[int, int] = OrderedDict()  # conversation -> tokens
        self._cached = self._held = 0  # tokens: cached for reuse, of running requests
        self._in_both = 0  # of running requests whose prompts may be used again already
        self._context = 0.0  # tokens that a step reads
        self._steps = self._number = 0
        self._begun_s = self._step_s = 0.0
        self._length = 0  # steps of the stretch
        self._computed: list[_Prefill] = []  # prompts that the stretch completes

    def add(self, request: SimulatedRequest, now_s: float) -> None:
        """A request comes; its step begins after the one that is being computed."""
        self._waiting.append(request)
        if self.next_s == math.inf:
            self._begin(now_s)
        elif self._length > 1:
            passed = min(self._length, max(1, math.ceil((now_s - self._begun_s) / self._step_s)))
            self._set_length(passed)

    def receive(self, request: SimulatedRequest) -> int:
        """The KV of its prompt is here before it comes; how many tokens of it are sent."""
        lacking = request.prompt_tokens - self._hit(request)
        request.known_tokens = request.prompt_tokens
        self._remember(request.conversation, request.prompt_tokens)
        return lacking

    def finish(self) -> tuple[list[SimulatedRequest], list[SimulatedRequest]]:
        """The stretch is over: requests that got their first token, and those that are done. The next one begins."""
        now_s = self.next_s
        self._steps += self._length
        self._context += self._length * len(self._decoding)
        self.busy_s += now_s - self._begun_s
        done = []
        while self._decoding and self._decoding[0][0] <= self._steps:
            done.append(heapq.heappop(self._decoding)[2])
        first = [prefill.request for prefill in self._computed]
        for request in first:
            request.first_s = now_s
            self._share(request)
            done += self._decode(request)
        for request in done:
            request.end_s = now_s
            self._leave(request)
        self._begin(now_s)
        return first, done

    def _decode(self, request: SimulatedRequest) -> list[SimulatedRequest]:
        """Goes on with a request whose prompt is computed; it is given back if it has no more tokens to come."""
        steps = math.ceil((request.output_tokens - 1) / self._times.tokens_per_step)
        if self._only_prefill or steps == 0:
            return [request]
        self._number += 1
        heapq.heappush(self._decoding, (self._steps + steps, self._number, request))
        self._context += request.prompt_tokens
        return []

    def _share(self, request: SimulatedRequest) -> None:
        """A prompt is computed: others may begin with it from now on."""
        self._in_both += request.prompt_tokens
        self._remember(request.conversation, request.prompt_tokens)
        self._remember(SHARED, request.shared_tokens)

    def _leave(self, request: SimulatedRequest) -> None:
        self._held -= request.prompt_tokens + request.output_tokens
        self._in_both -= request.prompt_tokens
        self._remember(request.conversation, request.prompt_tokens + request.output_tokens)
        if not self._only_prefill and request.output_tokens > 1:
            self._context = max(0.0, self._context - request.prompt_tokens - request.output_tokens)

    def _begin(self, now_s: float) -> None:
        """The next stretch."""
        self._begun_s, self._computed = now_s, []
        self._admit()
        chunk = self._chunk()
        if not chunk and not self._decoding:
            self.next_s = math.inf
            self.version += 1
            return
        length = 1 if chunk else self._decoding[0][0] - self._steps
        sequences = len(self._decoding) + len(self._computed)
        context = self._context + len(self._decoding) * (length - 1) / 2
        self._step_s = self._times.of(sequences, context, chunk)
        self._set_length(length)

    def _set_length(self, steps: int) -> None:
        self._length = steps
        self.next_s = self._begun_s + steps * self._step_s
        self.version += 1

    def _admit(self) -> None:
        """Take in what there is room for, in the order of arrival."""
        while self._waiting and len(self._decoding) + len(self._prefilling) < self._limits.max_running:
            request = self._waiting[0]
            size = request.prompt_tokens + request.output_tokens
            if self._held and self._held + size > self._limits.kv_tokens:
                return
            self._waiting.popleft()
            self._held += size
            request.cached_tokens = min(self._hit(request), request.prompt_tokens - 1)
            self._prefilling.append(_Prefill(request, request.prompt_tokens - request.cached_tokens))
            self._evict()

    def _chunk(self) -> int:
        """Prompt tokens of the next step."""
        left = self._limits.chunk_tokens
        while self._prefilling and left:
            first = self._prefilling[0]
            taken = min(left, first.left_tokens)
            first.left_tokens -= taken
            left -= taken
            if first.left_tokens == 0:
                self._computed.append(self._prefilling.popleft())
        return self._limits.chunk_tokens - left

    def _hit(self, request: SimulatedRequest) -> int:
        """Tokens of a prompt that are cached."""
        own = min(self._cache.get(request.conversation, 0), request.known_tokens)
        return max(own, min(self._cache.get(SHARED, 0), request.shared_tokens))

    def _remember(self, conversation: int, tokens: int) -> None:
        known = self._cache.pop(conversation, 0)
        self._cache[conversation] = max(known, tokens)
        self._cached += self._cache[conversation] - known
        self._evict()

    def _evict(self) -> None:
        """What is cached gives way to what is running."""
        while self._cache and self._cached + self._held - self._in_both > self._limits.kv_tokens:
            self._cached -= self._cache.popitem(last=False)[1]
