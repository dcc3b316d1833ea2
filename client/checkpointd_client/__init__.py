"""checkpointd for training scripts: saves beside training, commits on all ranks, and restarts from the newest whole checkpoint.

Names that need torch are imported at their first use, so `checkpointd_client.query` works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpointd import __version__
from checkpointd_client.lazy_names import names_of

if TYPE_CHECKING:
    from checkpointd.commit.retention import Retention
    from checkpointd.config import ExportConfig, SpoolConfig
    from checkpointd_client.capture.plain.classes import StoredMember
    from checkpointd_client.capture.rng import RngState
    from checkpointd_client.checkpointer import Checkpointer
    from checkpointd_client.export.consolidate import consolidate
    from checkpointd_client.export.state_dict import StateDict
    from checkpointd_client.loaded import Loaded
    from checkpointd_client.reader import OpenCheckpoint, open_checkpoint
    from checkpointd_client.roots import list_checkpoints, rollback
    from checkpointd_client.saves.handle import SaveHandle, Timings
    from checkpointd_client.saves.status import AttemptStatus, CheckpointInfo, Status

__all__ = [
    "AttemptStatus",
    "CheckpointInfo",
    "Checkpointer",
    "ExportConfig",
    "Loaded",
    "OpenCheckpoint",
    "Retention",
    "RngState",
    "SaveHandle",
    "SpoolConfig",
    "StateDict",
    "Status",
    "StoredMember",
    "Timings",
    "__version__",
    "consolidate",
    "list_checkpoints",
    "open_checkpoint",
    "rollback",
]

_HOMES = {
    "AttemptStatus": "saves.status",
    "CheckpointInfo": "saves.status",
    "Checkpointer": "checkpointer",
    "ExportConfig": "checkpointer",
    "Loaded": "loaded",
    "OpenCheckpoint": "reader",
    "Retention": "checkpointer",
    "RngState": "capture.rng",
    "SaveHandle": "saves.handle",
    "SpoolConfig": "checkpointer",
    "StateDict": "export.state_dict",
    "Status": "saves.status",
    "StoredMember": "capture.plain.classes",
    "Timings": "saves.handle",
    "consolidate": "export.consolidate",
    "list_checkpoints": "roots",
    "open_checkpoint": "reader",
    "rollback": "roots",
}

if not TYPE_CHECKING:  # a type checker that saw it would take every name for an export
    __getattr__ = names_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
