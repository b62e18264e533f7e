"""The report of a conversion: figures as JSON, the same as one HTML page with plots, and the likely causes of a bad result.

The page is one file without scripts or outside references; plots are SVG. Knows no model: everything is in the figures.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PRODUCTS = ("qkv", "output", "gate_up", "down")
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by people who see colours differently, too
OUTLIER = 5.0  # times the median error of a product
FEW_BITS = 4.2
WIDTH, HEIGHT, MARGIN = 720, 220, 46


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
        sections.append("<h2>Output error of each product, by layer</h2>" + _plot(series))
    drifts = [layer["drift"] for layer in report.layers]
    if any(drifts):
        sections.append("<h2>Distance of the hidden states from the original, by layer</h2>" + _plot({"drift": drifts}))
    sections += ["<h2>Layers</h2>" + _layers(report)]
    if report.samples:
        sections.append("<h2>Before and after</h2>" + _samples(report))
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
        "table{border-collapse:collapse;font-size:13px}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:left}"
        "svg text{font-size:11px;fill:#444}.wide{overflow-x:auto}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{_text(report.model)}: quantization</title><style>{style}</style></head><body>"
        f"<h1>{_text(report.model)}</h1>{''.join(sections)}</body></html>\n"
    )


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
    return _table([], rows)


def _layers(report: ConvertReport) -> str:
    rows = []
    for index, layer in enumerate(report.layers):
        schemes = ", ".join(dict.fromkeys(layer["schemes"].values()))
        errors = [f"{layer['errors'][p]:.2e}" if p in layer["errors"] else "" for p in PRODUCTS]
        rows.append((str(index), schemes, *errors, f"{layer['seconds']:.1f}"))
    return _table(["layer", "scheme", *PRODUCTS, "s"], rows)


def _samples(report: ConvertReport) -> str:
    return _table(["prompt", "original", "quantized"], report.samples)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>{f"<tr>{top}</tr>" if head else ""}{body}</table></div>'


def _text(value: object) -> str:
    return html.escape(str(value))


def _plot(series: Mapping[str, Sequence[float | None]]) -> str:
    """Lines over layers from zero to the largest value, with a legend."""
    top = max((value for values in series.values() for value in values if value is not None), default=0.0) or 1.0
    count = max(len(values) for values in series.values())

    def point(index: int, value: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * index / max(1, count - 1)
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value / top:.1f}"

    parts = []
    for number, (name, values) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        points = " ".join(point(i, v) for i, v in enumerate(values) if v is not None)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.6" points="{points}"/>')
        parts.append(f'<text x="{MARGIN + 110 * number}" y="16" style="fill:{color}">{_text(name)}</text>')
    base = HEIGHT - MARGIN
    axis = f'<path d="M{MARGIN} {MARGIN}V{base}H{WIDTH - MARGIN}" fill="none" stroke="#999"/>'
    ticks = f'<text x="2" y="{MARGIN + 4}">{top:.2g}</text><text x="{MARGIN - 12}" y="{base}">0</text>'
    labels = f'<text x="{MARGIN}" y="{base + 16}">0</text><text x="{WIDTH - MARGIN - 40}" y="{base + 16}">layer {count - 1}</text>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{axis}{ticks}{labels}{"".join(parts)}</svg>'
