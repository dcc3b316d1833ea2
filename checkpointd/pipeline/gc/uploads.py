"""Aborts the uploads of killed writers.

Invariant: an upload goes only if its attempt is decided or removed. Nothing that such an attempt still uploads can become part
of a checkpoint, so a writer that is alive all the same loses nothing. The exception is a mirror that copies an object again for
a checkpoint that is there: its run fails, the checkpoint has what it had, and the next run begins the object anew.
"""

from __future__ import annotations

import logging

from checkpointd.errors import StoreError
from checkpointd.layout.keys import OUTCOME, AttemptId, holder_of, is_tag
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.store.base import Store
from checkpointd.store.uploads import UnfinishedUpload, abort_upload_of, unfinished_uploads_of

log = logging.getLogger("checkpointd")


async def abort_dead_uploads(store: Store, known: CatalogLog, *, dry_run: bool = False) -> list[UnfinishedUpload]:
    """Abort the dead uploads at the root, and return them; with `dry_run`, only return them. If they cannot be listed or
    aborted, as for want of a right, the log says so.
    """
    gone: list[UnfinishedUpload] = []
    try:
        for upload in await unfinished_uploads_of(store):
            if await _is_dead(store, known, upload.key):
                if not dry_run:
                    await abort_upload_of(store, upload)
                gone.append(upload)
    except StoreError as error:
        log.warning("%s; the parts of unfinished uploads are charged until they are aborted", error)
    return gone


async def _is_dead(store: Store, known: CatalogLog, key: str) -> bool:
    if not _is_of_attempt(key):
        return False
    prefix = holder_of(key)
    if await store.stat(f"{prefix}/{OUTCOME}") is not None:
        return True
    await known.refresh()
    if known.fault or not known.state.number:
        return False
    # An attempt is announced before its first upload begins (ATTEMPT-8), so one that is not in the catalog was forgotten.
    entry = known.state.entries.get(prefix)
    return entry is None or not entry.is_open


def _is_of_attempt(key: str) -> bool:
    tag, *rest = key.split("/")
    return is_tag(tag) and len(rest) >= 2 and AttemptId.parse(rest[0]) is not None
