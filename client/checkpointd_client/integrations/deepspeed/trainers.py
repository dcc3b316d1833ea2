"""Hugging Face's Trainer and Accelerate: what they do to directories around a save learns that a save is not yet a checkpoint.

Both write `checkpoint-N` directories, remove old ones when they have called save, and load by looking at what is there.

Invariants
  H1  A rotation takes no committed checkpoint for the sake of one that has not committed.
  H2  What looks for files of a save in flight waits for it first.
  H3  Resuming from the newest means the newest that committed; Accelerate's loading one that is not there is an error.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from checkpointd.errors import NotFoundError
from checkpointd_client.handle import SaveHandle

log = logging.getLogger("checkpointd")

_Function = Callable[..., Any]


class Saves:
    """The directories that were saved to, each with its last save, as long as that is in flight."""

    def __init__(self) -> None:
        self._handles: dict[str, SaveHandle] = {}
        self._rotations: list[Rotation] = []
        self._any = False

    def add(self, directory: str, handle: SaveHandle) -> None:
        self._any = True
        self._handles[os.path.abspath(directory)] = handle
        handle.when_done(self._rotate)

    def add_rotation(self, rotation: Rotation) -> None:
        self._rotations.append(rotation)

    def _rotate(self) -> None:
        for rotation in self._rotations:
            rotation.again()

    def __bool__(self) -> bool:
        """Whether anything was saved."""
        return self._any

    def in_flight(self, folder: str) -> list[str]:
        """The directories in `folder`, in the order of their saves, whose last save has not ended."""
        for directory, handle in list(self._handles.items()):
            if handle.done():
                self._handles.pop(directory, None)
        return [directory for directory in list(self._handles) if os.path.dirname(directory) == os.path.abspath(folder)]

    def settle(self) -> None:
        """Wait until no save is in flight, whatever becomes of it: its handle and the log say what."""
        for handle in list(self._handles.values()):
            handle.ended_within(None)


class Rotation:
    """transformers' rotate_checkpoints, for which uncommitted checkpoints do not count; once they commit it is done again."""

    def __init__(self, original: _Function, saves: Saves) -> None:
        self._original, self._saves = original, saves
        self._wanted: Callable[[], None] | None = None
        self._alone = threading.Lock()

    def __call__(self, output_dir: str, save_total_limit: int | None = None, **options: Any) -> None:
        if save_total_limit is None or save_total_limit <= 0:
            return
        self._wanted = functools.partial(self._rotate, os.fspath(output_dir), save_total_limit, options)
        self.again()

    def again(self) -> None:
        """Rotate as was last asked for, now that more may have committed."""
        with self._alone:
            if self._wanted is not None:
                self._wanted()

    def _rotate(self, output_dir: str, limit: int, options: dict[str, Any]) -> None:
        for directory in self._saves.in_flight(output_dir):
            with suppress(FileNotFoundError):
                os.utime(directory)  # it goes by age, and showing an older checkpoint has made that one younger
        self._original(output_dir, save_total_limit=limit + (self._uncommitted(output_dir) if self._saves else 0), **options)

    @staticmethod
    def _uncommitted(output_dir: str) -> int:
        """How many directories have no checkpoint in them: in flight, failed, or only just made for a save to come."""
        return sum(path.is_dir() and not any(path.glob("global_step*")) for path in Path(output_dir).glob("checkpoint-*"))


_SAVES = Saves()

_IN_LOAD_STATE: ContextVar[bool] = ContextVar("in Accelerate's load_state", default=False)
"""It looks at nothing that an engine's load_checkpoint returns; everybody else is told there that no checkpoint was found."""


def watch(engine: Any) -> None:
    """Follow the saves of an attached engine."""
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(save_dir: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return save(save_dir, *args, **kwargs)
        finally:
            handle = engine.checkpoint_handle()
            if handle is not None:
                _SAVES.add(save_dir, handle)

    @functools.wraps(load)
    def load_checkpoint(load_dir: str, *args: Any, **kwargs: Any) -> Any:
        found = load(load_dir, *args, **kwargs)
        if found[0] is None and _IN_LOAD_STATE.get():
            raise NotFoundError(f"no checkpoint was committed in {load_dir}: it cannot be loaded")
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def teach() -> None:
    """Let those of the two libraries that this process has imported go by H1 to H3. Again is no harm."""
    if "transformers" in sys.modules:
        homes = ["transformers.trainer", "transformers.trainer_utils", "transformers.integrations.deepspeed"]
        modules = [importlib.import_module(name) for name in homes]
        _replace(modules, "rotate_checkpoints", _rotating)
        _replace(modules, "get_last_checkpoint", _last)
        _replace(modules, "deepspeed_load_checkpoint", _settled)
    if "accelerate" in sys.modules:
        accelerator = importlib.import_module("accelerate").Accelerator
        _replace([accelerator], "save_state", _saving_state)
        _replace([accelerator], "load_state", _loading_state)


def _replace(homes: list[Any], name: str, wrap: Callable[[_Function], _Function]) -> None:
    """Let `name` mean the wrapped function wherever it is found."""
    originals = {id(getattr(home, name)): getattr(home, name) for home in homes if hasattr(home, name)}
    if not originals:
        log.warning("this release has no %s: see docs/DEEPSPEED.md for the releases that were tried", name)
    wrapped = {
        key: original if hasattr(original, "checkpointd") else _marked(wrap(original)) for key, original in originals.items()
    }
    for home in homes:
        if hasattr(home, name):
            setattr(home, name, wrapped[id(getattr(home, name))])


def _marked(function: _Function) -> _Function:
    function.checkpointd = True  # type: ignore[attr-defined]  # says that it is done
    return function


def _rotating(original: _Function) -> _Function:
    rotation = Rotation(original, _SAVES)
    _SAVES.add_rotation(rotation)

    @functools.wraps(original)
    def rotate_checkpoints(output_dir: str, save_total_limit: int | None = None, *args: Any, **options: Any) -> None:
        named = dict(zip(("best_model_checkpoint", "use_mtime", "checkpoint_prefix"), args, strict=False))
        rotation(output_dir, save_total_limit, **named, **options)

    return rotate_checkpoints


def _last(original: _Function) -> _Function:
    @functools.wraps(original)
    def get_last_checkpoint(folder: str) -> Any:
        _SAVES.settle()
        whole = {path.parent for path in Path(folder).glob("checkpoint-*/global_step*") if path.parent.name[11:].isdigit()}
        newest = max(whole, key=lambda path: int(path.name[11:]), default=None)
        return original(folder) if newest is None else os.path.join(folder, newest.name)

    return get_last_checkpoint


def _settled(original: _Function) -> _Function:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        _SAVES.settle()
        return original(*args, **kwargs)

    return load


def _loading_state(original: _Function) -> _Function:
    load = _settled(original)

    @functools.wraps(original)
    def load_state(*args: Any, **kwargs: Any) -> Any:
        token = _IN_LOAD_STATE.set(True)
        try:
            return load(*args, **kwargs)
        finally:
            _IN_LOAD_STATE.reset(token)

    return load_state


def _saving_state(original: _Function) -> _Function:
    """Accelerate removes old checkpoints before it saves: it may, once there is a committed one."""

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.project_configuration.automatic_checkpoint_naming and self.project_configuration.total_limit is not None:
            _SAVES.settle()
            self.wait_for_everyone()
        return original(self, *args, **kwargs)

    return save_state
