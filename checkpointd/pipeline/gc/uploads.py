"""Aborts the uploads of killed writers.

Invariant: an upload goes only if its attempt is decided or removed. Nothing that such an attempt still uploads can become part
of a checkpoint, so a writer that is alive all the same loses nothing. The exception is a mirror that copies an object again for
a checkpoint that is there: its run fails, the checkpoint has what it had, and the next run begins the object anew.
"""

from __future__ import annotations

import logging

from checkpointd.commit.log import is_admitted
from checkpointd.errors import StoreError
from checkpointd.layout.keys import AttemptId, holder_of, is_tag
from checkpointd.layout.log_records import LogState
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.uploads import UnfinishedUpload, abort_upload_of, unfinished_uploads_of

log = logging.getLogger("checkpointd")


async def abort_dead_uploads(store: Store, *, dry_run: bool = False) -> list[UnfinishedUpload]:
    """Abort the dead uploads at the root, and return them; with `dry_run`, only return them. If they cannot be listed or
    aborted, as for want of a right, the log says so.
    """
    gone: list[UnfinishedUpload] = []
    try:
        uploads, root_log = await unfinished_uploads_of(store), RootLog.of(store)
        # The log comes second: an attempt is announced before its first upload begins (ATTEMPT-8).
        state = await root_log.look() if uploads else root_log.state
        for upload in uploads:
            if not root_log.fault and _is_dead(state, upload.key):
                if not dry_run:
                    await abort_upload_of(store, upload)
                gone.append(upload)
    except StoreError as error:
        log.warning("%s; the parts of unfinished uploads are charged until they are aborted", error)
    return gone


def _is_dead(state: LogState, key: str) -> bool:
    if not _is_of_attempt(key) or not state.begins:
        return False
    known = state.attempts.get(holder_of(key))
    return known.status != "undecided" if known is not None else not is_admitted(state, holder_of(key))


def _is_of_attempt(key: str) -> bool:
    tag, *rest = key.split("/")
    return is_tag(tag) and len(rest) >= 2 and AttemptId.parse(rest[0]) is not None
