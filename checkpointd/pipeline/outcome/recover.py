"""Recovery: what a start does with what earlier jobs have left. Before it begins, it finds the attempts that are whole; then it
corrects `latest`, and removes leftovers.

Recovery keeps commits that a newer commit of their tag has replaced: they may go only after the job has loaded (RETENTION-6 in
`commit/retention.py`).

Invariants
  RECOVER-1  A start commits an undecided attempt if every vote is there and valid, and if everything that the votes name is
      there. It aborts all others that it does not spare, by its `begin` (LOG-7).
  RECOVER-2  Recovery does not decide, change or wait for spared attempts, since their writers are still at work. While there
      are any, it removes no temporary files either, since it cannot tell those of living writers on other machines from those
      of dead ones. The next start removes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from checkpointd.commit import decide as decisions
from checkpointd.commit.decide import Decision
from checkpointd.config import ABSENCE_S
from checkpointd.errors import DamagedError, NotFoundError, StoreError
from checkpointd.layout.indexes import Index
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import AbortRecord, BeginRecord, CommitRecord, LogState, Record
from checkpointd.layout.manifest import Vote
from checkpointd.layout.plan import NumberedPlan, TensorNumbers
from checkpointd.pipeline.gc.collect import sweep, sweep_late
from checkpointd.pipeline.gc.uploads import abort_dead_uploads
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.outcome.publish import (
    RECOVERY,
    Ballot,
    Draft,
    check_together,
    draft_of,
    put_named_by,
    unequal_boxes,
)
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.latest import going_back, move_latest, newest_of
from checkpointd.pipeline.root.log import RootLog, new_nonce
from checkpointd.pipeline.root.plans import remove_plans
from checkpointd.pipeline.root.tag_directories import mend
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.workers import aside
from checkpointd.store.base import Store, each
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")


@dataclass(slots=True)
class Recovery:
    """The result of a recovery: the records by which the start decided attempts, the change of `latest`, how many attempts it
    swept and stray pieces it removed, and how many checkpoints it found.
    """

    decided: Sequence[CommitRecord | AbortRecord] = field(default_factory=list)
    latest_moved_to: str | None = None
    latest_removed: bool = False
    swept: int = 0
    strays: int = 0
    checkpoints: int = 0


async def whole_ones(store: Store, state: LogState, spared: Collection[str]) -> list[CommitRecord]:
    """The commits of the undecided attempts in `state` that are whole, but for those `spared` (`<tag>/<attempt>`). What they
    name is durable. An attempt that cannot be read now is not among them; the error is logged.
    """
    undecided = [a for a in state.attempts.values() if a.status == "undecided" and a.attempt not in spared]
    checking = asyncio.Lock()

    async def found(tag: str, attempt: AttemptId) -> CommitRecord | None:
        try:
            draft = await judge(store, tag, attempt, checking)
            if isinstance(draft.record, CommitRecord):
                await put_named_by(store, draft.record, draft)
                return draft.record
        except (StoreError, NotFoundError, DamagedError) as error:
            log.error("%s/%s cannot be read now, so it is not committed: %s", tag, attempt, error)
        return None

    commits = await each(lambda one: found(one.tag, one.id), undecided)
    return [one for one in commits if one is not None]


async def what_objects_show(store: Store, state: LogState) -> list[Record]:
    """For a log that is made again: the commits of attempts whose end `state` does not tell and that are whole, the aborts of
    the others that it knows, and a start without a job that fences all others (LOG-11).
    """
    known = {(one.tag, one.id): one for one in state.attempts.values()}
    unsure = [at for at in await root_view.directories(store) if at not in known or known[at].status == "undecided"]
    checking, found = asyncio.Lock(), list[Record]()
    for tag, attempt in sorted(unsure, key=lambda at: at[1]):
        draft = await judge(store, tag, attempt, checking)
        if isinstance(draft.record, CommitRecord):
            await put_named_by(store, draft.record, draft)
            found.append(msgspec.structs.replace(draft.record, rebuilt=True))
        elif (tag, attempt) in known:
            found.append(draft.record)
    newest = max([state.start, *(attempt.start for _, attempt in unsure)])
    found.append(BeginRecord(start=newest + 1, nonce=new_nonce(), world_size=0, writer=writer()))
    return found


async def make_again(store: Store) -> LogState:
    """Make the log again, which cannot be read to its end (LOG-11)."""
    root_log = RootLog.of(store)
    log.error("%s; it is made again now, from what can be read and from the objects", root_log.unreadable)
    return await root_log.rebuild(partial(what_objects_show, store))


async def recover(store: Store, before: LogState) -> Recovery:
    """Clear up after the starts before the newest one, which the caller has taken. `before`: the state before that.

    Errors of the storage are logged and left to the next start, so that the job can still load whole checkpoints.
    """
    root_log = RootLog.of(store)
    state = root_log.state
    done = Recovery(decided=decided_since(before, state), checkpoints=len(await root_view.checkpoints(store)))
    for record in done.decided:
        say(record)
    spared = () if state.begin is None else state.begin.spared
    try:
        named = await root_view.readable_latest(store)
        moved = await move_latest(root_log, is_start=True)
        done.latest_moved_to = moved if moved != named else None
        done.latest_removed = moved is None and named is not None
        if done.latest_moved_to is not None:
            due = newest_of(before)
            edited = "" if named is None or (due is not None and due.tag == named) else f". {going_back(store.url, named)}"
            log.warning("latest named %s; it names %s now%s", named or "nothing", moved, edited)
        await sweep_late(store)
        done.swept = len(await sweep(store))
        await remove_plans(store, state.start, spared)
        await root_log.compact()
        if not spared:
            done.strays = await store.sweep() + len(await abort_dead_uploads(store))
        await mend(store, 0 if spared else state.start)
    except (StoreError, DamagedError, NotFoundError) as error:
        log.error("recovery at %s is not complete: %s; the next start goes on with it", store.url, error)
    return done


def decided_since(before: LogState, state: LogState) -> list[CommitRecord | AbortRecord]:
    """What became of the attempts that were undecided in `before`."""
    undecided = [one.attempt for one in before.attempts.values() if one.status == "undecided"]
    now = [state.attempts[one] for one in undecided if one in state.attempts]
    return [record for one in now if (record := one.commit or one.abort) is not None]


async def judge(store: Store, tag: str, attempt: AttemptId, checking: asyncio.Lock | None = None) -> Draft:
    """The decision on an attempt that gets no more votes. Writes nothing. Raises UnreadableError if votes or indexes cannot be
    read now.

    `checking` is held while the plans of all ranks are in memory, so of many attempts the plans of one are there at a time.
    """
    # An abort cannot be taken back, so several looks must agree that an object is missing.
    store = PatientStore(store, Patience(ABSENCE_S, ABSENCE_S))
    ballot = Ballot(store, tag, attempt)
    await ballot.gather(await root_view.objects_of(store, ballot.prefix))
    decision = decisions.recover(ballot.votes, tag=tag, attempt=str(attempt))
    joint = b""
    if decision.commit:
        async with checking or asyncio.Lock():
            found = await _checked_storage(store, ballot)
        decision, joint = (found, b"") if isinstance(found, Decision) else (decision, found)
    info = _info(tag, attempt, ballot)
    return draft_of(info, decision, ballot, decided_by=RECOVERY, plan=joint)


def _info(tag: str, attempt: AttemptId, ballot: Ballot) -> AttemptInfo:
    """The attempt as the votes describe it. Rank 0's vote counts for the order, since rank 0 is the coordinator."""
    votes = [vote for _, vote in sorted(ballot.votes.items()) if vote is not None]
    first = votes[0] if votes else None
    return AttemptInfo(
        tag=tag,
        attempt=attempt,
        rank=RECOVERY,
        world_size=first.world_size if first else 0,
        step=first.step if first else -1,
        n=first.n if first else 0,
        save_latest=first.save_latest if first else True,
    )


async def _checked_storage(store: Store, ballot: Ballot) -> Decision | bytes:
    """The joint plan; the abort if an object that a yes vote names is missing or has another size, or if the ranks' indexes
    together are not a whole state. The indexes say their boxes themselves, so no plan is needed.
    """
    votes = {rank: vote for rank, vote in sorted(ballot.votes.items()) if vote is not None}
    names, numbering = TensorNumbers(), asyncio.Lock()
    stored, faults = dict[int, NumberedPlan](), dict[int, Decision]()

    async def check(vote: Vote) -> None:
        if faults:
            return  # one is enough, and others may take as long to find
        try:
            index = await _checked_index(store, ballot.prefix, vote)
        except (NotFoundError, DamagedError) as error:
            faults[vote.rank] = decisions.unshared(f"rank {vote.rank} voted yes, but {error}")
            return
        async with numbering:  # `names` is not made for several threads
            stored[vote.rank] = await aside(len(index.tensors), NumberedPlan.of, index, names)

    await each(check, [*votes.values()])
    if faults:
        return faults[min(faults)]
    stored = dict(sorted(stored.items()))
    checked = await check_together(stored, names, sum(vote.tensors for vote in votes.values()))
    if isinstance(checked, Decision):
        return checked
    return await unequal_boxes(store, votes, checked.doubled) or checked.joint_plan(ballot.votes)


async def _checked_index(store: Store, prefix: str, vote: Vote) -> Index:
    """The index that `vote` names, after the checks of a load. Of chunks objects only the sizes are compared."""
    index = await root_view.index_named_by(store, prefix, vote)
    for named in index.objects:
        key = named.key(prefix)
        size = await store.stat(key)
        if size != named.size:
            raise DamagedError(f"{key} has {size} bytes, not {named.size}", key=key)
    return index


def say(decided: CommitRecord | AbortRecord) -> None:
    """Log how an attempt that was left in doubt ended."""
    what = "rolled forward" if isinstance(decided, CommitRecord) else f"aborted: {decided.error.message}"
    log.warning("%s was left in doubt; %s", decided.attempt, what)
