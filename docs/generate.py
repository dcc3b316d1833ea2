"""Regenerate what the documentation takes from the code: the commit machine's table and diagram in docs/COMMIT.md.

`python docs/generate.py` writes the file, `--check` only says whether it is up to date (exit code 1 where it is not).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from checkpointd.commit.machine import FINAL, TABLE, Action, Phase

TARGET = Path(__file__).parent / "COMMIT.md"

HEAD = """# One rank's side of an attempt

Generated from `checkpointd/commit/machine.py` by `make docs`; do not edit. `failing` and `skipping` show as `failed` and
`skipped` to users, and an attempt that a newer epoch has ended shows as `fenced`. The coordinator's decision
(`commit/decide.py`) is a plain function of the votes: commit when every rank's yes is there and valid and the plans are
whole together, abort on the first no or invalid vote, abort at the deadline.

"""


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.STAGING}"]
    for (phase, event), (after, _) in TABLE.items():
        if phase is not after:
            lines.append(f"    {phase} --> {after}: {event}")
    lines += [f"    {phase} --> [*]" for phase in Phase if phase in FINAL]
    return "\n".join([*lines, "```"])


def table() -> str:
    """The table as Markdown, in the order of the phases."""
    rows = ["| phase | event | next phase | action |", "|---|---|---|---|"]
    order = list(Phase)
    for (phase, event), (after, action) in sorted(TABLE.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        rows.append(f"| {phase} | {event} | {after} | {'' if action is Action.NONE else action} |")
    return "\n".join(rows)


def page() -> str:
    return f"{HEAD}{diagram()}\n\n{table()}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        fresh = TARGET.exists() and TARGET.read_text() == page()
        if not fresh:
            print(f"{TARGET} is not what the code says: run `make docs`", file=sys.stderr)
        return 0 if fresh else 1
    TARGET.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
