"""A tuning run without processes: a laboratory whose servers are formulas, and everything a tuner needs around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triblade.config import Plan, TuneConfig
from triblade.errors import TuneError
from triblade.models.config import model_config
from triblade.tune.hardware import find_hardware
from triblade.tune.journal import Journal
from triblade.tune.laboratory import Measure
from triblade.tune.measured import Quality, Run
from triblade.tune.points import NO_DRAFTER, TOGETHER, Point, Space, space_of
from triblade.tune.shape import ModelShape
from triblade.tune.trial_plan import Checkpoint, TrialPlanner
from triblade.tune.tuner import Tuner

SMALL = ModelShape(
    name="small",
    config=model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 4096,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
        }
    ),
    has_head=True,
)
BITS_TIME = {"bf16": 1.0, "stored": 0.5, "int8": 0.7, "int4": 0.5, "int3": 0.5}
BITS_LOSS = {"int8": 0.002, "int4": 0.03, "int3": 0.2}


class Killed(BaseException):
    """The process dies."""


@dataclass
class World:
    """How long things take here.

    Attributes:
        acceptance: share of guesses that are right, by weights.
        guess_cost: of a guess, in tokens.
        workers: what workers multiply the time by.
        broken: weights that cannot be made.
        dies_at: points at which the process dies, until they are taken out.
    """

    acceptance: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(BITS_TIME, 0.6))
    guess_cost: float = 0.1
    workers: float = 0.9
    broken: frozenset[str] = frozenset()
    dies_at: list[Point] = field(default_factory=list)
    served: list[Point] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    models: dict[str, Point] = field(default_factory=dict)
    sent_bytes: float = 1e6

    def time_ms(self, point: Point) -> float:
        """Of a request."""
        step, tokens = 1.0, 1.0
        if point.drafter != NO_DRAFTER:
            right = self.acceptance[point.weights]
            tokens += sum(right**n for n in range(1, point.draft_length + 1))
            step += self.guess_cost * point.draft_length
        split = self.workers * (1 + 0.01 * int(point.placement[:2])) if point.placement != TOGETHER else 1.0
        return 1000 * BITS_TIME[point.weights] * step / tokens * split

    def run(self, point: Point, number: int) -> Run:
        """The figures of a run; the second one is a little slower."""
        time_ms = self.time_ms(point) * (1 + 0.01 * number)
        drafts = point.drafter != NO_DRAFTER
        right = self.acceptance[point.weights]
        return Run(
            ttft_ms=time_ms / 5,
            tpot_ms=time_ms / 100,
            e2el_ms=time_ms,
            output_tokens_per_s=4e5 / time_ms,
            requests_per_s=4e3 / time_ms,
            memory_mib=500 * BITS_TIME[point.weights] * (1.5 if point.placement != TOGETHER else 1.0),
            acceptance_rate=right if drafts else None,
            tokens_per_step=1 + right if drafts else None,
            prompt_tokens=200.0,
            sent_bytes=self.sent_bytes if point.placement != TOGETHER else 0.0,
        )


@dataclass
class FakeLaboratory:
    """See `World`."""

    world: World

    def checkpoint(self, point: Point) -> Checkpoint:
        if point.weights in self.world.broken:
            raise TuneError(f"convert ended with exit code 1: cannot make {point.weights}")
        return Checkpoint(model=f"made/{point.weights}", convert=f"triblade convert {point.weights}")

    def quality(self, point: Point, checkpoint: Checkpoint) -> Quality:
        loss = BITS_LOSS.get(point.weights, 0.0)
        return Quality(perplexity=10 * (1 + loss), ppl_increase=loss, kl=loss / 2, num_tokens=100)

    @contextmanager
    def serving(self, name: str, plan: Plan) -> Iterator[Measure]:
        point = _point_of(plan)
        if point in self.world.dies_at:
            raise Killed
        self.world.served.append(point)

        def measure(number: int) -> Run:
            self.world.runs.append(number)
            return self.world.run(point, number)

        yield measure


def _point_of(plan: Plan) -> Point:
    """What a plan says of the point that it was made for."""
    return Point(
        weights=plan.weights.scheme,
        kv_dtype="int8" if plan.decode.kv_cache_dtype == "int8" else "bfloat16",
        drafter=plan.decode.drafter or NO_DRAFTER,
        draft_length=plan.decode.num_speculative_tokens,
        placement=plan.topology.pd_memory if plan.topology.prefill_workers else TOGETHER,
        wire_codec=plan.transfer.wire_codec,
        chunk=plan.decode.max_num_batched_tokens,
        remote_prefill_tokens=plan.transfer.remote_prefill_tokens,
    ).plain


def space(config: TuneConfig, shape: ModelShape = SMALL) -> Space:
    return space_of(config, shape.stored_bits, ["suffix", "eagle"], shape.has_head)


def tuner(folder: Path, world: World, *, resume: bool = False, shape: ModelShape = SMALL, **options: Any) -> Tuner:
    """Everything for one run."""
    clock: Callable[[], float] | None = options.pop("clock", None)
    config = replace(TuneConfig(model="small"), output=folder, resume=resume, **options)
    where = space(config, shape)
    made = Tuner(
        config=config,
        space=where,
        planner=TrialPlanner(config, shape, find_hardware("cpu-desktop")),
        journal=Journal(folder, where, {"options": sorted(options)}, resume=resume),
        laboratory=FakeLaboratory(world),
        can_smooth=config.calibration is not None,
    )
    if clock is not None:
        made.clock = clock
    return made
