"""`checkpointd gc`: remove what no checkpoint needs, and old checkpoints by rule."""

from __future__ import annotations

import re

import click

from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import ask, show_json
from checkpointd.cli.removed import page
from checkpointd.cli.render import show
from checkpointd.commit.retention import Retention
from checkpointd.errors import UsageError
from checkpointd.pipeline.report.collection import collection

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])\Z", re.ASCII)


@click.command("gc", short_help="Remove what no checkpoint needs, and old checkpoints by rule.")
@places("[ROOT]")
@click.option("--keep-last", type=int, metavar="N", help="Keep the newest N checkpoints.")
@click.option("--every", "every_steps", type=int, metavar="STEPS", help="Keep those whose step is a multiple of STEPS.")
@click.option("--younger-than", metavar="AGE", help="Keep those younger than AGE, such as 12h or 7d.")
@click.option("--best", type=int, metavar="N", help="Keep the best N by --metric.")
@click.option("--metric", metavar="NAME", help="A metric that save(metrics=...) was given.")
@click.option(
    "--mode", type=click.Choice(["min", "max"]), default="min", help="Whether a smaller metric is better, or a larger."
)
@click.option("--dry-run", is_flag=True, help="Only say what would go; nothing is written.")
@as_json()
def command(
    places: tuple[str, ...],
    keep_last: int | None,
    every_steps: int | None,
    younger_than: str | None,
    best: int | None,
    metric: str | None,
    mode: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove at ROOT what no checkpoint needs: left-overs of aborted saves, and what removed checkpoints held.

    With rules, checkpoints that none of them names go as well; never the newest, the one that `latest` names, or the newest
    that was read back whole. Where none that stays was read back, one is read back first; where none is whole, none goes.
    With --best, those that were saved without the metric stay; a metric that no checkpoint has is an error. What newer
    checkpoints refer to stays. A job may save at the same time.
    """
    rules = Retention(
        keep_last=keep_last,
        every_steps=every_steps,
        younger_than_s=None if younger_than is None else age_s(younger_than),
        best=best,
        metric=metric,
        mode="max" if mode == "max" else "min",
    )
    found = ask(only_root(places, "gc"), lambda store: collection(store, rules, dry_run=dry_run))
    if as_json:
        show_json(found)
    else:
        show(page(found))


def age_s(text: str) -> float:
    """`90s`, `30m`, `12h`, `7d` or `2w` in seconds. UsageError for anything else."""
    match = _AGE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is no age; give a number and s, m, h, d or w, such as 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]
