"""Tables and words for attempts, votes and jobs, shared by the commands."""

from __future__ import annotations

from collections.abc import Sequence

from checkpointd.cli.formatting import ABSENT, count, duration, moment, size
from checkpointd.cli.render import Cell, Mood, Table
from checkpointd.layout.log_records import ReadBackState
from checkpointd.layout.manifest import WriterIdentity
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.report.holder import Holder
from checkpointd.report.listing import RowState
from checkpointd.report.votes import Ballot, RankWord

STATE_MOODS: dict[RowState, Mood] = {
    "committed": "good",
    "in-doubt": "doubt",
    "aborted": "bad",
    "incomplete": "bad",
    "removed": "bad",
    "deleted": "quiet",
    "replaced": "quiet",
    "left-behind": "quiet",
}
VOTE_MOODS: dict[Ballot, Mood] = {"yes": "good", "no": "bad", "missing": "doubt", "unreadable": "bad"}
READ_BACK_CELLS: dict[ReadBackState, tuple[str, Mood]] = {
    "no": ("no", "quiet"),
    "whole": ("whole", "good"),
    "damaged": ("damaged", "bad"),
}
LIVES = {"running": "still runs", "ended": "has ended", "unknown": "cannot be checked from here"}


def read_back_cell(state: ReadBackState) -> Cell:
    return Cell(*READ_BACK_CELLS[state])


def job_text(job: Holder) -> str:
    """The job of a start, in words."""
    if job.mirrors:
        return f"none: it mirrors {job.mirrors} (start {job.start}, {job}, {moment(job.since)})"
    if not job.is_job:
        return f"none: start {job.start} was taken by a recovery ({job}, {moment(job.since)})"
    who = f"{job} since {moment(job.since)}, which {LIVES[job.life]}"
    return f"start {job.start}, {count(job.world_size, 'rank')}: {who}"


def process_text(writer: WriterIdentity | None) -> str:
    return f"{writer.host}:{writer.pid}" if writer else ABSENT


def votes_table(ranks: Sequence[RankWord]) -> Table:
    """A line for each rank: its vote, bytes, time and process. The columns `inline` and `error` appear if needed."""
    titles = ["rank", "vote", "raw", "stored", "objects", "when", "process"]
    rows = [list(_vote_cells(word)) for word in ranks]
    for title, texts in (("inline", [inline_text(word) for word in ranks]), ("error", [error_text(word) for word in ranks])):
        if any(texts):
            titles.append(title)
            rows = [[*row, text] for row, text in zip(rows, texts, strict=True)]
    right = frozenset({"rank", "raw", "stored", "objects"})
    return Table(titles, rows, right=right, prose=frozenset({"process", "inline", "error"}), optional=("raw", "stored"))


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


PARTS = ("staging", "persisting", "hash", "codec", "disk", "waiting")


def seconds_table(ranks: Sequence[RankWord]) -> Table | None:
    """A line for each rank that recorded times: the duration of each part of its save. `hash`, `codec` and `disk` overlap."""
    rows: list[list[str | Cell]] = [
        [str(word.rank), *(ABSENT if s is None else duration(s) for s in (getattr(word.seconds, part) for part in PARTS))]
        for word in ranks
        if word.seconds != PhaseSeconds()
    ]
    return Table(("rank", *PARTS), rows, right=frozenset({"rank", *PARTS})) if rows else None


def inline_text(word: RankWord) -> str:
    """Why a trainer with a sidecar persisted its part itself; empty if the sidecar did it, or there is none."""
    return "" if word.inline is None else word.inline.why


def error_text(word: RankWord) -> str:
    """The error that kept a rank from voting yes, or its vote from being read; empty if there was none."""
    if word.error is None:
        return ""
    during = f" while {word.error.phase}" if word.error.phase else ""
    return f"{word.error.code}{during}: {word.error.message}"
