"""The one line for Hugging Face's libraries."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from checkpointd.errors import UsageError
from checkpointd_client.integrations.huggingface.accelerator import teach_accelerator
from checkpointd_client.integrations.huggingface.filling import SAVERS
from checkpointd_client.integrations.huggingface.replacing import after, replace
from checkpointd_client.integrations.huggingface.saving import DirectorySaver
from checkpointd_client.integrations.huggingface.trainer import teach_trainer

_asked: tuple[DirectorySaver, dict[str, Any]] | None = None


def install(
    root: str | os.PathLike[str] | None = None,
    *,
    sidecar: str | os.PathLike[str] | None = None,
    synchronous: bool = False,
    **options: Any,
) -> DirectorySaver:
    """Let Hugging Face's Trainer and Accelerator save through checkpointd from here on: in the background, all ranks or none.

    Call it on every rank, before the Trainer or the Accelerator is made. `root`: a directory at or above every directory that
    will be saved; by default the root is the directory above each of them. `sidecar`, `options`: those of Checkpointer.
    `synchronous`: a save returns once it has committed, and raises its error if it failed. Returns an object with the handle
    of the last save, `wait()`, `settle()` and `close()`. With an engine of DeepSpeed, `install()` of the deepspeed integration
    serves instead.

    UsageError for invalid settings, or for others than in an earlier call; ImportError if accelerate is missing.
    """
    global _asked
    accelerate = import_module("accelerate")  # the Trainer needs it, too
    if sidecar is not None:
        options["sidecar"] = sidecar
    said = {"root": root, "synchronous": synchronous, **options}
    if _asked is None:
        _asked = DirectorySaver(root, options, synchronous=synchronous), said
        SAVERS.append(_asked[0])
    elif _asked[1] != said:
        raise UsageError(f"install() was called with {_asked[1]} before, and now with {said}: call it once")
    teach_trainer()
    teach_accelerator()
    replace(accelerate.Accelerator, "__init__", after(teach_trainer))  # the Trainer may be imported later, and makes one
    return _asked[0]
