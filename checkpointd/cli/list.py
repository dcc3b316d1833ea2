"""`checkpointd list`: the checkpoints at a root."""

from __future__ import annotations

import click

from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import ask, show_json
from checkpointd.cli.attempts import state_cell
from checkpointd.cli.render import Cell, Table, show, warn
from checkpointd.cli.words import moment, number, ratio, size
from checkpointd.pipeline.report.listing import Listing, Row, listing

_RIGHT = frozenset({"step", "ranks", "raw", "stored", "objects", "ratio"})


@click.command("list", short_help="The checkpoints at a root.")
@places("[ROOT]")
@click.option("--all", "everything", is_flag=True, help="Also attempts that are no checkpoint: aborted, in doubt, removed.")
@as_json()
def command(places: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """The checkpoints at ROOT, newest first.

    `raw` is the size of the tensors, `stored` what is kept of it, `decided` when it was committed. With --all there is a line
    for every attempt, with the bytes of all its objects, and why it is not a checkpoint.
    """
    found = ask(only_root(places, "list"), lambda store: listing(store, everything=everything))
    if as_json:
        show_json(found)
        return
    if found.rows:
        show([attempts_table(found.rows) if everything else checkpoints_table(found.rows)])
    else:
        warn(f"there are no {'attempts' if everything else 'checkpoints'} at {found.root}")
    if found.latest.problem:
        warn(found.latest.problem)
    if not everything:
        _warn_of_damage(found)


def _warn_of_damage(found: Listing) -> None:
    for row in found.rows:
        if row.state == "damaged":
            warn(f"{row.tag}: {row.why}")


def checkpoints_table(rows: tuple[Row, ...]) -> Table:
    titles = ("tag", "step", "state", "ranks", "raw", "stored", "ratio", "decided", "latest")
    cells = [(*_cells(row), Cell("latest" if row.latest else "", "good")) for row in rows]
    return Table(titles, cells, right=_RIGHT, prose=frozenset({"tag"}), optional=("ratio", "raw", "step", "ranks"))


def attempts_table(rows: tuple[Row, ...]) -> Table:
    titles = ("tag", "attempt", "state", "step", "ranks", "objects", "decided", "why")
    cells = [
        (
            row.tag,
            row.attempt,
            state_cell(row.state),
            number(row.step),
            number(row.world_size),
            size(row.object_bytes),
            moment(row.time),
            "latest" if row.latest else row.brief or row.why,
        )
        for row in rows
    ]
    return Table(titles, cells, right=_RIGHT, prose=frozenset({"tag", "why"}), optional=("ranks", "step", "objects"))


def _cells(row: Row) -> tuple[str | Cell, ...]:
    return (
        row.tag,
        number(row.step),
        state_cell(row.state),
        number(row.world_size),
        size(row.raw_bytes),
        size(row.stored_bytes),
        ratio(row.raw_bytes, row.stored_bytes),
        moment(row.time),
    )
