"""How attempts, votes and jobs look, wherever they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from checkpointd.cli.render import Cell, Mood, Table
from checkpointd.cli.words import ABSENT, count, moment, size
from checkpointd.layout.manifest import Writer
from checkpointd.pipeline.catalog import ReadBackState
from checkpointd.pipeline.report.holder import Holder
from checkpointd.pipeline.report.listing import RowState
from checkpointd.pipeline.report.ranks import Ballot, RankWord

STATE_MOODS: dict[RowState, Mood] = {
    "committed": "good",
    "in-doubt": "doubt",
    "aborted": "bad",
    "damaged": "bad",
    "unreadable": "doubt",
    "incomplete": "bad",
    "deleted": "quiet",
    "superseded": "quiet",
}
VOTE_MOODS: dict[Ballot, Mood] = {"yes": "good", "no": "bad", "missing": "doubt", "unreadable": "bad"}
READ_BACK_CELLS: dict[ReadBackState, tuple[str, Mood]] = {
    "no": ("no", "quiet"),
    "whole": ("whole", "good"),
    "damaged": ("damaged", "bad"),
}
LIVES = {"running": "still runs", "ended": "has ended", "unknown": "cannot be checked from here"}


def state_cell(state: RowState) -> Cell:
    return Cell(state, STATE_MOODS[state])


def read_back_cell(state: ReadBackState) -> Cell:
    return Cell(*READ_BACK_CELLS[state])


def job_text(job: Holder) -> str:
    """Who runs, or ran, an epoch."""
    if not job.is_job:
        return f"none: epoch {job.epoch} was taken by a recovery ({job}, {moment(job.since)})"
    who = f"{job} since {moment(job.since)}, which {LIVES[job.life]}"
    return f"epoch {job.epoch}, {count(job.world_size, 'rank')}: {who}"


def process_text(writer: Writer | None) -> str:
    return f"{writer.host}:{writer.pid}" if writer else ABSENT


def votes_table(ranks: Sequence[RankWord]) -> Table:
    """A line for each rank: its vote, its bytes, when and by which process; its error where any has one."""
    errors = [error_text(word) for word in ranks]
    titles = ["rank", "vote", "raw", "stored", "objects", "when", "process", "error"]
    rows = [[*_vote_cells(word), error] for word, error in zip(ranks, errors, strict=True)]
    if not any(errors):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    right = frozenset({"rank", "raw", "stored", "objects"})
    return Table(titles, rows, right=right, prose=frozenset({"process", "error"}), optional=("raw", "stored"))


def _vote_cells(word: RankWord) -> tuple[str | Cell, ...]:
    return (
        str(word.rank),
        Cell(word.vote, VOTE_MOODS[word.vote]),
        size(word.raw_bytes),
        size(word.stored_bytes),
        size(word.object_bytes),
        moment(word.writer.time if word.writer else None),
        process_text(word.writer),
    )


def error_text(word: RankWord) -> str:
    """What kept a rank from voting yes; empty where nothing did."""
    if word.error is None:
        return word.problem
    during = f" while {word.error.phase}" if word.error.phase else ""
    return f"{word.error.code}{during}: {word.error.message}"
