"""The marks of removed attempts: which objects they condemn, and which checkpoints still need the others.

Invariants
  MARK-1  An attempt with a mark is no checkpoint. The mark with the greatest number counts; it condemns all of the attempt's
      objects but the chunks objects that it names as kept.
  MARK-2  A later mark keeps less than the one before it, never more: what was condemned once stays condemned.
  MARK-3  What cannot be read condemns everything for those who would refer to it, and frees nothing for those who would remove.
  MARK-4  Whoever takes an attempt for removed or aborted, and what it refers to for free, has made that durable first: a power
      cut must not bring a checkpoint back whose chunks have gone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.indexes import decode_index
from checkpointd.layout.keys import DELETED, OUTCOME, holds_bytes, mark_name, mark_number, vote_name
from checkpointd.layout.manifest import LISTING_BYTES_MAX, Deleted, decode, encode
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.identity import user, writer
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

LOOKS_MAX = 5
"""How often an attempt is looked at anew that is being decided or removed just now."""


DELETED_BY_NAME = "somebody deleted it"
DIRECTORY_REMOVED = "somebody removed its directory"
"""The reasons of marks for what a person removed, though it may have been the newest checkpoint."""


async def removed_by_hand(store: Store, views: Collection[AttemptView]) -> bool:
    """Whether a person had the newest of `views`, attempts at one tag, removed. What cannot be read says nothing (MARK-3)."""
    last = max(views, key=lambda view: view.attempt, default=None)
    if last is None or last.state != "deleted":
        return False
    try:
        mark = await standing_mark(store, last.prefix, last.sizes)
    except (DamagedError, NotFoundError):
        return False
    return mark is not None and mark.reason in (DELETED_BY_NAME, DIRECTORY_REMOVED)


async def standing_mark(store: Store, prefix: str, names: Iterable[str]) -> Deleted | None:
    """The mark that counts among the objects `names` of an attempt (MARK-1); None where there is none.

    DamagedError where it cannot be read, NotFoundError where it has gone since.
    """
    last = _last_mark(names)
    if last is None:
        return None
    key = f"{prefix}/{mark_name(last)}"
    return decode(await store.get(key), Deleted, key)


def _last_mark(names: Iterable[str]) -> int | None:
    return max((number for name in names if (number := mark_number(name)) is not None), default=None)


async def condemn(store: Store, prefix: str, reason: str, needed: Collection[str]) -> Deleted | None:
    """Mark the attempt as removed, keeping those of its chunks objects whose keys are `needed`, durably.

    Where it is marked already, what is not needed any more is condemned by a further mark (MARK-2). Returns a mark that stands,
    and is durable: what it condemns is condemned for everybody who looks from now on. None where it cannot be read (MARK-3).
    """
    names = [entry.name for entry in await store.list(prefix)]
    chunks = {name for name in names if holds_bytes(name)}
    kept = {name for name in chunks if f"{prefix}/{name}" in needed}
    first = Deleted(reason=reason, kept=tuple(sorted(kept)), user=user(), writer=writer())
    if await store.put_if_absent(f"{prefix}/{DELETED}", encode(first)):
        return first
    last = _last_mark([DELETED, *(entry.name for entry in await store.list(prefix))]) or 0
    try:
        standing = await _durable_mark(store, prefix, last)
    except DamagedError:
        standing = None
    except NotFoundError:
        return None  # the last records of it have just gone
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
        log.error("%s: what its mark keeps cannot be read, so all of it stays for now: %s", prefix, error)
        return None


async def _durable_mark(store: Store, prefix: str, number: int) -> Deleted | None:
    """The mark with that number, made durable first."""
    await store.settle(f"{prefix}/{mark_name(number)}")
    return await standing_mark(store, prefix, [mark_name(number)])


async def references(store: Store, without: Collection[str] = ()) -> frozenset[str]:
    """The keys of all objects that some other attempt needs: a checkpoint, or one that is not decided and may become one.

    `without`: attempts (`<tag>/<attempt>`) that are about to be removed. DamagedError where it cannot be told.
    """
    needed: set[str] = set()
    for view in await catalog.scan(store):
        if view.prefix not in without:
            needed |= await _needed_by(store, view)
    return frozenset(needed)


async def _needed_by(store: Store, view: AttemptView) -> set[str]:
    why: Exception | None = None
    for _ in range(LOOKS_MAX):
        try:
            return await _refers(store, view)
        except NotFoundError as error:
            # It was aborted, removed or written anew between listing and reading.
            why = error
            view = await catalog.view(store, view.tag, view.attempt)
    raise DamagedError(f"what {view.prefix} refers to cannot be told: {why}", key=view.prefix)


async def _refers(store: Store, view: AttemptView) -> set[str]:
    match view.state:
        case "deleted":
            if view.outcome is None or view.outcome.refers != ():
                await store.settle(f"{view.prefix}/{DELETED}")
            return set()
        case "aborted":
            if any(name.endswith(".index") for name in view.sizes):
                await store.settle(f"{view.prefix}/{OUTCOME}")
            return set()
        case "committed":
            return await _committed_refers(store, view)
        case _:
            return await _indexed(store, view)


async def _committed_refers(store: Store, view: AttemptView) -> set[str]:
    outcome = view.outcome
    assert outcome is not None
    if outcome.refers is not None:
        return set(outcome.refers)
    votes = [await catalog.read_vote(store, f"{view.prefix}/{vote_name(int(rank))}") for rank in outcome.votes]
    return {key for vote in votes for key in vote.refers}


async def _indexed(store: Store, view: AttemptView) -> set[str]:
    """What every index there names, whichever of them will be voted for."""
    found: set[str] = set()
    for name in view.sizes:
        if name.endswith(".index"):
            key = f"{view.prefix}/{name}"
            index = decode_index(await store.get(key, size_max=LISTING_BYTES_MAX), key)
            found |= {ref.key("") for ref in index.objects if ref.held_by}
    return found
