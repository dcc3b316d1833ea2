"""A checkpoint manager for torchtitan: it saves in the background, on all ranks or none. `docs/howto/TORCHTITAN.md` shows how.

It needs torchtitan, which is imported when one of its names is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpointd_client.integrations.torchtitan.checkpoints import CheckpointdManager
    from checkpointd_client.integrations.torchtitan.fault_tolerance import TorchFTCheckpointdManager

__all__ = ["CheckpointdManager", "TorchFTCheckpointdManager"]

_HOMES = {"CheckpointdManager": "checkpoints", "TorchFTCheckpointdManager": "fault_tolerance"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
