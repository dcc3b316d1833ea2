"""The adapter for `layout="deepspeed"`: DeepSpeed's own files, taken from the engine and committed by a Checkpointer."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from checkpointd.errors import (
    CheckpointdError,
    StagingError,
    StoreError,
    UsageError,
)
from checkpointd.layout.keys import check_tag
from checkpointd_client.capture.torch_files import check_saveable
from checkpointd_client.integrations.deepspeed.adapter_base import Adapter, DirectoryError, SaveTarget, check_found, unmade
from checkpointd_client.integrations.deepspeed.checkpoint_engine import mount_fault, steps_elsewhere
from checkpointd_client.integrations.deepspeed.directories import missing_fault
from checkpointd_client.integrations.deepspeed.offline.file_names import STATES_END
from checkpointd_client.integrations.deepspeed.reading import FileReads
from checkpointd_client.integrations.deepspeed.search import Search

log = logging.getLogger("checkpointd")


class FilesAdapter(Adapter):
    """Saves and loads the files that DeepSpeed would have written."""

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's save_checkpoint, which returns once everything is snapshotted. See `engine.checkpoint_handle()`.

        Where the ranks name tags that differ, DeepSpeed's `tag_validation` says what becomes of it: TagError, or the tag of
        rank 0 counts. Raises what the arguments or objects of the caller are to blame for, and DeadlineError naming ranks that
        did not call it. What the storage does later ends up in the handle.
        """
        if not save_dir:
            raise DirectoryError(f"save_dir is {save_dir!r}; give the path of a directory")
        save_latest = bool(save_latest)  # DeepSpeed takes whatever counts as one
        step = int(self.engine.global_steps)
        tag = f"global_step{step}" if tag is None else str(tag)
        client = dict(client_state or {})
        self.handle = None  # where this raises, there is none
        SaveTarget.of(save_dir, tag, self._root)
        tag = self._one_of(self._meet("save_checkpoint()", {"save_dir": os.path.abspath(save_dir), "step": step}, tag))
        place, filled = SaveTarget.of(save_dir, tag, self._root), self.filled
        unfinished, folder = ("", save_dir) if filled is None else (filled.name, filled.path)
        checkpointer = self._begun(save_dir if filled is None else os.path.dirname(os.path.abspath(save_dir)), place.root)
        try:
            files, fault = self._collected(folder, tag, client, save_latest, exclude_frozen_parameters)
            if not any(isinstance(content, Mapping) and client.keys() <= content.keys() for content in files.values()):
                check_saveable("client_state", client)  # where another rank writes its own, the same is asked of all
            if filled is not None:
                # It appears by one rename: beside others of its kind, in a directory that must be there.
                folder = os.path.dirname(os.path.abspath(save_dir))
                fault = fault or filled.fault or (unmade(folder) if self.engine.global_rank == 0 else None)
            fault = fault or mount_fault(self._store_of(place.root), folder)
            optimizer_only = self._optimizer_only()
        except BaseException as error:
            told = (
                error if isinstance(error, CheckpointdError) else StagingError(f"DeepSpeed's save_checkpoint failed: {error!r}")
            )
            self.handle = checkpointer.refuse(step, told, tag=place.tag, save_latest=save_latest, unfinished=unfinished)
            self.handle.observed = True
            raise
        if fault is not None:
            self.handle = checkpointer.refuse(
                step, StoreError(fault), tag=place.tag, save_latest=save_latest, unfinished=unfinished
            )
        else:
            self.handle = checkpointer.save_files(
                step,
                files,
                tag=place.tag,
                at=place.at,
                save_latest=save_latest,
                optimizer_only=optimizer_only,
                unfinished=unfinished,
                leftovers=(STATES_END,),
            )
        return True

    def _collected(
        self, save_dir: str, tag: str, client_state: dict[str, Any], save_latest: bool, exclude: bool
    ) -> tuple[dict[str, Any], str | None]:
        """The files that DeepSpeed would have written, and what the file system refused meanwhile."""
        self._engine.collect(os.path.join(save_dir, tag))
        try:
            self._save(save_dir, tag, client_state, save_latest, exclude)
        finally:
            collected = self._engine.collected()
        return collected

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load_checkpoint, of what is committed and whole. On every rank.

        Without a tag, a damaged newest checkpoint is logged as an error and the newest whole one is loaded, by all ranks
        together. A named one that is damaged raises DamagedError on every rank, before anything is touched. What DeepSpeed
        itself has saved is left to DeepSpeed. Where another job is alive at the root, or nothing may be written
        there, it is only read; RootInUseError if it is the one `root` of this engine.
        """
        self.settle()
        said = {"load_dir": os.path.abspath(load_dir), "tag": tag if tag is None else str(tag)}
        is_universal = self.engine.load_universal_checkpoint()
        seen = self._is_own(load_dir), None if is_universal else missing_fault(load_dir, tag), self._said_of(load_dir)
        is_ours, missing, how = self._meet("load_checkpoint()", said, seen)[0]
        if is_universal:  # what was made of a checkpoint by a tool
            found = self._load(load_dir, tag, *args, **kwargs)
            with suppress(UsageError):  # from outside the root, where nothing of ours is
                self._roots.went_on_from = SaveTarget.root_of(load_dir, self._root)
            return found
        root = SaveTarget.root_of(load_dir, self._root)
        if not is_ours:
            check_found(missing)
            return self._load(load_dir, tag, *args, **kwargs)
        folder = os.path.dirname(SaveTarget.of(load_dir, "any", self._root).at)
        asked = None if tag is None else check_tag(str(tag))
        reading_of = functools.partial(FileReads, self.engine, args, kwargs)
        with self._opened(root, how) as source:
            chosen, contents = Search(self.engine, source, load_dir, folder, asked, self._store_of(root), reading_of).chosen()
            with self._engine.holding(contents):
                found = self._load(load_dir, chosen, *args, **kwargs)
            source.take_up()
        return found

    def _optimizer_only(self) -> set[int]:
        """Where everything lies that nothing but a step of the optimizer changes. Of frozen parameters that is not known: they
        may be an average that the user takes.
        """
        engine = self.engine
        if steps_elsewhere(engine.optimizer):
            return set()
        trained = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
        found = {parameter.untyped_storage().data_ptr() for parameter in trained}
        base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for group in getattr(base, "param_groups", ()):
            found |= {parameter.untyped_storage().data_ptr() for parameter in group["params"]}
        for state in getattr(base, "state", {}).values():
            found |= {value.untyped_storage().data_ptr() for value in state.values() if isinstance(value, torch.Tensor)}
        return found
