"""Mends the catalog's log after a crash, and makes it again from the attempts' own objects."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container
from functools import partial

import msgspec

from checkpointd.errors import DamagedError, LinkError, NotFoundError, StoreError
from checkpointd.layout.catalog_records import CatalogEntry, CatalogRecord, close_of
from checkpointd.layout.keys import DELETED, OUTCOME, holds_bytes
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.catalog_log import CatalogLog, record_of
from checkpointd.pipeline.root.marks import standing_mark
from checkpointd.store.base import Store, each

log = logging.getLogger("checkpointd")

ADDED_MAX = 1024
"""If more records are missing, the whole catalog is made again, which takes one object."""
FORGOTTEN_MAX = 64
"""The number of attempts that one start forgets, since it looks at the directory of each."""


async def mend(store: Store, known: CatalogLog, views: Collection[AttemptView]) -> None:
    """Add to the log what `views`, of a look at the root, show beyond it, and forget tags that are gone (CATALOG-7). The log
    goes without an attempt whose outcome or mark cannot be made durable.
    """
    if not known.fault:
        looked = [view for view in views if view.entry is None and view.has_objects and not (view.is_void or view.is_copy)]
        entries = known.state.entries
        missing = await each(lambda view: _missing(store, view, entries.get(view.prefix)), looked)
        if sum(map(len, missing)) <= ADDED_MAX:
            incomplete = [(view, records) for view, records in zip(looked, missing, strict=True) if records]
            settled = await each(partial(_settles, store), [view for view, _ in incomplete])
            added = [one for (_, records), settles in zip(incomplete, settled, strict=True) if settles for one in records]
            await known.append(*added, *await _gone(store, known, {view.tag for view in views}))
            return
    await rebuild(store, known)


async def _gone(store: Store, known: CatalogLog, there: Container[str]) -> list[CatalogRecord]:
    """The records that forget tags which somebody removed by hand, at most FORGOTTEN_MAX. `there`: tags at the root."""
    found: list[CatalogRecord] = []
    for tag, prefixes in known.state.by_tag.items():
        if tag in there or not all(known.state.entries[prefix].is_decided for prefix in prefixes):
            continue
        if found and len(found) + len(prefixes) > FORGOTTEN_MAX:
            break
        try:
            is_gone = not await store.list(tag)  # a listing of the whole root may be old, or leave out a link
        except LinkError:
            continue
        if is_gone:
            if not all(known.state.entries[prefix].removed for prefix in prefixes):
                log.warning("somebody removed %s: the catalog forgets it", tag)
            found += [record_of("forgotten", *prefix.rsplit("/", 1)) for prefix in prefixes]
    return found


async def forget_gone(store: Store, known: CatalogLog) -> None:
    """Forget tags that somebody removed by hand, as a start does."""
    await known.refresh()
    if not known.fault:
        await known.append(*await _gone(store, known, set(await catalog.tags(store, known.state.by_tag))))


async def rebuild(store: Store, known: CatalogLog | None = None) -> int:
    """Make the catalog again from the attempts' own objects. Returns the number of attempts in it."""
    known = CatalogLog(store) if known is None else known
    await known.refresh()
    number = await known.begin_again()
    # An attempt that was announced may have no objects yet.
    entries = {prefix: entry for prefix, entry in known.state.entries.items() if not entry.is_decided}
    entries |= await known.announced_before(number)
    views = [view for view in sorted(await catalog.look_everywhere(store), key=_order) if not (view.is_void or view.is_copy)]
    await each(partial(_settle, store), views)
    for view, entry in zip(views, await each(partial(_entry, store), views), strict=True):
        entries.pop(view.prefix, None)
        entries[view.prefix] = entry
    await known.end_again(number, entries)
    log.info("the catalog of %s was made again: %d attempts", store.url, len(entries))
    return len(entries)


def _order(view: AttemptView) -> tuple[int, int, int]:
    n = view.outcome.order[1] if view.outcome is not None else 0
    return view.attempt.start, n, view.attempt.k


async def _settle(store: Store, view: AttemptView) -> bool:
    """Make durable what the catalog will say of the attempt (CATALOG-2): it may have been decided or marked only now. Returns
    False if it has been forgotten meanwhile.
    """
    is_there = True
    for name in (OUTCOME, DELETED):
        if name in view.sizes:
            try:
                await store.settle(f"{view.prefix}/{name}")
            except NotFoundError:
                is_there = False
    return is_there


async def _entry(store: Store, view: AttemptView) -> CatalogEntry:
    entry = CatalogEntry(tag=view.tag, attempt=str(view.attempt))
    if view.outcome is not None:
        close = close_of(view.outcome)
        entry = msgspec.structs.replace(
            entry, n=close.n, step=close.step, digest=close.digest, size=close.size, outcome=close.outcome
        )
    if view.state == "deleted":
        entry = msgspec.structs.replace(entry, removed=await _reason(store, view), kept=_left(view))
    is_damaged = view.read_back == "damaged"
    return msgspec.structs.replace(
        entry,
        verified=view.is_verified and not is_damaged,
        damaged=is_damaged,
        passed_over=view.passed_over,
        left_behind=view.left_behind,
    )


async def _settles(store: Store, view: AttemptView) -> bool:
    """Make the attempt's outcome and mark durable. Returns whether that could be done."""
    try:
        return await _settle(store, view)
    except StoreError as error:
        log.error("the catalog goes without what is new at %s, which may not be durable: %s", view.prefix, error)
        return False


async def _missing(store: Store, view: AttemptView, entry: CatalogEntry | None) -> list[CatalogRecord]:
    """The records that make `entry` agree with `view`."""
    truth, tag, attempt = await _entry(store, view), view.tag, view.attempt
    found: list[CatalogRecord] = []
    if entry is None:
        found.append(record_of("intent", tag, attempt))
        entry = CatalogEntry(tag=tag, attempt=str(attempt))
    if view.outcome is not None and not entry.digest:
        found.append(close_of(view.outcome))
    if truth.removed and (not entry.removed or entry.removing):
        found.append(record_of("removed", tag, attempt, reason=truth.removed, kept=truth.kept))
    if truth.damaged and not entry.damaged:
        found.append(record_of("damaged", tag, attempt))
    if truth.verified and not entry.verified:
        found.append(record_of("verified", tag, attempt))
    if truth.passed_over and not entry.passed_over:
        found.append(record_of("passed-over", tag, attempt))
    if truth.left_behind != entry.left_behind:
        found.append(record_of("left-behind" if truth.left_behind else "current", tag, attempt))
    return found


async def _reason(store: Store, view: AttemptView) -> str:
    try:
        mark = await standing_mark(store, view.prefix, view.sizes)
    except (DamagedError, NotFoundError) as error:
        return f"its mark cannot be read: {error}"
    return (mark.reason if mark is not None else "") or "removed"


def _left(view: AttemptView) -> tuple[str, ...]:
    """The chunks objects of a removed attempt that are there."""
    return tuple(sorted(name for name in view.sizes if holds_bytes(name)))
