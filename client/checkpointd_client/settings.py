"""The arguments of a Checkpointer, checked under the names that users write: what no part of it checks by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import get_args

from checkpointd import arguments
from checkpointd.config import TIMEOUT_S_MAX
from checkpointd.errors import UsageError
from checkpointd_client.choosing import Chooser
from checkpointd_client.saving import WhenBusy
from checkpointd_client.sidecar import OnSidecarLoss
from checkpointd_client.snapshot import StagingMode
from checkpointd_client.values import type_name


def check_choices(staging: object, when_busy: object, on_sidecar_loss: object) -> None:
    """UsageError for words that are none of those to choose from."""
    arguments.choice("staging", staging, get_args(StagingMode))
    arguments.choice("when_busy", when_busy, get_args(WhenBusy))
    arguments.choice("on_sidecar_loss", on_sidecar_loss, get_args(OnSidecarLoss))


def check_times(commit_timeout_s: object, grace_s: object, absence_s: object) -> None:
    """UsageError for what are no times to wait."""
    arguments.seconds("commit_timeout_s", commit_timeout_s, most=TIMEOUT_S_MAX)
    arguments.seconds("grace_s", grace_s, most=TIMEOUT_S_MAX, zero=True)
    arguments.seconds("absence_s", absence_s, most=TIMEOUT_S_MAX, zero=True)


def check_paths(root: object, sidecar: object = None) -> None:
    """UsageError for what is no path."""
    for name, value in (("root", root), ("sidecar", sidecar)):
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not (isinstance(path, str) and path) and not (name == "sidecar" and value is None):
            raise UsageError(f"{name} is {value!r:.80}; it must be a path")


def check_load(state: object, *, strict: object, fallback: object, cast: object) -> None:
    """UsageError for what load() cannot work with."""
    for name, value in (("strict", strict), ("fallback", fallback), ("cast", cast)):
        arguments.flag(name, value)
    if not isinstance(state, MutableMapping | Chooser):
        advice = "a dict that can be changed" if isinstance(state, Mapping) else "{'model': model, ...}"
        raise UsageError(f"the state to load into must map names to objects, not be a {type_name(state)}: pass {advice}")
