"""RayCheckpointer: a Checkpointer in Ray Train's training function, which reports each save to Ray when it has ended.

Invariants
  RAY-1  Ray registers a save only when it has ended on all ranks, and what it registers can be loaded: the checkpoint, or, if
      the save failed, the newest one before it. A save that fails does not end training. If Ray's storage does not take a
      report, that ends training, as with Ray's own reports. A restart then loads the checkpoint.
  RAY-2  A checkpoint whose reference Ray has removed is removed at the root once a newer one that stays was read back. At the
      run's own root, so is one that report() has saved and that has no reference, since a worker died. No other one is removed.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from ray import train
from ray.train import CheckpointUploadMode

from checkpointd.daemon.protocol.wire import METRICS_MAX
from checkpointd.errors import CheckpointdError, StoreError, UsageError
from checkpointd.waits import Waiting
from checkpointd_client.checkpointer import Checkpointer, core_of
from checkpointd_client.integrations.ray import reference
from checkpointd_client.integrations.ray.reference import OF_THE_RUN, Reference
from checkpointd_client.integrations.ray.storage import root_of
from checkpointd_client.saver import check_metrics
from checkpointd_client.saves.handle import OwnHandle, SaveHandle

log = logging.getLogger("checkpointd")

REPORTED = "ray_report"
"""The metric which shows that report() has saved a checkpoint. After a restart, nothing else tells these checkpoints from those
of save().
"""
REGISTER_S = 300.0
"""How long close() waits until Ray has registered a save that has ended."""


class RayCheckpointer(Checkpointer):
    """A Checkpointer for the training function of a `TorchTrainer`. Make it on every worker.

    `root`: a directory or bucket that every worker sees. None: `checkpointd` in the run's directory in Ray's storage path.
    `options`: those of `Checkpointer`. `job` is the run's name, so a restart by Ray takes the root over.

    Ray's `CheckpointConfig` (`num_to_keep`, `checkpoint_score_attribute`) decides which checkpoints stay. Raises what
    `Checkpointer` raises, and UsageError outside a training function, or for a storage path that needs `root`.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, **options: Any) -> None:
        try:
            context = train.get_context()
            self._storage = context.get_storage()
        except Exception as error:
            raise UsageError(
                f"RayCheckpointer works in the training function of Ray Train's TorchTrainer ({error}). In another process, "
                "open_reported(result.checkpoint) reads a checkpoint"
            ) from error
        self._is_of_the_run = root is None
        if root is None:
            root = root_of(self._storage.storage_filesystem, self._storage.experiment_fs_path)
        super().__init__(root, **{"job": context.get_experiment_name(), **options})
        status = self.status()
        self._is_first, self._place = status.rank == 0, status.root
        self._reporting: dict[threading.Event, OwnHandle] = {}
        """The saves that were reported and that Ray has not registered."""
        self._seen: dict[str, str | None] = {}
        """The references that are there, with their tags."""
        self._dropped: set[str | None] = set()
        """The tags whose references Ray has removed."""
        self._newest: tuple[str, int] | None = None
        newest = self.list()
        if newest:
            self._newest = newest[0].tag, newest[0].step

    def report(
        self,
        metrics: dict[str, Any],
        step: int | None = None,
        state: Mapping[str, object] | None = None,
        *,
        tag: str | None = None,
        client_state: Mapping[str, object] | None = None,
        required: bool = False,
        checkpoint_dir_name: str | None = None,
        validation: Any = False,
    ) -> SaveHandle | None:
        """Save `state`, and report it to Ray with `metrics` when it has committed. Returns at once, as `save()` does.

        Call it on every worker, like `ray.train.report`. Without `state`, it reports only `metrics` and returns None. `tag`,
        `client_state` and `required` are those of `save()`; `checkpoint_dir_name` and `validation` are those of Ray. If the
        save fails, the log says so, and the newest earlier checkpoint is reported. Raises what `save()` raises.
        """
        if (step is None) != (state is None):
            raise UsageError(
                "report(metrics, step, state) saves, and report(metrics) does not save: give both step and state, or none"
            )
        if step is None or state is None:
            train.report(metrics, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
            return None
        handle = self.save(step, state, tag=tag, client_state=client_state, metrics=_numbers(metrics), required=required)
        assert isinstance(handle, OwnHandle)  # save() makes no other
        if handle.phase == "skipped":
            train.report(metrics, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
            return handle
        done = threading.Event()
        self._reporting[done] = handle
        upload = partial(self._upload, handle, done)
        # Ray may refuse a report, or skip it because another worker has failed. It then drops `upload` without a call.
        weakref.finalize(upload, done.set).atexit = False
        train.report(
            metrics,
            checkpoint=train.Checkpoint(self._storage.experiment_fs_path, self._storage.storage_filesystem),
            checkpoint_dir_name=checkpoint_dir_name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=upload,
            validation=validation,
        )
        return handle

    def close(self) -> None:
        """Wait until Ray knows how each save ended, at most REGISTER_S after its end, then close as a Checkpointer does."""
        self._finish_reports()
        super().close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._finish_reports()
        super().__exit__(kind, error, trace)

    def _finish_reports(self) -> None:
        for done, handle in list(self._reporting.items()):
            handle.ended_within(None)
            if not Waiting(partial(_missing, handle)).until(done.wait, REGISTER_S):
                words = (
                    "%s is not registered with Ray %g s after its save has ended. close() does not wait any longer: check "
                    "whether %s answers"
                )
                log.error(words, handle.tag, REGISTER_S, self._storage.experiment_fs_path)
                return

    # --- on the thread on which Ray uploads --------------------------------------------------------------------------

    def _upload(self, handle: OwnHandle, done: threading.Event, _: Any, name: str) -> Any:
        """Wait for the save, and write the reference `name`. Ray calls it for one report after another."""
        try:
            directory = self._storage.build_checkpoint_path_from_name(name)
            handle.ended_within(None)
            error = handle.exception()
            if error is None:
                self._newest = handle.tag, handle.step
            if self._is_first:
                self._refer(handle, error, directory)
            return train.Checkpoint(directory, self._storage.storage_filesystem)
        finally:
            self._reporting.pop(done, None)
            done.set()

    def _refer(self, handle: SaveHandle, error: BaseException | None, directory: str) -> None:
        root = OF_THE_RUN if self._is_of_the_run else self._place
        if error is None:
            found = Reference(root, handle.tag, handle.attempt, handle.step)
        else:
            tag, step = self._newest or (None, None)
            found = Reference(root, tag, None, step, str(error))
            log.error("%s failed; Ray gets %s in its place: %s", handle.tag, tag or "a reference to no checkpoint", error)
        try:
            found.write(self._storage.storage_filesystem, directory)
        except OSError as fault:
            there = (
                f"{found.tag} is committed at {self._place}, and a restart loads it" if found.tag else "nothing has committed"
            )
            raise StoreError(
                f"Ray's storage does not take the report of {handle.tag}: {directory} cannot be written ({fault}). {there}. "
                "Ray ends training when a report fails: repair its storage_path, and allow restarts, for example with "
                "FailureConfig(max_failures=3)"
            ) from fault
        if error is None and not core_of(self).closed:  # after an error, Ray registers saves of a closed checkpointer
            try:
                self._remove_dropped(handle.tag, directory)
            except (CheckpointdError, OSError) as fault:
                log.warning("checkpoints that Ray has removed are still at %s: %s", self._place, fault)

    def _remove_dropped(self, reported: str, directory: str) -> None:
        """Of the checkpoints older than the `reported` one of `directory`, remove those without a reference (RAY-2)."""
        storage, before = self._storage, set(self._seen.values())
        self._seen.pop(directory, None)  # a `checkpoint_dir_name` may be given twice
        self._seen = reference.tags(storage.storage_filesystem, storage.experiment_fs_path, self._seen)
        named = set(self._seen.values())
        self._dropped = (self._dropped | before) - named
        is_older = is_safe = False
        for checkpoint in self.list():
            # Without a reference, it was never reported, or was dropped while no worker ran.
            is_unnamed = self._is_of_the_run and REPORTED in checkpoint.metrics and checkpoint.tag not in named
            is_dropped = checkpoint.tag in self._dropped or is_unnamed
            if is_older and is_safe and is_dropped:
                self.delete(checkpoint.tag)
            is_older |= checkpoint.tag == reported
            is_safe |= checkpoint.read_back == "whole" and not is_dropped


def _missing(handle: SaveHandle) -> str:
    return f"{handle.tag} is not registered with Ray yet: Ray's upload thread is still working on it, or on a report before it"


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that a checkpoint can keep; Ray keeps all of them."""
    found: dict[str, float] = {REPORTED: 1.0}
    for name, value in metrics.items():
        if isinstance(value, int | float) and len(found) < METRICS_MAX:
            with suppress(UsageError):
                found.update(check_metrics({name: +value}))
    return found
