"""The options with which a person gives the rules of retention, for the commands that remove checkpoints by rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from checkpointd.commit.retention import Retention
from checkpointd.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])\Z", re.ASCII)


def retention_options() -> Callable[[F], F]:
    """The options of the rules; the command gets the rules as `rules`."""
    options = (
        click.option("--keep-last", type=int, metavar="N", help="Keep the newest N checkpoints."),
        click.option("--every", type=int, metavar="STEPS", help="Keep those whose step is a multiple of STEPS."),
        click.option("--younger-than", metavar="AGE", help="Keep those younger than AGE, such as 12h or 7d."),
        click.option("--best", type=int, metavar="N", help="Keep the best N by --metric."),
        click.option("--metric", metavar="NAME", help="A metric that was passed to save(metrics=...)."),
        click.option(
            "--mode", type=click.Choice(["min", "max"]), default="min", help="Whether smaller or larger values are better."
        ),
    )

    def add(command: F) -> F:
        @wraps(command)
        def with_rules(
            *args: Any,
            keep_last: int | None,
            every: int | None,
            younger_than: str | None,
            best: int | None,
            metric: str | None,
            mode: str,
            **others: Any,
        ) -> Any:
            rules = Retention(
                keep_last=keep_last,
                every_steps=every,
                younger_than_s=None if younger_than is None else age_s(younger_than),
                best=best,
                metric=metric,
                mode="max" if mode == "max" else "min",
            )
            return command(*args, rules=rules, **others)

        made: Any = with_rules
        for option in reversed(options):
            made = option(made)
        return made  # type: ignore[no-any-return]  # the command with its options

    return add


def age_s(text: str) -> float:
    """`90s`, `30m`, `12h`, `7d` or `2w` in seconds. UsageError for anything else."""
    match = _AGE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is not an age; give a number and s, m, h, d or w, such as 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]
