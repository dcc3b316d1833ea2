"""Checkpoints whose directory somebody has removed: they are not damaged, and no load takes them."""

from __future__ import annotations

import logging

from checkpointd.errors import CheckpointdError
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd_client.integrations.deepspeed.opening import Opened

log = logging.getLogger("checkpointd")


def without_removed(
    opened: Opened, rank: int, load_dir: str, known: dict[str, Checkpoint], fault: str | None
) -> tuple[dict[str, Checkpoint], str | None]:
    """`known`, by prefix, without those whose directory is gone, and why it cannot be told what there is. Rank 0 alone looks,
    since it says to all others what may be loaded.
    """
    if rank != 0 or fault is not None:
        return known, fault
    try:
        removed = opened.removed()
    except CheckpointdError as error:
        return {}, str(error)
    for prefix in sorted(removed & known.keys()):
        log.warning("%s in %s was removed: its directory is gone, and the checkpoint goes with it", prefix, load_dir)
    return {prefix: checkpoint for prefix, checkpoint in known.items() if prefix not in removed}, fault
