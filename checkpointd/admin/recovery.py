"""Recovery from the command line: a preview of its decisions, or the recovery itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from checkpointd.commands import command
from checkpointd.commit.branches import commits_of, newest_of
from checkpointd.commit.log import apply
from checkpointd.config import ABSENCE_S
from checkpointd.errors import DamagedError
from checkpointd.layout.log_records import AbortRecord, CommitRecord, DamageRecord, LoggedAttempt, LogState
from checkpointd.pipeline.gc.collect import survey
from checkpointd.pipeline.outcome import starting
from checkpointd.pipeline.outcome.recover import judge, recover
from checkpointd.pipeline.root import leases, reserve, root_view, starts
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.wholeness import check_whole
from checkpointd.report.holder import Holder, newest_holder
from checkpointd.report.listing import AttemptRow, row_of
from checkpointd.report.log import look
from checkpointd.store.base import Store
from checkpointd.store.conditions import check_conditions_of
from checkpointd.store.patient import Patience

NO_RANKS = 0
"""The world size of a start without a job. It fences older starts, and the next one takes the number after it."""


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The actions of a recovery, real or with `dry_run` planned. It took `start`; `holder` held the start before."""

    root: str
    dry_run: bool
    start: int | None
    holder: Holder | None
    refused: str = ""
    """Only in a dry run: why the recovery itself would be refused."""
    log_damage: str = ""
    """What was wrong with the log, which was made again; empty if nothing was."""
    decided: tuple[AttemptRow, ...]
    surviving: tuple[str, ...] = ()
    """Undecided attempts (`<tag>/<attempt>`) that stay undecided because daemons still work at them."""
    damaged: tuple[str, ...] = ()
    """The newest checkpoints (`<tag>/<attempt>`), of which objects are gone: they are recorded as damaged."""
    latest_moved_to: str | None
    latest_removed: bool = False
    """`latest` named a tag that is gone, and no checkpoint is left for it to name."""
    swept: int
    """The number of attempts of which objects were removed."""
    strays: int | None
    """The number of removed files of interrupted writes; None in a dry run."""


async def recovery(store: Store, *, take_over: bool = False) -> RecoveryReport:
    """Take the next start and decide every attempt of older starts, except those that a daemon still works at. Makes a damaged
    log again.

    RootInUseError if a job is alive at the root, unless `take_over`.
    """
    return await reserve.on_full_disk(store, lambda: _recovered(store, take_over=take_over))


async def _recovered(store: Store, *, take_over: bool) -> RecoveryReport:
    state, damage = await look(store)
    damage = RootLog.of(store).ends_early or damage
    holder = await newest_holder(store, state)
    if state.number == 0 and not damage:
        # No job ever ran here. This may be any directory, and must not become a root by mistake.
        return RecoveryReport(
            root=store.url, dry_run=False, start=None, holder=None, decided=(), latest_moved_to=None, swept=0, strays=0
        )
    await check_conditions_of(store, new=False)
    taken = await starting.begin(store, beginner_of(store, take_over=take_over))
    try:
        done = await recover(store, taken.before)
        losses = await _losses(store, await root_view.state_of(store))
        for checkpoint, why in losses:
            await RootLog.of(store).add(DamageRecord(attempt=checkpoint.prefix, why=why))
    finally:
        await taken.lease.release()
    return RecoveryReport(
        root=store.url,
        dry_run=False,
        start=taken.start.start,
        holder=holder,
        log_damage=damage,
        decided=_rows(RootLog.of(store).state, done.decided),
        surviving=taken.start.spared,
        damaged=tuple(one.prefix for one, _ in losses),
        latest_moved_to=done.latest_moved_to,
        latest_removed=done.latest_removed,
        swept=done.swept,
        strays=done.strays,
    )


async def _losses(store: Store, state: LogState) -> list[tuple[LoggedAttempt, str]]:
    """The newest checkpoints, down to the first of which no object is gone, and what is missing of each."""
    found: list[tuple[LoggedAttempt, str]] = []
    for checkpoint in commits_of(state.attempts.values()):
        if not checkpoint.may_be_latest or checkpoint.read_back == "damaged":
            continue
        try:
            await check_whole(store, checkpoint, Patience(ABSENCE_S, ABSENCE_S))
            break
        except DamagedError as error:
            found.append((checkpoint, str(error)))
    return found


def beginner_of(store: Store, *, take_over: bool, name: str = "recover", at: Sequence[str] = ()) -> Beginner:
    """A start without a job, for the command `name`. `at`: its arguments after the root."""
    return Beginner(
        world_size=NO_RANKS,
        take_over=take_over,
        instead=(
            "That job decides its saves itself. To do this nevertheless, end the job first, or take the root over, so that all "
            f"its later saves fail: {command(name, store.url, *at, '--take-over')}"
        ),
    )


async def preview(store: Store, *, take_over: bool = False) -> RecoveryReport:
    """The report that `recovery` would give now; nothing is written. Of a damaged log, only what can be proved is known."""
    beginner = beginner_of(store, take_over=take_over)
    state, damage = await look(store)
    surviving = await starts.unfenced(store, await leases.attempts_at_work(store, beginner.sight))
    living = None if damage else await leases.refusing(store, beginner)
    left = [a for a in state.attempts.values() if a.status == "undecided" and a.prefix not in surviving]
    records = [(await judge(store, one.tag, one.id)).record for one in left]
    after = state
    for record in records:
        after = apply(after, record)
    named, due = await root_view.readable_latest(store), newest_of(after)
    return RecoveryReport(
        root=store.url,
        dry_run=True,
        start=None,
        holder=await newest_holder(store, state),
        refused=leases.refusal(store, living, beginner.instead) if living is not None else "",
        log_damage=damage,
        decided=_rows(after, records),
        surviving=surviving,
        damaged=tuple([one.prefix for one, _ in await _losses(store, after)]),
        latest_moved_to=due.tag if due is not None and due.tag != named else None,
        latest_removed=due is None and named is not None,
        swept=len(await survey(store, after)),
        strays=None,
    )


def _rows(state: LogState, decided: Iterable[CommitRecord | AbortRecord]) -> tuple[AttemptRow, ...]:
    return tuple(row_of(state.attempts[record.attempt]) for record in decided)
