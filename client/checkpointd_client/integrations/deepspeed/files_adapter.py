"""The adapter for `layout="deepspeed"`: DeepSpeed's own files, taken from the engine and committed by a Checkpointer."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from checkpointd.errors import NotFoundError, StoreError, UsageError
from checkpointd.layout.keys import check_tag
from checkpointd_client.capture.torch_files import check_saveable
from checkpointd_client.core import Core
from checkpointd_client.integrations.deepspeed.adapter_base import Adapter, SaveCall
from checkpointd_client.integrations.deepspeed.files_choice import FilesChoice
from checkpointd_client.integrations.deepspeed.offline.file_names import missing_fault
from checkpointd_client.integrations.deepspeed.reading import FileReads
from checkpointd_client.integrations.directories.targets import SaveTarget, mount_fault, unmade
from checkpointd_client.saves.handle import OwnHandle

log = logging.getLogger("checkpointd")


class FilesAdapter(Adapter):
    """Saves and loads the files that DeepSpeed would have written."""

    def _prepared(self, target: SaveTarget, call: SaveCall) -> Callable[[Core], OwnHandle]:
        filled, folder = self.filled, call.save_dir
        files, fault = self._collected(folder if filled is None else filled.path, call)
        client = call.client_state
        if not any(isinstance(content, Mapping) and client.keys() <= content.keys() for content in files.values()):
            check_saveable("client_state", client)  # all ranks make the check that the writing rank makes
        if filled is not None:
            # It appears by one rename, in a directory that must exist.
            folder = os.path.dirname(os.path.abspath(folder))
            fault = fault or filled.fault or (unmade(folder) if self.engine.global_rank == 0 else None)
        fault = fault or mount_fault(self._store_of(target.root), folder)
        if fault is not None:
            return lambda checkpointer: self._refused(checkpointer, target, call, StoreError(fault))
        optimizer_only = self._optimizer_only()
        return lambda checkpointer: checkpointer.save_files(
            call.step,
            files,
            tag=target.tag,
            at=target.at,
            save_latest=call.save_latest,
            optimizer_only=optimizer_only,
            unfinished="" if filled is None else filled.name,
        )

    def _collected(self, save_dir: str, call: SaveCall) -> tuple[dict[str, Any], str | None]:
        """The files that DeepSpeed would have written, and an error of the file system on the way."""
        self._engine.collect(os.path.join(save_dir, call.tag))
        try:
            self._save(save_dir, call.tag, call.client_state, call.save_latest, call.exclude_frozen_parameters)
        finally:
            collected = self._engine.collected()
        return collected

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load_checkpoint, for committed and undamaged checkpoints. Call it on every rank.

        Without a tag, all ranks load the newest checkpoint that is not damaged; damaged ones are logged as errors. A damaged
        checkpoint that `tag` names raises DamagedError on every rank, before anything is changed. DeepSpeed itself loads the
        checkpoints that it saved itself. If another job is alive at the root, or the root is read-only, the root is only read;
        if it is the `root` that this engine was attached with, RootInUseError is raised instead.
        """
        self.settle()
        said = {"load_dir": os.path.abspath(load_dir), "tag": tag if tag is None else str(tag)}
        is_universal = self.engine.load_universal_checkpoint()
        seen = self._is_own(load_dir), None if is_universal else missing_fault(load_dir, tag), self._said_of(load_dir)
        is_ours, missing, how = self._meet("load_checkpoint()", said, seen)[0]
        if is_universal:  # converted by DeepSpeed's own tool
            found = self._loaded_by_deepspeed(load_dir, tag, *args, **kwargs)
            with suppress(UsageError):  # outside the root there is no checkpoint of ours
                self._roots.went_on_from = SaveTarget.root_of(load_dir, self._root)
            return found
        root = SaveTarget.root_of(load_dir, self._root)
        if not is_ours:
            if missing is not None:
                raise NotFoundError(missing)
            return self._loaded_by_deepspeed(load_dir, tag, *args, **kwargs)
        folder = os.path.dirname(SaveTarget.of(load_dir, "any", self._root).at)
        asked = None if tag is None else check_tag(str(tag))
        reading_of = functools.partial(FileReads, self.engine, args, kwargs)
        with self._opened(root, how) as source:
            choice = FilesChoice(self.engine, source, load_dir, folder, asked, self._store_of(root), reading_of)
            chosen, own, contents = choice.chosen()
            with self._engine.holding(contents):
                found = self._loaded_by_deepspeed(load_dir, chosen, *args, **kwargs)
            if own is None:
                source.take_up()
            else:
                source.go_on_from(own)
        return found

    def _optimizer_only(self) -> set[int]:
        """The addresses of the storages that only optimizer steps change. Frozen parameters are not among them: they may be an
        average that the user computes.
        """
        engine = self.engine
        trained = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
        found = {parameter.untyped_storage().data_ptr() for parameter in trained}
        base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        masters = list(getattr(engine.optimizer, "fp32_partitioned_groups_flat", ()))  # stage 3 keeps them out of the groups
        for group in getattr(base, "param_groups", ()):
            masters += group["params"]
        found |= {parameter.untyped_storage().data_ptr() for parameter in masters}
        for state in getattr(base, "state", {}).values():
            found |= {value.untyped_storage().data_ptr() for value in state.values() if isinstance(value, torch.Tensor)}
        return found
