"""The one line for Hugging Face's libraries."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from checkpointd.errors import UsageError
from checkpointd_client.integrations.huggingface.accelerator import teach_accelerator
from checkpointd_client.integrations.huggingface.filling import SAVERS, leave
from checkpointd_client.integrations.huggingface.replacing import after, replace
from checkpointd_client.integrations.huggingface.saving import DirectorySaver
from checkpointd_client.integrations.huggingface.trainer import teach_trainer
from checkpointd_client.settings import Options

_asked: tuple[DirectorySaver, dict[str, Any]] | None = None


def install(
    root: str | os.PathLike[str] | None = None,
    *,
    sidecar: str | os.PathLike[str] | None = None,
    synchronous: bool = False,
    **options: Any,
) -> DirectorySaver:
    """Make Hugging Face's Trainer and Accelerator save through checkpointd: in the background, on all ranks or none.

    Call it on every rank, before you make the Trainer or the Accelerator. `root`: a directory that contains all directories to
    save; by default, the directory in which each of them lies. `sidecar`, `options`: those of Checkpointer. `synchronous`: a
    save returns after it has committed, or raises its error. Returns an object with the handle of the last save, `wait()`,
    `settle()` and `close()`. With DeepSpeed, use `install()` of the deepspeed integration.

    Raises UsageError if settings are invalid or differ from those of an earlier call, and ImportError if accelerate is missing.
    """
    global _asked
    if sidecar is not None:
        options["sidecar"] = sidecar
    Options.of({"root": root, "synchronous": synchronous, **options}, beside=("root", "synchronous"))
    accelerate = import_module("accelerate")  # the Trainer needs it, too
    said = {"root": root, "synchronous": synchronous, **options}
    if _asked is None:
        _asked = DirectorySaver(root, options, synchronous=synchronous), said
        SAVERS.append(_asked[0])
    elif _asked[1] != said:
        raise UsageError(f"install() was called with {_asked[1]} before, and now with {said}: call it once")
    teach_trainer()
    teach_accelerator()
    replace(accelerate.Accelerator, "__init__", after(_begin))
    return _asked[0]


def _begin() -> None:
    """An Accelerator is made, so a training begins: the one before may have ended without a word (HFSAVING-4)."""
    leave()
    teach_trainer()  # it may have been imported since, and makes an Accelerator, too
