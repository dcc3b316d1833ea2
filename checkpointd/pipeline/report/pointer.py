"""Where `latest` points, and whether that is where it should."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.store.base import Store

REPAIR = "the next start of the job, or `checkpointd recover`, sets it right"


class Pointer(msgspec.Struct, frozen=True, kw_only=True):
    """The tag that `latest` names. `damage`: it names no checkpoint. `behind`: a newer commit asked to be named instead."""

    tag: str | None
    damage: str = ""
    behind: str = ""

    @property
    def problem(self) -> str:
        return self.damage or self.behind


async def pointer(store: Store, checkpoints: Sequence[Checkpoint]) -> Pointer:
    """The pointer of `store`, judged by its `checkpoints`, newest first, as they were a moment ago."""
    try:
        tag = await catalog.latest(store)
    except DamagedError as error:
        return Pointer(tag=None, damage=f"{error}; {REPAIR}")
    named = next((c for c in checkpoints if c.tag == tag), None)
    if tag is not None and named is None:
        # It may have been committed since `checkpoints` were looked up.
        return Pointer(tag=tag, damage=await _fault(store, tag))
    due = next((c for c in checkpoints if c.outcome.save_latest), None)
    if due is not None and (named is None or named.outcome.order < due.outcome.order):
        names = f"names {tag}" if tag else "does not exist"
        behind = f"latest {names}, although {due.tag} was committed since; unless its job is just moving it, {REPAIR}"
        return Pointer(tag=tag, behind=behind)
    return Pointer(tag=tag)


async def _fault(store: Store, tag: str) -> str:
    try:
        await catalog.find(store, tag)
    except (NotFoundError, DamagedError) as error:
        return f"latest names {tag}, which cannot be loaded: {error}; {REPAIR}"
    return ""
