"""TorchFTCheckpointdManager: CheckpointdManager for runs of torchtitan with torchft, where replica groups come and go.

Invariants
  TORCHFT-1  Only the replica group whose participating rank is 0 has a start in the common folder. The others only read there.
      A group that becomes the first one takes the folder over, so a save of the group before can no longer commit.
  TORCHFT-2  Each replica group saves its data loader at every step in a folder of its own. If the storage is slower than the
      steps, some of these saves are skipped.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torchtitan.components.checkpointer import AsyncMode
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager

from checkpointd_client.core import Core
from checkpointd_client.integrations.torchtitan.checkpoints import CheckpointdManager
from checkpointd_client.integrations.torchtitan.step_folders import joined
from checkpointd_client.settings import Options


class TorchFTCheckpointdManager(TorchFTCheckpointManager, CheckpointdManager):
    """A CheckpointManager for torchft: use its Config in place of that of torchtitan's TorchFTCheckpointManager."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointdManager.Config):
        """The options of CheckpointdManager, and that of torchtitan's TorchFTCheckpointManager."""

        enable_ft_dataloader_checkpoints: bool = True
        """Save the data loader of each replica group at every step, so that no group trains on the same data twice."""

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.ft_manager and self.folder in self._roots and self.ft_manager.participating_rank() != 0:
            self._end(self.folder, is_over=False)  # another group saves there now
        return bool(super()._save(curr_step, last_step))

    def _ft_folder(self) -> str:
        return joined(self.folder, f"ft-replicat-{self.ft_replica_id}")

    def _ft_save(self, step: int) -> None:
        self.dcp_save(self.ft_states, self._create_checkpoint_id(step, folder=self._ft_folder()), AsyncMode.ASYNC)

    def _wait_for_saving(self) -> None:
        CheckpointdManager._wait_for_saving(self)

    def _begins_to_load(self, folder: str) -> bool:
        return not self.ft_manager and super()._begins_to_load(folder)

    def _begun(self, folder: str) -> Core:
        begins = folder not in self._roots
        root = super()._begun(folder)
        if begins and self.ft_manager:
            root.take_up()  # it has only been read from so far
        return root

    def _options(self, folder: str) -> Options:
        options = super()._options(folder)
        if not self.ft_manager:
            return options
        if folder == self.folder:
            return dataclasses.replace(options, take_over=True)
        return dataclasses.replace(options, when_busy="skip", sidecar=None, spool=None, full_every=None)
