"""What every command shares: the application they are registered with, groups of options, exit codes, how a report is printed.

Knows no command.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter

from triblade import __version__
from triblade.config import EngineConfig, LogLevel, TransferConfig
from triblade.sampling_params import SamplingParams

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BAD_OPTIONS = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

MODEL_GROUP = Group("Model and engine", sort_key=2)
SAMPLING_GROUP = Group("Sampling", sort_key=1)
SERVER_GROUP = Group("Server", sort_key=1)
CONVERT_GROUP = Group("Conversion", sort_key=1)
WORKER_GROUP = Group("Worker", sort_key=1)
TOPOLOGY_GROUP = Group("Workers", sort_key=3)
TRANSFER_GROUP = Group("Transfers between workers", sort_key=4)
BENCH_GROUP = Group("Load test", sort_key=1)
PLAN_GROUP = Group("Plan", sort_key=1)
TUNE_GROUP = Group("Tuning", sort_key=1)
DEPLOY_GROUP = Group("Deployment", sort_key=1)
ALIGN_GROUP = Group("Alignment", sort_key=1)
KV_GROUP = Group("KV table", sort_key=1)
ROUTE_GROUP = Group("Router", sort_key=1)
SIMULATE_GROUP = Group("Simulation", sort_key=1)

EngineFlags = Annotated[EngineConfig, Parameter(name="*", group=MODEL_GROUP)]
TransferFlags = Annotated[TransferConfig, Parameter(name="*", group=TRANSFER_GROUP)]
LogLevelFlag = Annotated[LogLevel, Parameter(help="Least severe messages to log (to standard error).")]


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The sampling parameters a person sets by hand; everything else keeps the engine's default."""

    max_tokens: int | None = 512
    """Most tokens to generate."""

    temperature: float = 0.0
    """Randomness; 0 always takes the most likely token."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability."""

    top_k: int = 0
    """Sample from this many most likely tokens; 0 is all."""

    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""

    repetition_penalty: float = 1.0
    """Above 1 makes tokens that occurred already less likely."""

    stop: tuple[str, ...] = ()
    """End before this text; may be given several times."""

    def params(self) -> SamplingParams:
        """The checked sampling parameters."""
        return SamplingParams(**asdict(self))


Sampling = Annotated[SamplingFlags, Parameter(name="*", group=SAMPLING_GROUP)]

app = App(
    name="triblade",
    help="Make open-weight LLMs fast on the hardware you have, and serve them over the OpenAI API.",
    version=__version__,
    version_format="plaintext",
    help_format="plaintext",
    default_parameter=Parameter(
        negative_iterable=()
    ),  # no --empty-NAME beside every option that may be given several times
    suppress_keyboard_interrupt=False,
)


def print_report(report: DataclassInstance, as_json: bool) -> None:
    """A report for people, or as one JSON object."""
    print(json.dumps(asdict(report)) if as_json else report)
