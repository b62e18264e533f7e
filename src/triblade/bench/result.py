"""The result of a load test as a file: what was asked for, what was found, on which machine; and two of them side by side.

The file holds every request, so that other figures can be made from it later. Reading one back gives what was written.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from triblade import __version__
from triblade.bench.metrics import Record, Summary
from triblade.config import BenchConfig
from triblade.errors import ConfigError
from triblade.files import written_whole

FORMAT = 1
# Figures that two results are compared by: label, place in the summary, whether more is better.
COMPARED = (
    ("requests/s", ("requests_per_s",), True),
    ("output tokens/s", ("output_tokens_per_s",), True),
    ("goodput/s", ("goodput_per_s",), True),
    ("TTFT p50, ms", ("ttft_ms", "quantiles", "p50"), False),
    ("TTFT p99, ms", ("ttft_ms", "quantiles", "p99"), False),
    ("TPOT p50, ms", ("tpot_ms", "quantiles", "p50"), False),
    ("TPOT p99, ms", ("tpot_ms", "quantiles", "p99"), False),
    ("ITL p50, ms", ("itl_ms", "quantiles", "p50"), False),
    ("ITL p99, ms", ("itl_ms", "quantiles", "p99"), False),
    ("end to end p50, ms", ("e2e_ms", "quantiles", "p50"), False),
    ("end to end p99, ms", ("e2e_ms", "quantiles", "p99"), False),
    ("memory, MiB", ("target", "peak_memory_mib"), False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One load test."""

    target: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]  # of `Summary`, and the target's own figures under "target"
    records: Sequence[Mapping[str, Any]]
    made: Mapping[str, Any]  # when, where, with what
    interrupted: bool = False

    @classmethod
    def of(
        cls, target: str, config: BenchConfig, summary: Summary, figures: Mapping[str, float], records: Sequence[Record]
    ) -> Result:
        """From what a run found."""
        return cls(
            target=target,
            config={name: str(v) if isinstance(v, Path) else v for name, v in asdict(config).items()},
            summary=asdict(summary) | {"target": dict(figures)},
            records=[asdict(record) for record in records],
            made=_circumstances(),
        )

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        with written_whole(path) as part:
            part.write_text(json.dumps({"format": FORMAT, **asdict(self)}), encoding="utf-8")


def load_result(path: Path) -> Result:
    """Read a file that `Result.save` wrote.

    Raises:
        ConfigError: it cannot be read, or is not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ConfigError(f"{path}: made by another version of bench", hint="measure again")
        return Result(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"no result of a load test: {path}: {error}", hint="a file that bench --output wrote"
        ) from error


def comparison(before: Result, after: Result) -> list[tuple[str, float, float, str]]:
    """Rows of label, both figures, and how they differ; figures that one of them lacks are left out."""
    rows = []
    for label, path, more_is_better in COMPARED:
        old, new = _figure(before.summary, path), _figure(after.summary, path)
        if old is not None and new is not None:
            rows.append((label, old, new, _verdict(old, new, more_is_better)))
    return rows


def differing_options(before: Result, after: Result) -> list[tuple[str, str]]:
    """Names of options that differ, and how, so that nobody compares pears with apples unknowingly; files and names aside."""
    aside = {"output", "html", "baseline", "served_model", "server_pid", "ready_timeout_s"}
    names = sorted((set(before.config) | set(after.config)) - aside)
    return [
        (name, f"{before.config.get(name)} -> {after.config.get(name)}")
        for name in names
        if _plain(before.config.get(name)) != _plain(after.config.get(name))
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value  # JSON knows no tuples


def _figure(summary: Mapping[str, Any], path: Sequence[str]) -> float | None:
    found: Any = summary
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def _verdict(old: float, new: float, more_is_better: bool) -> str:
    if old == 0 or not math.isfinite(new / old):
        return ""
    ratio = new / old
    word = "better" if (ratio > 1) == more_is_better else "worse"
    return f"{ratio - 1:+.1%} {word}" if f"{ratio:.3f}" != "1.000" else "same"


def _circumstances() -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "triblade": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }
