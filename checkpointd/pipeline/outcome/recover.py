"""Recovery: take the next epoch, decide older attempts in doubt, correct `latest`, remove leftovers.

Commits that a newer one has replaced stay: whether they may go is not known before the job has loaded (RETENTION-6 in
`commit/retention.py`).

Invariants
  RECOVER-1  An attempt of an older epoch is rolled forward exactly when every vote is there, valid, and what it names is there
      too.
  RECOVER-2  After recovery every attempt of an older epoch that does not survive has an outcome, durable, and `latest` names
      the newest commit that asked for it, or what another program has saved since. Where what it names is lost, it stays for a
      load to say so, until the next commit, unless the user accepts the loss; then it goes where no checkpoint is left to name.
  RECOVER-3  Of a surviving attempt nothing is decided, removed or waited for: its writers still work at it. Nor is any
      temporary file removed then, since those of writers on other machines cannot be told from dead ones'; the next start does
      it.
  RECOVER-4  A surviving attempt that nobody works at any more is decided by whoever waits for it (`outlived`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from checkpointd.commit import decide as decisions
from checkpointd.commit.decide import Decision
from checkpointd.config import ABSENCE_S
from checkpointd.errors import DamagedError, NotFoundError, StoreError
from checkpointd.layout.keys import OUTCOME, AttemptId, attempt_lease_key, vote_name
from checkpointd.layout.manifest import Outcome, Vote
from checkpointd.layout.plan import cover_fault
from checkpointd.pipeline.gc.collect import collect
from checkpointd.pipeline.outcome.publish import RECOVERY, Ballot, PlanCheck, outcome_of, put_outcome
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.candidates import lost_newest
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.latest import move_latest, move_latest_away
from checkpointd.pipeline.root.leases import Sight, Watch
from checkpointd.pipeline.root.tag_directories import mend
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")


@dataclass(slots=True)
class Recovery:
    """What a recovery did: the attempts it decided, whether `latest` moved or went, attempts swept, stray pieces removed; and
    how many checkpoints it found.
    """

    decided: list[Outcome] = field(default_factory=list)
    latest_moved_to: str | None = None
    latest_removed: bool = False
    swept: int = 0
    strays: int = 0
    checkpoints: int = 0


async def recover(store: Store, epoch: int, surviving: Collection[str] = (), *, accepts_loss: bool = False) -> Recovery:
    """Do all of it for attempts of epochs before `epoch`, which the caller has taken, but for `surviving` (`<tag>/<attempt>`).

    `accepts_loss`: `latest` moves also where the newest checkpoint is gone, and goes where no other one is left.
    `surviving` are those of the epoch's record. An attempt in only one of the two would be fenced for nothing or decided twice.
    What the storage refuses is logged and left for the next start: it must not keep the job from loading what is whole.
    """
    done, surviving = Recovery(), frozenset(surviving)
    seen = await catalog.scan(store)
    views = [await _settled(store, view, epoch, done, survives=view.prefix in surviving) for view in seen]
    checkpoints = catalog.checkpoints_of(views)
    done.checkpoints = len(checkpoints)
    newest = next((c for c in checkpoints if c.outcome.save_latest), None)
    try:
        loss = await lost(store, checkpoints)
        if loss is not None:
            log.error("%s", loss)
        # First: a mark which says that the newest was removed on purpose may go below.
        if newest is not None and (loss is None or accepts_loss):
            moved = await move_latest(store, newest.tag, newest.outcome.order, is_start=True)
            done.latest_moved_to = newest.tag if moved else None
            if moved:
                was = "was behind the newest commit" if loss is None else "named what is gone"
                log.warning("latest %s; it names %s now", was, newest.tag)
        elif loss is not None and accepts_loss:
            done.latest_removed = await _remove_latest(store, done)
        facts = [view.facts for view in views if view.prefix not in surviving]
        done.swept = len(await collect(store, facts))
        if not surviving:
            done.strays = await store.sweep()
        await mend(store, 0 if surviving else epoch)
    except StoreError as error:
        log.error("recovery at %s is not complete: %s; the next start goes on with it", store.url, error)
    _report(done)
    return done


async def lost(store: Store, checkpoints: Collection[Checkpoint]) -> DamagedError | None:
    """What says that the checkpoint which `latest` names is gone."""
    try:
        named = await catalog.latest(store)
    except DamagedError:
        return None  # it is set right
    if named is None or named in {c.tag for c in checkpoints}:
        return None
    return await lost_newest(store, Patience(ABSENCE_S, ABSENCE_S))


async def _remove_latest(store: Store, done: Recovery) -> bool:
    """Remove `latest`, as no checkpoint is left that it could name; whether it went."""
    named = await catalog.latest(store)
    if named is not None:
        done.latest_moved_to = await move_latest_away(store, named)  # a surviving attempt may have been committed meanwhile
    if named is None or done.latest_moved_to is not None:
        return False
    log.warning("latest named %s, which is gone, and no checkpoint is left: it is removed", named)
    return True


async def _settled(store: Store, attempt: AttemptView, epoch: int, done: Recovery, *, survives: bool) -> AttemptView:
    if attempt.attempt.epoch >= epoch:
        return attempt
    try:
        if attempt.state == "in-doubt":
            if survives:
                return attempt
            done.decided.append(await resolve(store, attempt))
            return await catalog.view(store, attempt.tag, attempt.attempt)
        if OUTCOME in attempt.sizes:
            # Its writer may have died between making it visible and making it durable; `latest` rests on it from here on.
            await store.settle(f"{attempt.prefix}/{OUTCOME}")
    except (StoreError, NotFoundError, DamagedError) as error:
        log.error("%s cannot be decided now: %s; the next start tries again", attempt.prefix, error)
    return attempt


async def resolve(store: Store, attempt: AttemptView) -> Outcome:
    """Decide one attempt that nobody will vote on any more."""
    return await put_outcome(store, await judge(store, attempt))


async def judge(store: Store, attempt: AttemptView) -> Outcome:
    """The outcome that `resolve` would put; nothing is written. UnreadableError where what it rests on cannot be read now."""
    # An abort cannot be taken back: what is missing must really be, and not only be out of this client's sight.
    store = PatientStore(store, Patience(ABSENCE_S, ABSENCE_S))
    ballot = Ballot(store, attempt.tag, attempt.attempt)
    await ballot.gather(await store.list(attempt.prefix))
    decision = decisions.recover(ballot.votes, tag=attempt.tag, attempt=str(attempt.attempt))
    if decision.commit:
        decision = await PlanCheck(store).fault(ballot.votes) or await _storage_fault(store, attempt, ballot) or decision
    info = _info(attempt.tag, attempt.attempt, ballot)
    return outcome_of(info, decision, ballot.refs, decided_by=RECOVERY, votes=ballot.votes)


def _info(tag: str, attempt: AttemptId, ballot: Ballot) -> AttemptInfo:
    """What the votes say of the attempt; rank 0's word on the order counts, since it is the coordinator."""
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


async def _storage_fault(store: Store, attempt: AttemptView, ballot: Ballot) -> Decision | None:
    """The abort where something that a yes vote names is missing or of another size."""
    for rank, vote in sorted(ballot.votes.items()):
        try:
            await _check_named(store, attempt.prefix, vote)
        except (NotFoundError, DamagedError) as error:
            return decisions.unshared(f"rank {rank} voted yes, but {error}")
    return None


async def _check_named(store: Store, prefix: str, vote: Vote | None) -> None:
    """The same checks as loading makes, down to the chunks: of those, only the objects' sizes are looked at."""
    assert vote is not None
    index = await catalog.index_named_by(store, prefix, vote)
    fault = cover_fault(await catalog.read_plan(store, vote.plan or ""), index)
    if fault:
        raise DamagedError(f"its index is not what its plan says: {fault}")
    for named in index.objects:
        key = named.key(prefix)
        size = await store.stat(key)
        if size != named.size:
            raise DamagedError(f"{key} has {size} bytes, not {named.size}", key=key)


VOTES_S = 15.0
"""How long the other nodes' votes may take once the coordinator's is there: a node that died with its daemon never votes."""
_PAUSE_S = 0.1


async def outlived(store: Store, surviving: Collection[str], timeout_s: float, sight: Sight | None = None) -> tuple[str, ...]:
    """Wait until the attempts `surviving`, at which daemons of other nodes work, are decided; those that are not by then.

    At most `timeout_s`, and VOTES_S from the coordinator's vote on. One that nobody works at any more is decided here
    (RECOVER-4).
    """
    looker = sight or Sight()
    waited = [_decided_in_time(store, prefix, timeout_s, looker) for prefix in surviving]
    found = await asyncio.gather(*waited)
    return tuple(prefix for prefix, decided in zip(surviving, found, strict=True) if not decided)


async def _decided_in_time(store: Store, prefix: str, timeout_s: float, sight: Sight) -> bool:
    tag, _, name = prefix.rpartition("/")
    attempt = AttemptId.parse(name)
    assert attempt is not None
    loop, watch = asyncio.get_running_loop(), Watch(store, attempt_lease_key(prefix), sight)
    until, has_voted = loop.time() + timeout_s, False
    while True:
        try:
            await watch.look()
            view = await catalog.view(store, tag, attempt)
            if view.state != "in-doubt":
                return True
            if watch.has_ended():
                await _decide(store, view)
                return True
            if not has_voted and vote_name(0) in view.sizes:
                has_voted, until = True, min(until, loop.time() + VOTES_S)
        except StoreError as error:
            log.warning("%s cannot be looked at: %s; trying again", prefix, error)
        if loop.time() >= until:
            return False
        await asyncio.sleep(_PAUSE_S)


async def _decide(store: Store, view: AttemptView) -> None:
    """Decide a surviving attempt whose worker has gone, and let `latest` name it if it is a checkpoint now."""
    outcome = await resolve(store, view)
    _say(outcome)
    if outcome.outcome == "commit" and outcome.save_latest:
        await move_latest(store, outcome.tag, outcome.order, is_start=True)


def _report(done: Recovery) -> None:
    for outcome in done.decided:
        _say(outcome)


def _say(outcome: Outcome) -> None:
    what = "rolled forward" if outcome.outcome == "commit" else f"aborted: {outcome.error.message if outcome.error else ''}"
    log.warning("%s/%s was left in doubt; %s", outcome.tag, outcome.attempt, what)
