"""CheckpointdIO: a CheckpointIO for Lightning's Trainer that commits in the background.

Invariants
  LIGHTNING-1  A path names a file only when its save has committed. The file is what torch.save would have written.
  LIGHTNING-2  ModelCheckpoint's saves go on in the background. Any other save ends before the call returns: users who call
      Trainer.save_checkpoint read the file next, and a Slurm job that is requeued ends.
  LIGHTNING-3  All tensors are copied before the call returns. Lightning runs the forward and backward pass within the
      optimizer's step, so there is no time between steps in which a copy could go on. Also, callbacks such as WeightAveraging
      change weights outside of steps.
  LIGHTNING-4  An old checkpoint is removed after a newer one has committed (PENDING-1) and was read back whole.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from checkpointd.config import Ranks
from checkpointd_client.integrations.lightning.places import local_path, place_to_load
from checkpointd_client.integrations.lightning.reading import stored_content
from checkpointd_client.integrations.lightning.saves import TrainingSaves, step_of
from checkpointd_client.restore.verified import VerifiedFile
from checkpointd_client.saves.handle import OwnHandle
from checkpointd_client.unpickling.archive import entries_of

log = logging.getLogger("checkpointd")


def _on_host(storage: Any, location: Any) -> Any:
    """Lightning's default: every tensor is loaded to the host."""
    del location
    return storage


class CheckpointdIO(TorchCheckpointIO):  # type: ignore[misc]  # Lightning is not installed where types are checked
    """Saves Lightning's checkpoints in the background: `Trainer(plugins=[CheckpointdIO()])`.

    `root`: the directory that contains `.checkpointd`; by default, the directory of the checkpoints (ModelCheckpoint's
    `dirpath`). Checkpoints outside `root` get roots of their own. `options`: those of Checkpointer, except `retention` and
    `pickle_client_state`.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, **options: Any) -> None:
        super().__init__()
        self.saves = TrainingSaves(root, options, Ranks())  # rank 0 alone saves

    @property
    def handle(self) -> OwnHandle | None:
        """The handle of the last save on rank 0; None on other ranks, and before the first one."""
        return self.saves.pending.handle

    # --- saving ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None) -> None:
        """Copy `checkpoint` and return; the file `path` appears at the commit. Called on rank 0.

        Raises StateError for an object that cannot be pickled. An error of the storage is in `handle` and the log. It is raised
        only if the call waits for the commit (LIGHTNING-2).
        """
        place = self.saves.roots.place(path) if storage_options is None else None
        if place is None:
            if local_path(path) is None:
                log.warning("%s lies in another file system: Lightning itself saves it, before the call returns", path)
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        os.makedirs(os.path.dirname(place.path), exist_ok=True)
        files = {place.name: checkpoint}
        self.saves.save(place, lambda core: core.save_files(step_of(checkpoint), files, tag=place.tag, at=place.at))

    # --- loading -----------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = _on_host, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint at `path`. If checkpointd has committed it, every byte is verified, and DamagedError is raised
        if one is wrong. Lightning itself loads other files. `weights_only` means the same for both.
        """
        self.settle()
        place = place_to_load(path)
        if place is not None:

            def load(file: VerifiedFile) -> Any:
                entries_of(file)  # type: ignore[arg-type]  # torch would decompress what a stranger has compressed
                file.seek(0)
                return torch.load(file, map_location=map_location, weights_only=weights_only)  # type: ignore[arg-type]

            is_ours, content = stored_content(place, load, self.saves.roots.timeout_s)
            if is_ours:
                return content  # type: ignore[no-any-return]  # a dict, if Lightning has saved it
        found: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        return found

    # --- removing ----------------------------------------------------------------------------------------------

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path` once a newer one has committed (LIGHTNING-4). Called on rank 0."""
        absolute = local_path(path)
        if absolute is None:
            super().remove_checkpoint(path)
            return
        self.saves.remove(absolute)

    # --- ending ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait until no save is in flight and what was to be removed is gone, without raising the errors of saves."""
        self.saves.pending.settle()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight. Raises their first error, or WaitTimeoutError after `timeout` seconds."""
        self.saves.roots.wait(timeout)

    def teardown(self) -> None:
        """Called when a training ends: wait for the saves in flight and end the background threads.

        Raises the error of the last save if it failed, unless the training itself has failed.
        """
        self.saves.close()
