"""Compares the directories of checkpoints of files with what was committed, for readers: it shows, restores and locks nothing.

Invariants
  SHOWN-1  A job may be showing or replacing a checkpoint at this moment, so a difference counts only if looks spread over some
      seconds find it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from checkpointd.layout.keys import SERVICE
from checkpointd.layout.manifest import Outcome
from checkpointd.phrases import listed
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.tag_directories import files_of, is_gone
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience
from checkpointd.store.showing import plain_files_of


async def without_directory(store: Store, checkpoints: Collection[Checkpoint], absence_s: float) -> set[str]:
    """The prefixes of the `checkpoints` whose directory is missing: somebody removed it, or it was never shown.

    A directory counts as missing if looks spread over `absence_s` seconds do not find it.
    """
    plain = plain_files_of(store)
    if plain is None:
        return set()
    files = [checkpoint for checkpoint in checkpoints if checkpoint.outcome.shown_at]
    gone = await asyncio.gather(*(is_gone(plain, one.outcome.shown_at, absence_s) for one in files))
    # While a file system is not mounted, everything is gone, this root as well.
    if not await plain.is_there(SERVICE):
        return set()
    return {checkpoint.prefix for checkpoint, missing in zip(files, gone, strict=True) if missing}


async def unlike(store: Store, outcome: Outcome, absence_s: float) -> str | None:
    """The files of the commit `outcome` that its directory does not show as they were stored, in words; None if it shows
    all."""
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
