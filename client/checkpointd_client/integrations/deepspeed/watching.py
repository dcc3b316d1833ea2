"""Saves of DeepSpeed's engines that Hugging Face's Trainer and Accelerate ask for, with the directories that these fill."""

from __future__ import annotations

import functools
import os
from typing import Any
from weakref import WeakSet

from checkpointd.errors import NotFoundError, UsageError
from checkpointd_client.integrations.deepspeed.adapter_base import Adapter
from checkpointd_client.integrations.directories.targets import SaveTarget
from checkpointd_client.integrations.huggingface.accelerator import IN_LOAD_STATE, teach_accelerator
from checkpointd_client.integrations.huggingface.filling import SAVERS, Filled, Filling, Wanted, current
from checkpointd_client.integrations.huggingface.replacing import SAVES
from checkpointd_client.integrations.huggingface.trainer import teach_trainer
from checkpointd_client.saves.handle import OwnHandle


def check_layout(layout: object) -> None:
    """UsageError for the layout whose checkpoints these libraries do not find."""
    if layout == "checkpointd":
        raise UsageError(
            "install() supports only layout='deepspeed': Hugging Face's Trainer and Accelerate resume from, rotate and load "
            "checkpoint-N directories that hold DeepSpeed's files, and layout='checkpointd' stores none there. Leave the "
            "layout out; in your own training loop, attach(engine, layout='checkpointd') works"
        )


def teach() -> None:
    """Make the imported ones of the two libraries follow their saves. It may be called again."""
    if ENGINES not in SAVERS:
        SAVERS.append(ENGINES)
    teach_trainer()
    teach_accelerator()


class EngineSaver:
    """Saves what the libraries want to save with an engine. `plugs`: the adapters of the engines that are watched."""

    def __init__(self) -> None:
        self.plugs: WeakSet[Adapter] = WeakSet()

    def _plug_of(self, engine: Any) -> Adapter:
        return next(plug for plug in self.plugs if plug.engine is engine)

    def serves(self, engine: Any | None) -> bool:
        """Whether it is one engine, and attached."""
        return any(plug.engine is engine and plug.is_attached for plug in self.plugs)

    def filling(self, wanted: Wanted) -> Filling | None:
        """Let the directory be filled out of sight for the engine's next save; None for a root's own directory."""
        plug = self._plug_of(wanted.engine)
        root = SaveTarget.root_of(wanted.directory, plug._root)
        if wanted.directory == root:
            return None
        given = plug._checkpointer(root).fill(os.path.relpath(wanted.directory, root))
        save = functools.partial(self._save, wanted.engine)
        return Filling(wanted.directory, Filled(given.name, given.path), save)

    def _save(self, engine: Any, filling: Filling, usual: tuple[str, ...]) -> OwnHandle | None:
        """Let the engine save as the library asked, together with the filled directory. All ranks must call it."""
        plug = self._plug_of(engine)
        call = filling.call or ((usual, {}) if filling.filled.fault else None)
        if call is None:
            filling.drop()
            raise UsageError(
                f"{filling.directory} was filled, and no rank's engine was asked to save: call the engine's save_checkpoint in "
                "_save_checkpoint or save_state, as the library itself does"
            )
        args, kwargs = call
        plug.filled = filling.filled
        try:
            engine.save_checkpoint(filling.directory, *args, **kwargs)
        finally:
            plug.filled = None
            if plug.handle is None:  # no save has begun that would remove it
                filling.drop()
        return plug.handle

    def chosen(self, engine: Any | None, folder: str, asked: str | None) -> str | None:
        """Start at the root of the checkpoints before the library chooses the newest: a checkpoint that an earlier job
        committed, but could not show before it died, appears then. The engine verifies its files itself.
        """
        if asked is None:
            plug, place = self._plug_of(engine), os.path.join(folder, "checkpoint_0")
            if plug._meet("load_state()", {"load_dir": os.path.abspath(place)}, plug._is_own(place))[0]:
                plug._checkpointer(SaveTarget.root_of(place, plug._root))
        return None

    def leave(self) -> None:
        """Close the roots of all engines, until one saves or loads again."""
        for plug in list(self.plugs):
            plug.leave()


ENGINES = EngineSaver()


def watch(engine: Any, plug: Adapter) -> None:
    """Follow the saves of an attached engine."""
    save, load = engine.save_checkpoint, engine.load_checkpoint
    ENGINES.plugs.add(plug)

    @functools.wraps(save)
    def save_checkpoint(save_dir: str, *args: Any, **kwargs: Any) -> Any:
        filling = current()
        if filling is not None and filling.takes(save_dir):
            filling.call = args, kwargs  # begins when all of it is filled
            return True
        with SAVES.beginning(save_dir):
            try:
                return save(save_dir, *args, **kwargs)
            finally:
                handle = engine.checkpoint_handle()
                if handle is not None:
                    SAVES.add(save_dir, handle)

    @functools.wraps(load)
    def load_checkpoint(load_dir: str, *args: Any, **kwargs: Any) -> Any:
        found = load(load_dir, *args, **kwargs)
        if found[0] is None and IN_LOAD_STATE.get():
            raise NotFoundError(f"no checkpoint was committed in {load_dir}: it cannot be loaded")
        return found

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint
