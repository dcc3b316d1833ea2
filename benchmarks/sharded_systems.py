"""The systems that save FSDP2 state: each behind the calls of `systems.py`, all of them with the same DTensors."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.systems import (
    Checkpointd,
    CheckpointdRaw,
    Dcp,
    DcpProcess,
    DcpProcessReused,
    DcpThread,
    DcpThreadReused,
    Saving,
    System,
    TorchCheckpointing,
    nothing,
)


class _Global(Dcp):
    """One tree for all ranks: its DTensors say what each has, and what is plain in it is the same on all."""

    def open(self) -> None:
        """No names for each rank."""
        super().open()
        self._tree = self.tree


class Blocking(_Global):
    """dcp.save, which training waits for."""

    def save(self, step: int) -> Saving:
        """Call dcp.save; returns when every rank has written."""
        dcp_save(self._tree, checkpoint_id=self.path(step), process_group=self._group)
        return Saving(nothing, nothing)


class Thread(_Global, DcpThread):
    """async_save's default."""


class ThreadReused(_Global, DcpThreadReused):
    """A writer thread, and one stager whose buffers are reused."""


class Process(_Global, DcpProcess):
    """A writer process, and async_save's default stager."""


class ProcessReused(_Global, DcpProcessReused):
    """A writer process, and one stager whose buffers are reused and shared with it."""


class OwnParts(TorchCheckpointing):
    """torch_checkpointing as it comes: every rank keeps its own part of each DTensor.

    Another number of ranks needs its DefaultResharder, declared from the first save on. With it, version 0.1.1 moves the ranks'
    metadata through CUDA tensors at every save, so ranks without a GPU cannot save at all.
    """

    reshards = False


class _Objects(Checkpointd):
    """The module and the optimizer go in as they are."""

    def _objects(self) -> dict[str, Any]:
        return {"model": self.state.model, "optimizer": self.state.optimizer}


class Compressed(_Objects):
    """checkpointd, which chooses compression by itself."""


class Raw(_Objects, CheckpointdRaw):
    """checkpointd that stores every chunk as it is."""


SYSTEMS: dict[str, type[System]] = {
    "dcp.save": Blocking,
    "dcp-thread": Thread,
    "dcp-thread-reused": ThreadReused,
    "dcp-process": Process,
    "dcp-process-reused": ProcessReused,
    "torch-checkpointing": OwnParts,
    "checkpointd": Compressed,
    "checkpointd-raw": Raw,
}
