"""What one request used and how long it took, counted from its outputs: the `usage` of its answer, and the metrics.

Both are fed by the same lines, so they agree. Invariant: every choice of an admitted request ends exactly once.
"""

from __future__ import annotations

import time

from triblade.engine.outputs import FinishReason, RequestOutput
from triblade.serve.metrics import ServerMetrics
from triblade.serve.render.base import Usage

Choice = tuple[int, int]  # (number of the prompt, number of the choice)


class RequestRecorder:
    """Records one request.

    Args:
        arrival_s: when it arrived, by `time.perf_counter`.

    Attributes:
        usage: what the answer reports.
    """

    def __init__(self, metrics: ServerMetrics, num_prompts: int, n: int, arrival_s: float) -> None:
        self.usage = Usage()
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._open = {(prompt, child): 0 for prompt in range(num_prompts) for child in range(n)}  # -> tokens so far
        self._begun: set[int] = set()  # prompts whose first choice gave something
        self._timed: set[int] = set()  # prompts whose first token is out
        self._last: dict[Choice, float] = {}  # time of the choice's last token

    @property
    def num_open(self) -> int:
        """Choices that have not ended."""
        return len(self._open)

    def note(self, prompt: int, output: RequestOutput) -> None:
        """One output of prompt number `prompt`."""
        if output.index == 0 and prompt not in self._begun:
            self._begun.add(prompt)
            self._begin(output)
        choice = (prompt, output.index)
        if output.token_ids:
            self._tokens(choice, len(output.token_ids))
        if output.finish_reason is not None:
            self._metrics.ended(output.finish_reason, self._open.pop(choice, 0))

    def complete(self) -> None:
        """The whole answer is sent."""
        self._metrics.observe("e2e_request_latency_seconds", time.perf_counter() - self._arrival_s)

    def close(self, reason: FinishReason) -> None:
        """The request is over; choices that are still open ended for this reason."""
        for count in self._open.values():
            self._metrics.ended(reason, count)
        self._open.clear()

    def _begin(self, output: RequestOutput) -> None:
        self.usage.prompt_tokens += output.num_prompt_tokens
        self.usage.cached_tokens += output.num_cached_tokens
        self._metrics.count("prompt_tokens", output.num_prompt_tokens)
        self._metrics.count("prefix_cache_queries", output.num_prompt_tokens)
        self._metrics.count("prefix_cache_hits", output.num_cached_tokens)
        self._metrics.observe("request_prompt_tokens", output.num_prompt_tokens)
        if output.queue_time_s is not None:
            self._metrics.observe("request_queue_time_seconds", output.queue_time_s)

    def _tokens(self, choice: Choice, count: int) -> None:
        now = time.perf_counter()
        self.usage.completion_tokens += count
        self._open[choice] = self._open.get(choice, 0) + count
        self._metrics.count("generation_tokens", count)
        if choice[0] not in self._timed:
            self._timed.add(choice[0])
            self._metrics.observe("time_to_first_token_seconds", now - self._arrival_s)
        if choice in self._last:
            gap = (now - self._last[choice]) / count
            for _ in range(count):
                self._metrics.observe("inter_token_latency_seconds", gap)
        self._last[choice] = now
