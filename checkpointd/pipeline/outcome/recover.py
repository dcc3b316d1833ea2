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
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from checkpointd.commit import decide as decisions
from checkpointd.commit.branches import newest_of
from checkpointd.commit.decide import Decision
from checkpointd.commit.log import was_used
from checkpointd.config import ABSENCE_S
from checkpointd.errors import DamagedError, NotFoundError, StoreError
from checkpointd.layout.indexes import Index
from checkpointd.layout.keys import COORDINATOR, AttemptId, attempt_prefix, is_tag, vote_name
from checkpointd.layout.log_records import AbortRecord, CommitRecord, LogState, Record
from checkpointd.layout.manifest import Vote
from checkpointd.layout.plan import NumberedPlan, TensorNumbers
from checkpointd.phrases import listed
from checkpointd.pipeline.gc.collect import sweep, sweep_late
from checkpointd.pipeline.gc.uploads import abort_dead_uploads
from checkpointd.pipeline.outcome.publish import (
    RECOVERY,
    Ballot,
    Draft,
    check_together,
    draft_of,
    put_named_by,
    unequal_boxes,
)
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.indexes import index_named_by
from checkpointd.pipeline.root.latest import going_back, move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.tag_directories import settle
from checkpointd.pipeline.root.wholeness import in_words, missing
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.workers import aside
from checkpointd.store.base import Entry, Store, each
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


async def decided_now(store: Store, state: LogState, spared: Collection[str]) -> list[CommitRecord | AbortRecord]:
    """The decisions on the undecided attempts in `state`, but for those `spared` (`<tag>/<attempt>`). What a commit names is
    durable. An attempt that cannot be read now is not among them; the error is logged.
    """
    undecided = [a for a in state.attempts.values() if a.status == "undecided" and a.prefix not in spared]
    checking = asyncio.Lock()

    async def found(tag: str, attempt: AttemptId) -> CommitRecord | AbortRecord | None:
        try:
            draft = await judge(store, tag, attempt, checking)
            if isinstance(draft.record, CommitRecord):
                await put_named_by(store, draft.record, draft)
            return draft.record
        except (StoreError, NotFoundError, DamagedError) as error:
            log.error("%s/%s cannot be read now, so it is not committed: %s", tag, attempt, error)
        return None

    decided = await each(lambda one: found(one.tag, one.id), undecided)
    return [one for one in decided if one is not None]


async def what_objects_show(store: Store, state: LogState) -> list[Record]:
    """For a log that is made again: the commits of attempts whose end `state` does not tell and that are whole, the aborts of
    the others that it knows, and a start without a job that fences all others (LOG-11).
    """
    known = {(one.tag, one.id): one for one in state.attempts.values()}
    unsure = [at for at in await root_view.directories(store) if at not in known or known[at].status == "undecided"]
    checking, found = asyncio.Lock(), list[Record]()
    for tag, attempt in sorted(unsure, key=lambda at: at[1]):
        first = None if (tag, attempt) in known else await _first_vote(store, attempt_prefix(tag, attempt))
        if _is_of_another_root(store, state, first):
            continue
        draft = await judge(store, tag, attempt, checking)
        if isinstance(draft.record, CommitRecord):
            await put_named_by(store, draft.record, draft)
            found.append(msgspec.structs.replace(draft.record, rebuilt=True))
        elif (tag, attempt) in known:
            found.append(draft.record)
    return [*found, starts.new(store, max([state.start, *(attempt.start for _, attempt in unsure)]) + 1)]


@dataclass(frozen=True, slots=True)
class Beyond:
    """Directories of attempts (`<tag>/<attempt>`) beyond the end of the log. `later`: those that were saved at this root since
    then, so somebody has removed the log, or put an older one in its place. `others`: those of a root with another id.
    """

    later: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def start(self) -> int:
        """The greatest start of the others."""
        return max([0, *(AttemptId.of(one).start for one in self.others)])


async def beyond(store: Store, at_root: Collection[Entry], state: LogState) -> Beyond:
    """The attempts whose start has not begun in `state`, where the log ends, or whose vote tells a number of a save that was
    not announced there. `at_root` was listed before the log was read.

    Of the tags that the log knows, only the newest and those that were saved several times are looked at, unless `latest` does
    not name the newest: then others may have been saved again since.
    """
    saved, newest = Counter(one.tag for one in state.attempts.values()), newest_of(state)
    is_followed = await _named(store) == (newest and newest.tag)
    known = {tag for tag, count in saved.items() if is_followed and count == 1 and (newest is None or tag != newest.tag)}
    tags = [one.name for one in at_root if one.is_prefix and one.name not in known and is_tag(one.name)]
    found = [
        f"{tag}/{one.name}"
        for tag, entries in zip(tags, await each(store.list, tags), strict=True)
        for one in entries
        if one.is_prefix and AttemptId.parse(one.name) is not None
    ]
    strange = [one for one in found if one not in state.attempts and AttemptId.of(one).start >= state.start]
    votes = dict(zip(strange, await each(partial(_first_vote, store), strange), strict=True))
    others = [one for one in strange if _is_of_another_root(store, state, votes[one])]
    later = [one for one in strange if one not in others and _is_later(state, one, votes[one])]
    if others:
        words = "these attempts at %s were saved at another root, or before log/root was made anew, and no load takes them: %s"
        log.error(words, store.url, listed(sorted(others), 4))
    return Beyond(tuple(sorted(later)), tuple(sorted(others)))


async def _named(store: Store) -> str | None:
    """The tag that `latest` names, as far as it can be read."""
    try:
        return await root_view.readable_latest(store)
    except StoreError:
        return None


async def _first_vote(store: Store, attempt: str) -> Vote | None:
    """The coordinator's vote; None if there is none that can be read."""
    vote: Vote | None
    try:
        vote = await root_view.read_vote(store, f"{attempt}/{vote_name(COORDINATOR)}")
    except (NotFoundError, DamagedError):
        ballot = Ballot(store, attempt.rpartition("/")[0], AttemptId.of(attempt))
        await ballot.gather_all(await root_view.objects_of(store, attempt))
        vote = ballot.votes.get(COORDINATOR)
    return vote if vote is not None and vote.prefix == attempt else None


def _is_of_another_root(store: Store, state: LogState, vote: Vote | None) -> bool:
    """Whether the attempt was saved at another root, by its `vote`. The checkpoints of a mirror always were, and if nothing of
    the log is left, its id may be a new one.
    """
    is_mirror = any(one.origin for one in state.begins)
    own = RootLog.of(store).root_id
    return vote is not None and bool(state.number and vote.root and own) and not is_mirror and vote.root != own


def _is_later(state: LogState, attempt: str, vote: Vote | None) -> bool:
    if AttemptId.of(attempt).start > state.start:
        return True
    return vote is not None and not was_used(state, attempt, vote.n)


async def make_again(store: Store, state: LogState, later: Sequence[str]) -> LogState:
    """Make the log again (LOG-11), which cannot be read to its end, or ends with `state` and is older than the attempts
    `later`.
    """
    root_log = RootLog.of(store)
    why = root_log.ends_early
    if not root_log.fault:
        why = f"the log of {store.url} is gone, or an older copy is in its place: {listed(later, 4)} came after its last entry"
    log.error("%s; it is made again now, from what can be read and from the objects", why)
    return await root_log.rebuild(partial(what_objects_show, store), None if root_log.fault else state)


async def recover(store: Store, before: LogState) -> Recovery:
    """Clear up after the starts before the newest one, which the caller has taken. `before`: the state before that.

    Errors of the storage are logged and left to the next start, so that the job can still load whole checkpoints.
    """
    root_log = RootLog.of(store)
    state = root_log.state
    done = Recovery(decided=decided_since(before, state), checkpoints=len(root_view.checkpoints_of(state.attempts.values())))
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
        await root_log.compact()
        if not spared:
            done.strays = await store.sweep() + len(await abort_dead_uploads(store))
        await settle(store, 0 if spared else state.start)
        await _warn_of_losses(store, root_log.state)
    except (StoreError, DamagedError, NotFoundError) as error:
        log.error("recovery at %s is not complete: %s; the next start goes on with it", store.url, error)
    return done


async def _warn_of_losses(store: Store, state: LogState) -> None:
    """Log which checkpoints somebody has removed by hand, or removed what they need."""
    for line in in_words(store.url, await missing(store, root_view.checkpoints_of(state.attempts.values()))):
        log.warning("%s", line)


def decided_since(before: LogState, state: LogState) -> list[CommitRecord | AbortRecord]:
    """What became of the attempts that were undecided in `before`."""
    undecided = [one.prefix for one in before.attempts.values() if one.status == "undecided"]
    now = [state.attempts[one] for one in undecided if one in state.attempts]
    return [record for one in now if (record := one.decision) is not None]


async def judge(store: Store, tag: str, attempt: AttemptId, checking: asyncio.Lock | None = None) -> Draft:
    """The decision on an attempt that gets no more votes. Writes nothing. Raises UnreadableError if votes or indexes cannot be
    read now.

    `checking` is held while the plans of all ranks are in memory, so of many attempts the plans of one are there at a time.
    """
    # An abort cannot be taken back, so several looks must agree that an object is missing.
    store = PatientStore(store, Patience(ABSENCE_S, ABSENCE_S))
    ballot = Ballot(store, tag, attempt)
    await ballot.gather_all(await root_view.objects_of(store, ballot.prefix))
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
    together are not a whole state. The indexes have their plans in them.
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
    index = await index_named_by(store, prefix, vote)
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
