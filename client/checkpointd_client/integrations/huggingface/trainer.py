"""Changes Hugging Face's Trainer so that it does not treat a save as a checkpoint before it commits.

The Trainer writes `checkpoint-N` directories, removes old ones once it has called save, and loads the directories that it
finds. This module replaces methods of its class and names in its module, so it works no matter who imported these before.

Invariants
  TRAINER-1  A `checkpoint-N` gets that name only at its commit, and then it is whole. So no function can find an uncommitted
      one.
  TRAINER-2  A rotation removes no committed checkpoint in favour of one that has not committed (`rotating.py`).
  TRAINER-3  A function that looks for files of a save in flight waits for it first.
  TRAINER-4  What a user's own method of the Trainer writes is written before the call returns: the method may rename or read
      the files, or change weights until it returns, in ways that torch does not count.
  TRAINER-5  The store is not uploaded to the hub.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from checkpointd.layout.keys import SERVICE
from checkpointd_client.integrations.huggingface.filling import Filling, Wanted, chosen, current, filling_of, leave, serves
from checkpointd_client.integrations.huggingface.replacing import SAVES, Function, instead, replace, settled
from checkpointd_client.integrations.huggingface.rotating import Limit

log = logging.getLogger("checkpointd")

ENGINES = "*/*_states.pt"
"""The files of DeepSpeed's engines in a checkpoint."""


def teach_trainer() -> None:
    """Change the Trainer, if it was imported. It may be called again."""
    if "transformers" not in sys.modules:
        return
    module = importlib.import_module("transformers.trainer")
    replace(module, "rotate_checkpoints", _rotating)
    replace(module, "deepspeed_load_checkpoint", settled)
    with suppress(ImportError):  # releases without it
        jit = importlib.import_module("transformers.trainer_jit_checkpoint")
        replace(jit.CheckpointManager, "execute_jit_checkpoint", _saving_at_once)
    for name, wrap in _OF_TRAINER.items():
        replace(module.Trainer, name, wrap)
    replace(importlib.import_module("huggingface_hub").HfApi, "upload_folder", _uploading)


def _engine_of(trainer: Any) -> Any:
    """The engine of DeepSpeed that saves with the Trainer, if one does."""
    return None if trainer.args.save_only_model else getattr(trainer, "deepspeed", None)


def _saving_checkpoint(original: Function) -> Function:
    @functools.wraps(original)
    def _save_checkpoint(self: Any, model: Any, trial: Any = None, **kwargs: Any) -> Any:
        run_dir = self._get_output_dir(trial=trial)
        best = self.state.best_model_checkpoint
        if best is not None and os.path.isdir(best):
            SAVES.note_best(run_dir, best)
        step = int(self.state.global_step)
        directory = os.path.abspath(os.path.join(run_dir, f"checkpoint-{step}"))
        wanted = Wanted(directory, step, _engine_of(self), (getattr(self, "optimizer", None),))
        filling = None if getattr(self.args, "save_on_each_node", False) else filling_of(wanted)
        if filling is None:
            return original(self, model, trial, **kwargs)
        elsewhere, save_to_json = os.path.dirname(filling.filled.path), self.state.save_to_json

        def state_saved(path: str) -> None:
            _name_best(self.state, run_dir, elsewhere)
            with filling.keeping():
                save_to_json(path)

        pushes: list[str] = []
        steps = {name: filling.kept(_step(self, name, filling)) for name in _WRITING if hasattr(self, name)}
        if hasattr(self, "_push_from_checkpoint"):
            steps["_push_from_checkpoint"] = pushes.append
        with (
            filling.active(),
            instead(self, _get_output_dir=lambda *_, **__: elsewhere, **steps),
            instead(self.state, save_to_json=state_saved),
        ):
            found = original(self, model, trial, **kwargs)
        _name_best(self.state, run_dir, elsewhere)
        handle = filling.save(filling, ())
        # Only a committed checkpoint goes to the hub, under its own name.
        if pushes and handle is not None and handle.ended_within(None) and handle.phase == "committed":
            self._push_from_checkpoint(filling.directory)
        return found

    return _save_checkpoint


_WRITING = ("save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


def _step(trainer: Any, name: str, filling: Filling) -> Function:
    """The Trainer's method `name`; within it, what is not the library's own code takes no files (TRAINER-4)."""
    method: Function = getattr(trainer, name)
    methods = [method, *([trainer._save] if name == "save_model" and hasattr(trainer, "_save") else [])]
    is_own = all(str(getattr(one, "__module__", "")).partition(".")[0] == "transformers" for one in methods)
    return method if is_own else filling.written_at_once(method)


def _name_best(state: Any, run_dir: str, elsewhere: str) -> None:
    """Set the best checkpoint to the name that it has, or will have at its commit."""
    step = getattr(state, "best_global_step", None)
    name = f"checkpoint-{step}"
    if step and any(os.path.isdir(os.path.join(folder, name)) for folder in (run_dir, elsewhere)):
        state.best_model_checkpoint = os.path.join(run_dir, name)


def _rotating(original: Function) -> Function:
    @functools.wraps(original)
    def rotate_checkpoints(output_dir: str, save_total_limit: int | None = None, *args: Any, **options: Any) -> None:
        filling = current()
        if filling is None:  # checkpointd does not save there
            original(output_dir, save_total_limit, *args, **options)
            return
        named = dict(zip(("best_model_checkpoint", "use_mtime", "checkpoint_prefix"), args, strict=False)) | options
        limit = Limit(
            save_total_limit or 0,
            rf"{re.escape(named.get('checkpoint_prefix', 'checkpoint'))}-\d+",
            "trainer_state.json",
            filling.above,
            named.get("best_model_checkpoint"),
            None if filling.call is None else ENGINES,
        )
        SAVES.limit(filling.real(os.fspath(output_dir)), limit)

    return rotate_checkpoints


def _uploading(original: Function) -> Function:
    @functools.wraps(original)
    def upload_folder(self: Any, *args: Any, ignore_patterns: list[str] | str | None = None, **kwargs: Any) -> Any:
        given = [ignore_patterns] if isinstance(ignore_patterns, str) else list(ignore_patterns or ())
        return original(self, *args, ignore_patterns=[*given, f"{SERVICE}/*", f"*/{SERVICE}/*"], **kwargs)

    return upload_folder


def _saving_at_once(original: Function) -> Function:
    """On SIGTERM the Trainer makes `checkpoint-N` itself, marked as unfinished. Here it only appears when it is whole."""

    @functools.wraps(original)
    def execute_jit_checkpoint(self: Any) -> Any:
        trainer = self.trainer
        if not serves(_engine_of(trainer)):
            return original(self)
        self.is_checkpoint_requested = False
        trainer._save_checkpoint(trainer.model, trial=None)
        return None

    return execute_jit_checkpoint


def _finalizing(original: Function) -> Function:
    """The end of a training uses the best checkpoint, which must be committed."""

    @functools.wraps(original)
    def _finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        SAVES.settle()
        best = self.state.best_model_checkpoint
        if best is not None and SAVES.has_failed(best):
            earlier = SAVES.best(os.path.dirname(best))
            told = "the model keeps the weights of the last step" if earlier is None else f"{earlier} counts as the best"
            log.error("the best checkpoint, %s, could not be saved: %s", best, told)
            self.state.best_model_checkpoint = earlier
        return original(self, *args, **kwargs)

    return _finalize_training


def _saving_model(original: Function) -> Function:
    """A model that the user saves may need the space that a failing save frees."""

    @functools.wraps(original)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> Any:
        if not _internal_call:
            SAVES.settle()
        return original(self, output_dir, _internal_call)

    return save_model


def _resuming(original: Function) -> Function:
    """A training resumes from a checkpoint that all ranks find whole."""

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        SAVES.begin()
        try:
            if resume_from_checkpoint and not self.is_deepspeed_enabled:  # an engine verifies its own files
                asked = None if resume_from_checkpoint is True else os.fspath(resume_from_checkpoint)
                resume_from_checkpoint = chosen(None, self.args.output_dir, asked) or resume_from_checkpoint
            return original(self, resume_from_checkpoint, *args, **kwargs)
        finally:
            leave()

    return train


_OF_TRAINER: dict[str, Callable[[Function], Function]] = {
    "_save_checkpoint": _saving_checkpoint,
    "save_model": _saving_model,
    "train": _resuming,
    "_finalize_training": _finalizing,
}
