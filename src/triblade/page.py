"""One HTML file with tables and plots, without scripts or outside references, for light and dark screens and for phones.

Plots are SVG: lines over numbers, with axes, ticks and a legend. Whoever makes a report brings figures and text; escaping is done
here.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)  # told apart by people who see colours differently
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 270, 56, 16, 44, 40
TICKS = 4
STYLE = """
:root{color-scheme:light dark;--ink:#222;--paper:#fff;--line:#ccc;--faint:#666}
@media(prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#16181c;--line:#444;--faint:#999}}
body{font:15px/1.5 system-ui,sans-serif;max-width:54rem;margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere;
color:var(--ink);background:var(--paper)}
table{border-collapse:collapse;font-size:13px;overflow-wrap:normal}
td,th{padding:.2rem .7rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
.number{text-align:right;font-variant-numeric:tabular-nums}
svg{width:100%;height:auto;max-width:720px}
svg text{font:11px system-ui,sans-serif;fill:var(--faint)}
.axis{stroke:var(--faint);fill:none}.grid{stroke:var(--line);stroke-width:.5}
.wide{overflow-x:auto}
"""

Points = Sequence[tuple[float, float]]


def page(title: str, sections: Sequence[str]) -> str:
    """The whole document; sections are HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><h1>{text(title)}</h1>{''.join(sections)}</body></html>\n"
    )


def section(heading: str, *parts: str) -> str:
    """A heading and what follows it (HTML)."""
    return f"<h2>{text(heading)}</h2>{''.join(parts)}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; cells are text, numbers and their heads stand to the right."""
    kinds = (_kind(next((row[place] for row in rows if row[place] != ""), "")) for place in range(len(head)))
    top = "".join(f"<th{kind}>{text(cell)}</th>" for cell, kind in zip(head, kinds, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table>{f"<tr>{top}</tr>" if head else ""}{body}</table></div>'


def facts(rows: Sequence[tuple[str, object]]) -> str:
    """A table of names and what they stand for, all to the left."""
    return table([], [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in rows])


def text(value: object) -> str:
    """Escaped for HTML."""
    return html.escape(str(value))


def plot(series: Mapping[str, Points], *, x_label: str, y_label: str) -> str:
    """Lines through (x, y) points, in axes from the smallest x (or zero, if that is near) and from zero."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    left = 0.0 if 0 <= left <= right / 2 else left
    top = max(*(y for _, y in points), 1e-12)
    frame = _Frame(left, right if right > left else left + 1, top)
    lines = [_line(frame, number, name, line) for number, (name, line) in enumerate(series.items())]
    labels = (
        f'<text x="{LEFT}" y="12">{text(y_label)}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{text(x_label)}</text>'
    )
    caption = text(f"{y_label} over {x_label}")
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{caption}">{frame.axes()}{labels}{"".join(lines)}</svg>'


class _Frame:
    """From numbers to places in the picture."""

    def __init__(self, left: float, right: float, top: float) -> None:
        self.left, self.right, self.top = left, right, top

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.left) / (self.right - self.left)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top

    def axes(self) -> str:
        base = HEIGHT - BOTTOM
        parts = []
        for step in range(TICKS + 1):
            x_value, y_value = self.left + (self.right - self.left) * step / TICKS, self.top * step / TICKS
            x, y = self.x(x_value), self.y(y_value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}M{x:.1f} {TOP}V{base}"/>')
            parts.append(f'<text x="{x:.1f}" y="{base + 15}" text-anchor="middle">{x_value:.4g}</text>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_value:.3g}</text>')
        return "".join(parts) + f'<path class="axis" d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}"/>'


def _line(frame: _Frame, number: int, name: str, line: Points) -> str:
    color = COLORS[number % len(COLORS)]
    places = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line)
    label = f'<text x="{LEFT + 130 * number}" y="{TOP - 8}" style="fill:{color}">{text(name)}</text>'
    return f'<polyline fill="none" stroke="{color}" stroke-width="1.8" points="{places}"/>{label}'


def _cell(value: object) -> str:
    shown = f"{value:.4g}" if isinstance(value, float) else value
    return f"<td{_kind(value)}>{text(shown)}</td>"


def _kind(value: object) -> str:
    return ' class="number"' if isinstance(value, int | float) else ""
