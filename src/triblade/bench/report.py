"""A result for people: lines for a terminal, and one HTML page with plots. Knows results only, measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triblade.bench.metrics import QUANTILES
from triblade.bench.result import Result, comparison, differing_options
from triblade.page import Points, facts, page, plot, section, table

MEASURES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "end to end": "e2e_ms"}
CURVE_POINTS = 200
FIGURES = {
    "peak_memory_mib": "peak memory, MiB",
    "mean_cpu_cores": "busy cores, mean",
    "mean_other_cores": "cores busy with something else, mean",
    "mean_device_utilization": "busy share of the GPU, mean",
    "peak_device_memory_mib": "peak GPU memory, MiB",
    "peak_kv_cache_usage_perc": "peak share of the KV cache",
    "peak_num_requests_running": "most sequences running",
    "peak_num_requests_waiting": "most sequences waiting",
    "num_preemptions": "preemptions",
    "acceptance_rate": "accepted share of drafted tokens",
    "mean_accepted_length": "tokens of a step with a draft",
    "kv_transfer_wire_bytes": "KV sent, bytes",
    "kv_transfer_seconds": "KV sent, seconds",
}


def summary_lines(result: Result) -> str:
    """The result in a few lines."""
    found = result.summary
    lines = [
        f"{result.target}: {found['requests']} requests in {found['duration_s']:.1f} s, {found['failed']} failed"
        + (", interrupted" if result.interrupted else ""),
        f"{found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:.1f} output tokens/s, "
        f"{found['total_tokens_per_s']:.1f} tokens/s; at most {found['peak_in_flight']} at once",
    ]
    if found["goodput_per_s"] is not None:
        lines.append(f"goodput {found['goodput_per_s']:.2f} requests/s, {found['goodput_share']:.1%} of all")
    lines.append(_columns(_header(result), _measures(result)))
    lines += [f"{label}: {value:.4g}" for label, value in _figures(result)]
    lines += [f"failed: {count} x {reason}" for reason, count in found["errors"].items()]
    return "\n".join(lines)


def comparison_lines(before: Result, after: Result) -> str:
    """Two results side by side."""
    rows = [(label, f"{old:.4g}", f"{new:.4g}", verdict) for label, old, new, verdict in comparison(before, after)]
    notes = [f"note: {name}: {difference}" for name, difference in differing_options(before, after)]
    return "\n".join([_columns(("", "before", "after", ""), rows), *notes])


def result_page(result: Result, baseline: Result | None = None) -> str:
    """The result as HTML."""
    found = result.summary
    rows = [
        ("target", result.target),
        ("workload", f"{result.config['workload']}, {_load(result.config)}, seed {result.config['seed']}"),
        ("requests", f"{found['requests']}, {found['failed']} failed"),
        ("duration, s", found["duration_s"]),
        ("requests/s", found["requests_per_s"]),
        ("output tokens/s", found["output_tokens_per_s"]),
        ("tokens/s", found["total_tokens_per_s"]),
        *([] if found["goodput_share"] is None else [("goodput, requests/s", found["goodput_per_s"])]),
        *_figures(result),
        *((f"failed: {reason}", count) for reason, count in found["errors"].items()),
        ("made", f"{result.made['at']}, triblade {result.made['triblade']}, {result.made['platform']}"),
    ]
    sections = [facts(rows), section("Latency, ms", table(_header(result), _measures(result)))]
    if baseline is not None:
        compared = table(["", "before", "after", ""], comparison(baseline, result))
        differences = differing_options(baseline, result)
        notes = section("Options that differ", facts(differences)) if differences else ""
        sections.append(section(f"Compared with {baseline.target}", compared, notes))
    return page(f"Load test of {result.target}", [*sections, *_plots(result.records)])


def _plots(records: Sequence[Mapping[str, Any]]) -> list[str]:
    good = [record for record in records if record["error"] is None and record["piece_s"]]
    first = sorted(1000 * (r["piece_s"][0] - r["sent_s"]) for r in good)
    gaps = sorted(1000 * (b - a) for r in good for a, b in zip(r["piece_s"], r["piece_s"][1:], strict=False))
    whole = sorted(1000 * (r["end_s"] - r["sent_s"]) for r in good)
    over_time = [(r["sent_s"], 1000 * (r["piece_s"][0] - r["sent_s"])) for r in sorted(good, key=lambda r: r["sent_s"])]
    return [
        section("Time to first token", _distribution({"TTFT": first})),
        section("Between pieces of an answer", _distribution({"ITL": gaps})),
        section("End to end", _distribution({"end to end": whole})),
        section("Over time", plot({"TTFT": over_time}, x_label="sent after, s", y_label="TTFT, ms")),
        section("At once", plot({"requests": _in_flight(records)}, x_label="s", y_label="requests in flight")),
    ]


def _distribution(values: Mapping[str, Sequence[float]]) -> str:
    """Share of values up to x."""
    return plot({name: _cumulative(v) for name, v in values.items() if v}, x_label="ms", y_label="share up to")


def _cumulative(ordered: Sequence[float]) -> Points:
    count = len(ordered)
    chosen = sorted({round(i * (count - 1) / CURVE_POINTS) for i in range(CURVE_POINTS + 1)})
    return [(ordered[index], (index + 1) / count) for index in chosen]


def _in_flight(records: Sequence[Mapping[str, Any]]) -> Points:
    running, points = 0, []
    for when, change in sorted([(r["sent_s"], 1) for r in records] + [(r["end_s"], -1) for r in records]):
        points.append((when, float(running)))
        running += change
        points.append((when, float(running)))
    return points


def _load(config: Mapping[str, Any]) -> str:
    if config["arrivals"] == "trace":
        return f"as in the trace, {config['trace_speed']:g} times as fast"
    if config["request_rate"] is not None:
        end = "" if config["ramp_to_rate"] is None else f" to {config['ramp_to_rate']:g}"
        return f"{config['request_rate']:g}{end} conversations/s, {config['arrivals']}"
    users = "default" if config["concurrency"] is None else config["concurrency"]
    return f"{users} users"


def _header(result: Result) -> list[str]:
    return ["ms", "count", "mean", *(f"p{100 * q:g}" for q in QUANTILES), "max"]


def _measures(result: Result) -> list[tuple[object, ...]]:
    found = [(label, result.summary[key]) for label, key in MEASURES.items()]
    return [(label, m["count"], m["mean"], *m["quantiles"].values(), m["maximum"]) for label, m in found if m]


def _figures(result: Result) -> list[tuple[str, float]]:
    found = result.summary["target"]
    return [(label, found[name]) for name, label in FIGURES.items() if name in found]


def _columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns."""
    shown = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    return "\n".join(_aligned(row, widths) for row in shown)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "  ".join(cells).rstrip()
