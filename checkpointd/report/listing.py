"""The attempts at a root, one row each."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from checkpointd.commit.facts import State
from checkpointd.errors import DamagedError, NotFoundError, UnreadableError
from checkpointd.layout.keys import DELETED, PASSED_OVER
from checkpointd.layout.manifest import Deleted, Outcome, PassedOver, decode
from checkpointd.layout.save_timings import Cost
from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView, ReadBackState
from checkpointd.pipeline.root.wholeness import Lost, Votes, Wholeness, directory_of, lost_state, lost_text
from checkpointd.pipeline.workers import run_workers
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.votes import votes_of, words_of
from checkpointd.store.base import Store

RowState: TypeAlias = State | Literal["superseded", "incomplete", "removed", "copied", "left-behind"]
"""`superseded`: the attempt was committed, but the tag was committed again later, so a collection will remove it.
`incomplete`: the attempt was committed, but objects that it needs are gone. `removed`: it was committed, and its directory was
removed by hand. `copied`: it is a copy of another tag's directory, or that directory under another name. `left-behind`: it is a
checkpoint of a branch that was left: training went on from an older one."""

LEFT_BEHIND_WORDS = "training went on from an older checkpoint, so no load takes it unless it is named"
_NO_COST = Cost()
ROWS = 8
"""Attempts whose votes are read at once."""


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. Sizes in bytes: `raw_bytes` and `stored_bytes` of the tensors, `object_bytes` of all its objects."""

    tag: str
    attempt: str
    state: RowState
    latest: bool
    step: int | None
    world_size: int | None
    raw_bytes: int | None
    stored_bytes: int | None
    object_bytes: int
    """For an attempt that only the catalog told of: of the chunks objects that it wrote."""
    time: str | None
    """When it was decided, by the clock of the machine that decided."""
    read_back: ReadBackState = "no"
    """Whether it was read back since it was written, and the result."""
    why: str = ""
    """Why it is not a checkpoint, or left behind; empty if it is one that a load may take."""
    brief: str = ""
    """For an aborted attempt, the same in brief: the class of the error and the ranks at fault."""
    metrics: dict[str, float]
    lost: tuple[Lost, ...] = ()
    """What is missing, if the state is `incomplete` or `removed`."""
    passed_over: str = ""
    """Why load() took an older checkpoint instead; empty if it never did."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The rows, newest first; `left_out` is the number of older ones that the limit cut off."""

    root: str
    latest: Pointer
    rows: tuple[AttemptRow, ...]
    left_out: int = 0


async def listing(store: Store, *, everything: bool = False, limit: int | None = None) -> Listing:
    """The checkpoints of `store`, also those that were removed by hand, and attempts whose outcome is damaged or unreadable.
    With `everything`, all others as well.

    With `limit`, only the newest `limit` rows. Objects and votes are looked at only for the newest attempts, and for those that
    are not decided (`catalog.scan`); the catalog tells the rest.
    """
    attempts = [attempt for attempt in await catalog.scan(store) if attempt.has_objects]
    checkpoints = catalog.checkpoints_of(attempts)
    current = {c.tag: c.attempt for c in checkpoints}
    wholeness, vanished = Wholeness(store, attempts), await catalog.vanished(store)
    removed = await wholeness.seen_abandoned()
    found = [
        a
        for a in attempts
        if everything or current.get(a.tag) == a.attempt or a.is_left_checkpoint or a.state in ("damaged", "unreadable")
    ]
    gone = await catalog.vanished(store, removed=True) if everything else []
    found += vanished + gone
    shown = sorted(found, key=newest_last, reverse=True)[:limit]
    named = await pointer(store, checkpoints, wholeness)
    rows: dict[int, AttemptRow] = {}

    async def add(place: int, attempt: AttemptView, is_current: bool) -> None:
        votes = await votes_of(store, attempt) if attempt.entry is None else {}
        lost = await wholeness.lost(attempt, votes) if is_current or attempt.is_left_checkpoint else ()
        row = _row(attempt, votes, lost, is_current, is_current and attempt.tag == named.tag)
        if attempt.state == "deleted":
            row = msgspec.structs.replace(row, why=await _removed_because(store, attempt))
        rows[place] = msgspec.structs.replace(row, passed_over=await passed_over(store, attempt))

    works = []
    for place, attempt in enumerate(shown):
        is_current = current.get(attempt.tag) == attempt.attempt
        if attempt in gone and attempt.entry is not None:
            row = _row(attempt, {}, (), is_current=False, is_latest=False)
            rows[place] = msgspec.structs.replace(row, why=attempt.entry.removed)
        elif attempt in vanished:
            rows[place] = _row(attempt, {}, (directory_of(attempt.tag),), is_current=True, is_latest=False)
        elif _is_told(attempt) and attempt.prefix not in removed:
            rows[place] = _row(attempt, {}, (), is_current, is_current and attempt.tag == named.tag)
        else:
            works.append(partial(add, place, attempt, is_current))
    await run_workers(works, ROWS)
    ordered = tuple(rows[place] for place in range(len(shown)))
    return Listing(root=store.url, latest=named, rows=ordered, left_out=len(found) - len(shown))


def _is_told(attempt: AttemptView) -> bool:
    """Whether the catalog tells the whole row, so that nothing is read for it."""
    outcome = attempt.outcome
    refers_to_none = outcome is not None and not outcome.holders
    return attempt.entry is not None and refers_to_none and attempt.state != "deleted" and not attempt.passed_over


def newest_last(attempt: AttemptView) -> tuple[int, float, int]:
    """Sorts attempts by their order; an undecided attempt counts as the newest of its start, and a copy as older than all."""
    if attempt.is_copy:
        return (-1, 0, 0)
    outcome = attempt.outcome
    n = outcome.order[1] if outcome else math.inf
    return (attempt.attempt.start, n, attempt.attempt.k)


def _row(attempt: AttemptView, votes: Votes, lost: tuple[Lost, ...], is_current: bool, is_latest: bool) -> AttemptRow:
    words = _Words.of(attempt, votes)
    state: RowState = "copied" if attempt.is_copy else attempt.state
    if attempt.state == "committed":
        standing: RowState = "committed" if is_current else "superseded"
        state = lost_state(lost) if lost else "left-behind" if attempt.left_behind else standing
    return AttemptRow(
        tag=attempt.tag,
        attempt=str(attempt.attempt),
        state=state,
        latest=is_latest,
        step=words.step,
        world_size=words.world_size,
        raw_bytes=words.raw_bytes,
        stored_bytes=words.stored_bytes,
        object_bytes=attempt.nbytes,
        time=attempt.outcome.writer.time if attempt.outcome else None,
        read_back=attempt.read_back,
        why=lost_text(lost) or _why(attempt, state, words.missing),
        brief=_brief(attempt.outcome),
        metrics=attempt.outcome.metrics if attempt.outcome else {},
        lost=lost,
    )


class _Words(NamedTuple):
    """What the votes say, or the outcome of an attempt at whose objects nobody looked."""

    step: int | None
    world_size: int | None
    raw_bytes: int | None
    stored_bytes: int | None
    missing: list[int]

    @classmethod
    def of(cls, attempt: AttemptView, votes: Votes) -> _Words:
        outcome = attempt.outcome
        if attempt.entry is not None and outcome is not None:
            cost, step = outcome.cost or _NO_COST, outcome.step if outcome.step >= 0 else None
            return cls(step, outcome.world_size or None, cost.raw_bytes or None, cost.stored_bytes or None, [])
        words = words_of(attempt, votes)
        return cls(words.step, words.world_size, words.raw_bytes(), words.stored_bytes(), words.missing())


async def _removed_because(store: Store, attempt: AttemptView) -> str:
    if attempt.entry is not None:
        return attempt.entry.removed
    mark = await removal(store, attempt)
    return f"removed; the reason cannot be read: {mark}" if isinstance(mark, str) else mark.reason


async def passed_over(store: Store, attempt: AttemptView) -> str:
    """Why a load took an older checkpoint, by the record that the load left; empty if there is no record."""
    if not attempt.passed_over:
        return ""
    key = f"{attempt.prefix}/{PASSED_OVER}"
    try:
        return decode(await store.get(key), PassedOver, key).why
    except (DamagedError, NotFoundError, UnreadableError) as error:
        return f"the record that says why cannot be read: {error}"


async def removal(store: Store, attempt: AttemptView) -> Deleted | str:
    """The mark of an attempt that was removed, or the reason for which it cannot be read."""
    key = f"{attempt.prefix}/{DELETED}"
    try:
        return decode(await store.get(key), Deleted, key)
    except (DamagedError, NotFoundError, UnreadableError) as error:
        return str(error)


def _why(attempt: AttemptView, state: RowState, missing: list[int]) -> str:
    error = attempt.outcome.error if attempt.outcome else None
    match state:
        case "committed" | "incomplete" | "removed" | "deleted":
            return ""
        case "left-behind":
            return LEFT_BEHIND_WORDS
        case "superseded":
            return "the tag was saved again since"
        case "aborted":
            return error.message if error else "no reason was recorded"
        case "damaged" | "copied":
            return attempt.damage or ""
        case "unreadable":
            return f"its outcome cannot be read now: {attempt.unreadable}"
        case "in-doubt":
            return f"no outcome; no vote of {rank_runs(missing)}" if missing else "no outcome, although every vote is there"


def _brief(outcome: Outcome | None) -> str:
    if outcome is None or outcome.error is None:
        return ""
    return f"{outcome.error.code}, {rank_runs(outcome.ranks)}" if outcome.ranks else outcome.error.code
