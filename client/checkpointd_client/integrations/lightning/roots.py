"""The roots that Lightning's checkpoints go to, each with its Checkpointer, from the first save until the training ends."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from typing import Any

from checkpointd.config import CommitConfig, Ranks
from checkpointd.errors import CheckpointdError, UsageError
from checkpointd_client.core import Core
from checkpointd_client.integrations.lightning.places import CheckpointPlace, place_to_save
from checkpointd_client.settings import Options

log = logging.getLogger("checkpointd")


class Roots:
    """`root`: the directory in which the root lies; None means that of each checkpoint. `options`: those of Checkpointer.
    `ranks`: the ranks that save; None means all.
    """

    def __init__(self, root: str | os.PathLike[str] | None, options: dict[str, Any], ranks: Ranks | None = None) -> None:
        refused = sorted(options.keys() & {"retention", "pickle_client_state"})
        if refused:
            raise UsageError(
                f"CheckpointdIO takes no {' and no '.join(refused)}: ModelCheckpoint decides which checkpoints stay, and "
                "torch.save what they hold"
            )
        # A path that is saved again is the user's choice, whether this job has loaded from there or not.
        self.options = {"afresh": True, **options}
        Options.of(
            self.options if root is None else {"root": root, **self.options}, beside=("root",)
        )  # raises for a bad value before the training begins
        self.timeout_s = float(options.get("commit_timeout_s", CommitConfig().timeout_s))
        self._root = None if root is None else os.path.realpath(root)
        self._ranks = ranks
        self._open: dict[str, Core] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as in a process that Lightning spawns, has no root open."""
        return Roots, (self._root, self.options, self._ranks)

    def place(self, path: str | os.PathLike[str]) -> CheckpointPlace | None:
        """Where a save to `path` goes; None if Lightning itself saves it."""
        return place_to_save(path, {*self._open, *(() if self._root is None else (self._root,))})

    def core(self, folder: str) -> Core:
        """The Checkpointer of the root in `folder`, made if there is none."""
        found = self._open.get(folder)
        if found is None:
            found = self._open[folder] = Core(CheckpointPlace(folder, "any").root, Options.of(self.options), self._ranks)
        return found

    def is_open(self, folder: str) -> bool:
        """Whether this process has a Checkpointer for the root in `folder`."""
        return folder in self._open

    @property
    def of_one_rank(self) -> bool:
        """Whether this process saves by itself, so that it opens and closes them alone."""
        return self._ranks is not None

    def reaches(self, folder: str) -> bool:
        """Whether this process can use the root in `folder` now, without other ranks that begin there together with it."""
        return self.of_one_rank or self.is_open(folder)

    def remove(self, place: CheckpointPlace) -> bool:
        """Remove the checkpoint at `place`, in favour of others. Returns whether it is gone, or will never go."""
        try:
            if self.core(place.folder).let_go(place.tag):
                return True
        except CheckpointdError as error:
            log.error("%s is no longer needed and cannot be removed: %s", place.path, error)
            return True
        log.warning("%s stays for now: no other checkpoint there could be read back whole", place.path)
        return False

    def wait(self, timeout: float | None) -> None:
        """Wait until no save is in flight; raises their first error."""
        for core in list(self._open.values()):
            core.wait(timeout)

    def close(self) -> None:
        """Close all of them. Raises the error of a last save, unless another error is being handled, which it would hide."""
        cores, self._open = self._open, {}
        with ExitStack() as stack:  # all of them, even if one raises
            for core in cores.values():
                stack.callback(_close, core)


def _close(core: Core) -> None:
    handled = sys.exception()
    try:
        core.close(ends_well=handled is None)
    except CheckpointdError as error:
        if handled is None:
            raise
        log.error("the last save failed: %s", error)
