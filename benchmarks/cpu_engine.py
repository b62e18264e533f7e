"""Our engine as a worker of `cpu.py`: whole engine steps, scheduler and sampler included, in a process of its own.

Run as a module it loads a model with the native backend and answers the commands of `worker`. Everything goes through
`Engine.step`, but for `chunk`, which drives the executor to compute several known tokens of one sequence in a step, as
speculation does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from worker import Figures, answer

from triblade import __version__, host
from triblade.config import EngineConfig
from triblade.engine.build import kv_layout, plan_for
from triblade.engine.native import NativeExecutor
from triblade.engine.request import Request
from triblade.engine.scheduler import ScheduledRequest
from triblade.llm import LLM
from triblade.models.loader import open_model
from triblade.quant.packed_weights import packed_bytes
from triblade.sampling_params import SamplingParams

MEBI = 2**20


class TimedProgram:
    """The native program with a clock: seconds inside its calls."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def run(self, *arguments: int) -> None:
        """One step."""
        self._timed(self._program.run, arguments)

    def score(self, *arguments: int) -> None:
        """The head, of some rows."""
        self._timed(self._program.score, arguments)

    def _timed(self, call: Callable[..., None], arguments: tuple[int, ...]) -> None:
        start = time.perf_counter()
        call(*arguments)
        self.seconds += time.perf_counter() - start


class Triblade:
    """A loaded engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._llm = LLM(config)
        self._engine = self._llm.engine
        executor = self._engine.runner.executor
        if not isinstance(executor, NativeExecutor):
            raise SystemExit(f"this benchmark is of the native backend, got: {executor.name}")
        self.executor = executor
        self._random = random.Random(config.seed)
        self._loading_peak = host.peak_rss_bytes()

    def prefill(self, tokens: int) -> Figures:
        """Tokens per second of one prompt, its first output token sampled."""
        start = time.perf_counter()
        self._prompts(1, tokens, 1)
        return {"rate": tokens / (time.perf_counter() - start)}

    def decode(self, batch: int, context: int, steps: int) -> Figures:
        """Tokens per second of `batch` sequences after `context` tokens each."""
        requests = self._prompts(batch, context, steps + 2)
        start = time.perf_counter()
        for _ in range(steps):
            self._engine.step()
        seconds = time.perf_counter() - start
        self._engine.abort(requests)
        return {"rate": batch * steps / seconds}

    def chunk(self, context: int, tokens: Sequence[int], repeat: int) -> Figures:
        """Milliseconds of a step with so many tokens of one sequence, logits of each, by number of tokens; medians."""
        requests = self._prompts(1, context + max(tokens), 4)
        times: dict[int, list[float]] = {number: [] for number in tokens}
        for _ in range(repeat):
            for number in tokens:  # computed before, so that the cache stays as it is
                start = time.perf_counter()
                self.executor.forward([ScheduledRequest(requests[0], context, number, 0, True)])
                self.executor.score(range(number), with_logits=False)
                times[number].append(time.perf_counter() - start)
        self._engine.abort(requests)
        return {str(number): statistics.median(values) * 1e3 for number, values in times.items()}

    def host(self, batch: int, context: int, steps: int) -> Figures:
        """Milliseconds of a decode step inside and outside the native calls; medians."""
        requests = self._prompts(batch, context, steps + 2)
        program = self.executor._program
        timed = self.executor._program = TimedProgram(program)
        inside, outside = [], []
        for _ in range(steps):
            timed.seconds = 0.0
            start = time.perf_counter()
            self._engine.step()
            outside.append(time.perf_counter() - start - timed.seconds)
            inside.append(timed.seconds)
        self.executor._program = program
        self._engine.abort(requests)
        return {"outside_ms": statistics.median(outside) * 1e3, "inside_ms": statistics.median(inside) * 1e3}

    def generate(self, requests: int, prompt: int, new: int) -> Figures:
        """Output tokens per second of many requests, prompts included, as many at once as the engine takes."""
        prompts = [self._tokens(prompt) for _ in range(requests)]
        start = time.perf_counter()
        self._llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
        return {"rate": requests * new / (time.perf_counter() - start)}

    def memory(self) -> Figures:
        """Fill every context, then MiB: the process's peak, what the engine holds by its own figures, and its estimate."""
        length = self._engine.context_length
        prompts = [self._tokens(length - 16) for _ in range(self._config.max_num_seqs)]
        self._llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        peak, executor = host.peak_rss_bytes(), self.executor
        parts = {"weights": executor.weight_bytes, "kv": executor.cache.pool.nbytes, "buffers": executor.buffer_bytes}
        process = {"peak": peak, "loading_peak": self._loading_peak}
        figures = {**process, **parts, "held": sum(parts.values()), "estimate": self._estimate()}
        return {f"{name}_mib": size / MEBI for name, size in figures.items()}

    def _estimate(self) -> int:
        """What the engine announced at its start."""
        model, device = open_model(self._config), torch.device("cpu")
        weights = packed_bytes(model.checkpoint, model.config, model.dtype, self._config.quantization)
        return plan_for(self._config, model, kv_layout(self._config, model, True), weights, device).total_bytes

    def _prompts(self, batch: int, tokens: int, new: int) -> list[Request]:
        """Requests whose prompts are computed and whose first token is sampled."""
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        requests = [r for _ in range(batch) for r in self._engine.prepare(self._tokens(tokens), params)]
        self._engine.add(requests)
        while any(not r.output_token_ids for r in requests):
            self._engine.step()
        return requests

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(100, 40000) for _ in range(number)]


def shape(engine: Triblade) -> dict[str, str]:
    """The numbers that the limit probe takes, and versions."""
    model = engine.executor._config
    sizes = (
        model.hidden_size,
        model.q_size + 2 * model.kv_size,
        model.q_size,
        model.intermediate_size,
        model.vocab_size,
    )
    probe = " ".join(map(str, (*sizes, model.num_layers)))
    return {"triblade": __version__, "torch": torch.__version__, "backend": engine.executor.name, "probe": probe}


def main() -> None:
    """Load and answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--kv", default="auto")
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    engine = Triblade(
        EngineConfig(
            model=args.model,
            quantization="int4",
            kv_cache_dtype=args.kv,
            max_model_len=args.context,
            max_num_seqs=args.sequences,
            threads=args.threads,
            seed=args.seed,
            backend="native",
            enable_prefix_caching=False,
        )
    )
    names = ("prefill", "decode", "chunk", "host", "generate", "memory")
    answer(shape(engine), {name: getattr(engine, name) for name in names})


if __name__ == "__main__":
    main()
