"""save_checkpoint and load_checkpoint with DeepSpeed's arguments, for use without an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from checkpointd.errors import UsageError
from checkpointd_client.capture import state_dicts
from checkpointd_client.capture.scalars import is_scalar, type_name
from checkpointd_client.checkpointer import Checkpointer, core_of
from checkpointd_client.restore.target_chooser import Described, LoadTargets
from checkpointd_client.saves.handle import SaveHandle

MODEL_NAMES, SCHEDULER_NAMES = ("model", "module"), ("lr_scheduler", "scheduler")
OPTIMIZER = "optimizer"


def save_checkpoint(
    checkpointer: Checkpointer,
    save_dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, object] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    *,
    step: int | None = None,
    **state: object,
) -> SaveHandle:
    """`save` with the arguments of DeepSpeed's `engine.save_checkpoint`. Call it on every rank; it returns at once.

    Pass the objects of the engine by keyword: `model=`, `optimizer=`, `lr_scheduler=` and any others, each a module, an
    optimizer, an object with state_dict and load_state_dict, or a dict of tensors. Plain values go into `client_state`.
    `save_dir` must be the root of `checkpointer`. `step`: None takes the last number in `tag`. With `step`, `tag` may be left
    out; it is then `global_step<step>`. Raises as `save` does.
    """
    _check_directory(checkpointer, save_dir, "save_dir")
    _check_state(state, "save_checkpoint")
    return checkpointer.save(
        _step(tag) if step is None else step,
        state,
        tag=tag,
        client_state=client_state,
        save_latest=save_latest,
        exclude_frozen_parameters=exclude_frozen_parameters,
    )


def load_checkpoint(
    checkpointer: Checkpointer,
    load_dir: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    **state: Any,
) -> tuple[str | None, dict[str, Any] | None]:
    """`load` with the arguments of DeepSpeed's `engine.load_checkpoint`; the checkpoint's path and client state.

    `state` are the objects that save_checkpoint got, under the same names. They are filled in place. Returns (None, None) if
    nothing was saved yet; NotFoundError for a `tag` that does not exist. `load_optimizer_states=False` leaves `optimizer=` as
    it is, `load_lr_scheduler_states=False` leaves `lr_scheduler=`, and `load_module_only=True` leaves everything but `model=`.
    `load_module_strict=False` loads only values that fit. `load_dir` must be the root of `checkpointer`. Raises as `load` does.
    """
    _check_directory(checkpointer, load_dir, "load_dir")
    _check_state(state, "load_checkpoint")
    left = set() if load_optimizer_states else {OPTIMIZER}
    left |= set() if load_lr_scheduler_states else set(SCHEDULER_NAMES)
    if load_module_only:
        left = state.keys() - set(MODEL_NAMES)
    wanted = {name: value for name, value in state.items() if name not in left}
    if not wanted:
        raise UsageError(f"nothing is left to load of {', '.join(state)}: give the model as model=")
    some = len(wanted) < len(state)
    loaded = core_of(checkpointer).load(_Some(wanted) if some else wanted, tag, strict=load_module_strict)
    if loaded is None:
        return None, None
    return os.path.join(os.fspath(load_dir), loaded.tag), loaded.client_state


class _Some:
    """Some parts of the stored state, by their names; a module must have all values that are stored for it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def places(self, stored: Described) -> LoadTargets:
        """The targets in the chosen objects."""
        refused = state_dicts.refused(self._state)
        if refused is not None:
            raise refused
        places = LoadTargets(self._state)
        for part, live in self._state.items():
            names = stored.get(part)
            if isinstance(live, nn.Module) and isinstance(names, Mapping):
                own = live.state_dict().keys()
                places.faults += [
                    f"{part}.{name}: in the checkpoint, and nowhere in the module" for name in names if name not in own
                ]
        return places


def _check_directory(checkpointer: Checkpointer, directory: str | os.PathLike[str], name: str) -> None:
    root, text = checkpointer.status().root, os.fspath(directory)
    if text != root and ("://" in text or os.path.realpath(text) != os.path.realpath(root)):
        raise UsageError(f"{name} is {text}, and this Checkpointer's root is {root}: make one for each directory")


def _check_state(state: Mapping[str, object], call: str) -> None:
    if not state:
        raise UsageError(f"{call}() was given nothing to work on: name it, as in {call}(..., model=model, optimizer=optimizer)")
    plain = next((name for name, value in state.items() if is_scalar(value)), None)
    if plain is not None:
        raise UsageError(
            f"{plain} is of type {type_name(state[plain])}, which cannot be filled in place: put it into client_state"
        )


def _step(tag: str | None) -> int:
    numbers = re.findall(r"\d+", tag or "")
    if not numbers:
        raise UsageError(f"which step is it? Give step=, or a tag that ends in its number; the tag is {tag!r}")
    return int(numbers[-1])
