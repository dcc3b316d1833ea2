"""A checkpoint manager for torchtitan: it saves in the background, on all ranks or none. `docs/howto/TORCHTITAN.md` shows how.

It needs torchtitan, which is imported when one of its names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpointd_client.lazy_names import names_of

if TYPE_CHECKING:
    from checkpointd_client.integrations.torchtitan.checkpoints import CheckpointdManager
    from checkpointd_client.integrations.torchtitan.fault_tolerance import TorchFTCheckpointdManager

__all__ = ["CheckpointdManager", "TorchFTCheckpointdManager"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, {"CheckpointdManager": "checkpoints", "TorchFTCheckpointdManager": "fault_tolerance"})
