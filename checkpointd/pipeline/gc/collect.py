"""Removes the bulk of dead attempts: mark, check again which objects are needed, then sweep.

A crash in between shows no half-removed checkpoint, and no object goes that a checkpoint names.

Invariants
  COLLECT-1  Before an object of a committed attempt goes, a mark that condemns the object is durable.
  COLLECT-2  The outcome and the votes of an aborted attempt stay until it is forgotten (COLLECT-8), so no late vote revives it.
  COLLECT-3  The `deleted` mark is the last object of an attempt to go.
  COLLECT-4  No object of a checkpoint goes that the index of a vote names. If the chain of outcome, ballot, vote and index of a
      rank cannot be verified, all objects of the rank stay.
  COLLECT-5  The writers of an attempt tidy up its tag, and apply retention, only while there is no newer start. A job that
      starts later sees their commit and never loads the checkpoint that it replaced. A job that had started before may be
      loading that checkpoint.
  COLLECT-6  An object of a removed checkpoint goes only if no other checkpoint, and no index of an undecided attempt, names it.
      The collector checks this after the mark that condemns the object is durable. A writer that puts its index later finds the
      mark and does not vote (DEDUP-3 in `dedup.py`). If the check fails, nothing is removed.
  COLLECT-7  The collector reads the marks before this check, and removes only objects that these marks condemn. It ignores a
      mark that another collector puts after the check, since a save may have put its index in between. The other collector
      checks later, and sees that index.
  COLLECT-8  An aborted attempt is forgotten only after the catalog has its close, or if the catalog does not name it. Its
      outcome goes last. So a writer that comes late sees the close before it votes (ANNOUNCE-1), or finds its index gone after
      it has put a commit (COMMIT-5). While the catalog cannot be read, nothing is forgotten.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from checkpointd.commit.facts import AttemptFacts, Dead
from checkpointd.commit.garbage import dead_weight, spent_records, with_spare_objects
from checkpointd.errors import DamagedError, NotFoundError, StoreError, StoreFullError
from checkpointd.layout.keys import (
    OUTCOME,
    holder_of,
    holds_bytes,
    is_bulk,
    mark_number,
    object_key,
    object_rank,
    object_takeover,
)
from checkpointd.layout.manifest import Deleted
from checkpointd.pipeline.read.readback import is_incomplete, recorded, survivor
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.ballots import vote_of
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.catalog_log import CatalogLog, note, record_of
from checkpointd.pipeline.root.marks import condemn, references
from checkpointd.pipeline.root.tag_directories import hide
from checkpointd.store.base import Entry, Store, each

log = logging.getLogger("checkpointd")

SWEEPS = 8
"""The number of attempts whose objects are removed at once; each removes several objects at once."""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """The `objects` that one attempt lost, and those `kept` because newer checkpoints refer to them. Sizes are in bytes."""

    tag: str
    attempt: str
    reason: str
    objects: tuple[str, ...]
    freed_bytes: int
    kept: tuple[str, ...] = ()
    kept_bytes: int = 0


async def collect(
    store: Store,
    attempts: Iterable[AttemptFacts],
    going: Sequence[Dead] = (),
    *,
    deleted: Sequence[Dead] = (),
    staying: Sequence[Checkpoint] = (),
    known: CatalogLog | None = None,
    thorough: bool = True,
    failed: list[StoreError] | None = None,
) -> list[Removal]:
    """Remove dead objects, and return a Removal for each attempt that lost all that it should lose.

    If objects of one attempt cannot be removed, those of the others are removed all the same. The errors are added to `failed`;
    without `failed`, the first one is raised at the end.

    Among `attempts`, this removes what `dead_weight` and `spent_records` name, and unused objects of several writers. `going`
    are checkpoints that were replaced or that no rule keeps (see `retire.py`); `deleted` are checkpoints that a user removed.

    None of `going` goes unless a checkpoint that stays was read back whole (READBACK-3 in `readback.py`). If none was, one is
    read back now. `staying`: checkpoints that are known to stay, newest first, which are checked before all others. `known`:
    the catalog as this process has read it. If not `thorough`, a removed attempt of which objects are still needed is left
    alone, unless an attempt that refers to it goes now.
    """
    known = CatalogLog(store) if known is None else known
    errors: list[StoreError] = [] if failed is None else failed
    found = list(attempts)
    dead = [*dead_weight(found), *await _proved(store, going, deleted, staying, known), *deleted]
    released = {holder for facts, _ in dead if not facts.kept for holder in facts.holders}
    dead = [one for one in dead if thorough or not one[0].kept or one[0].prefix in released]
    removed = await _sweep_each([partial(_sweep, store, *one) for one in dead if one[0].state == "aborted"], errors)
    removed += await _remove(store, [(facts, reason) for facts, reason in dead if facts.state != "aborted"], known, errors)
    gone = _prefixes(dead)
    for facts in with_spare_objects(found):
        if facts.prefix not in gone:
            with _noted(errors):
                await _drop_unnamed(store, facts)
    # What has just been removed counts, too: the next look at this tag may be far.
    swept = {(one.tag, one.attempt) for one in removed if not one.kept}
    tags = {tag for tag, _ in swept}
    left = [_as_swept(f) if f.tag in tags and (f.tag, str(f.attempt)) in swept else f for f in found]
    await note(store, *(record_of("removed", one.tag, one.attempt, reason=one.reason, kept=one.kept) for one in removed))
    await _forget(store, spent_records(left), known, errors)
    if errors and failed is None:
        raise errors[0]
    return [removal for removal in removed if removal.objects]


@contextlib.contextmanager
def _noted(errors: list[StoreError]) -> Iterator[None]:
    try:
        yield
    except StoreFullError:
        raise  # `reserve.on_full_disk` makes room
    except StoreError as error:
        errors.append(error)


async def survey(store: Store, attempts: Iterable[AttemptFacts], going: Sequence[Dead] = ()) -> list[Removal]:
    """The objects that `collect` would remove now. Writes nothing."""
    dead = [*dead_weight(attempts), *going]
    needed = await references(store, _prefixes(dead), _prefixes(dead))
    # Marks do not matter here: `collect` condemns unneeded objects before it checks.
    listed = [(facts, reason, await catalog.objects_of(store, facts.prefix)) for facts, reason in dead]
    found = [_removal(facts, reason, entries, _needed_of(facts, needed)) for facts, reason, entries in listed]
    return [removal for removal in found if removal.objects]


def _prefixes(dead: Iterable[Dead]) -> frozenset[str]:
    return frozenset(facts.prefix for facts, _ in dead)


async def _proved(
    store: Store, going: Sequence[Dead], deleted: Sequence[Dead], newest: Sequence[Checkpoint], known: CatalogLog
) -> Sequence[Dead]:
    """`going`, or nothing if no checkpoint that stays is known to be whole (READBACK-3). `newest`: those to check first."""
    if not going or await recorded(store, newest) is not None:
        return going
    gone = _prefixes([*going, *deleted])
    staying = [c for c in catalog.commits_of(await catalog.scan(store, known)) if c.prefix not in gone]
    if await recorded(store, staying) is not None:
        return going
    while staying and await is_incomplete(store, staying[0]):
        del staying[0]  # the rules did not count it
    found = await survivor(store, staying)
    if found is None:
        log.error("%d older checkpoints stay, since none of the newer ones could be read back whole", len(going))
        return ()
    # The rules counted newer checkpoints that have just proved damaged, so the choice must be made again at the next look.
    return going if found is staying[0] else ()


async def _remove(store: Store, dead: Sequence[Dead], known: CatalogLog, errors: list[StoreError]) -> list[Removal]:
    """Condemn the unneeded objects of attempts that were checkpoints, check again which are needed, and sweep (COLLECT-6)."""
    if not dead:
        return []
    try:
        needed = await references(store, _prefixes(dead), _prefixes(dead), known=known)
        dead = [(facts, reason) for facts, reason in dead if not facts.kept or not needed.issuperset(facts.kept)]
        if not dead:
            return []
        await note(store, *(record_of("removing", facts.tag, facts.attempt) for facts, _ in dead))
        marks = [await condemn(store, facts.prefix, reason, needed) for facts, reason in dead]
        needed = await references(store, _prefixes(dead), known=known)
    except DamagedError as error:
        log.error(
            "no object of %d replaced or removed checkpoints is removed: it is not known which are still needed (%s)",
            len(dead),
            error,
        )
        return []
    shown = await hide(store, _prefixes(dead))
    errors += shown.values()
    sweeps = [
        partial(_sweep, store, facts, reason, mark, needed)
        for (facts, reason), mark in zip(dead, marks, strict=True)
        if mark is not None and facts.prefix not in shown  # else all its objects stay for now (MARK-3)
    ]
    return await _sweep_each(sweeps, errors)


async def _sweep_each(sweeps: Sequence[Callable[[], Awaitable[Removal]]], errors: list[StoreError]) -> list[Removal]:
    """The removals by those of `sweeps` that succeed, in their order; the errors of the others are added to `errors`."""
    removed: dict[int, Removal] = {}

    async def sweep(place: int) -> None:
        with _noted(errors):
            removed[place] = await sweeps[place]()

    await each(sweep, range(len(sweeps)), SWEEPS)
    return [removed[place] for place in sorted(removed)]


async def _sweep(
    store: Store, facts: AttemptFacts, reason: str, mark: Deleted | None = None, needed: Collection[str] = ()
) -> Removal:
    """Remove the indexes, and the chunks objects that are not `needed` and that `mark`, read before `needed`, condemns
    (COLLECT-7).
    """
    kept = _needed_of(facts, needed) | set(mark.kept if mark is not None else ())
    removal = _removal(facts, reason, await catalog.objects_of(store, facts.prefix), kept)
    await store.delete_each([object_key(facts.prefix, name) for name in removal.objects])
    return removal


def _needed_of(facts: AttemptFacts, needed: Collection[str]) -> set[str]:
    """The names of the attempt's objects among the keys `needed`."""
    return {key.rpartition("/")[2] for key in needed if holder_of(key) == facts.prefix}


def _removal(facts: AttemptFacts, reason: str, entries: Iterable[Entry], kept: Collection[str]) -> Removal:
    """The removal of an attempt's bulk, except the chunks objects `kept`."""
    bulk = [entry for entry in entries if is_bulk(entry.name)]
    staying = [entry for entry in bulk if entry.name in kept and holds_bytes(entry.name)]
    going = [entry for entry in bulk if entry not in staying]
    return Removal(
        tag=facts.tag,
        attempt=str(facts.attempt),
        reason=reason,
        objects=tuple(entry.name for entry in going),
        freed_bytes=sum(entry.size for entry in going),
        kept=tuple(entry.name for entry in staying),
        kept_bytes=sum(entry.size for entry in staying),
    )


async def _drop_unnamed(store: Store, facts: AttemptFacts) -> None:
    """Remove the objects of writers whose index no vote names. A writer that is still at work drops its later objects
    itself."""
    prefix = facts.prefix
    names = [entry.name for entry in await catalog.objects_of(store, prefix)]
    for rank in facts.contested:
        try:
            outcome = await catalog.read_outcome(store, facts.tag, facts.attempt)
            vote = await vote_of(store, outcome, rank)
            index = await catalog.index_named_by(store, prefix, vote)
        except (DamagedError, NotFoundError) as error:
            log.error("%s: unused objects of rank %d stay, since its used ones cannot be read: %s", prefix, rank, error)
            continue
        assert vote.index is not None
        # Only objects of this attempt count: objects of older attempts may have the same names.
        named = {vote.index.name, *(ref.name for ref in index.objects if not ref.held_by)}
        for name in names:
            if object_rank(name) == rank and object_takeover(name) is not None and name not in named:
                await store.delete(object_key(prefix, name))


def _as_swept(facts: AttemptFacts) -> AttemptFacts:
    return replace(facts, state="aborted" if facts.state == "aborted" else "deleted", bulk=False)


async def _forget(store: Store, spent: Sequence[AttemptFacts], known: CatalogLog, errors: list[StoreError]) -> None:
    """Remove all that is left of `spent` attempts. Of the aborted ones, only those that COLLECT-8 allows."""
    if any(facts.state == "aborted" for facts in spent):
        await known.refresh()
        spent = [facts for facts in spent if facts.state != "aborted" or _may_forget(facts, known)]
    forgotten: list[AttemptFacts] = []

    async def forget(facts: AttemptFacts) -> None:
        with _noted(errors):
            await remove_records(store, facts.prefix)
            forgotten.append(facts)

    await each(forget, spent, SWEEPS)
    await note(store, *(record_of("forgotten", facts.tag, facts.attempt) for facts in forgotten))


async def forget_removed(store: Store, known: CatalogLog) -> None:
    """Remove the records of removed checkpoints of which nothing else is left, and so their directories. The catalog goes on
    telling why they were removed. Only for a job of one rank that ends: another rank may not have read an outcome yet.
    """
    pointer = await catalog.readable_latest(store)
    views = await catalog.scan(store, known)
    entries = known.state.entries
    told = {prefix for prefix, entry in entries.items() if entry.removed and not entry.removing and not entry.kept}
    spent = [v.prefix for v in views if v.state == "deleted" and v.prefix in told and v.tag != pointer and not v.facts.bulk]
    await each(partial(remove_records, store), spent, SWEEPS)


def _may_forget(facts: AttemptFacts, known: CatalogLog) -> bool:
    entry = known.state.entries.get(facts.prefix)
    return not known.fault and (entry is None or not entry.is_open)


async def remove_records(store: Store, prefix: str) -> None:
    """Remove all objects of an attempt: first those that say nothing of it by themselves, then the outcome, then the marks."""
    names = [entry.name for entry in await catalog.objects_of(store, prefix)]
    await store.delete_each([object_key(prefix, name) for name in names if _last_of_all(name) == (0, 0)])
    for name in sorted(names, key=_last_of_all):
        if _last_of_all(name) > (0, 0):
            await store.delete(object_key(prefix, name))


def _last_of_all(name: str) -> tuple[int, int]:
    mark = mark_number(name)
    return (2, -mark) if mark is not None else (int(name == OUTCOME), 0)
