"""The plug between a DeepSpeed engine and a Checkpointer: the user's own save_checkpoint and load_checkpoint, in the background."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from checkpointd.errors import UsageError
from checkpointd.layout.keys import SERVICE
from checkpointd_client.checkpointer import Checkpointer
from checkpointd_client.handle import SaveHandle
from checkpointd_client.integrations.deepspeed.engine import CheckpointdEngine

Layout = Literal["deepspeed", "checkpointd"]


def attach(
    engine: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    sidecar: str | os.PathLike[str] | None = None,
    layout: Layout | None = None,
    **options: Any,
) -> Plug:
    """Let `engine.save_checkpoint` and `engine.load_checkpoint` go through checkpointd from here on. On every rank.

    What is not given here is read from the DeepSpeed settings under `checkpoint.checkpointd`. `options` are Checkpointer's.
    """
    settings = dict(_settings_of(engine))
    given = {"root": root, "sidecar": sidecar, "layout": layout, **options}
    settings.update({name: value for name, value in given.items() if value is not None})
    chosen = settings.pop("layout", "deepspeed")
    if chosen not in get_args(Layout):
        raise UsageError(f"layout is {chosen!r}; choose one of {', '.join(get_args(Layout))}")
    plug = _class_for(chosen)(engine, settings)
    plug.connect()
    return plug


def _class_for(layout: Layout) -> type[Plug]:
    if layout == "deepspeed":
        return Plug
    from checkpointd_client.integrations.deepspeed.box_plug import BoxPlug  # which is made of this module's Plug

    return BoxPlug


def _settings_of(engine: Any) -> Mapping[str, Any]:
    found = (engine.config or {}).get("checkpoint", {}).get("checkpointd", {})
    if not isinstance(found, dict):
        raise UsageError(f"checkpoint.checkpointd in the DeepSpeed settings is {found!r}; it must be an object of settings")
    return found


def install() -> None:
    """Attach every engine that deepspeed.initialize makes from here on: for those who do not call it themselves."""
    import deepspeed

    original = deepspeed.initialize
    if getattr(original, "_checkpointd", False):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        attach(made[0])
        return made

    initialize._checkpointd = True  # type: ignore[attr-defined]
    deepspeed.initialize = initialize


class Plug:
    """One engine's. `handle` is that of its last save."""

    def __init__(self, engine: Any, settings: dict[str, Any]) -> None:
        self.engine = engine
        self.handle: SaveHandle | None = None
        self._root = settings.pop("root", None)
        self._options = settings
        self._checkpointers: dict[str, Checkpointer] = {}
        self._engine = CheckpointdEngine(self.wait)

    def connect(self) -> None:
        """Take the place of the engine's own methods."""
        engine = self.engine
        self._save, self._load, self._destroy = engine.save_checkpoint, engine.load_checkpoint, engine.destroy
        engine.checkpoint_engine = self._engine
        engine.save_checkpoint, engine.load_checkpoint, engine.destroy = (
            self.save_checkpoint,
            self.load_checkpoint,
            self.destroy,
        )
        engine.checkpoint_handle = lambda: self.handle

    def wait(self) -> None:
        """Wait until no save is in flight; raises what became of them."""
        for checkpointer in self._checkpointers.values():
            checkpointer.wait()

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's save_checkpoint, which returns once everything is snapshotted. See `engine.checkpoint_handle()`."""
        checkpointer = self._checkpointer(save_dir)
        tag = str(f"global_step{self.engine.global_steps}" if tag is None else tag)
        self._engine.collect(os.path.join(save_dir, tag))
        try:
            self._save(save_dir, tag, dict(client_state or {}), save_latest, exclude_frozen_parameters)
        finally:
            files = self._engine.collected()
        self.handle = checkpointer.save_files(
            self.engine.global_steps, files, tag=tag, save_latest=save_latest, stepped=self._stepped()
        )
        return True

    def load_checkpoint(self, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load_checkpoint, of what is committed."""
        self.wait()
        return self._load(load_dir, *args, **kwargs)

    def destroy(self) -> None:
        """DeepSpeed's destroy, after the saves in flight."""
        self.close()
        self._destroy()

    def close(self) -> None:
        """Wait for the saves in flight and end the background threads."""
        for checkpointer in self._checkpointers.values():
            checkpointer.close()

    def _checkpointer(self, save_dir: str) -> Checkpointer:
        root = os.path.abspath(os.fspath(self._root if self._root is not None else save_dir))
        if root not in self._checkpointers:
            self._checkpointers[root] = Checkpointer(os.path.join(root, SERVICE), **self._options)
        return self._checkpointers[root]

    def _stepped(self) -> set[int]:
        """Where everything lies that nothing but a step of the optimizer changes."""
        engine = self.engine
        found = {parameter.untyped_storage().data_ptr() for parameter in engine.module.parameters()}
        base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for group in getattr(base, "param_groups", ()):
            found |= {parameter.untyped_storage().data_ptr() for parameter in group["params"]}
        for state in getattr(base, "state", {}).values():
            found |= {value.untyped_storage().data_ptr() for value in state.values() if isinstance(value, torch.Tensor)}
        return found
