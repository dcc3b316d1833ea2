"""The candidates of a load, newest first, and the damaged checkpoints that were passed over.

Invariants
  CANDIDATE-1  A damaged checkpoint that may be newer than the candidate is always reported. So is a checkpoint that is gone
      while `latest` still names it, unless a mark says that somebody removed it on purpose, or it has a mark and a newer one is
      there. If a symbolic link lies at its tag, LinkError is raised, since the link may lead to the checkpoint.
  CANDIDATE-3  A checkpoint of a branch that was left is never a candidate, however damaged the others are.
  CANDIDATE-2  A checkpoint that may be newer is not passed over because it cannot be read now, or because one look did not find
      it. Further looks follow, and UnreadableError is raised if it still cannot be read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import nlargest

from checkpointd.commands import command
from checkpointd.commit.facts import Order
from checkpointd.errors import DamagedError, NotFoundError, UnreadableError
from checkpointd.layout.keys import LATEST, OUTCOME, PASSED_OVER, vote_name
from checkpointd.layout.manifest import PassedOver, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.catalog_log import CatalogLog, note, record_of
from checkpointd.pipeline.root.marks import removed_by_hand
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience

logger = logging.getLogger("checkpointd")

RECENT = 64
"""A load looks at this many of the newest attempts, and at all if it has tried these, or none of them asked for `latest`."""


@dataclass(frozen=True, slots=True)
class Passed:
    """Damage that keeps an attempt from being loaded. `prefix` is None if `latest` names a tag that is not there."""

    error: DamagedError
    prefix: str | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The checkpoints whose saves asked for `latest`, newest first, and the damage that was found. Old ones may be left out
    if there is a newer one that the load has not tried.

    `known`: the same with those that did not ask. `passed_over`: damaged attempts that may be newer than all of them. `other`:
    damage of older ones, and a `latest` that names a checkpoint which was removed, on purpose or because of a newer one.
    """

    checkpoints: tuple[Checkpoint, ...]
    known: tuple[Checkpoint, ...]
    passed_over: tuple[Passed, ...]
    other: tuple[DamagedError | UnreadableError, ...]
    copies: tuple[DamagedError, ...] = ()
    """Directories of tags that somebody copied or renamed by hand: no checkpoints, and no damage either."""


@dataclass(frozen=True, slots=True)
class _CatalogLook:
    found: Candidates
    absent: str = ""
    """The message about a checkpoint that should be there but was not seen by this look."""
    lost: DamagedError | None = None
    """The same as an error, unless somebody removed the checkpoint on purpose."""


async def candidates(store: Store, patience: Patience, tried: Collection[str] = ()) -> Candidates:
    """The checkpoints at `store` for a load that names no tag. Raises UnreadableError if the storage does not tell, LinkError
    if a link lies at the tag that `latest` names. `tried`: attempts (`<tag>/<attempt>`) that this load does not take.
    """
    return await _found(store, patience, tried)


async def _found(store: Store, patience: Patience, tried: Collection[str] = (), *, everything: bool = False) -> Candidates:
    with patience.looks() as looks:
        while True:
            try:
                look = await _look(store, tried, everything=everything)
                if not look.absent or await looks.is_lost(look.absent):
                    return look.found
            except UnreadableError as error:
                await looks.unreadable(error)


async def newest_tag(store: Store) -> str | None:
    """The tag that `latest` means where a tag is expected: that of the checkpoint that a load would try first. None if there is
    none. Usually the file `latest` names it; it may lag behind, or somebody may have edited it.
    """
    look = await _look(store)
    return look.found.checkpoints[0].tag if look.found.checkpoints else None


async def named(store: Store, tag: str | None) -> str:
    """The tag that a user names: `tag` itself, or for None and `latest` that of the checkpoint that a load takes. Raises
    NotFoundError.
    """
    if tag is not None and tag != LATEST:
        return tag
    found = await newest_tag(store)
    if found is None:
        raise NotFoundError(f"there is no {LATEST} at {store.url}: nothing was committed there yet")
    return found


async def lost_newest(store: Store, patience: Patience) -> DamagedError | None:
    """The error that the checkpoint which `latest` names is gone; None if it is there, or was removed on purpose."""
    with patience.looks() as looks:
        while True:
            look = await _look(store)
            if not look.absent or await looks.is_lost(look.absent):
                return look.lost


async def listed(store: Store, patience: Patience) -> list[Checkpoint]:
    """All checkpoints, newest first. Logs damaged attempts that may be newer (CANDIDATE-1)."""
    found = await _found(store, patience, everything=True)
    for passed in found.passed_over:
        logger.error("%s. It may be newer than all that is listed", passed.error)
    return [*found.known]


async def find(store: Store, tag: str, patience: Patience) -> Checkpoint:
    """The checkpoint of `tag`, as `catalog.find`, but with further looks if it is missing or cannot be read."""
    with patience.looks() as looks:
        while True:
            try:
                return await catalog.find(store, tag)
            except UnreadableError as error:
                await looks.unreadable(error)
            except NotFoundError as error:
                if await looks.is_lost(str(error)):
                    raise


async def _look(store: Store, tried: Collection[str] = (), *, everything: bool = False) -> _CatalogLook:
    # `latest` is read first: the checkpoint that it names was committed before, so the scan must find it.
    pointer = await catalog.readable_latest(store)
    log = CatalogLog(store)
    await log.refresh()
    least = (0, 0) if everything else min(nlargest(RECENT, (e.order for e in log.state.entries.values())), default=(0, 0))
    scanned = await catalog.scan(store, log, newest=1, wanted=lambda entry: entry.order >= least or entry.tag == pointer)
    attempts = await catalog.with_newest_looked(store, scanned, tried)
    commits = catalog.commits_of(attempts)
    known = catalog.newest_of_tags(commits)
    # The checkpoint that `latest` names counts even if its tag was saved again without asking for `latest`. An older commit of
    # a tag, which stays while it alone is verified, comes after the commit that replaced it.
    found = tuple(c for c in commits if c.may_be_latest or (c.tag == pointer and not c.left_behind and c in known))
    if least > (0, 0) and not any(c.outcome.order >= least and c.prefix not in tried for c in found):
        return await _look(store, tried, everything=True)
    over: list[Passed] = []
    other: list[DamagedError | UnreadableError] = []
    copies = [DamagedError(one.damage or "", key=f"{one.prefix}/{OUTCOME}") for one in attempts if one.is_copy]
    for attempt in [one for one in attempts if one.entry is None and not one.left_behind and not one.is_copy]:
        fault = catalog.fault_of(attempt)
        if fault is None:
            continue
        older = found and await order_at_most(store, attempt) < found[0].outcome.order
        if older:
            other.append(fault)
        elif isinstance(fault, DamagedError):
            over.append(Passed(fault, attempt.prefix))
        else:
            raise fault
    lost = None if pointer is None or pointer in {c.tag for c in known} else await _missing(store, pointer, attempts)
    if lost is not None and await catalog.readable_latest(store) != pointer:
        # `latest` has moved on, and the checkpoint that it named was removed since.
        return await _look(store, tried, everything=everything)
    is_removed = lost is not None and pointer is not None and await _is_removed(store, pointer, found)
    if lost is not None and is_removed:
        other.append(lost)
    elif lost is not None:
        over.append(Passed(lost, None))
    there = Candidates(found, tuple(known), tuple(over), tuple(other), tuple(copies))
    return _CatalogLook(there, str(lost or ""), None if is_removed else lost)


async def _is_removed(store: Store, tag: str, newest_first: Sequence[Checkpoint]) -> bool:
    """Whether what `latest` names, at `tag`, was removed on purpose, or has a mark while a newer checkpoint is there."""
    named = await catalog.attempts_of(store, tag)  # the catalog may know of the removal, and not yet of the outcome
    return _is_replaced(named, newest_first) or await removed_by_hand(store, named)


def _is_replaced(named: Sequence[AttemptView], newest_first: Sequence[Checkpoint]) -> bool:
    """Whether the checkpoint that `latest` names, one of `named`, was removed and a newer one is there.

    A collector may have read `latest` before a commit moved it there, and the next commit, which is newer, has not moved it on.
    """
    last = max(named, key=lambda view: view.attempt, default=None)
    if last is None or last.state != "deleted" or last.outcome is None or not newest_first:
        return False
    return last.outcome.order < newest_first[0].outcome.order


async def order_at_most(store: Store, attempt: AttemptView) -> Order:
    """The order of an attempt whose outcome is unknown, from rank 0's vote; without the vote, the last order of its start."""
    try:
        vote = await catalog.read_vote(store, f"{attempt.prefix}/{vote_name(0)}")
    except (NotFoundError, DamagedError, UnreadableError):
        return (attempt.attempt.start, sys.maxsize)
    return (attempt.attempt.start, vote.n)


async def _missing(store: Store, tag: str, attempts: Sequence[AttemptView]) -> DamagedError | None:
    """The error that the checkpoint `tag`, which `latest` names, is not there; None if its damage is reported already."""
    named = [attempt for attempt in attempts if attempt.tag == tag]
    if any(attempt.state == "damaged" and not attempt.is_copy for attempt in named):
        return None
    why = f"it is gone: somebody removed {tag}, or the storage has lost it, or latest is damaged"
    if not named:
        await store.list(tag)  # raises LinkError if a link lies there, which the listing of the root left out
    else:
        try:
            why = f"{(await catalog.find(store, tag)).prefix} was committed only now"
        except (NotFoundError, DamagedError) as error:
            why = str(error)
    return DamagedError(
        f"latest names {tag}, which cannot be loaded: {why}. Bring it back from a copy of the root, or accept the loss: "
        f"{command('recover', store.url)} lets latest name the newest that is left, or removes latest if none is left",
        key=LATEST,
    )


async def note_passed_over(store: Store, prefix: str, why: str) -> None:
    """Record in the attempt at `prefix` that load() passed over it, so that retention and gc never remove it.

    The first record stays. An attempt without an outcome, which somebody has removed, gets no record.
    """
    if any(entry.name == OUTCOME for entry in await store.list(prefix)):
        await store.put_if_absent(f"{prefix}/{PASSED_OVER}", encode(PassedOver(why=why, writer=writer())))
        await note(store, record_of("passed-over", *prefix.rsplit("/", 1)))


async def note_tag_passed_over(store: Store, tag: str, why: str) -> None:
    """The same for the attempt that a load of the tag `tag` would take."""
    attempts = [a for a in await catalog.attempts_of(store, tag) if a.state in ("committed", "damaged")]
    if attempts:
        await note_passed_over(store, attempts[-1].prefix, why)
