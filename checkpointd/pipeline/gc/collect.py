"""Remove the bulk of dead attempts: mark first, then look who needs it, then sweep, so that a crash in between leaves nothing
half-removed in sight, and nothing goes that a checkpoint names.

Invariants
  COLLECT-1  A mark of a committed attempt that condemns an object is durable before that object goes.
  COLLECT-2  Outcome and votes of an aborted attempt stay: no late vote can revive it.
  COLLECT-3  The `deleted` mark is the last object of an attempt to go.
  COLLECT-4  Of a checkpoint nothing goes that a vote's index names. An object of a rank whose chain outcome, vote, index cannot
      be read as it was committed stays.
  COLLECT-5  An attempt's own writers tidy up its tag, and apply retention, only while no newer epoch has begun: a job that
      starts later sees their commit, and never loads what it replaced. One that had started before may be loading it.
  COLLECT-6  Of a removed checkpoint an object goes only if no other attempt names it: no checkpoint, and none that is undecided
      and has an index. That is looked at after the mark that condemns the object was durable; a writer that puts its index
      later finds the mark, and does not vote for it (DEDUP-3 in `dedup.py`). A look that fails removes nothing.
  COLLECT-7  The marks are read before that look, and only what these marks condemn goes. A mark that another collector puts
      after the look says nothing here: a save whose index came in between was seen by neither, and that collector, which looks
      later, will see it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

import msgspec

from checkpointd.commit.facts import AttemptFacts, Dead
from checkpointd.commit.garbage import dead_weight, spent_records, with_spare_objects
from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import attempt_prefix, holds_bytes, is_bulk, mark_number, object_rank, object_takeover, vote_name
from checkpointd.layout.manifest import Deleted
from checkpointd.pipeline.read.readback import recorded, survivor
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.marks import condemn, references
from checkpointd.pipeline.root.tag_directories import hide
from checkpointd.store.base import Entry, Store

log = logging.getLogger("checkpointd")


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that lost objects: which went, and which stay because newer checkpoints refer to them. Sizes in bytes."""

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
) -> list[Removal]:
    """Remove what `dead_weight` and `spent_records` name among `attempts`, what writers wrote in vain beside checkpoints, the
    checkpoints `going`, which were replaced or let go by a rule (see `retire.py`), and those `deleted`, which a user named.
    Returns what went of each attempt that lost anything.

    None of `going` goes unless a checkpoint that stays was read back whole (READBACK-3 in `readback.py`); one is read back now
    where none was. `staying`: those that are known to stay, newest first, which are looked at before all others.
    """
    known = list(attempts)
    dead = [*dead_weight(known), *await _proved(store, going, deleted, staying), *deleted]
    removed = [await _sweep(store, facts, reason) for facts, reason in dead if facts.state == "aborted"]
    removed += await _remove(store, [(facts, reason) for facts, reason in dead if facts.state != "aborted"])
    gone = {(facts.tag, facts.attempt) for facts, _ in dead}
    for facts in with_spare_objects(known):
        if (facts.tag, facts.attempt) not in gone:
            await _drop_unnamed(store, facts)
    for facts in spent_records(known):
        await _forget(store, attempt_prefix(facts.tag, facts.attempt))
    return [removal for removal in removed if removal.objects]


async def survey(store: Store, attempts: Iterable[AttemptFacts], going: Sequence[Dead] = ()) -> list[Removal]:
    """What `collect` would remove now; nothing is written."""
    dead = [*dead_weight(attempts), *going]
    needed = await references(store, _prefixes(dead))
    # No mark is looked at: `collect` condemns what nobody needs before it looks.
    found = [_removal(facts, reason, await _entries(store, facts), _needed_of(facts, needed)) for facts, reason in dead]
    return [removal for removal in found if removal.objects]


def _prefixes(dead: Iterable[Dead]) -> frozenset[str]:
    return frozenset(attempt_prefix(facts.tag, facts.attempt) for facts, _ in dead)


async def _proved(store: Store, going: Sequence[Dead], deleted: Sequence[Dead], known: Sequence[Checkpoint]) -> Sequence[Dead]:
    """`going`, or nothing of it where no checkpoint that stays is known to be whole (READBACK-3)."""
    if not going or await recorded(store, known) is not None:
        return going
    gone = _prefixes([*going, *deleted])
    staying = [c for c in catalog.commits_of(await catalog.scan(store)) if c.prefix not in gone]
    if await recorded(store, staying) is not None:
        return going
    found = await survivor(store, staying)
    if found is None:
        log.error("%d older checkpoints stay, since none of the newer ones could be read back whole", len(going))
        return ()
    # What is newer than that one has just turned out to be damaged, and was counted by the rules: the next look chooses anew.
    return going if found is staying[0] else ()


async def _remove(store: Store, dead: Sequence[Dead]) -> list[Removal]:
    """Condemn what nobody needs of attempts that were checkpoints, look again who needs what, and sweep the
    rest (COLLECT-6).
    """
    if not dead:
        return []
    try:
        needed = await references(store, _prefixes(dead))
        marks = [await condemn(store, attempt_prefix(facts.tag, facts.attempt), reason, needed) for facts, reason in dead]
        needed = await references(store)
    except DamagedError as error:
        log.error(
            "no object of %d replaced or removed checkpoints is removed: it is not known which are still needed (%s)",
            len(dead),
            error,
        )
        return []
    await hide(store, _prefixes(dead))
    return [
        await _sweep(store, facts, reason, mark, needed)
        for (facts, reason), mark in zip(dead, marks, strict=True)
        if mark is not None  # MARK-3: all of it stays for now
    ]


async def _sweep(
    store: Store, facts: AttemptFacts, reason: str, mark: Deleted | None = None, needed: Collection[str] = ()
) -> Removal:
    """Remove indexes, and chunks objects that nobody needs and that `mark`, which was read before `needed`,
    condemns (COLLECT-7).
    """
    entries = await _entries(store, facts)
    kept = _needed_of(facts, needed) | set(mark.kept if mark is not None else ())
    removal = _removal(facts, reason, entries, kept)
    for name in removal.objects:
        await store.delete(f"{attempt_prefix(facts.tag, facts.attempt)}/{name}")
    return removal


async def _entries(store: Store, facts: AttemptFacts) -> list[Entry]:
    return await store.list(attempt_prefix(facts.tag, facts.attempt))


def _needed_of(facts: AttemptFacts, needed: Collection[str]) -> set[str]:
    """The names of the attempt's objects among the keys `needed`."""
    prefix = attempt_prefix(facts.tag, facts.attempt)
    return {key.removeprefix(f"{prefix}/") for key in needed if key.startswith(f"{prefix}/")}


def _removal(facts: AttemptFacts, reason: str, entries: Iterable[Entry], kept: Collection[str]) -> Removal:
    """What goes of an attempt of which the chunks objects `kept` stay."""
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
    """Remove what other writers than the one that voted wrote; a writer that still writes drops the rest when
    it learns of it.
    """
    prefix = attempt_prefix(facts.tag, facts.attempt)
    names = [entry.name for entry in await store.list(prefix)]
    for rank in facts.contested:
        try:
            outcome = await catalog.read_outcome(store, facts.tag, facts.attempt)
            vote = await catalog.read_vote(store, f"{prefix}/{vote_name(rank)}", outcome.votes[str(rank)].digest)
            index = await catalog.index_named_by(store, prefix, vote)
        except (DamagedError, NotFoundError, KeyError) as error:
            log.error("%s: what rank %d does not need cannot be told from what it does: %s", prefix, rank, error)
            continue
        assert vote.index is not None
        # Its own objects alone: those of older attempts may bear the same names.
        named = {vote.index.name, *(ref.name for ref in index.objects if not ref.held_by)}
        for name in names:
            if object_rank(name) == rank and object_takeover(name) is not None and name not in named:
                await store.delete(f"{prefix}/{name}")


async def _forget(store: Store, prefix: str) -> None:
    names = [entry.name for entry in await store.list(prefix)]
    marks = sorted((name for name in names if mark_number(name) is not None), key=lambda name: -(mark_number(name) or 0))
    for name in [*(name for name in names if mark_number(name) is None), *marks]:
        await store.delete(f"{prefix}/{name}")
