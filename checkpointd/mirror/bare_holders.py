"""Attempts that stand at a mirror without being checkpoints there: they hold objects to which newer checkpoints refer.

At the origin such an attempt was removed, or is a checkpoint that the mirror leaves out. At the mirror it has a `deleted` mark
from the beginning, as any removed attempt whose objects are needed. So no start decides it, and collections keep its objects
for as long as an index names them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import DELETED, OUTCOME, AttemptId, holder_of, holds_bytes
from checkpointd.layout.manifest import Deleted, Outcome, encode
from checkpointd.pipeline.gc.collect import remove_records
from checkpointd.pipeline.identity import user, writer
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.catalog_log import CatalogLog, note, note_outcome, record_of
from checkpointd.pipeline.root.marks import greatest_mark, references
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

LEFT_OUT = "it is not mirrored; newer checkpoints may need its objects"
"""The reason in the mark of a bare holder."""


async def kept_at_origin(origin: Store, view: AttemptView) -> tuple[str, ...]:
    """The names of the chunks objects of an attempt to which checkpoints of the origin may refer, now or later."""
    if view.state == "deleted":
        try:
            mark = await greatest_mark(origin, view.prefix)
        except (NotFoundError, DamagedError):
            return ()
        return mark.kept if mark is not None else ()
    return tuple(entry.name for entry in await catalog.objects_of(origin, view.prefix) if holds_bytes(entry.name))


async def mark_bare(
    mirror: Store, tag: str, attempt: AttemptId, kept: Collection[str], outcome: Outcome | None, *, reason: str = LEFT_OUT
) -> None:
    """Make the undecided or missing attempt at the mirror a bare holder, which keeps the objects `kept`. The mark comes before
    the outcome, so it is a checkpoint at no moment.
    """
    prefix, n, step = f"{tag}/{attempt}", outcome.order[1] if outcome else 0, outcome.step if outcome else -1
    await CatalogLog(mirror).append(record_of("intent", tag, attempt, n=n, step=step))
    mark = Deleted(reason=reason, kept=tuple(sorted(kept)), user=user(), writer=writer())
    await mirror.put_if_absent(f"{prefix}/{DELETED}", encode(mark))
    if outcome is not None:
        await mirror.put_if_absent(f"{prefix}/{OUTCOME}", encode(outcome))
        await note_outcome(mirror, outcome)
    await note_kept(mirror, tag, attempt, reason=reason)


async def note_kept(mirror: Store, tag: str, attempt: AttemptId, *, reason: str = LEFT_OUT) -> None:
    """Let the catalog name the objects that a bare holder has now, so that a collection finds them when nobody needs them."""
    there = [entry.name for entry in await catalog.objects_of(mirror, f"{tag}/{attempt}") if holds_bytes(entry.name)]
    await note(mirror, record_of("removed", tag, attempt, reason=reason, kept=there))


async def forget(mirror: Store, tag: str, attempt: AttemptId) -> None:
    """Remove all of an attempt at the mirror that is no checkpoint, so that it can be copied again."""
    await remove_records(mirror, f"{tag}/{attempt}")
    await note(mirror, record_of("forgotten", tag, attempt))


async def is_kept(mirror: Store, holder: str, names: Collection[str]) -> bool:
    """Whether no mark of the attempt `holder` at the mirror condemns one of its objects `names`."""
    try:
        mark = await greatest_mark(mirror, holder)
    except (NotFoundError, DamagedError):
        return False
    return mark is None or set(names) <= set(mark.kept)


async def is_free(mirror: Store, holder: str, without: Collection[str]) -> bool:
    """Whether nothing at the mirror but the attempts `without` refers to objects of `holder`, as far as that can be read."""
    try:
        return not await references(mirror, {holder}, without)
    except DamagedError:
        return False


async def is_needed(mirror: Store, key: str) -> bool:
    """Whether a checkpoint at the mirror refers to the object `key`, or may do so. Copies that were begun do not count: they
    compare the object before their commit.
    """
    begun = {view.prefix for view in await catalog.scan(mirror, newest=0) if view.state == "in-doubt"}
    try:
        return key in await references(mirror, {holder_of(key)}, begun)
    except DamagedError:
        return True
