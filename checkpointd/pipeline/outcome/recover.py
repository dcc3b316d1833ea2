"""Recovery: decides older attempts in doubt, corrects `latest`, and removes leftovers, for a start that has taken the next
start.

Recovery keeps commits that a newer commit of their tag has replaced: they may go only after the job has loaded (RETENTION-6 in
`commit/retention.py`).

Invariants
  RECOVER-1  Recovery commits an attempt of an older start if every vote is there and valid, and if everything that the votes
      name is there. Otherwise it aborts the attempt. If the storage cannot tell, the next start decides.
  RECOVER-2  After recovery, every attempt of an older start that does not survive has a durable outcome, and `latest` names the
      newest commit that asked for it, or a later save of another program. Where the storage fails, the log says what is
      missing, and the next start goes on. If the checkpoint that `latest` names is lost, `latest` stays until the next commit,
      so that a load reports the loss. If the user accepts the loss, `latest` moves to the newest checkpoint, or goes if there
      is none.
  RECOVER-3  Recovery does not decide, change or wait for surviving attempts, since their writers are still at work. While there
      are any, it removes no temporary files either, since it cannot tell those of living writers on other machines from those
      of dead ones. The next start removes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from checkpointd.commands import at_tag, command
from checkpointd.commit import decide as decisions
from checkpointd.commit.decide import Decision
from checkpointd.config import ABSENCE_S
from checkpointd.errors import DamagedError, NotFoundError, StoreError
from checkpointd.layout.indexes import Index
from checkpointd.layout.keys import OUTCOME, AttemptId
from checkpointd.layout.manifest import Outcome, Vote
from checkpointd.layout.plan import NumberedPlan, TensorNumbers
from checkpointd.phrases import listed
from checkpointd.pipeline.gc.collect import collect
from checkpointd.pipeline.gc.uploads import abort_dead_uploads
from checkpointd.pipeline.outcome.branches import leave_behind, newest_of_trainings
from checkpointd.pipeline.outcome.publish import RECOVERY, Ballot, Draft, check_together, draft_of, put_outcome, unequal_boxes
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.candidates import lost_newest
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.catalog_log import CatalogLog, note_outcome, record_of
from checkpointd.pipeline.root.catalog_mending import mend as mend_catalog
from checkpointd.pipeline.root.latest import move_latest, move_latest_away
from checkpointd.pipeline.root.plans import remove_plans
from checkpointd.pipeline.root.tag_directories import mend
from checkpointd.pipeline.root.wholeness import Wholeness, lost_advice, lost_text
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.workers import aside
from checkpointd.store.base import Store, each
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")

COMPACT_EVERY = 64
"""A start puts a summary of the catalog after this many batches, since the processes of its job read the rest next."""


@dataclass(slots=True)
class Recovery:
    """The result of a recovery: the outcomes that it put, the change of `latest`, how many attempts it swept and stray pieces
    it removed, and how many checkpoints it found.
    """

    decided: list[Outcome] = field(default_factory=list)
    latest_moved_to: str | None = None
    latest_removed: bool = False
    swept: int = 0
    strays: int = 0
    checkpoints: int = 0
    unsettled: set[str] = field(default_factory=set)
    """The attempts (`<tag>/<attempt>`) whose outcomes could not be made durable."""


async def recover(
    store: Store,
    start: int,
    surviving: Collection[str] = (),
    *,
    accepts_loss: bool = False,
    known: CatalogLog | None = None,
) -> Recovery:
    """Recover the attempts of starts before `start`, which the caller has taken, except `surviving` (`<tag>/<attempt>`).

    `surviving` must be those of the start's record: an attempt in only one of the two would be fenced for nothing, or decided
    twice. `accepts_loss`: `latest` moves even if the newest checkpoint is gone, and goes if no other is left. `known`: the
    catalog's log as this process has read it already. Errors of the storage, and damaged records, are logged and left to the
    next start, so that the job can still load whole checkpoints.
    """
    done, surviving, known = Recovery(), frozenset(surviving), known or CatalogLog(store)
    settling = _Settling(store, start, surviving, done.unsettled)
    settled = await each(settling.settle, await catalog.scan(store, known))
    done.decided += [outcome for _, outcome in settled if outcome is not None]
    views = await catalog.with_newest_looked(store, [view for view, _ in settled])
    checkpoints = catalog.checkpoints_of(views)
    done.checkpoints = len(checkpoints)
    await _warn_of_losses(store, views, checkpoints)
    newest = next((c for c in checkpoints if c.may_be_latest), None)
    keeps: str | None = None
    """The tag whose records stay, since `latest` goes on naming it."""
    try:
        loss = await lost(store, checkpoints)
        if loss is not None:
            log.error("%s", loss)
        for head in newest_of_trainings(checkpoints):
            if head.outcome.left:
                await leave_behind(store, head.outcome, known=known)  # its writer may have died before it did so
        # Before `collect`, which may remove the mark that says that the newest checkpoint was removed on purpose.
        if newest is not None and newest.prefix in done.unsettled:
            log.error("latest stays where it is, since the newest commit, %s, may not be durable", newest.prefix)
            keeps = await catalog.readable_latest(store)
        elif newest is not None and (loss is None or accepts_loss):
            if newest.attempt.start >= start:  # there is a newer start, and its writer may have died before this was durable
                await store.settle(f"{newest.prefix}/{OUTCOME}")
            named = await catalog.readable_latest(store)
            moved = await move_latest(store, newest.tag, newest.outcome.order, is_start=True)
            done.latest_moved_to = newest.tag if moved else None
            if moved:
                _say_moved(store, named, newest, is_gone=loss is not None)
        elif loss is not None and accepts_loss:
            done.latest_removed = await _remove_latest(store, done)
        facts = [view.facts for view in views if view.prefix not in surviving and view.tag != keeps]
        await known.refresh()  # else what was announced just now would be announced again
        await mend_catalog(store, known, [view for view in views if view.attempt.start < start])
        failed: list[StoreError] = []
        done.swept = len(await collect(store, facts, known=known, failed=failed))
        if failed:
            words = "objects of attempts (%d) at %s could not be removed: %s; the next removal tries again"
            log.error(words, len(failed), store.url, failed[0])
        await remove_plans(store, start, surviving)
        await known.refresh()
        await known.compact(every=COMPACT_EVERY)
        if not surviving:
            done.strays = await store.sweep() + len(await abort_dead_uploads(store, known))
        await mend(store, 0 if surviving else start, known)
    except (StoreError, DamagedError, NotFoundError) as error:
        log.error("recovery at %s is not complete: %s; the next start goes on with it", store.url, error)
    for outcome in done.decided:
        say(outcome)
    return done


async def lost(store: Store, checkpoints: Collection[Checkpoint]) -> DamagedError | None:
    """The error that the checkpoint which `latest` names is gone; None if it is not."""
    named = await catalog.readable_latest(store)
    if named is None or named in {c.tag for c in checkpoints}:
        return None
    return await lost_newest(store, Patience(ABSENCE_S, ABSENCE_S))


def _say_moved(store: Store, named: str | None, newest: Checkpoint, *, is_gone: bool) -> None:
    if is_gone or named is None:
        log.warning("latest %s; it names %s now", "named what is gone" if is_gone else "was missing", newest.tag)
        return
    log.warning(
        "latest named %s, and names %s now, which was committed later. If the last job died before it moved latest, all is "
        "well. If somebody has edited latest to go back to %s: that alone changes no load. Stop this job first: %s",
        named,
        newest.tag,
        named,
        command("rollback", *at_tag(store.url, named)),
    )


async def _warn_of_losses(store: Store, views: Collection[AttemptView], checkpoints: Collection[Checkpoint]) -> None:
    """Log which of `checkpoints` are not whole any more, as far as listings show it."""
    wholeness, known = Wholeness(store, views), {view.prefix: view for view in views}
    found = [(checkpoint.tag, await wholeness.lost(known[checkpoint.prefix])) for checkpoint in checkpoints]
    broken = [(tag, lost) for tag, lost in found if lost]
    if broken:
        tag, lost = broken[0]
        log.warning(
            "these checkpoints at %s cannot be loaded: %s. Of %s: %s; %s. To remove checkpoints, use the command delete",
            store.url,
            listed([tag for tag, _ in broken]),
            tag,
            lost_text(lost),
            lost_advice(store.url, tag, lost),
        )


async def _remove_latest(store: Store, done: Recovery) -> bool:
    """Remove `latest` if there is no checkpoint that it could name. Returns whether it was removed."""
    named = await catalog.latest(store)
    if named is not None:
        done.latest_moved_to = await move_latest_away(store, named)  # a surviving attempt may have been committed meanwhile
    if named is None or done.latest_moved_to is not None or await catalog.latest(store) is not None:
        return False
    log.warning("latest named %s, which is gone, and no checkpoint is left: it is removed", named)
    return True


@dataclass(slots=True)
class _Settling:
    """Gives the attempts of starts before `start`, except the `surviving` ones, durable outcomes. A job that died behind slow
    storage may leave hundreds in doubt, so several are settled at once, and all their closes are put later, by `mend_catalog`.
    """

    store: Store
    start: int
    surviving: frozenset[str]
    unsettled: set[str]
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def settle(self, attempt: AttemptView) -> tuple[AttemptView, Outcome | None]:
        """The attempt as it is then, and its outcome if this put it."""
        if attempt.attempt.start >= self.start:
            return attempt, None
        try:
            if attempt.state == "in-doubt":
                if attempt.prefix in self.surviving:
                    return attempt, None
                outcome = await _announced_and_put(self.store, await judge(self.store, attempt, self._checking))
                return await catalog.view(self.store, attempt.tag, attempt.attempt), outcome
            if OUTCOME in attempt.sizes:  # of others, a record tells the outcome, and came later (CATALOG-2)
                # The writer may have died before the outcome was durable, and `latest` depends on it from now on.
                self.unsettled.add(attempt.prefix)
                await self.store.settle(f"{attempt.prefix}/{OUTCOME}")
                self.unsettled.discard(attempt.prefix)
        except (StoreError, NotFoundError, DamagedError) as error:
            is_decided = attempt.prefix in self.unsettled
            what = "the outcome of %s cannot be made durable" if is_decided else "%s cannot be decided now"
            log.error(f"{what}: %s; the next start tries again", attempt.prefix, error)
        return attempt, None


async def announced_and_put(store: Store, draft: Draft) -> Outcome:
    """Put the outcome of `draft` for an attempt that was left in doubt, unless there is one, and then its close. Returns the
    outcome that counts.
    """
    outcome = await _announced_and_put(store, draft)
    await note_outcome(store, outcome)
    return outcome


async def _announced_and_put(store: Store, draft: Draft) -> Outcome:
    """The same without the close.

    The attempt is announced first: its lease may have come before its announcement, and one that was seen may not be durable
    (CATALOG-1).
    """
    decided = draft.outcome
    await CatalogLog(store).append(record_of("intent", decided.tag, decided.attempt, n=decided.order[1], step=decided.step))
    return await put_outcome(store, draft)


async def judge(store: Store, attempt: AttemptView, checking: asyncio.Lock | None = None) -> Draft:
    """The outcome of an attempt that gets no more votes. Writes nothing. Raises UnreadableError if votes or indexes cannot be
    read now.

    `checking` is held while the plans of all ranks are in memory, so of many attempts the plans of one are there at a time.
    """
    # An abort cannot be taken back, so several looks must agree that an object is missing.
    store = PatientStore(store, Patience(ABSENCE_S, ABSENCE_S))
    ballot = Ballot(store, attempt.tag, attempt.attempt)
    await ballot.gather(await catalog.objects_of(store, attempt.prefix))
    decision = decisions.recover(ballot.votes, tag=attempt.tag, attempt=str(attempt.attempt))
    joint = b""
    if decision.commit:
        async with checking or asyncio.Lock():
            found = await _checked_storage(store, attempt, ballot)
        decision, joint = (found, b"") if isinstance(found, Decision) else (decision, found)
    info = _info(attempt.tag, attempt.attempt, ballot)
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


async def _checked_storage(store: Store, attempt: AttemptView, ballot: Ballot) -> Decision | bytes:
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
            index = await _checked_index(store, attempt.prefix, vote)
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
    index = await catalog.index_named_by(store, prefix, vote)
    for named in index.objects:
        key = named.key(prefix)
        size = await store.stat(key)
        if size != named.size:
            raise DamagedError(f"{key} has {size} bytes, not {named.size}", key=key)
    return index


def say(outcome: Outcome) -> None:
    """Log how an attempt that was left in doubt ended."""
    what = "rolled forward" if outcome.outcome == "commit" else f"aborted: {outcome.error.message if outcome.error else ''}"
    log.warning("%s/%s was left in doubt; %s", outcome.tag, outcome.attempt, what)
