"""`checkpointd gc`: remove leftovers, and old checkpoints by rule."""

from __future__ import annotations

import re

import click

from checkpointd.admin.gc import collection
from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import ask
from checkpointd.cli.collection_page import page
from checkpointd.cli.render import show_answer
from checkpointd.commit.retention import Retention
from checkpointd.errors import UsageError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])\Z", re.ASCII)


@click.command("gc", short_help="Remove leftovers, and old checkpoints by rule.")
@places("[ROOT]")
@click.option("--keep-last", type=int, metavar="N", help="Keep the newest N checkpoints.")
@click.option("--every", "every_steps", type=int, metavar="STEPS", help="Keep those whose step is a multiple of STEPS.")
@click.option("--younger-than", metavar="AGE", help="Keep those younger than AGE, such as 12h or 7d.")
@click.option("--best", type=int, metavar="N", help="Keep the best N by --metric.")
@click.option("--metric", metavar="NAME", help="A metric that was passed to save(metrics=...).")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", help="Whether smaller or larger values are better.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed; write nothing.")
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
    """Remove leftovers at ROOT: objects of aborted saves and of removed checkpoints that no checkpoint needs.

    With rules, it also removes checkpoints that no rule keeps; never the newest, the one that `latest` names, or the newest
    that was read back whole. If none that stays was read back, one is read back first; if none is whole, none is removed.
    With --best, checkpoints without the metric stay; a metric that no checkpoint has is an error. Objects that newer
    checkpoints refer to stay. A job may save at the same time.
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
    show_answer(found, page, as_json=as_json)


def age_s(text: str) -> float:
    """`90s`, `30m`, `12h`, `7d` or `2w` in seconds. UsageError for anything else."""
    match = _AGE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is not an age; give a number and s, m, h, d or w, such as 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]
