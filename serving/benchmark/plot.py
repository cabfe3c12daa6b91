"""The benchmark as one SVG, without a plotting library: throughput and the three times over the load."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, MARGIN = 430, 280, 62
COLOURS = ("#a8481f", "#2f6f8f", "#5b7f3a", "#7a4f91", "#b08a1e", "#555555")
PANELS: tuple[tuple[str, str], ...] = (
    ("tokens_per_s", "tokens/s"),
    ("ttft_ms", "time to first token, ms (p50, p95, p99)"),
    ("tpot_ms", "time per output token, ms (p50, p95, p99)"),
    ("e2e_ms", "end to end, ms (p50, p95, p99)"),
)
_DASHES = {"p50": "", "p95": "6 4", "p99": "2 3"}

Point = tuple[float, float]


def render(reports: Sequence[dict[str, Any]], kind: str) -> str:
    """Returns an SVG with one colour per report and one panel per figure, over `kind`: concurrency or rate."""
    rows = math.ceil(len(PANELS) / 2)
    panels = [
        f'<g transform="translate({(number % 2) * WIDTH} {(number // 2) * HEIGHT})">{_panel(reports, kind, *panel)}</g>'
        for number, panel in enumerate(PANELS)
    ]
    legend = "".join(_legend(number, report["label"]) for number, report in enumerate(reports))
    height = rows * HEIGHT + 30 + 18 * len(reports)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(panels)}'
        f'<g transform="translate({MARGIN} {rows * HEIGHT + 14})">{legend}</g></svg>\n'
    )


def _panel(reports: Sequence[dict[str, Any]], kind: str, figure: str, title: str) -> str:
    lines = [
        (COLOURS[i % len(COLOURS)], *line) for i, report in enumerate(reports) for line in _lines(report, kind, figure)
    ]
    points = [point for _, _, line in lines for point in line]
    if not points:
        return ""
    x_of = _log_scale([x for x, _ in points], MARGIN, WIDTH - 16)
    y_of = _log_scale([y for _, y in points], HEIGHT - 44, 34)
    ticks = "".join(_tick_x(x_of, x) for x in sorted({x for x, _ in points}))
    ticks += "".join(_tick_y(y_of, y) for y in _round_values([y for _, y in points]))
    drawn = "".join(_line([(x_of(x), y_of(y)) for x, y in line], colour, dash) for colour, dash, line in lines)
    unit = "clients" if kind == "concurrency" else "requests/s"
    return (
        f'<text x="{MARGIN}" y="20" font-weight="bold">{escape(title)}</text>{ticks}{drawn}'
        f'<text x="{WIDTH - 16}" y="{HEIGHT - 10}" text-anchor="end" fill="#666">{unit}</text>'
    )


def _lines(report: dict[str, Any], kind: str, figure: str) -> list[tuple[str, list[Point]]]:
    """Returns (dashes, points) of a report's lines in a panel; zeros have no place on a logarithmic scale."""
    points = [point for point in report["points"] if kind in point]
    if figure == "tokens_per_s":
        return [("", [(point[kind], point[figure]) for point in points if point[figure] > 0])]
    return [
        (dash, [(point[kind], value) for point in points if (value := point[figure].get(name, 0)) > 0])
        for name, dash in _DASHES.items()
    ]


def _log_scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = math.log(min(values)), math.log(max(values))
    low, high = (low - 0.5, high + 0.5) if high - low < 1e-9 else (low, high)
    return lambda value: start + (math.log(value) - low) / (high - low) * (end - start)


def _round_values(values: Sequence[float]) -> list[float]:
    """Returns the values 1, 2 and 5 times a power of ten within the range of `values`."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]


def _line(points: Sequence[Point], colour: str, dash: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dash}"/>{dots}'
    )


def _tick_x(x_of: Callable[[float], float], value: float) -> str:
    x, y = x_of(value), HEIGHT - 44
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="34" y2="{y}" stroke="#eee"/>'
        f'<text x="{x:.1f}" y="{y + 15}" text-anchor="middle" fill="#666">{value:g}</text>'
    )


def _tick_y(y_of: Callable[[float], float], value: float) -> str:
    y = y_of(value)
    return (
        f'<line x1="{MARGIN}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>'
        f'<text x="{MARGIN - 7}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{value:,g}</text>'
    )


def _legend(number: int, label: str) -> str:
    colour, y = COLOURS[number % len(COLOURS)], 18 * number
    return f'<rect y="{y}" width="12" height="12" fill="{colour}"/><text x="19" y="{y + 10}">{escape(label)}</text>'
