"""Shows what an earlier job has committed and not shown, before anybody looks for it by name."""

from __future__ import annotations

import logging
import os

from checkpointd.config import PersistConfig
from checkpointd.errors import CheckpointdError
from checkpointd.layout.keys import SERVICE
from checkpointd.pipeline.root.tag_directories import settle
from checkpointd.store import open_store
from checkpointd_client.integrations.lightning.places import local_path
from checkpointd_client.ranks.writer import WriterThread

log = logging.getLogger("checkpointd")

SHOWING_S = 60.0


def show_commits(folder: str) -> None:
    """Show the commits of the root in `folder`, if there is one. All processes of a job may call it. Raises nothing."""
    path = local_path(folder)
    root = None if path is None else os.path.join(path, SERVICE)
    if root is None or not os.path.isdir(root) or not os.access(root, os.W_OK | os.X_OK):
        return
    try:
        writer = WriterThread(threads=PersistConfig().encoders)
        try:
            store = open_store(root)
            try:
                writer.call(settle(store), SHOWING_S)
            finally:
                writer.call(store.close(), SHOWING_S)
        finally:
            writer.close()
    except (CheckpointdError, OSError) as error:
        log.error("what was committed in %s and not shown yet stays so for now: %s", path, error)
