"""The report of a conversion: figures as JSON, the same as one HTML page with plots, and the likely causes of a bad result.

The page is one file without scripts or outside references; plots are SVG. Knows no model: everything is in the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triblade.page import page, plot, section, table

PRODUCTS = ("qkv", "output", "gate_up", "down")
OUTLIER = 5.0  # times the median error of a product
FEW_BITS = 4.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What a conversion did; errors are shares of a product's squared output, KL is nats per token."""

    model: str
    output: str
    format: str
    method: str
    scheme: str
    average_bits: float
    bytes_before: int
    bytes_after: int
    seconds: float
    peak_memory_bytes: int
    calibration: Mapping[str, Any] | None
    drift: Mapping[str, Any] | None
    layers: Sequence[Mapping[str, Any]]
    tables: Mapping[str, str]  # schemes of embedding and head, where they are quantized
    quality: Mapping[str, Any] | None
    samples: Sequence[tuple[str, str, str]]

    def __str__(self) -> str:
        lines = [
            f"{self.output}: {self.scheme} by {self.method}, {self.average_bits:.2f} bits per weight, "
            f"{self.bytes_after / 1e6:.1f} MB (was {self.bytes_before / 1e6:.1f}), {self.seconds:.0f} s"
        ]
        lines += [f"{module}: {scheme}" for module, scheme in self.tables.items()]
        if self.quality is not None:
            q = self.quality
            lines.append(
                f"perplexity {q['perplexity']:.4f} (was {q['original_perplexity']:.4f}), KL {q['kl']:.5f} nats/token, "
                f"top-1 agreement {q['top1_agreement']:.2%} over {q['num_tokens']} tokens"
            )
        return "\n".join(lines)


def causes(report: ConvertReport) -> list[str]:
    """What probably made the result bad, and what to try."""
    found = []
    if report.calibration is None:
        found.append("no calibration text: give some with --calibration")
    elif report.calibration["used_tokens"] < 16384:
        found.append(f"little calibration text ({report.calibration['used_tokens']} tokens): give more")
    if report.drift is not None and report.drift["score"] - report.drift["score_by_chance"] > 0.1:
        found.append("calibration text unlike the traffic: calibrate on a sample of the traffic")
    if report.average_bits < FEW_BITS:
        found.append(f"few bits ({report.average_bits:.2f} per weight): try --bits 4, or --group-size 32")
    outliers = outlier_layers(report)
    if outliers:
        found.append(f"outliers: {', '.join(outliers[:3])}: keep them at 8 bits with --rules")
    return found or ["no single cause stands out: try more bits, smaller groups, or the method best"]


def outlier_layers(report: ConvertReport) -> list[str]:
    """Products whose error is far above that of the same product in other layers."""
    found = []
    for product in PRODUCTS:
        errors = [layer["errors"].get(product) for layer in report.layers]
        known = [error for error in errors if error is not None]
        if len(known) < 3:
            continue
        middle = statistics.median(known)
        found += [
            f"layers.{index} {product}"
            for index, error in enumerate(errors)
            if error is not None and error > OUTLIER * middle
        ]
    return found


def report_page(report: ConvertReport) -> str:
    """The report as HTML."""
    sections = [_summary(report)]
    series = {p: [layer["errors"].get(p) for layer in report.layers] for p in PRODUCTS}
    if any(value for values in series.values() for value in values):
        sections.append(section("Output error of each product, by layer", _by_layer(series, "error")))
    drifts = [layer["drift"] for layer in report.layers]
    if any(drifts):
        heading = "Distance of the hidden states from the original, by layer"
        sections.append(section(heading, _by_layer({"drift": drifts}, "distance")))
    sections.append(section("Layers", _layers(report)))
    if report.samples:
        sections.append(section("Before and after", table(["prompt", "original", "quantized"], report.samples)))
    return page(f"{report.model}: quantization", sections)


def _by_layer(series: Mapping[str, Sequence[float | None]], label: str) -> str:
    lines = {name: [(i, v) for i, v in enumerate(values) if v is not None] for name, values in series.items()}
    return plot(lines, x_label="layer", y_label=label)


def _summary(report: ConvertReport) -> str:
    rows = [
        ("scheme", report.scheme),
        ("method", report.method),
        ("format", report.format),
        ("bits per weight", f"{report.average_bits:.3f}"),
        *report.tables.items(),
        ("size", f"{report.bytes_after / 1e6:.1f} MB, was {report.bytes_before / 1e6:.1f} MB"),
        ("time", f"{report.seconds:.0f} s, peak memory {report.peak_memory_bytes / 1e9:.2f} GB"),
    ]
    if report.calibration is not None:
        rows.append(("calibration", f"{report.calibration['used_tokens']} tokens of {report.calibration['file']}"))
    if report.drift is not None:
        rows.append(("drift to traffic", f"{report.drift['score']:.3f} (chance {report.drift['score_by_chance']:.3f})"))
    if report.quality is not None:
        q = report.quality
        rows += [
            ("perplexity", f"{q['perplexity']:.3f}, was {q['original_perplexity']:.3f}"),
            ("KL", f"{q['kl']:.4f} nats per token"),
            ("top-1 agreement", f"{q['top1_agreement']:.1%}"),
        ]
    return table([], rows)


def _layers(report: ConvertReport) -> str:
    rows = []
    for index, layer in enumerate(report.layers):
        schemes = ", ".join(dict.fromkeys(layer["schemes"].values()))
        errors = [f"{layer['errors'][p]:.2e}" if p in layer["errors"] else "" for p in PRODUCTS]
        rows.append((str(index), schemes, *errors, f"{layer['seconds']:.1f}"))
    return table(["layer", "scheme", *PRODUCTS, "s"], rows)
