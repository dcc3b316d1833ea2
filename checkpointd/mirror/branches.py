"""Lets a mirror know which checkpoints were left behind at its origin, so that readers of both take the same one."""

from __future__ import annotations

from collections.abc import Iterable

from checkpointd.errors import NotFoundError
from checkpointd.layout.keys import LEFT_BEHIND
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.catalog_log import CatalogLog, record_of
from checkpointd.pipeline.root.latest import move_latest_to_newest
from checkpointd.store.base import Store


async def follow(origin: Store, mirror: Store, theirs: Iterable[AttemptView], ours: Iterable[AttemptView]) -> None:
    """Copy and remove the records of what was left behind, and move the mirror's `latest` if that changes the newest one."""
    there = {view.prefix: view for view in theirs}
    changed = [
        view
        for view in ours
        if view.prefix in there and view.state == "committed" and view.left_behind != there[view.prefix].left_behind
    ]
    if not changed:
        return
    for view in changed:
        key = f"{view.prefix}/{LEFT_BEHIND}"
        try:
            await (mirror.delete(key) if view.left_behind else mirror.put(key, await origin.get(key)))
        except NotFoundError:  # it has changed again since the look: the next step follows
            return
    records = [record_of("current" if view.left_behind else "left-behind", view.tag, view.attempt) for view in changed]
    await CatalogLog(mirror).append(*records)
    await move_latest_to_newest(mirror)
