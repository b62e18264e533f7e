"""What the CPU benchmark compares, and with which bounds: the table of `cpu.py` as data.

A comparison is the ratio of two medians, or of a median and a fixed bound. Knows no engine and measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Samples = Mapping[str, Sequence[float]]
Want = Literal["at least", "at most", "within"]


@dataclass(frozen=True)
class Comparison:
    """One line of the table.

    `ours` and `against` name samples; a number stands for itself. The ratio must be at least `bound`, or at most `bound`, or
    off one by no more than `bound`.
    """

    name: str
    unit: str
    ours: str
    against: str | float
    want: Want
    bound: float | None
    aim: float | None


RATE, MS = "tokens/s", "ms"
COMPARISONS = (
    Comparison(
        "decode, batch 1, context 512", RATE, "triblade decode 1x512", "llama.cpp decode 1x512", "at least", 1.9, 2.5
    ),
    Comparison("  of the limit probe", RATE, "triblade decode 1x512", "limit int4_head 1", "at least", None, 0.75),
    Comparison(
        "  of the limit with our 8-bit head", RATE, "triblade decode 1x512", "limit int8_head 1", "at least", None, None
    ),
    Comparison("decode, batch 4", RATE, "triblade decode 4x128", "llama.cpp decode 4x128", "at least", 2.5, 4),
    Comparison("decode, batch 8", RATE, "triblade decode 8x128", "llama.cpp decode 8x128", "at least", 3.0, 4),
    Comparison("decode, batch 16", RATE, "triblade decode 16x128", "llama.cpp decode 16x128", "at least", 3.0, 4),
    Comparison(
        "  of the limit with our 8-bit head",
        RATE,
        "triblade decode 16x128",
        "limit int8_head 16",
        "at least",
        None,
        None,
    ),
    Comparison("prefill, 512 tokens", RATE, "triblade prefill 512", "llama.cpp prefill 512", "at least", 1.8, 3),
    Comparison("step of 5 tokens against 1", MS, "triblade chunk 5", "triblade chunk 1", "at most", 1.4, 1.25),
    Comparison("  the same, llama.cpp", MS, "llama.cpp chunk 5", "llama.cpp chunk 1", "at most", None, None),
    Comparison(
        "token at context 4096 against 128, int8 KV", MS, "int8 KV ms 1x4096", "int8 KV ms 1x128", "at most", 1.6, 1.3
    ),
    Comparison("  the same, bf16 KV", MS, "triblade ms 1x4096", "triblade ms 1x128", "at most", None, None),
    Comparison(
        "  the same, llama.cpp (fp16 KV)", MS, "llama.cpp ms 1x4096", "llama.cpp ms 1x128", "at most", None, None
    ),
    Comparison("host time of a step, batch 1", MS, "triblade host 1", 0.25, "at most", 1, 0.4),
    Comparison("host time of a step, batch 16", MS, "triblade host 16", 0.8, "at most", 1, 0.375),
    Comparison("start to ready, quantized checkpoint", "s", "server start", 4.0, "at most", 1, 0.5),
    Comparison("  the same, rounding while loading", "s", "server start, rounding", 4.0, "at most", None, None),
    Comparison("peak memory", "MiB", "memory peak", 700 * 1e6 / 2**20, "at most", 1, 5 / 7),
    Comparison("  the same, int8 KV", "MiB", "memory int8 peak", 700 * 1e6 / 2**20, "at most", 1, 5 / 7),
    Comparison(
        "model, KV and buffers against the estimate", "MiB", "memory held", "memory estimate", "within", 0.05, None
    ),
    Comparison(
        "HTTP, 16 clients, streaming, of the engine",
        RATE,
        "server streaming",
        "triblade generate",
        "at least",
        0.75,
        0.85,
    ),
    Comparison("HTTP, 16 clients, not streaming", RATE, "server whole", "triblade generate", "at least", 0.9, None),
)


def compare(samples: Samples) -> list[dict[str, Any]]:
    """Every comparison whose samples were measured, with its ratio and whether it holds."""
    results = []
    for row in COMPARISONS:
        ours, against = _value(row.ours, samples), _value(row.against, samples)
        if ours is not None and against is not None:
            ratio = ours / against
            verdict = {"reached": _holds(row.want, ratio, row.bound), "aim_reached": _holds(row.want, ratio, row.aim)}
            figures = {"values": [ours, against], "rounds": len(samples[row.ours]), "ratio": ratio}
            results.append({**asdict(row), **figures, **verdict})
    return results


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The comparisons as Markdown."""
    lines = ["| | ours | against | ratio | wanted | aim | |", "|---|---|---|---|---|---|---|"]
    for row in results:
        ours, against = (f"{value:,.4g}" for value in row["values"])
        bounds = (f"{row['want']} {row['bound']:g}" if row["bound"] else "", f"{row['aim']:g}" if row["aim"] else "")
        verdict = {None: "", True: "yes", False: "NO"}[row["reached"]] + (", aim" if row["aim_reached"] else "")
        cells = (f"{row['name']}, {row['unit']}", ours, against, f"{row['ratio']:.2f}", *bounds, verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _value(name: str | float, samples: Samples) -> float | None:
    if not isinstance(name, str):
        return name
    return statistics.median(samples[name]) if samples.get(name) else None


def _holds(want: Want, ratio: float, bound: float | None) -> bool | None:
    if bound is None:
        return None
    return {"at least": ratio >= bound, "at most": ratio <= bound, "within": abs(ratio - 1) <= bound}[want]
