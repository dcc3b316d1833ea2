"""The marks of removed attempts: which objects they condemn, and which checkpoints still need the others.

Invariants
  MARK-1  An attempt with a mark is not a checkpoint. The mark with the greatest number counts. It condemns all objects of the
      attempt except the chunks objects that it lists as kept.
  MARK-2  A later mark keeps no object that an earlier mark condemned.
  MARK-3  A mark that cannot be read condemns all objects of its attempt. A collector removes none of them before a readable
      mark condemns them.
  MARK-4  Before a collector treats the references of a removed or aborted attempt as gone, it makes the mark or the outcome
      durable. Otherwise a power cut could bring back a checkpoint whose chunks are gone.
  MARK-5  The marks of an attempt are numbered without a gap. Mark n+1 is put only beside mark n. They are the last objects of
      the attempt to go, the greatest first. So the mark that counts is found by its name, without a listing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.catalog_records import CatalogEntry
from checkpointd.layout.indexes import decode_index
from checkpointd.layout.keys import DELETED, OUTCOME, holder_of, holds_bytes, mark_name, mark_number, object_key
from checkpointd.layout.manifest import LISTING_BYTES_MAX, Deleted, Outcome, decode, encode
from checkpointd.pipeline.identity import user, writer
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.ballots import votes_of
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

LOOKS_MAX = 5
"""How many times to look at an attempt that is being decided or removed meanwhile."""

DELETED_BY_NAME = "deleted on request"
DIRECTORY_REMOVED = "its directory was removed by hand"
"""The reasons in marks of checkpoints that a person removed, which may have been the newest ones."""


async def removed_by_hand(store: Store, views: Collection[AttemptView]) -> bool:
    """Whether a person removed the newest of `views`, the attempts at one tag. False if its mark cannot be read."""
    last = max(views, key=lambda view: view.attempt, default=None)
    if last is None or last.state != "deleted":
        return False
    try:
        mark = await standing_mark(store, last.prefix, last.sizes)
    except (DamagedError, NotFoundError):
        return False
    return mark is not None and mark.reason in (DELETED_BY_NAME, DIRECTORY_REMOVED)


async def standing_mark(store: Store, prefix: str, names: Iterable[str]) -> Deleted | None:
    """The mark that counts among the objects `names` of an attempt (MARK-1); None if there is none.

    Raises DamagedError if the mark cannot be read, NotFoundError if it is gone.
    """
    last = _last_mark(names)
    if last is None:
        return None
    key = f"{prefix}/{mark_name(last)}"
    return decode(await store.get(key), Deleted, key)


async def greatest_mark(store: Store, prefix: str) -> Deleted | None:
    """The same, found by a few looks at names (MARK-5), however many objects the attempt has."""
    if await store.stat(f"{prefix}/{DELETED}") is None:
        return None
    there, absent = 0, 1
    while await store.stat(f"{prefix}/{mark_name(absent)}") is not None:
        there, absent = absent, 2 * absent
    while absent - there > 1:
        middle = (there + absent) // 2
        found = await store.stat(f"{prefix}/{mark_name(middle)}") is not None
        there, absent = (middle, absent) if found else (there, middle)
    return await standing_mark(store, prefix, [mark_name(there)])


def _last_mark(names: Iterable[str]) -> int | None:
    return max((number for name in names if (number := mark_number(name)) is not None), default=None)


async def condemn(store: Store, prefix: str, reason: str, needed: Collection[str]) -> Deleted | None:
    """Mark the attempt as removed, durably, and keep those of its chunks objects whose keys are in `needed`.

    If it has a mark already, a further mark condemns the objects that are not needed any more (MARK-2). Returns the mark that
    counts from now on; None if it cannot be read (MARK-3).
    """
    names = [entry.name for entry in await catalog.objects_of(store, prefix)]
    chunks = {name for name in names if holds_bytes(name)}
    kept = {name for name in chunks if object_key(prefix, name) in needed}
    first = Deleted(reason=reason, kept=tuple(sorted(kept)), user=user(), writer=writer())
    if await store.put_if_absent(f"{prefix}/{DELETED}", encode(first)):
        return first
    last = _last_mark([DELETED, *(entry.name for entry in await store.list(prefix))]) or 0
    try:
        standing = await _durable_mark(store, prefix, last)
    except DamagedError:
        standing = None
    except NotFoundError:
        return None  # its last records have just been removed
    allowed = set(standing.kept) if standing is not None else set()
    if standing is not None and not (allowed & chunks) - kept:
        return standing
    reason = standing.reason if standing is not None else reason
    less = Deleted(reason=reason, kept=tuple(sorted(kept & allowed)), user=user(), writer=writer())
    if await store.put_if_absent(f"{prefix}/{mark_name(last + 1)}", encode(less)):
        return less
    try:
        return await _durable_mark(store, prefix, last + 1)
    except (DamagedError, NotFoundError) as error:
        log.error("%s: its mark cannot be read, so all its objects stay for now: %s", prefix, error)
        return None


async def _durable_mark(store: Store, prefix: str, number: int) -> Deleted | None:
    """The mark with this number, which is made durable first."""
    await store.settle(f"{prefix}/{mark_name(number)}")
    return await standing_mark(store, prefix, [mark_name(number)])


async def references(
    store: Store, holders: Collection[str], without: Collection[str] = (), *, known: CatalogLog | None = None
) -> frozenset[str]:
    """The keys of all objects of `holders` (`<tag>/<attempt>`) that another attempt refers to: a checkpoint, or an undecided
    attempt.

    `without`: attempts that are about to be removed. `known`: the catalog as this process has read it. Raises DamagedError if
    references cannot be read.
    """
    needed: set[str] = set()

    def may_refer(entry: CatalogEntry) -> bool:
        outcome = None if entry.removed else entry.decoded
        return outcome is not None and any(holder in holders for holder in outcome.holders)

    # What the log says of a decided attempt may be old, and is then too much: a checkpoint only ever loses its references.
    for view in await catalog.scan(store, known, newest=0, wanted=may_refer):
        if view.prefix not in without:
            needed |= await _needed_by(store, view, holders)
    return frozenset(key for key in needed if holder_of(key) in holders)


async def _needed_by(store: Store, view: AttemptView, holders: Collection[str]) -> set[str]:
    why: Exception | None = None
    for _ in range(LOOKS_MAX):
        try:
            return await _refers(store, view, holders)
        except NotFoundError as error:
            # The attempt was aborted, removed or rewritten between the listing and the read.
            why = error
            view = await catalog.view(store, view.tag, view.attempt)
    raise DamagedError(f"the references of {view.prefix} cannot be read: {why}", key=view.prefix)


async def _refers(store: Store, view: AttemptView, holders: Collection[str]) -> set[str]:
    match view.state:
        case "deleted":
            if view.entry is None and (view.outcome is None or view.outcome.holders):
                await store.settle(f"{view.prefix}/{DELETED}")
            return set()
        case "aborted":
            if any(name.endswith(".index") for name in view.sizes):
                await store.settle(f"{view.prefix}/{OUTCOME}")
            return set()
        case "committed":
            assert view.outcome is not None
            return await _committed_refers(store, view.outcome, holders)
        case _:
            return await _indexed(store, view)


async def _committed_refers(store: Store, outcome: Outcome, holders: Collection[str]) -> set[str]:
    if not any(holder in holders for holder in outcome.holders):
        return set()
    found: set[str] = set()
    for vote in (await votes_of(store, outcome)).values():
        if isinstance(vote, DamagedError):
            raise vote
        found.update(vote.refers)
    return found


async def _indexed(store: Store, view: AttemptView) -> set[str]:
    """The references of all indexes of an undecided attempt, whichever of them a vote will name."""
    found: set[str] = set()
    for name in view.sizes:
        if name.endswith(".index"):
            key = object_key(view.prefix, name)
            index = decode_index(await store.get(key, size_max=LISTING_BYTES_MAX), key)
            found |= {ref.key("") for ref in index.objects if ref.held_by}
    return found
