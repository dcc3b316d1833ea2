"""Removes checkpoints: a record of the log says that they are none any more, and then their objects go, and those of aborted
attempts.

Invariants
  COLLECT-1  An object goes only once the log has shown, proved and durable, that its attempt was removed or aborted (LOG-10).
  COLLECT-2  An object stays that a checkpoint, or the base of an undecided attempt, refers to. If it cannot be told what they
      refer to, all objects that may be meant stay.
  COLLECT-3  Only what the log names is removed. A directory that a person has brought there stays.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

import msgspec

from checkpointd.commit.log import needed_by_others
from checkpointd.errors import DamagedError, NotFoundError, StoreError, StoreFullError
from checkpointd.layout.keys import holder_of, object_key
from checkpointd.layout.log_records import LoggedAttempt, LogState, RemoveRecord, SweepRecord
from checkpointd.pipeline.identity import user, writer
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.ballots import votes_of
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.tag_directories import hide
from checkpointd.store.base import Entry, Store, each

log = logging.getLogger("checkpointd")

SWEEPS = 8
"""The number of attempts whose objects are removed at once; each removes several objects at once."""
ABORTED = "the attempt was aborted"
NOT_MIRRORED = "it is not mirrored, and newer checkpoints do not need its objects any more"
DELETED_BY_NAME = "deleted on request"
DELETED_WITH_TAG = "its tag was deleted on request"
DIRECTORY_REMOVED = "its directory was removed by hand"
"""The reasons of removals by a person."""

NONE_GOING: Mapping[str, Sequence[str]] = MappingProxyType({})

Needed = Mapping[str, Collection[str] | None]
"""The keys of the objects that must stay, by attempt (`<tag>/<attempt>`); None for all of an attempt."""
Kept = dict[str, frozenset[str]]
"""The attempts of which only objects are left that others need, by `<tag>/<attempt>`: nothing more can go while all of these
others are there.
"""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """The `objects` that one attempt lost, and those `kept` because newer checkpoints refer to them. Sizes are in bytes."""

    tag: str
    attempt: str
    reason: str
    objects: tuple[str, ...]
    freed_bytes: int
    kept: tuple[str, ...] = ()
    kept_bytes: int = 0


async def remove(store: Store, going: Mapping[str, Sequence[str]], start: int = 0) -> str:
    """Record that the checkpoints `going` (`<tag>/<attempt>`, by the reason) are none any more. `start`: the start whose
    retention removes them; 0 for a person. Returns why the log did not take it; empty if it did.
    """
    by = user()
    records = [
        RemoveRecord(attempts=tuple(names), reason=reason, start=start, user=by, writer=writer())
        for reason, names in going.items()
        if names
    ]
    return await RootLog.of(store).add(*records) if records else ""


async def sweep(
    store: Store, only: Collection[str] | None = None, *, failed: list[StoreError] | None = None, kept: Kept | None = None
) -> list[Removal]:
    """Remove the objects of removed and aborted attempts that nobody needs; of those in `only`, by default of all. `kept`: what
    earlier sweeps of this process have found, which is not looked at again; this brings it up to date.

    If objects of one attempt cannot be removed, those of the others are removed all the same. The errors are added to `failed`;
    without `failed`, the first one is raised at the end.
    """
    errors: list[StoreError] = [] if failed is None else failed
    root_log = RootLog.of(store)
    state, kept = await root_log.look(settles=True), {} if kept is None else kept
    dead = sweepable(state, kept, only)
    if not dead or root_log.fault:
        return []
    needed, by = await references(store, state, [one.prefix for one in dead])
    unhidden = await hide(store, {one.prefix for one in dead if one.committed})
    errors += unhidden.values()
    removals: dict[str, Removal] = {}

    async def one_swept(one: LoggedAttempt) -> None:
        try:
            removal = _removal(one, await root_view.objects_of(store, one.prefix), needed.get(one.prefix, ()))
            await root_log.check_root()
            await store.delete_each([object_key(one.prefix, name) for name in removal.objects])
            removals[one.prefix] = removal
            kept.pop(one.prefix, None)
            if removal.kept and one.prefix in by:
                kept[one.prefix] = by[one.prefix]
        except StoreFullError:
            raise  # `reserve.on_full_disk` makes room
        except StoreError as error:
            errors.append(error)

    await each(one_swept, [one for one in dead if one.prefix not in unhidden], SWEEPS)
    others = needed_by_others(state)
    empty = tuple(one.prefix for one in dead if one.prefix in removals and one.prefix not in others)
    if empty:
        await root_log.add(SweepRecord(attempts=empty))
    if errors and failed is None:
        raise errors[0]
    return [removals[one.prefix] for one in dead if one.prefix in removals and removals[one.prefix].objects]


async def sweep_late(store: Store) -> None:
    """Remove what a rank of an earlier start has still put for an aborted attempt after it was swept, before the rank died."""
    root_log = RootLog.of(store)
    for one in root_log.state.attempts.values():
        if one.status == "aborted" and one.swept and (late := await root_view.objects_of(store, one.prefix)):
            await root_log.check_root()
            await store.delete_each([object_key(one.prefix, entry.name) for entry in late])


def swept_next(state: LogState, only: Collection[str] | None = None) -> list[LoggedAttempt]:
    """The attempts whose objects may go, as far as nobody needs them."""
    dead = (one for one in state.attempts.values() if one.status in ("aborted", "removed") and not one.swept)
    return [one for one in dead if only is None or one.prefix in only]


def sweepable(state: LogState, kept: Kept, only: Collection[str] | None = None) -> list[LoggedAttempt]:
    """The same without those of which earlier sweeps have left only what others need."""
    dead = swept_next(state, only)
    there = {one.prefix for one in state.attempts.values() if one.status == "checkpoint"} if dead and kept else ()
    return [one for one in dead if one.prefix not in kept or not kept[one.prefix].issubset(there)]


async def survey(store: Store, state: LogState, going: Mapping[str, Sequence[str]] = NONE_GOING) -> list[Removal]:
    """The objects that would go in `state` if the checkpoints `going` were removed, too. Writes nothing."""
    reasons = {name: reason for reason, names in going.items() for name in names}
    dead = [*swept_next(state), *(state.attempts[name] for name in reasons)]
    needed, _ = await references(store, state, [one.prefix for one in dead], without=reasons)
    found = [
        _removal(one, await root_view.objects_of(store, one.prefix), needed.get(one.prefix, ()), reasons.get(one.prefix))
        for one in dead
    ]
    return [removal for removal in found if removal.objects]


def _removal(
    one: LoggedAttempt, entries: Iterable[Entry], needed: Collection[str] | None, reason: str | None = None
) -> Removal:
    listed = list(entries)
    staying = [e for e in listed if needed is None or object_key(one.prefix, e.name) in needed]
    going = [e for e in listed if e not in staying]
    return Removal(
        tag=one.tag,
        attempt=str(one.id),
        reason=reason or _reason(one),
        objects=tuple(entry.name for entry in going),
        freed_bytes=sum(entry.size for entry in going),
        kept=tuple(entry.name for entry in staying),
        kept_bytes=sum(entry.size for entry in staying),
    )


def _reason(one: LoggedAttempt) -> str:
    if one.removal is not None:
        return one.removal.reason
    return ABORTED if one.status == "aborted" else NOT_MIRRORED


async def references(
    store: Store, state: LogState, holders: Collection[str], without: Collection[str] = ()
) -> tuple[Needed, Mapping[str, frozenset[str]]]:
    """What others need of `holders` (`<tag>/<attempt>`): checkpoints, and undecided attempts through their base (COLLECT-2).
    `without`: checkpoints that are about to be removed. Also returns checkpoints that need all of it together, by holder; a
    holder is left out if these may come to need less of it while they are there.
    """
    wanted, needed, by = set(holders), dict[str, set[str] | None](), dict[str, frozenset[str]]()
    referring = [a for a in state.attempts.values() if a.status == "checkpoint" and a.prefix not in without]
    for one in state.attempts.values():
        base = state.attempts.get(one.base) if one.status == "undecided" else None
        if base is not None and base.status != "checkpoint":
            needed[base.prefix] = None
            referring.append(base)
    concerned = [one for one in referring if not wanted.isdisjoint(one.holders)]
    for one in sorted(concerned, key=attrgetter("order"), reverse=True):
        try:
            keys = await _referred(store, one)
        except (DamagedError, NotFoundError) as error:
            log.error("%s: what it refers to cannot be read, so all of it stays: %s", one.prefix, error)
            needed |= dict.fromkeys(one.holders)
            continue
        for key in keys:
            holder = holder_of(key)
            kept = needed.setdefault(holder, set())
            if kept is not None and key not in kept:
                kept.add(key)
                by[holder] = by.get(holder, frozenset()) | {one.prefix}
    found = {name: keys for name, keys in needed.items() if name in wanted}
    return found, {name: some for name, some in by.items() if found.get(name) is not None}


async def _referred(store: Store, one: LoggedAttempt) -> set[str]:
    """The keys of older attempts' objects that the checkpoint refers to."""
    found: set[str] = set()
    for vote in (await votes_of(store, one.commit)).values():
        if isinstance(vote, DamagedError):
            raise vote
        found.update(vote.refers)
    return found
