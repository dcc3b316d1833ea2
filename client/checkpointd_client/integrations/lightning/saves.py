"""The saves of a training: where they go, what waits for their commits, and when the background threads end.

CheckpointdIO has one for its files, and CheckpointdModelParallelStrategy has one for its shards.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from checkpointd import arguments
from checkpointd.config import Ranks
from checkpointd_client.core import Core
from checkpointd_client.integrations.lightning.callbacks import follow, is_in_background
from checkpointd_client.integrations.lightning.pending import Pending
from checkpointd_client.integrations.lightning.places import CheckpointPlace, place_shown
from checkpointd_client.integrations.lightning.roots import Roots
from checkpointd_client.saves.handle import OwnHandle

log = logging.getLogger("checkpointd")


class TrainingSaves:
    """All saves of one training. `root`, `options`, `ranks`: those of Roots."""

    def __init__(self, root: str | os.PathLike[str] | None, options: Mapping[str, Any], ranks: Ranks | None = None) -> None:
        if root is not None:
            arguments.path("root", root)
        self.roots = Roots(root, dict(options), ranks)
        self.pending = Pending(self._remove)
        self._has_saved_in_background = False
        follow()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a process that Lightning has spawned."""
        self.__dict__.update(state)
        follow()

    def save(self, place: CheckpointPlace, begin: Callable[[Core], OwnHandle]) -> None:
        """Save to `place` by `begin`, and wait for the commit unless ModelCheckpoint saves (LIGHTNING-2)."""
        in_background = is_in_background()
        self._has_saved_in_background |= in_background
        try:
            handle = begin(self.roots.core(place.folder))
            self.pending.begin(place.path, handle)
            if not in_background:
                handle.wait()
        finally:
            self._close_without_teardown()

    def remove(self, path: str) -> None:
        """Remove the checkpoint at `path` once a newer one has committed."""
        self.pending.remove(path)
        if self.roots.of_one_rank:  # roots of all ranks are closed on all of them, and rank 0 alone removes
            self._close_without_teardown()

    def close(self) -> None:
        """Wait for the saves in flight and end the background threads. Raises the error of the last save if it failed, unless
        the training itself has failed.
        """
        self.pending.settle()
        self._has_saved_in_background = False
        self.roots.close()

    def _close_without_teardown(self) -> None:
        """Only a training, whose saves go on in the background, ends with a call of `close`."""
        if not self._has_saved_in_background:
            self.close()

    def _remove(self, path: str) -> bool:
        """Remove it now; returns whether it is gone, or will never go."""
        place = None if os.path.islink(path) else place_shown(path)
        if place is not None and self.roots.reaches(place.folder):
            return self.roots.remove(place)
        try:
            TorchCheckpointIO().remove_checkpoint(path)  # Lightning itself has saved it
        except OSError as error:
            log.error("%s is no longer needed and cannot be removed: %s", path, error)
        return True


def step_of(checkpoint: Mapping[str, Any]) -> int:
    """The step of a checkpoint of Lightning's; 0 if it has none."""
    step = checkpoint.get("global_step", 0)
    return step if type(step) is int and step >= 0 else 0
