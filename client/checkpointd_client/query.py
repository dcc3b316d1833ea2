"""Status for scripts: asks the node's daemon for saves in flight, commits and failures. Needs no torch.

from checkpointd_client.query import StatusClient

with StatusClient("/run/checkpointd/checkpointd.sock") as client:
    for root in client.status().roots:
        print(root.root, root.latest, [save.phase for save in root.in_flight])
"""

from __future__ import annotations

from checkpointd.daemon.query import TIMEOUT_S, AsyncStatusClient, StatusClient
from checkpointd.daemon.status.model import (
    CheckpointStatus,
    DaemonStatus,
    HeldStatus,
    MemoryStatus,
    RankStatus,
    RootStatus,
    SaveStatus,
)
from checkpointd.errors import SidecarError

__all__ = [
    "TIMEOUT_S",
    "AsyncStatusClient",
    "CheckpointStatus",
    "DaemonStatus",
    "HeldStatus",
    "MemoryStatus",
    "RankStatus",
    "RootStatus",
    "SaveStatus",
    "SidecarError",
    "StatusClient",
]
