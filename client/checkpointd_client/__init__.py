"""checkpointd for training scripts: non-blocking saves, an all-rank commit, and a restart that finds its way."""

from __future__ import annotations

from checkpointd_client.checkpointer import Checkpointer
from checkpointd_client.handle import SaveHandle, Timings
from checkpointd_client.loading import Loaded
from checkpointd_client.rng import RngState
from checkpointd_client.status import AttemptStatus, Status

__all__ = ["AttemptStatus", "Checkpointer", "Loaded", "RngState", "SaveHandle", "Status", "Timings"]
