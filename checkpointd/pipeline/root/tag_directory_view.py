"""What directories show of checkpoints of files, for whoever may only look: nothing is shown, put back or locked.

Invariants
  SHOWN-1  A job may be showing a checkpoint, or replacing one, at this very moment: what one look finds is not yet so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from checkpointd.layout.keys import SERVICE
from checkpointd.layout.manifest import Outcome
from checkpointd.phrases import listed
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.tag_directories import files_of
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.showing import plain_files_of


async def without_directory(store: Store, checkpoints: Collection[Checkpoint], absence_s: float) -> set[str]:
    """Those of `checkpoints`, by prefix, whose directory is not there, as looks spread over `absence_s` seconds agree: somebody
    removed it, or it was never shown.
    """
    plain = plain_files_of(store)
    if plain is None:
        return set()
    files = [checkpoint for checkpoint in checkpoints if checkpoint.outcome.shown_at]
    gone = await asyncio.gather(*(_is_gone(plain, one.outcome.shown_at, absence_s) for one in files))
    # With a file system that is not mounted for a moment everything is gone, this root as well.
    if not await plain.is_there(SERVICE):
        return set()
    return {checkpoint.prefix for checkpoint, is_gone in zip(files, gone, strict=True) if is_gone}


async def _is_gone(plain: PlainFiles, at: str, absence_s: float) -> bool:
    with Patience(absence_s, absence_s).looks() as looks:
        while not await plain.is_there(at):
            if await looks.is_lost(at):
                return True
    return False


async def unlike(store: Store, outcome: Outcome, absence_s: float) -> str | None:
    """Which files of the commit `outcome` are not where they are to be shown, as they were stored; None where all are."""
    plain = plain_files_of(store)
    if plain is None or not outcome.shown_at:
        return None
    files = await files_of(store, outcome)
    with Patience(absence_s, absence_s).looks() as looks:
        while changed := await plain.changed(outcome.shown_at, files):
            if await looks.is_lost(outcome.shown_at):
                named = listed([f"{name} ({what})" for name, what in sorted(changed.items())], 3)
                return f"{outcome.shown_at} does not show what was committed: {named}"
    return None
