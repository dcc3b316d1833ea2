"""The attempts at a root, one row each."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import msgspec

from checkpointd.commit.facts import STATES, State
from checkpointd.layout.log_records import LoggedAttempt, ReadBackState
from checkpointd.layout.save_timings import Cost
from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.wholeness import Lost, lost_state, lost_text, seen_at_a_glance
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.log import look
from checkpointd.report.votes import rank_words
from checkpointd.store.base import Store, each

RowState: TypeAlias = State | Literal["superseded", "incomplete", "removed", "left-behind"]
"""`superseded`: the attempt was committed, but the tag was committed again later, so a collection will remove it.
`incomplete`: the attempt was committed, but objects that it needs are gone. `removed`: it was committed, and the directory that
showed its files was removed by hand. `left-behind`: it is a checkpoint of a branch that was left: training went on from an
older one."""

LEFT_BEHIND_WORDS = "training went on from an older checkpoint, so no load takes it unless it is named"
_NO_COST = Cost()


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. Sizes in bytes: `raw_bytes` and `stored_bytes` of the tensors, `object_bytes` of all its objects if it is
    undecided, else of the chunks objects that it wrote.
    """

    tag: str
    attempt: str
    state: RowState
    latest: bool
    step: int | None
    world_size: int | None
    raw_bytes: int | None
    stored_bytes: int | None
    object_bytes: int
    time: str | None
    """When it was decided, by the clock of the machine that decided."""
    read_back: ReadBackState = "no"
    """Whether it was read back since it was written, and the result."""
    why: str = ""
    """Why it is not a checkpoint, or left behind, or damaged; empty if it is one that a load may take."""
    brief: str = ""
    """For an aborted attempt, the same in brief: the class of the error and the ranks at fault."""
    metrics: dict[str, float]
    lost: tuple[Lost, ...] = ()
    """What is missing, if the state is `incomplete` or `removed`."""
    passed_over: str = ""
    """Why load() took an older checkpoint instead; empty if it never did."""

    @property
    def prefix(self) -> str:
        return f"{self.tag}/{self.attempt}"


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The rows, newest first; `left_out` is the number of older ones that the limit cut off."""

    root: str
    latest: Pointer
    rows: tuple[AttemptRow, ...]
    left_out: int = 0
    log_damage: str = ""
    """Why the log could not be read to its end, so that newer attempts may be missing here; empty if it could."""


async def listing(store: Store, *, everything: bool = False, limit: int | None = None) -> Listing:
    """The checkpoints of `store`, or with `everything` all attempts; with `limit`, only the newest `limit` rows.

    The log tells nearly all. The root is listed once, to see the tags that are gone, and the objects of undecided attempts.
    """
    state, damage = await look(store)
    attempts = state.attempts.values()
    current = {c.prefix for c in root_view.checkpoints_of(attempts)}
    found = [one for one in attempts if everything or one.prefix in current or (one.status == "checkpoint" and one.left_behind)]
    found.sort(key=lambda one: one.order, reverse=True)
    shown = found[:limit]
    missing = await seen_at_a_glance(store, root_view.commits_of(shown))
    undecided = [one for one in shown if one.status == "undecided"]
    rows = {row.prefix: row for row in await each(partial(_undecided, store), undecided)}
    named = await pointer(store, state, damage)
    for one in shown:
        if one.prefix not in rows:
            is_current = one.prefix in current
            lost = missing.get(one.prefix, ()) if is_current or one.left_behind else ()
            rows[one.prefix] = _row(one, _state_of(one, lost, is_current), lost, named.tag)
    ordered = tuple(rows[one.prefix] for one in shown)
    return Listing(root=store.url, latest=named, rows=ordered, left_out=len(found) - len(shown), log_damage=damage)


async def _undecided(store: Store, one: LoggedAttempt) -> AttemptRow:
    sizes = await root_view.sizes_of(store, one.prefix)
    words = await rank_words(store, one, sizes)
    missing = words.missing()
    why = f"undecided; no vote of {rank_runs(missing)}" if missing else "undecided, although every vote is there"
    if words.world_size is None:
        why = "undecided; no rank has voted"
    return AttemptRow(
        tag=one.tag,
        attempt=str(one.id),
        state="in-doubt",
        latest=False,
        step=words.step,
        world_size=words.world_size,
        raw_bytes=words.raw_bytes(),
        stored_bytes=words.stored_bytes(),
        object_bytes=sum(sizes.values()),
        time=None,
        why=why,
        metrics={},
    )


def _state_of(one: LoggedAttempt, lost: tuple[Lost, ...], is_current: bool) -> RowState:
    if one.status != "checkpoint":
        return STATES[one.status]
    if lost:
        return lost_state(lost)
    return "left-behind" if one.left_behind else "committed" if is_current else "superseded"


def _row(one: LoggedAttempt, state: RowState, lost: tuple[Lost, ...], latest: str | None) -> AttemptRow:
    commit = one.committed
    cost = (commit and commit.cost) or _NO_COST
    decided = one.decision
    return AttemptRow(
        tag=one.tag,
        attempt=str(one.id),
        state=state,
        latest=one.tag == latest and state in ("committed", "incomplete", "removed"),
        step=one.step if one.step >= 0 else None,
        world_size=commit.world_size if commit else None,
        raw_bytes=cost.raw_bytes or None,
        stored_bytes=cost.stored_bytes or None,
        object_bytes=cost.written_bytes,
        time=decided.writer.time if decided else None,
        read_back=one.read_back,
        why=lost_text(lost) or _why(one, state),
        brief=_brief(one),
        metrics=commit.metrics if commit else {},
        lost=lost,
        passed_over=one.passed_over,
    )


def _why(one: LoggedAttempt, state: RowState) -> str:
    match state:
        case "left-behind":
            return LEFT_BEHIND_WORDS
        case "superseded":
            return "the tag was saved again since"
        case "aborted" if one.abort is not None:
            return one.abort.error.message
        case "deleted" if one.removal is not None:
            return one.removal.reason
    return one.damaged


def _brief(one: LoggedAttempt) -> str:
    abort = one.abort
    if abort is None:
        return ""
    return f"{abort.error.code}, {rank_runs(abort.ranks)}" if abort.ranks else abort.error.code
