"""The plug for `layout="checkpointd"`: the engine as named tensors in this project's own format, for any stage and ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from checkpointd.errors import UsageError
from checkpointd_client.checkpointer import Checkpointer
from checkpointd_client.integrations.deepspeed.boxes import state_of
from checkpointd_client.integrations.deepspeed.places import EnginePlaces, What
from checkpointd_client.integrations.deepspeed.plug import Plug
from checkpointd_client.integrations.deepspeed.zero import check_supported


class BoxPlug(Plug):
    """`<save_dir>` is a root of checkpoints, or the root that was given is one for all."""

    def connect(self) -> None:
        """Take the place of the engine's own methods; UsageError for an engine that has no names for all it keeps."""
        check_supported(self.engine)
        super().connect()

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's save_checkpoint, which returns once everything is snapshotted or about to be. See `checkpoint_handle`."""
        engine = self.engine
        tag = str(f"global_step{engine.global_steps}" if tag is None else tag)
        checkpointer = self._checkpointer(save_dir)
        engine._checkpoint_tag_validation(tag)
        self.handle = checkpointer.save(
            engine.global_steps,
            state_of(engine, exclude_frozen_parameters=exclude_frozen_parameters),
            tag=tag,
            client_state=dict(client_state or {}),
            save_latest=save_latest,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """DeepSpeed's load_checkpoint: where it was, and the client state; None and None where there is no checkpoint.

        Ranks and stage may be others than those that saved it, and it may have been saved without DeepSpeed, as
        `{"model": model, "optimizer": optimizer}`. MismatchError, with nothing loaded, lists all that does not fit.
        """
        if custom_load_fn is not None:
            raise UsageError("custom_load_fn is for whole state dicts, which layout='checkpointd' does not make")
        engine = self.engine
        what = What(
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )
        if engine._optimizer_has_ckpt_event_prologue():
            engine.optimizer.checkpoint_event_prologue()
        places = EnginePlaces(engine, what)
        loaded = self._checkpointer(load_dir).load(places, tag, cast=True)
        if loaded is None:
            if engine._optimizer_has_ckpt_event_epilogue():
                engine.optimizer.checkpoint_event_epilogue()
            return None, None
        places.settle()
        return os.path.join(load_dir, loaded.tag), loaded.client_state

    def _checkpointer(self, save_dir: str) -> Checkpointer:
        root = os.path.abspath(os.fspath(self._root if self._root is not None else save_dir))
        if root not in self._checkpointers:
            self._checkpointers[root] = Checkpointer(root, **self._options)
        return self._checkpointers[root]
