"""Lightning's checkpoints, saved in the background, all or nothing. `docs/howto/LIGHTNING.md` shows how."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointd_client.integrations.lightning.checkpoint_io import CheckpointdIO
    from checkpointd_client.integrations.lightning.strategy import CheckpointdModelParallelStrategy

__all__ = ["CheckpointdIO", "CheckpointdModelParallelStrategy"]

_HOMES = {"CheckpointdIO": "checkpoint_io", "CheckpointdModelParallelStrategy": "strategy"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
