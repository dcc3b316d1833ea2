"""Changes Hugging Face's Accelerate so that it does not treat a save as a checkpoint before it commits.

Invariants
  ACCELERATOR-1  A directory of `save_state` gets its name only at its commit, and then it is whole.
  ACCELERATOR-2  Old checkpoints go after the commit of a newer one (`rotating.py`), not before it is saved.
  ACCELERATOR-3  `load_state` waits for the saves in flight at its root, and until the tensors of all others are copied. If it
      is to load a checkpoint that does not exist, it raises an error.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from checkpointd_client.integrations.huggingface.filling import Wanted, chosen, filling_of, leave
from checkpointd_client.integrations.huggingface.replacing import SAVES, Function, after, replace
from checkpointd_client.integrations.huggingface.rotating import Limit
from checkpointd_client.integrations.huggingface.trainer import ENGINES

MODEL_NAME = "pytorch_model"
"""The tag under which Accelerate lets an engine save."""

IN_LOAD_STATE: ContextVar[bool] = ContextVar("in Accelerate's load_state", default=False)
"""load_state ignores the result of an engine's load_checkpoint, so a missing checkpoint must raise an error there."""


def teach_accelerator() -> None:
    """Change the Accelerator, if it was imported. It may be called again."""
    if "accelerate" in sys.modules:
        accelerator = importlib.import_module("accelerate").Accelerator
        replace(accelerator, "save_state", _saving_state)
        replace(accelerator, "load_state", _loading_state)
        replace(accelerator, "end_training", after(leave))


def _engine_of(accelerator: Any) -> Any:
    """The engine of DeepSpeed that saves with Accelerate, if one does; several are all given back."""
    if str(getattr(accelerator, "distributed_type", "")).rpartition(".")[2] not in ("DEEPSPEED", "MEGATRON_LM"):
        return None
    return accelerator._models[0] if len(accelerator._models) == 1 else tuple(accelerator._models)


def _saving_state(original: Function) -> Function:
    """Accelerate removes old checkpoints before it saves: here they go when the new one has committed."""

    @functools.wraps(original)
    def save_state(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        naming = self.project_configuration
        names, limit = naming.automatic_checkpoint_naming, naming.total_limit
        directory = _place_of(self) if names else output_dir
        filling = None if directory is None or naming.save_on_each_node else filling_of(_wanted(self, os.fspath(directory)))
        if filling is None:
            if names and limit is not None:
                SAVES.settle()
                self.wait_for_everyone()
            return original(self, output_dir, *args, **kwargs)
        if names and os.path.exists(filling.directory):
            filling.drop()
            raise ValueError(
                f"{filling.directory} already exists: set ProjectConfiguration.iteration to the number of the next checkpoint"
            )
        iteration = naming.iteration
        with filling.active():
            naming.automatic_checkpoint_naming = False
            try:
                with filling.keeping():
                    original(self, filling.filled.path, *args, **kwargs)
            finally:
                naming.automatic_checkpoint_naming = names
        naming.iteration = iteration + 1  # on each rank, whether its files could be written or not
        if names and self.is_main_process:
            engines = None if filling.call is None else ENGINES
            kept = None if limit is None else Limit(limit, r"checkpoint_\d+", _STATES, filling.above, engines=engines)
            SAVES.limit(os.path.dirname(filling.directory), kept)
        filling.save(filling, (MODEL_NAME,))
        return Path(filling.directory)

    return save_state


_STATES = "random_states_0.pkl"


def _wanted(accelerator: Any, directory: str) -> Wanted:
    number = re.search(r"\d+$", os.path.basename(os.path.abspath(directory)))
    step = int(number[0]) if number and len(number[0]) < 19 else int(accelerator.project_configuration.iteration)
    return Wanted(os.path.abspath(directory), step, _engine_of(accelerator), tuple(accelerator._optimizers))


def _loading_state(original: Function) -> Function:
    @functools.wraps(original)
    def load_state(self: Any, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        engine = _engine_of(self)
        if engine is not None:
            SAVES.settle()
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = chosen(engine, os.path.dirname(_place_of(self)), None)
        elif input_dir is not None:
            asked = os.path.abspath(os.path.expanduser(input_dir))
            chosen(engine, os.path.dirname(asked), asked)
        token = IN_LOAD_STATE.set(True)
        try:
            return original(self, input_dir, *args, **kwargs)
        finally:
            IN_LOAD_STATE.reset(token)

    return load_state


def _place_of(accelerator: Any) -> str:
    """Where Accelerate names the next checkpoint by itself; the directory above it is made."""
    folder = os.path.join(accelerator.project_dir, "checkpoints")
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, f"checkpoint_{accelerator.save_iteration}")
