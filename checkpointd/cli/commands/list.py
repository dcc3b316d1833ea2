"""`checkpointd list`: the checkpoints at a root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click

from checkpointd.cli.arguments import as_json, only_root, places
from checkpointd.cli.asking import ask
from checkpointd.cli.attempts import STATE_MOODS, read_back_cell
from checkpointd.cli.formatting import metrics, moment, number, ratio, size
from checkpointd.cli.locating import is_used, suggestion
from checkpointd.cli.render import Cell, Table, show, show_json, warn
from checkpointd.pipeline.root.wholeness import in_words
from checkpointd.report.listing import AttemptRow, listing


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table. A narrow terminal leaves columns out in the order of `optional`, but never those with 0.
    `rare`: the column is shown only if a row has text for it.
    """

    title: str
    cell: Callable[[AttemptRow], str | Cell]
    right: bool = False
    prose: bool = False
    optional: int = 0
    rare: bool = False


TAG = Column("tag", lambda row: row.tag, prose=True)
STEP = Column("step", lambda row: number(row.step), right=True, optional=4)
STATE = Column("state", lambda row: Cell(row.state, STATE_MOODS[row.state]))
RANKS = Column("ranks", lambda row: number(row.world_size), right=True, optional=5)
DECIDED = Column("decided", lambda row: moment(row.time))
CHECKPOINTS = (
    *(TAG, STEP, STATE, RANKS),
    Column("raw", lambda row: size(row.raw_bytes), right=True, optional=3),
    Column("stored", lambda row: size(row.stored_bytes), right=True),
    Column("ratio", lambda row: ratio(row.raw_bytes, row.stored_bytes), right=True, optional=2),
    DECIDED,
    Column("read back", lambda row: read_back_cell(row.read_back), optional=6),
    Column("latest", lambda row: Cell("latest" if row.latest else "", "good")),
    Column("metrics", lambda row: metrics(row.metrics) if row.metrics else "", prose=True, optional=1, rare=True),
)
ATTEMPTS = (
    *(TAG, Column("attempt", lambda row: row.attempt), STATE, STEP, RANKS),
    Column("objects", lambda row: size(row.object_bytes), right=True, optional=6),
    DECIDED,
    Column("why", lambda row: row.brief or row.why or ("latest" if row.latest else ""), prose=True),
)


@click.command("list", short_help="The checkpoints at a root.")
@places("[ROOT]")
@click.option("--all", "everything", is_flag=True, help="Also attempts that are not checkpoints: aborted, in doubt, removed.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the newest N.")
@as_json()
def command(places: tuple[str, ...], everything: bool, limit: int | None, as_json: bool) -> None:
    """List the checkpoints at ROOT, newest first, with the metrics that were passed to save().

    `raw` is the size of the tensors, `stored` their size on the disk, `decided` the time of the commit, and `read back` whether
    the whole checkpoint was read from the storage since, and found whole. A checkpoint is `incomplete` if a tag that it needs
    is gone, and `removed` if somebody removed the directory that showed its files. --all shows every attempt, with the bytes of
    its objects, and why it is not a checkpoint.
    """
    root = only_root(places, "list")
    found = ask(root, lambda store: listing(store, everything=everything, limit=limit), unused=True, read_only=True)
    if as_json:
        show_json(found)
        return
    if found.rows:
        show([table(found.rows, ATTEMPTS if everything else CHECKPOINTS)])
    else:
        nothing = f"there are no {'attempts' if everything else 'checkpoints'} at {found.root}"
        warn(nothing if is_used(found.root) else f"{nothing}, no job ever saved there: {suggestion(found.root, root)}")
    if found.log_damage:
        warn(found.log_damage)
    if found.latest.note:
        warn(found.latest.note)
    if not everything:
        for row in found.rows:
            if row.why and row.state == "committed":
                warn(f"{row.tag}: {row.why}")
        for line in in_words(found.root, {row.prefix: row.missing for row in found.rows if row.missing}):
            warn(line)


def table(rows: Sequence[AttemptRow], columns: Sequence[Column]) -> Table:
    shown = [column for column in columns if not column.rare or any(column.cell(row) for row in rows)]
    return Table(
        [column.title for column in shown],
        [[column.cell(row) for column in shown] for row in rows],
        right=frozenset(column.title for column in shown if column.right),
        prose=frozenset(column.title for column in shown if column.prose),
        optional=tuple(c.title for c in sorted(shown, key=lambda c: c.optional) if c.optional),
    )
