"""The adapter between a DeepSpeed engine and a Checkpointer, for every layout: it replaces the engine's methods.

Invariants
  ADAPTER-1  All ranks meet, with a deadline, before a Checkpointer is made and before DeepSpeed's own barriers, which never
      time out. If ranks are missing, the error names them.
  ADAPTER-2  Once the ranks have met, every rank votes on the attempt, even if DeepSpeed or the user's objects raise an error.
  ADAPTER-3  A load reads committed checkpoints: it waits for the saves in flight, on every rank.
  ADAPTER-4  If this job cannot begin at a root, a load only reads there, on every rank.
"""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from checkpointd import arguments
from checkpointd.config import CommitConfig
from checkpointd.errors import (
    CheckpointdError,
    ClosedError,
    StagingError,
    StateError,
    UsageError,
)
from checkpointd.layout.keys import SERVICE
from checkpointd_client.core import Core
from checkpointd_client.integrations.deepspeed.checkpoint_engine import CheckpointdEngine
from checkpointd_client.integrations.deepspeed.optimizer_process import OptimizerProcess
from checkpointd_client.integrations.directories.agreement import agreed
from checkpointd_client.integrations.directories.opening import Opened, Said, opened, said_of
from checkpointd_client.integrations.directories.roots import OpenRoots
from checkpointd_client.integrations.directories.targets import SaveTarget, store_of, unmade
from checkpointd_client.integrations.huggingface.filling import Filled
from checkpointd_client.saves.handle import OwnHandle

log = logging.getLogger("checkpointd")


class DirectoryError(UsageError, ValueError):
    """No directory was given to save in, or it cannot be made. Also a ValueError, as in DeepSpeed."""


class TagError(UsageError, AssertionError):
    """The ranks' tags differ, and DeepSpeed's `tag_validation` is "Fail". Also an AssertionError, as in DeepSpeed."""


def _detached() -> OwnHandle | None:
    """The checkpoint_handle() of an engine that is detached."""
    raise ClosedError(
        "checkpoint_handle() after detach(): DeepSpeed saves by itself again, before save_checkpoint() returns. The handle of "
        "the last save before detach() is `plug.handle`, of the Adapter that attach() returned"
    )


@dataclass(frozen=True, slots=True)
class SaveCall:
    """The arguments of one save_checkpoint, completed; `tag` is the tag that all ranks use."""

    save_dir: str
    tag: str
    step: int
    client_state: dict[str, Any]
    save_latest: bool
    exclude_frozen_parameters: bool


class Adapter(ABC):
    """The adapter of one engine. `handle` is the handle of its last save."""

    def __init__(self, engine: Any, settings: dict[str, Any]) -> None:
        self.engine = engine
        self.handle: OwnHandle | None = None
        root = settings.pop("root", None)
        if root is not None:
            arguments.path("root", root)
        self._root = None if root is None else os.fspath(root)
        self._synchronous = bool(settings.pop("synchronous", False))
        self._options = settings
        self._timeout_s = settings.get("commit_timeout_s", CommitConfig().timeout_s)
        arguments.seconds("commit_timeout_s", self._timeout_s, most=arguments.TIMEOUT_S_MAX)
        self._roots = OpenRoots(self._store_of, settings)
        self._engine = CheckpointdEngine(self.settle)
        self._process = OptimizerProcess.of(engine)
        self.is_attached = False
        self.filled: Filled | None = None
        """The unfinished directory that the next save_checkpoint completes, if another library fills one."""

    def connect(self) -> None:
        """Replace the engine's own methods."""
        engine = self.engine
        self._process.connect(self._roots.fence, self._roots.step_begins)
        self._save, self._load, self._destroy = engine.save_checkpoint, engine.load_checkpoint, engine.destroy
        self._stock = engine.checkpoint_engine
        engine.checkpoint_engine = self._engine
        self._copy = engine._copy_recovery_script
        engine._copy_recovery_script = self._copying
        engine.save_checkpoint, engine.load_checkpoint, engine.destroy = self._saving(), self.load_checkpoint, self.destroy
        engine.checkpoint_handle = lambda: self.handle
        self.is_attached = True

    def _saving(self) -> Callable[..., bool]:
        """The engine's new save_checkpoint, with the same parameters, since some libraries inspect them."""

        @functools.wraps(self.save_checkpoint)
        def save_checkpoint(*args: Any, **kwargs: Any) -> bool:
            saved = self.save_checkpoint(*args, **kwargs)
            if self._synchronous and self.handle is not None:
                self.handle.wait()
            return saved

        return save_checkpoint

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's save_checkpoint. It returns once everything that may change is snapshotted; the save goes on in the
        background (`engine.checkpoint_handle()`).

        If the ranks name different tags, DeepSpeed's `tag_validation` decides: either TagError is raised, or the tag of rank 0
        counts. Faulty arguments and objects raise here, as does DeadlineError, which names the ranks that did not call. The
        handle reports later failures of the storage.
        """
        if not save_dir:
            raise DirectoryError(f"save_dir is {save_dir!r}; give the path of a directory")
        arguments.path("save_dir", save_dir)
        step = int(self.engine.global_steps)
        tag = f"global_step{step}" if tag is None else str(tag)
        client = dict(client_state or {})
        self.handle = None  # an error below must not leave the handle of an earlier save
        SaveTarget.of(save_dir, tag, self._root)
        folder = os.path.abspath(save_dir)
        tag = self._one_of(self._meet("save_checkpoint()", {"save_dir": folder, "step": step}, tag))
        target = SaveTarget.of(save_dir, tag, self._root)
        # DeepSpeed takes any true value as save_latest.
        call = SaveCall(save_dir, tag, step, client, bool(save_latest), exclude_frozen_parameters)
        checkpointer = self._begun(save_dir if self.filled is None else os.path.dirname(folder), target.root)
        try:
            save = self._prepared(target, call)
        except BaseException as error:
            told = error if isinstance(error, CheckpointdError) else StagingError(f"the engine cannot be saved: {error!r}")
            self.handle = self._refused(checkpointer, target, call, told)
            self.handle.observed = True
            raise
        self.handle = save(checkpointer)
        return True

    @abstractmethod
    def _prepared(self, target: SaveTarget, call: SaveCall) -> Callable[[Core], OwnHandle]:
        """Gather the state of the engine; the returned function saves it. If this raises, the rank votes no (ADAPTER-2)."""

    def _refused(self, checkpointer: Core, target: SaveTarget, call: SaveCall, error: CheckpointdError) -> OwnHandle:
        """Vote no because of `error`."""
        unfinished = "" if self.filled is None else self.filled.name
        return checkpointer.refuse(call.step, error, tag=target.tag, save_latest=call.save_latest, unfinished=unfinished)

    @abstractmethod
    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load_checkpoint, for committed and undamaged checkpoints. Call it on every rank."""

    def _loaded_by_deepspeed(self, load_dir: str, tag: str | None, *args: Any, **kwargs: Any) -> Any:
        found = self._load(load_dir, tag, *args, **kwargs)
        if found[0] is not None:
            self._process.loaded()
        return found

    def detach(self) -> None:
        """Close, and give the engine its own methods back, even if close() raises."""
        try:
            self.close()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        engine = self.engine
        self._process.disconnect()
        engine.checkpoint_engine = self._stock
        engine.save_checkpoint, engine.load_checkpoint, engine.destroy = self._save, self._load, self._destroy
        engine._copy_recovery_script = self._copy
        engine.checkpoint_handle = _detached
        self.is_attached = False

    def _copying(self, save_path: str) -> None:
        """DeepSpeed's copy of its scripts, on rank 0 alone. An error is only logged: the other ranks wait in a barrier
        (ADAPTER-2).
        """
        try:
            self._copy(save_path)
        except OSError as error:
            log.warning("DeepSpeed's scripts could not be copied to %s: %s", save_path, error)

    def _is_own(self, load_dir: str) -> bool:
        """Whether there is a store for `load_dir`. Rank 0 decides for all, since ranks may see different states of a file
        system.
        """
        try:
            root = SaveTarget.root_of(load_dir, self._root)
        except UsageError:  # raised later, when no rank waits for this one
            return False
        return root in self._roots or os.path.isdir(os.path.join(root, SERVICE))

    def _said_of(self, load_dir: str) -> Said | None:
        """The message of this rank about the root of `load_dir`; None if `load_dir` has no root."""
        with suppress(UsageError):
            return said_of(self._store_of(SaveTarget.root_of(load_dir, self._root)))
        return None

    def _opened(self, root: str, said: Said) -> AbstractContextManager[Opened]:
        """Open `root` for a load, in the way that rank 0 `said` is possible (ADAPTER-4)."""
        begin, saves = functools.partial(self._roots.checkpointer, root), self._root is not None
        return opened(self._store_of(root), begin, said, self._timeout_s, self._options, saves=saves)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight; raises their errors."""
        self._roots.wait(timeout)

    def settle(self) -> None:
        """Wait until no save is in flight, without raising the errors of saves: they may differ between ranks, and the ranks go
        on to do something together.
        """
        self._roots.settle()

    def destroy(self) -> None:
        """DeepSpeed's destroy, after the saves in flight."""
        try:
            self.close()
        finally:
            self._destroy()

    def close(self) -> None:
        """Wait for the saves in flight and end the background threads."""
        self._roots.close()

    def leave(self) -> None:
        """Close the roots until the engine saves or loads again. Raises nothing."""
        self._roots.leave()

    def _begun(self, save_dir: str, root: str) -> Core:
        """The Checkpointer of a root to save in. DirectoryError on every rank if rank 0 cannot make the first `save_dir` there;
        for a later `save_dir`, the handle reports the error.
        """
        if root not in self._roots:
            fault = unmade(save_dir) if self.engine.global_rank == 0 else None
            fault = self._meet("save_checkpoint()", {"save_dir": os.path.abspath(save_dir)}, fault)[0]
            if fault is not None:
                raise DirectoryError(f"save_dir {save_dir} cannot be made: {fault}; give the path of a directory that can be")
        return self._roots.to_save(root)

    def _checkpointer(self, root: str) -> Core:
        return self._roots.checkpointer(root)

    @staticmethod
    def _store_of(root: str) -> str:
        """The directory of the store of a root."""
        return store_of(root)

    def _meet(self, doing: str, said: Mapping[str, object], own: Any) -> list[Any]:
        """Let all ranks meet, each with the same `said` (ADAPTER-1); returns the `own` of each rank. StateError on every rank
        if the optimizer's process of one of them stands in the way.
        """
        met = agreed(doing, said, (own, self._process.fault(self._timeout_s / 2)), self._timeout_s)
        for rank, (_, fault) in enumerate(met):
            if fault is not None:
                raise StateError(f"{doing} on rank {rank}: {fault}. Nothing was saved or loaded")
        return [one for one, _ in met]

    def _one_of(self, tags: list[str]) -> str:
        """The tag of rank 0. TagError if the tags differ and DeepSpeed's `tag_validation` is "Fail"."""
        other = next((rank for rank, tag in enumerate(tags) if tag != tags[0]), None)
        if other is not None:
            text = f"the ranks save under tags that differ: rank 0 under {tags[0]!r}, and rank {other} under {tags[other]!r}"
            if self.engine.checkpoint_tag_validation_fail():
                raise TagError(f"{text}; give one tag on all ranks")
            if self.engine.checkpoint_tag_validation_enabled():
                log.warning("%s; all of them are saved under %r", text, tags[0])
        return tags[0]
