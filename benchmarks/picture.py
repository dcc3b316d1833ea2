"""The picture of the README: what one save costs training, when it is durable, and what a load takes, from RESULTS.md.

python benchmarks/picture.py    # writes speed.svg; `compare.py --write` writes it with RESULTS.md
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import curves

HERE = Path(__file__).resolve().parent

SYSTEMS = {
    "torch.save": "torch.save",
    "dcp-thread": "dcp.async_save",
    "torch-checkpointing": "torch-checkpointing",
    "checkpointd": "checkpointd",
    "checkpointd-sidecar": "checkpointd, sidecar",
}
"""Rows of RESULTS.md, and what the picture calls them."""
PANELS = {
    "lost, s": "training that one save costs",
    "durable, s": "until the checkpoint is durable",
    "load, cache dropped, s": "load from the disk",
}
"""Columns of RESULTS.md, and what the picture calls them."""

ROW, BAR, LABELS, WIDTH, GAP = 26, 16, 150, 190, 60
STYLE = """
  .page { fill: #ffffff; }
  text { font: 13px Helvetica, Arial, sans-serif; fill: #0f172a; }
  .title { font-weight: bold; }
  .peer { fill: #94a3b8; }
  .ours { fill: #0284c7; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; }
    text { fill: #e2e8f0; }
    .peer { fill: #64748b; }
    .ours { fill: #38bdf8; }
  }
"""


def medians(page: str, column: str) -> dict[str, float]:
    """The medians of `column` by system, of the first table of `page` that has it."""
    lines = iter(page.splitlines())
    for line in lines:
        heads = [head.strip() for head in line.strip("| ").split("|")]
        if column in heads:
            next(lines)
            break
    else:
        raise ValueError(f"RESULTS.md has no column {column!r}: measure again with `benchmarks/compare.py --write`")
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        found[cells[0]] = float(cells[heads.index(column)].split()[0])
    return found


def panel(title: str, values: dict[str, float], left: int, *, names: bool) -> list[str]:
    """Bars of `values` from `left` on, as long as the longest allows; `names` puts the system's name before each."""
    bars, longest = [f'<text class="title" x="{left}" y="18">{title}</text>'], max(values.values())
    for number, (system, value) in enumerate(values.items()):
        top, length = 30 + number * ROW, max(2.0, value / longest * WIDTH)
        if names:
            bars.append(f'<text x="{left - 10}" y="{top + 13}" text-anchor="end">{SYSTEMS[system]}</text>')
        kind = "ours" if system.startswith("checkpointd") else "peer"
        bars.append(f'<rect class="{kind}" x="{left}" y="{top}" width="{length:.1f}" height="{BAR}" rx="3"/>')
        bars.append(f'<text x="{left + length + 6:.1f}" y="{top + 13}">{value:.2g} s</text>')
    return bars


def picture(page: str) -> str:
    """The SVG for the tables of `page`."""
    drawn: list[str] = []
    for number, (column, title) in enumerate(PANELS.items()):
        values = medians(page, column)
        left = LABELS + number * (WIDTH + GAP)
        drawn += panel(title, {system: values[system] for system in SYSTEMS if system in values}, left, names=number == 0)
    width, height = LABELS + len(PANELS) * (WIDTH + GAP), 36 + len(SYSTEMS) * ROW
    return curves.svg(width, height, drawn, STYLE)


def write(page: str) -> None:
    """Write speed.svg for the tables of `page`."""
    (HERE / "speed.svg").write_text(picture(page))


if __name__ == "__main__":
    write((HERE / "RESULTS.md").read_text())
