"""The attempts at a root, one row each. All reports on attempts have these rows, in the same words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from checkpointd.commit.facts import STATES, State
from checkpointd.commit.machine import FENCED
from checkpointd.errors import FencedError
from checkpointd.layout.log_records import LoggedAttempt, ReadBackState
from checkpointd.layout.save_timings import Cost
from checkpointd.phrases import rank_runs
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.wholeness import Loss, missing
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.log import look
from checkpointd.report.votes import RankWords, rank_words
from checkpointd.store.base import Store, each

RowState: TypeAlias = State | Literal["replaced", "incomplete", "removed", "left-behind"]
"""`replaced`: the attempt was committed, but the tag was committed again later, so a collection will remove it.
`incomplete`: the attempt was committed, but objects that it needs are gone. `removed`: it was committed, and the directory that
showed its files was removed by hand. `left-behind`: it is a checkpoint of a branch that was left: training went on from an
older one."""

_NO_COST = Cost()


class AttemptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. Sizes in bytes: `raw_bytes` and `stored_bytes` of the tensors, `object_bytes` of all its objects if it is
    undecided, else of the chunks objects that it wrote.
    """

    tag: str
    attempt: str
    order: tuple[int, int]
    """Of two checkpoints, that of the greater one is newer."""
    state: RowState
    latest: bool = False
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
    missing: Loss | None = None
    """If the state is `incomplete` or `removed`."""

    @property
    def prefix(self) -> str:
        return f"{self.tag}/{self.attempt}"

    @property
    def named(self) -> str:
        return f"{self.tag} ({self.attempt})"


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
    losses = await missing(store, (one for one in shown if one.prefix in current or one.left_behind))
    undecided = [one for one in shown if one.status == "undecided"]
    read = await each(lambda one: rank_words(store, one), undecided)
    words = {one.prefix: of_ranks for one, of_ranks in zip(undecided, read, strict=True)}
    named = await pointer(store, state, damage)
    rows = tuple(
        row_of(one, losses.get(one.prefix), words.get(one.prefix), is_current=one.prefix in current, named=named.tag)
        for one in shown
    )
    return Listing(root=store.url, latest=named, rows=rows, left_out=len(found) - len(shown), log_damage=damage)


def row_of(
    one: LoggedAttempt,
    lost: Loss | None = None,
    words: RankWords | None = None,
    *,
    is_current: bool = True,
    named: str | None = None,
) -> AttemptRow:
    """The row of an attempt of which `lost` is missing. `words`: of its ranks, if it is undecided. `is_current`: no newer
    commit has replaced it. `named`: the tag that `latest` names.
    """
    state = _state_of(one, lost, is_current)
    commit, decided = one.committed, one.decision
    cost = (commit and commit.cost) or _NO_COST
    step = one.step if words is None or words.step is None else words.step
    return AttemptRow(
        tag=one.tag,
        attempt=str(one.id),
        order=one.order,
        state=state,
        latest=one.tag == named and state in ("committed", "incomplete", "removed"),
        step=step if step >= 0 else None,
        world_size=commit.world_size if commit else words.world_size if words else None,
        raw_bytes=words.raw_bytes() if words else cost.raw_bytes or None,
        stored_bytes=words.stored_bytes() if words else cost.stored_bytes or None,
        object_bytes=words.object_bytes() if words else cost.written_bytes,
        time=decided.writer.time if decided else None,
        read_back=one.read_back,
        why=words.why() if words else "; ".join(_whys(one, lost, is_current)),
        brief=_brief(one),
        metrics=commit.metrics if commit else {},
        missing=lost,
    )


def _state_of(one: LoggedAttempt, lost: Loss | None, is_current: bool) -> RowState:
    if one.status != "checkpoint":
        return STATES[one.status]
    if lost is not None:
        return lost.state
    return "left-behind" if one.left_behind else "committed" if is_current else "replaced"


def _whys(one: LoggedAttempt, lost: Loss | None, is_current: bool) -> Iterable[str]:
    if one.abort is not None:
        yield one.abort.error.message
    elif one.removal is not None:
        yield one.removal.reason
    elif one.status == "checkpoint":
        if one.left_behind:
            yield "training went on from an older checkpoint, so no load takes it unless it is named"
        elif not is_current:
            yield "the tag was saved again since"
        if one.passed_over:
            yield f"load() took an older checkpoint, so retention keeps this one: {one.passed_over}"
        if one.damaged:
            yield f"it was read since, and is damaged: {one.damaged}"
        if lost is not None:
            yield lost.text


def _brief(one: LoggedAttempt) -> str:
    if one.abort is None:
        return ""
    code, ranks = one.abort.error.code, one.abort.ranks
    what = FENCED if code == FencedError.__name__ else code
    return f"{what}, {rank_runs(ranks)}" if ranks else what
