"""Other programs' checkpoint formats: the client has one module for each, since reading and writing them needs torch."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from checkpointd.errors import UsageError
from checkpointd.layout.keys import LATEST

IMPORTS = ("dcp", "deepspeed")
EXPORTS = ("dcp", "deepspeed")


def module_for(name: str, part: str) -> Any:
    """The client's module that does `part` of format `name`. UsageError where torch or the client cannot be imported."""
    try:
        return import_module(f"checkpointd_client.integrations.{name}.{part}")
    except ImportError as error:
        raise UsageError(
            f"the format {name} needs torch, which cannot be imported ({error}): pip install 'checkpointd[torch]'"
        ) from error


def zero_directory(root: str, tag: str | None) -> str | None:
    """The directory with DeepSpeed's files of checkpoint `tag` (default: the latest) at `root`; None where there are none."""
    if tag is None or tag == LATEST:
        try:
            with open(os.path.join(root, LATEST), encoding="utf-8") as file:
                tag = file.read().strip()
        except (OSError, UnicodeDecodeError):
            return None
    place = os.path.join(root, tag)
    try:
        return place if any(name.endswith("_model_states.pt") for name in os.listdir(place)) else None
    except OSError:
        return None
