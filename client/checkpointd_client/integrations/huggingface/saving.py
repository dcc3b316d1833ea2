"""Saves checkpoints of Trainer and Accelerate without DeepSpeed, and finds the checkpoint to resume from.

Invariants
  HFSAVING-1  All ranks meet, with a deadline, before the libraries' own barriers, which have none. If ranks are missing, the
      error names them.
  HFSAVING-2  Once the ranks have met, every rank votes on the attempt, even if the library or the user's objects raise an
      error.
  HFSAVING-3  A checkpoint of checkpointd is loaded only if all ranks have found it whole. An older one is taken in its place
      only if nobody named it, and if its damage is proven.
  HFSAVING-4  After a training, nothing of its checkpoints' roots stays in the process: no memory, thread or descriptor.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from typing import Any

import torch

from checkpointd import arguments
from checkpointd.commands import command
from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig
from checkpointd.errors import (
    CheckpointdError,
    DamagedError,
    FormatError,
    StagingError,
    StoreError,
    UnreadableError,
    UsageError,
)
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd_client.capture.optimizers import tensors_of
from checkpointd_client.core import Core
from checkpointd_client.integrations.directories.agreement import agreed
from checkpointd_client.integrations.directories.opening import (
    UNREADABLE,
    WHOLE,
    Opened,
    first_said,
    known_of,
    opened,
    said_of,
    words_of,
)
from checkpointd_client.integrations.directories.roots import OpenRoots
from checkpointd_client.integrations.directories.targets import SaveTarget, mount_fault, store_of, unmade
from checkpointd_client.integrations.huggingface.filling import Filled, Filling, Wanted
from checkpointd_client.integrations.huggingface.replacing import SAVES
from checkpointd_client.integrations.huggingface.taking import Taking
from checkpointd_client.ranks.board import COORDINATOR, find_ranks
from checkpointd_client.saves.handle import OwnHandle

log = logging.getLogger("checkpointd")

_DOING = "looking for a checkpoint to resume from"


class DirectorySaver:
    """Saves to directories. `handle` is the handle of the last save."""

    def __init__(self, root: str | os.PathLike[str] | None, options: dict[str, Any], *, synchronous: bool) -> None:
        self.handle: OwnHandle | None = None
        self._root = None if root is None else os.path.abspath(os.fspath(root))
        self._synchronous, self._options = synchronous, options
        self._timeout_s = options.get("commit_timeout_s", CommitConfig().timeout_s)
        arguments.seconds("commit_timeout_s", self._timeout_s, most=arguments.TIMEOUT_S_MAX)
        self._roots = OpenRoots(store_of, options)
        self._failed: OwnHandle | None = None
        """The last save of a training that has ended, if it failed: close() raises its error."""

    # --- what a user may ask for -------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight. Raises an error if a save has failed."""
        self._roots.wait(timeout)

    def settle(self) -> None:
        """Wait until no save is in flight and old checkpoints are removed. Raises nothing."""
        SAVES.settle()

    def close(self) -> None:
        """Wait for the saves in flight, and leave the roots. A later save opens them again."""
        SAVES.settle()
        self._roots.close()
        failed, self._failed = self._failed, None
        if failed is not None and not failed.observed and (error := failed.peek()) is not None:
            raise error

    def leave(self) -> None:
        """Wait for the saves in flight, and leave the roots (HFSAVING-4). Raises nothing: a later close() does."""
        SAVES.settle()
        self._roots.leave()
        failed = self.handle is not None and self.handle.phase in (Phase.ABORTED, Phase.FAILED)
        self._failed = self.handle if failed else None

    # --- saving ------------------------------------------------------------------------------------------------

    def serves(self, engine: Any | None) -> bool:
        """Whether no engine takes part."""
        return engine is None

    def filling(self, wanted: Wanted) -> Filling | None:
        """Let the directory be filled out of sight for the next save. Call it on every rank. None if it cannot have a root."""
        try:
            target = self._target(wanted.directory)
        except (UsageError, FormatError) as error:
            log.warning("%s is written without checkpointd: %s", wanted.directory, error)
            return None
        self.handle = None  # an error below must not leave the handle of an earlier save
        said, above = {"directory": wanted.directory, "step": wanted.step}, os.path.dirname(wanted.directory)
        fault = unmade(above) if find_ranks().rank == COORDINATOR else None
        fault = agreed("save", said, fault, self._timeout_s)[COORDINATOR]
        if fault is not None:
            raise UsageError(f"{above} cannot be made, so nothing can be saved there: {fault}")
        checkpointer = self._roots.to_save(target.root)
        if self._options.get("retention") is None:
            checkpointer.take_up()  # the library's limit decides what stays, whether this job has loaded from there or not
        given = checkpointer.fill(target.at, whole=True)
        taking = Taking(given.path, stepped(wanted.optimizers))
        save = functools.partial(self._save, checkpointer, target, wanted.step, taking)
        refused = functools.partial(self._refused, checkpointer, target, wanted.step, given.name)
        return Filling(wanted.directory, Filled(given.name, given.path), save, taking.active, refused)

    def _target(self, directory: str) -> SaveTarget:
        """Where a directory is saved: its root is the directory above. Accelerate's `checkpoints` may contain nothing else, so
        the root of what lies in it is above that.
        """
        above, name = os.path.split(directory)
        root = self._root or (os.path.dirname(above) if os.path.basename(above) == "checkpoints" else above)
        return SaveTarget.of(above, name, root)

    def _save(
        self, checkpointer: Core, target: SaveTarget, step: int, taking: Taking, filling: Filling, usual: tuple[str, ...]
    ) -> OwnHandle:
        del usual  # of engines
        with SAVES.beginning(filling.directory):
            handle = self._begun(checkpointer, target, step, taking, filling)
        if self._synchronous:
            handle.wait()
            SAVES.settle()  # old checkpoints have gone, too
        return handle

    def _begun(self, checkpointer: Core, target: SaveTarget, step: int, taking: Taking, filling: Filling) -> OwnHandle:
        name = filling.filled.name
        fault = filling.filled.fault or mount_fault(store_of(target.root), os.path.dirname(filling.directory))
        if fault is not None:
            handle = checkpointer.refuse(step, StoreError(fault), tag=target.tag, unfinished=name)
        else:
            try:
                files = taking.files()
            except CheckpointdError as error:
                self._refused(checkpointer, target, step, name, error)
                raise
            handle = checkpointer.save_files(step, files, tag=target.tag, at=target.at, unfinished=name)
        self.handle = handle
        SAVES.add(filling.directory, handle)
        return handle

    def _refused(self, checkpointer: Core, target: SaveTarget, step: int, unfinished: str, error: BaseException) -> None:
        """Vote no because of `error`, which is raised here."""
        told = error if isinstance(error, CheckpointdError) else StagingError(f"{target.at} cannot be saved: {error!r}")
        self.handle = checkpointer.refuse(step, told, tag=target.tag, unfinished=unfinished)
        self.handle.observed = True
        SAVES.add(os.path.join(target.root, target.at), self.handle)

    # --- resuming ----------------------------------------------------------------------------------------------

    def chosen(self, engine: Any | None, folder: str, asked: str | None) -> str | None:
        """The checkpoint to load, found whole by all ranks; None if checkpointd has saved none there. Call it on every rank.

        DamagedError on every rank if `asked` is damaged, or all checkpoints in `folder` are; UnreadableError if it cannot be
        read now.
        """
        del engine
        folder = os.path.abspath(folder if asked is None else os.path.dirname(os.path.abspath(asked)))
        try:
            root = self._target(os.path.join(folder, "any")).root
        except (UsageError, FormatError):
            SAVES.settle(folder)
            return None
        SAVES.settle(root)
        is_ours, how = root in self._roots.checkpointers or os.path.isdir(store_of(root)), said_of(store_of(root))
        is_ours, how = agreed("load", {"folder": folder, "asked": asked}, [is_ours, how], self._timeout_s)[COORDINATOR]
        if not is_ours:
            return None
        begin = functools.partial(self._roots.checkpointer, root)
        with opened(store_of(root), begin, how, self._timeout_s, self._options, saves=False) as source:
            found, own = self._found(source, folder, asked)
            if own is not None:
                source.go_on_from(own)
            elif found is not None:
                source.take_up()
            return found

    def _found(self, source: Opened, folder: str, asked: str | None) -> tuple[str | None, LoggedAttempt | None]:
        """The directory to load, and the checkpoint that it shows; None for that of another program."""
        ranks, (known, fault) = find_ranks(), known_of(source)
        shown = {c.commit.shown_at: c for c in reversed(known.values())}  # the newest of each directory
        names = _numbered(folder) if asked is None else [os.path.basename(os.path.abspath(asked))]
        listed = [(name, self._prefix_of(shown, os.path.join(folder, name))) for name in names]
        if asked is None:
            listed = [(name, prefix) for name, prefix in listed if prefix is None or not known[prefix].left_behind]
        candidates = first_said(source, listed, fault)
        for name, prefix in candidates:
            if prefix is None:  # another program saved it
                return os.path.join(folder, name), None
            heard = source.meet(words_of(source, known.get(prefix), ranks.rank, ranks.world_size), _DOING)
            damage = [text for _, text in sorted(heard.items()) if text != WHOLE]
            if not damage:
                return os.path.join(folder, name), known[prefix]
            why = f"{os.path.join(folder, name)}: {'; '.join(damage)}"
            if any(text.startswith(UNREADABLE) for text in damage):
                raise UnreadableError(
                    f"{'; '.join(damage)}. The checkpoint may be whole, so no older one is loaded: repair the storage first"
                )
            if asked is not None:
                raise DamagedError(f"{why}: it is damaged")
            log.error("%s: it is damaged; trying an older checkpoint", why)
            source.pass_over(prefix, "; ".join(damage))
        if candidates:
            root = self._target(os.path.join(folder, "any")).root
            raise DamagedError(f"every checkpoint in {folder} is damaged: {command('verify', root)} says how")
        return None, None

    def _prefix_of(self, shown: dict[str, LoggedAttempt], directory: str) -> str | None:
        try:
            found = shown.get(self._target(directory).at)
        except (UsageError, FormatError):
            return None
        return None if found is None else found.prefix


def _numbered(folder: str) -> list[str]:
    """The names in `folder` that the libraries give to checkpoints, with the highest number first."""
    try:
        names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []
    numbered = [(int(found[1]), name) for name in names if (found := re.fullmatch(r"checkpoint[-_](\d+)", name))]
    return [name for _, name in sorted(numbered, reverse=True)]


def stepped(optimizers: tuple[Any, ...]) -> set[int]:
    """The addresses of the storages that only steps of `optimizers` change. Frozen parameters are not among them: they may be
    an average that the user computes.
    """
    found = set[int]()
    for optimizer in (getattr(one, "optimizer", one) for one in optimizers):
        if isinstance(optimizer, torch.optim.Optimizer):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            tensors = [getattr(one, "_local_tensor", one) for one in [*parameters, *tensors_of(optimizer)]]
            found |= {one.untyped_storage().data_ptr() for one in tensors}
    return found - {0}
