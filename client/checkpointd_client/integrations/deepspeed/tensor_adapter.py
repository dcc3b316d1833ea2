"""The adapter for `layout="checkpointd"`: saves the engine as named tensors, for any ZeRO stage and number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.other_formats import is_root
from checkpointd_client.core import Core
from checkpointd_client.integrations.deepspeed.adapter_base import Adapter, DirectoryError, SaveCall
from checkpointd_client.integrations.deepspeed.engine_state import state_of
from checkpointd_client.integrations.deepspeed.load_targets import EngineTargets, LoadRequest
from checkpointd_client.integrations.deepspeed.offline.file_names import missing_fault
from checkpointd_client.integrations.deepspeed.tensor_choice import TensorChoice, chosen, stock_in
from checkpointd_client.integrations.deepspeed.zero_optimizer import check_supported, gather_persistent
from checkpointd_client.integrations.directories.opening import Opened, first_said, known_of, said_of
from checkpointd_client.integrations.directories.targets import SEPARATOR, SaveTarget
from checkpointd_client.loaded import Loaded
from checkpointd_client.saves.handle import OwnHandle

log = logging.getLogger("checkpointd")

_NEWEST = "newest"
"""Stands for the newest tag until it is known."""


class TensorAdapter(Adapter):
    """Each `save_dir` is a root of its own, unless one root was given for all."""

    def connect(self) -> None:
        """Replace the engine's own methods. UsageError if the engine keeps state that cannot be named."""
        check_supported(self.engine)
        super().connect()

    def _prepared(self, target: SaveTarget, call: SaveCall) -> Callable[[Core], OwnHandle]:
        gather_persistent(self.engine)
        state = state_of(self.engine, exclude_frozen_parameters=call.exclude_frozen_parameters)
        return lambda checkpointer: checkpointer.save(
            call.step, state, tag=target.tag, client_state=call.client_state, save_latest=call.save_latest
        )

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """DeepSpeed's load_checkpoint: returns the checkpoint's path and client state; None and None if there is no checkpoint.

        The number of ranks and the ZeRO stage may have changed, and the checkpoint may have been saved without DeepSpeed, as
        `{"model": model, "optimizer": optimizer}`. MismatchError lists everything that does not fit; nothing is loaded then. If
        DeepSpeed itself saved the newest checkpoint, or the named one, DeepSpeed loads it. UsageError if it is unclear which
        checkpoint is the newest, NotFoundError for a tag that does not exist.
        """
        place = self._place(load_dir, _NEWEST if tag is None else tag)
        said = {"load_dir": os.path.abspath(load_dir), "tag": place.tag}
        choices = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only, custom_load_fn
        self.settle()  # a load changes the memory that snapshots are taken from
        seen = self._is_root(place.root), missing_fault(load_dir, tag), said_of(place.root)
        is_ours, missing, how = self._meet("load_checkpoint()", said, seen)[0]
        if not is_ours:
            if missing is not None:
                raise NotFoundError(missing)
            return self._load_stock(load_dir, tag, choices)
        what = LoadRequest(
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
        )
        with self._opened(place.root, how) as root:
            tags, theirs = self._chosen(root, load_dir, tag)
            if theirs is None and custom_load_fn is not None:
                raise UsageError("custom_load_fn is for whole state dicts, which layout='checkpointd' does not make")
            loaded = None if theirs is not None else self._loaded(root, what, tags)
            root.take_up()
        if theirs is not None:
            return self._load_stock(load_dir, theirs, choices)
        return (None, None) if loaded is None else (os.path.join(place.root, loaded.tag), loaded.client_state)

    def _loaded(self, root: Opened, what: LoadRequest, tags: list[str | None]) -> Loaded | None:
        """Load the first of `tags` that is undamaged; None if there is none."""
        engine = self.engine
        if engine._optimizer_has_ckpt_event_prologue():
            engine.optimizer.checkpoint_event_prologue()
        places = EngineTargets(engine, what)
        loaded = _first_whole(root, places, tags)
        if loaded is not None:
            places.settle()
            self._process.loaded()
        elif engine._optimizer_has_ckpt_event_epilogue():
            engine.optimizer.checkpoint_event_epilogue()
        return loaded

    def _is_root(self, root: str) -> bool:
        """Whether `root` has checkpoints in checkpointd's own format."""
        return root in self._roots or is_root(root)

    def _place(self, directory: str, tag: object) -> SaveTarget:
        if not directory:
            raise DirectoryError(f"the directory is {directory!r}; give the path of one")
        return SaveTarget.of(directory, str(tag), self._root)

    def _load_stock(self, load_dir: str, tag: str | None, choices: tuple[Any, ...]) -> tuple[str | None, dict[str, Any] | None]:
        log.info("DeepSpeed loads a checkpoint of its own from %s, which needs the ranks and the stage that saved it", load_dir)
        self.settle()
        found: tuple[str | None, dict[str, Any] | None] = self._loaded_by_deepspeed(load_dir, tag, *choices)
        return found

    def _chosen(self, root: Opened, load_dir: str, tag: str | None) -> tuple[list[str | None], str | None]:
        """The tags to try, as rank 0 sees them, newest first (None: the newest undamaged one); or a tag of DeepSpeed itself."""
        place = self._place(load_dir, _NEWEST if tag is None else tag)
        theirs = stock_in(place.root, load_dir, None if tag is None else str(tag))
        is_all = self._root is None and place.at == _NEWEST
        tags: list[str | None] = [place.tag] if tag is not None else [None]
        known, fault = known_of(root) if theirs is not None or (tag is None and not is_all) else ({}, None)
        own = self._in_directory(load_dir, tag, list(known.values()))
        if tag is None and not is_all:
            tags = [c.prefix for c in own]
        found = TensorChoice() if fault or theirs is None else chosen(place.root, load_dir, theirs, own)
        tags, theirs, doubt = first_said(root, [tags, found.theirs, found.doubt], fault)
        if doubt is not None:
            raise UsageError(doubt)
        return tags, theirs

    def _in_directory(self, load_dir: str, tag: str | None, known: list[LoggedAttempt]) -> list[LoggedAttempt]:
        """Those of `known` that were saved in `load_dir` under `tag`; without a tag, those with `save_latest`."""
        if tag is not None:
            return [c for c in known if c.tag == self._place(load_dir, tag).tag]
        below = self._place(load_dir, _NEWEST).at.removesuffix(_NEWEST).replace("/", SEPARATOR)
        asked = [c for c in known if c.commit.save_latest and c.tag.startswith(below)]
        return [c for c in asked if self._is_in(load_dir, c.tag, c.tag.removeprefix(below))]

    def _is_in(self, load_dir: str, tag: str, name: str) -> bool:
        """Whether `tag` is the tag of a save in `load_dir` itself, under `name` or the part of it before a digest."""
        names = filter(None, (name, name.rpartition(SEPARATOR)[0]))
        return any(self._place(load_dir, one).tag == tag for one in names)

    @staticmethod
    def _store_of(root: str) -> str:
        return root


def _first_whole(root: Opened, places: EngineTargets, tags: list[str | None]) -> Loaded | None:
    """Load the first of `tags` that is undamaged; None if there are no tags. DamagedError on every rank if all are damaged. Of
    several, each is `<tag>/<attempt>`.
    """
    damage: DamagedError | None = None
    for tag in tags:
        try:
            return root.load(places, None if tag is None else tag.partition("/")[0], cast=True)
        except DamagedError as error:
            if tag is not None and tag is not tags[-1]:
                log.error("%s, and an older one is looked for", error)
                root.pass_over(tag, str(error))
            damage = error
    if damage is not None:
        raise damage
    return None
