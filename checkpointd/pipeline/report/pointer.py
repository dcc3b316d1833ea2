"""Where `latest` points, and whether that is where it should."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from checkpointd.errors import DamagedError
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
    """The pointer of `store`, judged by its `checkpoints`, newest first."""
    try:
        tag = await catalog.latest(store)
    except DamagedError as error:
        return Pointer(tag=None, damage=f"{error}; {REPAIR}")
    due = next((c for c in checkpoints if c.outcome.save_latest), None)
    named = next((c for c in checkpoints if c.tag == tag), None)
    if tag is not None and named is None:
        return Pointer(tag=tag, damage=f"latest names {tag}, which is not a checkpoint; {REPAIR}")
    if due is not None and (named is None or named.outcome.order < due.outcome.order):
        names = f"names {tag}" if tag else "does not exist"
        return Pointer(tag=tag, behind=f"latest {names}, although {due.tag} was committed since; {REPAIR}")
    return Pointer(tag=tag)
