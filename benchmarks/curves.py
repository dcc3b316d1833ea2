"""Cost against size: the exponent that fits, and a drawing with logarithmic axes, readable in light and dark. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]
"""Sizes and costs, both above zero."""

COLOURS = ("#0284c7", "#d97706", "#059669", "#db2777", "#7c3aed", "#65a30d", "#dc2626", "#64748b", "#92613d")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 640, 360, 70, 44, 48, 290
STYLE = """
  .page { fill: #ffffff; }
  text { font: 12px Helvetica, Arial, sans-serif; fill: #0f172a; }
  .title { font-size: 13px; font-weight: bold; }
  .grid { stroke: #cbd5e1; stroke-width: 1; }
  .goal { stroke: #64748b; stroke-width: 1; stroke-dasharray: 5 4; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; }
    text { fill: #e2e8f0; }
    .grid { stroke: #334155; }
  }
"""


def exponent(points: Points) -> float | None:
    """The `b` of the `cost = a * size^b` that fits best (least squares of the logarithms); None with fewer than two sizes.

    0: the cost does not depend on the size. 1: it grows in proportion.
    """
    logs = [(math.log(size), math.log(cost)) for size, cost in points if cost > 0]
    middle = sum(x for x, _ in logs) / len(logs) if logs else 0.0
    spread = sum((x - middle) ** 2 for x, _ in logs)
    if not spread:
        return None
    level = sum(y for _, y in logs) / len(logs)
    return round(sum((x - middle) * (y - level) for x, y in logs) / spread, 6) + 0.0  # without the noise of floats, and no -0


def exponent_words(points: Points) -> str:
    """The exponent in a table or a legend."""
    found = exponent(points)
    return "-" if found is None else f"{found:.2f}".replace("-0.00", "0.00")


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from the decade below the smallest value to the decade above the largest one."""

    low: int
    high: int

    @staticmethod
    def around(values: Sequence[float]) -> Axis:
        """The axis for `values`."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return Axis(low, max(high, low + 1))

    def part(self, value: float) -> float:
        """Where `value` lies: 0 to 1."""
        return (math.log10(value) - self.low) / (self.high - self.low)


def drawing(title: str, across: str, curves: Mapping[str, Points], goals: Mapping[str, float] | None = None) -> str:
    """An SVG of `curves` by name. `across`: what the sizes are. `goals`: a dashed line for each, by its words."""
    shown = {name: [(size, cost) for size, cost in points if cost > 0] for name, points in curves.items()}
    shown = {name: points for name, points in shown.items() if points}
    known = goals or {}
    sizes = Axis.around([size for points in shown.values() for size, _ in points])
    costs = Axis.around([*(cost for points in shown.values() for _, cost in points), *known.values()])
    right, bottom = WIDTH - 20, HEIGHT - BOTTOM

    def x(size: float) -> float:
        return LEFT + (right - LEFT) * sizes.part(size)

    def y(cost: float) -> float:
        return bottom - (bottom - TOP) * costs.part(cost)

    drawn = [f'<text class="title" x="{LEFT}" y="22">{title}</text>']
    for power in range(costs.low, costs.high + 1):
        at = y(10.0**power)
        drawn.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick(power)}</text>')
    drawn += [
        f'<text x="{x(10.0**power):.1f}" y="{bottom + 18}" text-anchor="middle">{tick(power)}</text>'
        for power in range(sizes.low, sizes.high + 1)
    ]
    drawn.append(f'<text x="{right}" y="{bottom + 38}" text-anchor="end">{across}</text>')
    for words, limit in known.items():
        drawn.append(f'<line class="goal" x1="{LEFT}" y1="{y(limit):.1f}" x2="{right}" y2="{y(limit):.1f}"/>')
        drawn.append(f'<text x="{LEFT + 6}" y="{y(limit) - 5:.1f}">{words}</text>')
    for number, (name, points) in enumerate(shown.items()):
        colour, beside = COLOURS[number % len(COLOURS)], TOP + 10 + 20 * number
        line = " ".join(f"{x(size):.1f},{y(cost):.1f}" for size, cost in points)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{x(size):.1f}" cy="{y(cost):.1f}" r="3.5" fill="{colour}"/>' for size, cost in points]
        drawn.append(f'<circle cx="{WIDTH + 8}" cy="{beside - 4}" r="5" fill="{colour}"/>')
        drawn.append(f'<text x="{WIDTH + 20}" y="{beside}">{name}: exponent {exponent_words(points)}</text>')
    return svg(WIDTH + LEGEND, HEIGHT, drawn)


def svg(width: int, height: int, drawn: Sequence[str], style: str = STYLE) -> str:
    """The SVG with a background of its own, since a page may be dark where the reader's system is not."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">'
    background = f'<rect class="page" width="{width}" height="{height}"/>'
    return "\n".join([head, f"<style>{style}</style>", background, *drawn, "</svg>", ""])


def tick(power: int) -> str:
    """A power of ten for people."""
    return f"{10**power:,}" if power >= 0 else f"{10.0**power:.{-power}f}"
