"""Lightning's checkpoints, saved in the background, all or nothing. `docs/howto/LIGHTNING.md` shows how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from checkpointd_client.lazy_names import names_of

if TYPE_CHECKING:
    from checkpointd_client.integrations.lightning.checkpoint_io import CheckpointdIO
    from checkpointd_client.integrations.lightning.strategy import CheckpointdModelParallelStrategy

__all__ = ["CheckpointdIO", "CheckpointdModelParallelStrategy"]

if not TYPE_CHECKING:
    __getattr__ = names_of(__name__, {"CheckpointdIO": "checkpoint_io", "CheckpointdModelParallelStrategy": "strategy"})
