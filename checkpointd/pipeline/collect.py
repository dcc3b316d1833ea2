"""Remove the bulk of dead attempts: mark first, then look who needs it, then sweep, so that a crash in between leaves nothing
half-removed in sight, and nothing goes that a checkpoint names.

Invariants
  G1  A mark of a committed attempt that condemns an object is durable before that object goes.
  G2  Outcome and votes of an aborted attempt stay: no late vote can revive it.
  G3  The `deleted` mark is the last object of an attempt to go.
  G4  Of a checkpoint nothing goes that a vote's index names. An object of a rank whose chain outcome, vote, index cannot be
      read as it was committed stays.
  G5  An attempt's own writers tidy up its tag, and apply retention, only while no newer epoch has begun: a job that starts
      later sees their commit, and never loads what it replaced. One that had started before may be loading it.
  G6  Of a removed checkpoint an object goes only if no other attempt names it: no checkpoint, and none that is undecided and
      has an index. That is looked at after the mark that condemns the object was durable; a writer that puts its index
      later finds the mark, and does not vote for it (X3 in `unchanged.py`). A look that fails removes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from checkpointd.commit.retention import AttemptFacts, dead_weight, spent_records, with_spare_objects
from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import attempt_prefix, holds_bytes, is_bulk, mark_number, object_hand, object_rank, vote_name
from checkpointd.pipeline import catalog, epochs
from checkpointd.pipeline.marks import condemn, references, standing_mark
from checkpointd.pipeline.showing import hide
from checkpointd.store.base import Entry, Store

log = logging.getLogger("checkpointd")

Dead = tuple[AttemptFacts, str]


@dataclass(frozen=True, slots=True)
class Removal:
    """What goes of one attempt, and what stays because other checkpoints need it; sizes in bytes."""

    tag: str
    attempt: str
    reason: str
    names: tuple[str, ...]
    nbytes: int
    kept: tuple[str, ...] = ()
    kept_bytes: int = 0


async def collect(store: Store, attempts: Iterable[AttemptFacts], retired: Sequence[Dead] = ()) -> list[Removal]:
    """Remove what `dead_weight` and `spent_records` name among `attempts`, what hands wrote in vain beside checkpoints, and
    the checkpoints `retired`, which somebody chose. Returns what went of each attempt that lost anything.
    """
    known = list(attempts)
    dead = _all_dead(known, retired)
    removed = [await _sweep(store, facts, reason) for facts, reason in dead if facts.state == "aborted"]
    removed += await _remove(store, [(facts, reason) for facts, reason in dead if facts.state != "aborted"])
    gone = {(facts.tag, facts.attempt) for facts, _ in dead}
    for facts in with_spare_objects(known):
        if (facts.tag, facts.attempt) not in gone:
            await _drop_unnamed(store, facts)
    for facts in spent_records(known):
        await _forget(store, attempt_prefix(facts.tag, facts.attempt))
    return [removal for removal in removed if removal.names]


async def survey(store: Store, attempts: Iterable[AttemptFacts], retired: Sequence[Dead] = ()) -> list[Removal]:
    """What `collect` would remove now; nothing is written."""
    dead = _all_dead(list(attempts), retired)
    gone = frozenset(attempt_prefix(facts.tag, facts.attempt) for facts, _ in dead)
    needed = await references(store, gone)
    # No mark is looked at: `collect` condemns what nobody needs before it looks.
    found = [_removal(facts, reason, await _entries(store, facts), _needed_of(facts, needed)) for facts, reason in dead]
    return [removal for removal in found if removal.names]


def _all_dead(known: list[AttemptFacts], retired: Sequence[Dead]) -> list[Dead]:
    dead = dead_weight(known)
    named = {(facts.tag, facts.attempt) for facts, _ in dead}
    return [*dead, *((facts, reason) for facts, reason in retired if (facts.tag, facts.attempt) not in named)]


async def collect_tag(store: Store, tag: str) -> list[Removal]:
    """The same for one tag, after one of its attempts was decided."""
    return await collect(store, [a.facts for a in await catalog.attempts_of(store, tag)])


async def tidy(store: Store, tag: str, epoch: int) -> bool:
    """The same for a writer of an attempt of `epoch`; False where a newer one has begun, and nothing was removed (G5)."""
    if await epochs.newest(store) > epoch:
        return False
    await collect_tag(store, tag)
    return True


async def _remove(store: Store, dead: Sequence[Dead]) -> list[Removal]:
    """Condemn what nobody needs of attempts that were checkpoints, look again who needs what, and sweep the rest (G6)."""
    if not dead:
        return []
    try:
        gone = frozenset(attempt_prefix(facts.tag, facts.attempt) for facts, _ in dead)
        needed = await references(store, gone)
        for facts, reason in dead:
            await condemn(store, attempt_prefix(facts.tag, facts.attempt), reason, needed)
        needed = await references(store)
    except DamagedError as error:
        log.error("nothing of %d replaced or removed checkpoints goes: who needs it cannot be told (%s)", len(dead), error)
        return []
    await hide(store, {attempt_prefix(facts.tag, facts.attempt) for facts, _ in dead})
    return [await _sweep(store, facts, reason, needed) for facts, reason in dead]


async def _sweep(store: Store, facts: AttemptFacts, reason: str, needed: Collection[str] = ()) -> Removal:
    """Remove indexes, and chunks objects that nobody needs and no mark keeps."""
    entries = await _entries(store, facts)
    kept = _needed_of(facts, needed) | await _kept_by_mark(store, facts, entries)
    removal = _removal(facts, reason, entries, kept)
    for name in removal.names:
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
        names=tuple(entry.name for entry in going),
        nbytes=sum(entry.size for entry in going),
        kept=tuple(entry.name for entry in staying),
        kept_bytes=sum(entry.size for entry in staying),
    )


async def _kept_by_mark(store: Store, facts: AttemptFacts, entries: Sequence[Entry]) -> set[str]:
    """What the mark that counts does not condemn; everything where it cannot be read (K3)."""
    prefix, names = attempt_prefix(facts.tag, facts.attempt), [entry.name for entry in entries]
    try:
        mark = await standing_mark(store, prefix, names)
    except (DamagedError, NotFoundError) as error:
        log.error("%s: what its mark keeps cannot be read, so all of it stays for now: %s", prefix, error)
        return set(names)
    return set(mark.kept if mark is not None else ())


async def _drop_unnamed(store: Store, facts: AttemptFacts) -> None:
    """Remove what other hands than the one that voted wrote; a hand that still writes drops the rest when it learns of it."""
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
            if object_rank(name) == rank and object_hand(name) is not None and name not in named:
                await store.delete(f"{prefix}/{name}")


async def _forget(store: Store, prefix: str) -> None:
    names = [entry.name for entry in await store.list(prefix)]
    marks = sorted((name for name in names if mark_number(name) is not None), key=lambda name: -(mark_number(name) or 0))
    for name in [*(name for name in names if mark_number(name) is None), *marks]:
        await store.delete(f"{prefix}/{name}")
