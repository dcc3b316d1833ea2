"""The plug between a DeepSpeed engine and a Checkpointer: save_checkpoint and load_checkpoint as users know them.

Invariants
  P1  Before a Checkpointer is made, and before DeepSpeed's own barriers, which wait for ever, all ranks are waited for with a
      deadline; who is missing is named.
  P2  Once the ranks have met, every rank votes on the attempt, whatever DeepSpeed or the user's objects raise.
  P3  A load reads what was committed: it waits for the saves in flight, on every rank.
  P4  Where this job cannot begin at a root, a load only reads there, on every rank.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from checkpointd import arguments
from checkpointd.config import TIMEOUT_S_MAX, CommitConfig
from checkpointd.errors import (
    CheckpointdError,
    ClosedError,
    NotFoundError,
    StagingError,
    StoreError,
    UsageError,
)
from checkpointd.layout.files import check_place
from checkpointd.layout.keys import SERVICE, check_tag
from checkpointd.layout.manifest import digest
from checkpointd_client.checkpointer import Checkpointer
from checkpointd_client.convening import convene
from checkpointd_client.files import check_saveable
from checkpointd_client.handle import SaveHandle
from checkpointd_client.integrations.deepspeed.directories import missing_fault
from checkpointd_client.integrations.deepspeed.engine import CheckpointdEngine, mount_fault, steps_elsewhere
from checkpointd_client.integrations.deepspeed.filling import Filled
from checkpointd_client.integrations.deepspeed.opening import Opened, Said, opened, said_of
from checkpointd_client.integrations.deepspeed.reading import Reading
from checkpointd_client.integrations.deepspeed.roots import Roots
from checkpointd_client.integrations.deepspeed.search import Search

log = logging.getLogger("checkpointd")

Layout = Literal["deepspeed", "checkpointd"]

SEPARATOR = "--"


class DirectoryError(UsageError, ValueError):
    """There is no directory to save in, and none can be made. A ValueError too, as it is of DeepSpeed."""


class TagError(UsageError, AssertionError):
    """Ranks save under tags that differ, and DeepSpeed's `tag_validation` is "Fail". An AssertionError too, as of DeepSpeed."""


def attach(
    engine: Any,
    root: str | os.PathLike[str] | None = None,
    *,
    sidecar: str | os.PathLike[str] | None = None,
    layout: Layout | None = None,
    synchronous: bool | None = None,
    **options: Any,
) -> Plug:
    """Let `engine.save_checkpoint` and `engine.load_checkpoint` go through checkpointd from here on. On every rank.

    `root`: a directory at or above every `save_dir` that will be used; by default each save_dir by itself, and the directory
    above one that is called `checkpoint-N`. `options` are those
    of Checkpointer. What is not given here is read from the DeepSpeed settings, under `checkpoint.checkpointd`.
    `synchronous`: save_checkpoint returns once the save has committed, and raises what it failed of; for scripts that read the
    files right after it.

    UsageError for settings that cannot be, and for an engine that is attached already.
    """
    if isinstance(engine.checkpoint_engine, CheckpointdEngine):
        raise UsageError("this engine is attached to checkpointd already: attach it once")
    settings = dict(_settings_of(engine))
    given = {"root": root, "sidecar": sidecar, "layout": layout, "synchronous": synchronous, **options}
    settings.update({name: value for name, value in given.items() if value is not None})
    chosen = settings.pop("layout", "deepspeed")
    if chosen not in get_args(Layout):
        raise UsageError(f"layout is {chosen!r}; choose one of {', '.join(get_args(Layout))}")
    if _copies_files(engine):
        raise UsageError(
            "DeepSpeed copies NVMe-offloaded optimizer states by itself: checkpointd cannot commit them; turn it off"
        )
    plug = _class_for(chosen)(engine, settings)
    plug.connect()
    return plug


def _detached() -> SaveHandle | None:
    """What an engine that is not attached any more answers to checkpoint_handle()."""
    raise ClosedError(
        "checkpoint_handle() after detach(): DeepSpeed saves by itself again, before save_checkpoint() returns. The handle of "
        "the last save before detach() is `plug.handle`, of the Plug that attach() returned"
    )


def _class_for(layout: Layout) -> type[Plug]:
    if layout == "deepspeed":
        return Plug
    from checkpointd_client.integrations.deepspeed.box_plug import BoxPlug  # which is made of this module's Plug

    return BoxPlug


def _settings_of(engine: Any) -> Mapping[str, Any]:
    found = (getattr(engine, "config", None) or {}).get("checkpoint", {}).get("checkpointd", {})
    if not isinstance(found, dict):
        raise UsageError(f"checkpoint.checkpointd in the DeepSpeed settings is {found!r}; it must be an object of settings")
    return found


def _copies_files(engine: Any) -> bool:
    return bool(engine.zero_nvme_offload_optimizer())


def unmade(directory: str) -> str | None:
    """Why a directory cannot be made; None where it is there now."""
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        return str(error)
    return None


def install(**options: Any) -> None:
    """Attach every engine that deepspeed.initialize makes from here on: for those who do not call it themselves.

    `options` are those of `attach`. Hugging Face's Trainer and Accelerate learn that a save is not yet a checkpoint. UsageError
    for layout "checkpointd", whose checkpoints they do not find.
    """
    import deepspeed

    from checkpointd_client.integrations.deepspeed.trainers import check_layout, teach, watch

    check_layout(options.get("layout"))
    teach()
    original = deepspeed.initialize
    if hasattr(original, "checkpointd"):
        return

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        check_layout(options.get("layout") or _settings_of(made[0]).get("layout"))
        plug = attach(made[0], **options)
        teach()  # what was imported meanwhile
        watch(made[0], plug)
        return made

    initialize.checkpointd = attach  # type: ignore[attr-defined]  # says that it is installed
    deepspeed.initialize = initialize


@dataclass(frozen=True, slots=True)
class Place:
    """Where a save goes: which Checkpointer's, its tag there, and the directory that is to show it, relative to the root."""

    root: str
    tag: str
    at: str

    @staticmethod
    def root_of(save_dir: str, root: str | None) -> str:
        """The directory beside which a save_dir's checkpoints are stored."""
        return Place.of(save_dir, "any", root).root

    @staticmethod
    def of(save_dir: str, tag: str, root: str | None) -> Place:
        """UsageError for a save_dir outside `root`, and for a tag that is no name of a directory."""
        folder = os.path.abspath(save_dir)
        base = own_root(folder) if root is None else os.path.abspath(root)
        below = os.path.relpath(folder, base)
        if below.split(os.sep)[0] == os.pardir:
            raise UsageError(f"save_dir {folder} does not lie at or below {base}, the root that this engine was attached with")
        parts = [*([] if below == os.curdir else below.split(os.sep)), check_tag(tag)]
        return Place(base, check_tag(_joined(parts)), check_place("/".join(parts)))


def _joined(parts: list[str]) -> str:
    """A tag for a directory below the root: another one for each, or one save would replace another's files."""
    name = SEPARATOR.join(parts)
    return name if name.split(SEPARATOR) == parts else f"{name}{SEPARATOR}{digest('/'.join(parts).encode())[:16]}"


def own_root(folder: str) -> str:
    """The root of a save_dir for which none was given: itself, or of a `checkpoint-N` the directory in which such ones lie.

    These come and go with each save. Accelerate's (`checkpoint_N`) lie in a directory `checkpoints`, in which nothing else may
    be.
    """
    above, name = os.path.split(folder)
    found = re.fullmatch(r"checkpoint([-_])\d+", name)
    if found is None:
        return folder
    return os.path.dirname(above) if found[1] == "_" and os.path.basename(above) == "checkpoints" else above


def check_found(missing: str | None) -> None:
    """NotFoundError for what rank 0 says is missing."""
    if missing is not None:
        raise NotFoundError(missing)


class Plug:
    """One engine's. `handle` is that of its last save."""

    def __init__(self, engine: Any, settings: dict[str, Any]) -> None:
        self.engine = engine
        self.handle: SaveHandle | None = None
        root = settings.pop("root", None)
        self._root = None if root is None else os.fspath(root)
        self._synchronous = bool(settings.pop("synchronous", False))
        self._options = settings
        self._timeout_s = settings.get("commit_timeout_s", CommitConfig().timeout_s)
        arguments.seconds("commit_timeout_s", self._timeout_s, most=TIMEOUT_S_MAX)
        self._roots = Roots(self._store_of, settings)
        self._engine = CheckpointdEngine(self.settle)
        self.is_attached = False
        self.filled: Filled | None = None
        """What the next save_checkpoint belongs to, where others fill its directory."""

    def connect(self) -> None:
        """Take the place of the engine's own methods."""
        engine = self.engine
        self._save, self._load, self._destroy = engine.save_checkpoint, engine.load_checkpoint, engine.destroy
        self._stock = engine.checkpoint_engine
        engine.checkpoint_engine = self._engine
        self._copy = engine._copy_recovery_script
        engine._copy_recovery_script = self._copying
        engine.save_checkpoint, engine.load_checkpoint, engine.destroy = self._saving(), self.load_checkpoint, self.destroy
        engine.checkpoint_handle = lambda: self.handle
        self.is_attached = True

    def _saving(self) -> Callable[..., bool]:
        """What the engine's users call; with the parameters of save_checkpoint, which some of them look at."""

        @functools.wraps(self.save_checkpoint)
        def save_checkpoint(*args: Any, **kwargs: Any) -> bool:
            saved = self.save_checkpoint(*args, **kwargs)
            if self._synchronous and self.handle is not None:
                self.handle.wait()
            return saved

        return save_checkpoint

    def detach(self) -> None:
        """Close, and give the engine its own methods back, whatever close() raises."""
        try:
            self.close()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        engine = self.engine
        engine.checkpoint_engine = self._stock
        engine.save_checkpoint, engine.load_checkpoint, engine.destroy = self._save, self._load, self._destroy
        engine._copy_recovery_script = self._copy
        engine.checkpoint_handle = _detached
        self.is_attached = False

    def _copying(self, save_path: str) -> None:
        """DeepSpeed's copy of its scripts, on rank 0 alone: where a disk is full, the other ranks wait in a barrier (P2)."""
        try:
            self._copy(save_path)
        except OSError as error:
            log.warning("DeepSpeed's scripts could not be copied to %s: %s", save_path, error)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's save_checkpoint, which returns once everything is snapshotted. See `engine.checkpoint_handle()`.

        Where the ranks name tags that differ, DeepSpeed's `tag_validation` says what becomes of it: TagError, or the tag of
        rank 0 counts. Raises what the arguments or objects of the caller are to blame for, and DeadlineError naming ranks that
        did not call it. What the storage does later ends up in the handle.
        """
        if not save_dir:
            raise DirectoryError(f"save_dir is {save_dir!r}; give the path of a directory")
        save_latest = bool(save_latest)  # DeepSpeed takes whatever counts as one
        step = int(self.engine.global_steps)
        tag = f"global_step{step}" if tag is None else str(tag)
        client = dict(client_state or {})
        self.handle = None  # where this raises, there is none
        Place.of(save_dir, tag, self._root)
        tag = self._one_of(self._meet("save_checkpoint()", {"save_dir": os.path.abspath(save_dir), "step": step}, tag))
        place, filled = Place.of(save_dir, tag, self._root), self.filled
        unfinished, folder = ("", save_dir) if filled is None else (filled.name, filled.path)
        checkpointer = self._begun(save_dir if filled is None else os.path.dirname(os.path.abspath(save_dir)), place.root)
        try:
            files, fault = self._collected(folder, tag, client, save_latest, exclude_frozen_parameters)
            if not any(isinstance(content, Mapping) and client.keys() <= content.keys() for content in files.values()):
                check_saveable("client_state", client)  # where another rank writes its own, the same is asked of all
            if filled is not None:
                # It appears by one rename: beside others of its kind, in a directory that must be there.
                folder = os.path.dirname(os.path.abspath(save_dir))
                fault = fault or filled.fault or (unmade(folder) if self.engine.global_rank == 0 else None)
            fault = fault or mount_fault(self._store_of(place.root), folder)
            stepped = self._stepped()
        except BaseException as error:
            told = (
                error if isinstance(error, CheckpointdError) else StagingError(f"DeepSpeed's save_checkpoint failed: {error!r}")
            )
            self.handle = checkpointer.refuse(step, told, tag=place.tag, save_latest=save_latest, unfinished=unfinished)
            self.handle.observed = True
            raise
        if fault is not None:
            self.handle = checkpointer.refuse(
                step, StoreError(fault), tag=place.tag, save_latest=save_latest, unfinished=unfinished
            )
        else:
            self.handle = checkpointer.save_files(
                step, files, tag=place.tag, at=place.at, save_latest=save_latest, stepped=stepped, unfinished=unfinished
            )
        return True

    def _collected(
        self, save_dir: str, tag: str, client_state: dict[str, Any], save_latest: bool, exclude: bool
    ) -> tuple[dict[str, Any], str | None]:
        """The files that DeepSpeed would have written, and what the file system refused meanwhile."""
        self._engine.collect(os.path.join(save_dir, tag))
        try:
            self._save(save_dir, tag, client_state, save_latest, exclude)
        finally:
            collected = self._engine.collected()
        return collected

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's load_checkpoint, of what is committed and whole. On every rank.

        Without a tag, a damaged newest checkpoint is logged as an error and the newest whole one is loaded, by all ranks
        together. A named one that is damaged raises DamagedError on every rank, before anything is touched. What DeepSpeed
        itself has saved is left to DeepSpeed. Where another job is alive at the root, or nothing may be written
        there, it is only read; RootInUseError if it is the one `root` of this engine.
        """
        self.settle()
        said = {"load_dir": os.path.abspath(load_dir), "tag": tag if tag is None else str(tag)}
        is_universal = self.engine.load_universal_checkpoint()
        seen = self._is_own(load_dir), None if is_universal else missing_fault(load_dir, tag), self._said_of(load_dir)
        is_ours, missing, how = self._meet("load_checkpoint()", said, seen)[0]
        if is_universal:  # what was made of a checkpoint by a tool
            found = self._load(load_dir, tag, *args, **kwargs)
            with suppress(UsageError):  # from outside the root, where nothing of ours is
                self._roots.went_on_from = Place.root_of(load_dir, self._root)
            return found
        root = Place.root_of(load_dir, self._root)
        if not is_ours:
            check_found(missing)
            return self._load(load_dir, tag, *args, **kwargs)
        folder = os.path.dirname(Place.of(load_dir, "any", self._root).at)
        asked = None if tag is None else check_tag(str(tag))
        reading_of = functools.partial(Reading, self.engine, args, kwargs)
        with self._opened(root, how) as source:
            chosen, contents = Search(self.engine, source, load_dir, folder, asked, self._store_of(root), reading_of).chosen()
            with self._engine.holding(contents):
                found = self._load(load_dir, chosen, *args, **kwargs)
            source.take_up()
        return found

    def _is_own(self, load_dir: str) -> bool:
        """Whether there is a store for `load_dir`. Rank 0 says it for all: file systems may show the ranks different things."""
        try:
            root = Place.root_of(load_dir, self._root)
        except UsageError:  # raised later, where nobody waits for this rank
            return False
        return root in self._roots or os.path.isdir(os.path.join(root, SERVICE))

    def _said_of(self, load_dir: str) -> Said | None:
        """What this rank would say of the root of `load_dir`."""
        with suppress(UsageError):
            return said_of(self._store_of(Place.root_of(load_dir, self._root)))
        return None

    def _opened(self, root: str, said: Said) -> AbstractContextManager[Opened]:
        """`root` for a load, as rank 0 has `said` that it can be (P4)."""
        begin, saves = functools.partial(self._roots.checkpointer, root), self._root is not None
        return opened(self._store_of(root), begin, said, self._timeout_s, self._options, saves=saves)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is in flight; raises what became of them."""
        self._roots.wait(timeout)

    def settle(self) -> None:
        """Wait until no save is in flight, whatever becomes of it: what may end otherwise on another rank must not be raised
        where ranks do something together.
        """
        self._roots.settle()

    def destroy(self) -> None:
        """DeepSpeed's destroy, after the saves in flight."""
        try:
            self.close()
        finally:
            self._destroy()

    def close(self) -> None:
        """Wait for the saves in flight and end the background threads."""
        self._roots.close()

    def _begun(self, save_dir: str, root: str) -> Checkpointer:
        """The Checkpointer of a root to save in. DirectoryError on every rank if rank 0 cannot make the first `save_dir` there;
        a later one that cannot be made is told by the handle.
        """
        if root not in self._roots:
            fault = unmade(save_dir) if self.engine.global_rank == 0 else None
            fault = self._meet("save_checkpoint()", {"save_dir": os.path.abspath(save_dir)}, fault)[0]
            if fault is not None:
                raise DirectoryError(f"save_dir {save_dir} cannot be made: {fault}; give the path of a directory that can be")
        return self._roots.to_save(root)

    def _checkpointer(self, root: str) -> Checkpointer:
        return self._roots.checkpointer(root)

    @staticmethod
    def _store_of(root: str) -> str:
        """Where the Checkpointer of a root stores."""
        return os.path.join(root, SERVICE)

    def _meet(self, doing: str, said: Mapping[str, object], own: Any) -> list[Any]:
        """All ranks, each having `said` the same (P1); what each of them says for itself."""
        text = json.dumps({"call": doing, **said}, sort_keys=True)
        heard = convene(json.dumps([text, own]), f"calling {doing}", self._timeout_s)
        texts, owns = zip(*(json.loads(heard[rank]) for rank in sorted(heard)), strict=True)
        other = next((rank for rank, one in enumerate(texts) if one != texts[0]), None)
        if other is not None:
            raise UsageError(
                f"the ranks do not call the same: rank 0 said {texts[0]}, and rank {other} {texts[other]}. Nothing was saved "
                "or loaded: let every rank make the same call, with the same directory, at the same step"
            )
        return list(owns)

    def _one_of(self, tags: list[str]) -> str:
        """The tag of rank 0, which a checkpoint can be found by; TagError where DeepSpeed is to fail if others differ."""
        other = next((rank for rank, tag in enumerate(tags) if tag != tags[0]), None)
        if other is not None:
            text = f"the ranks save under tags that differ: rank 0 under {tags[0]!r}, and rank {other} under {tags[other]!r}"
            if self.engine.checkpoint_tag_validation_fail():
                raise TagError(f"{text}; give one tag on all ranks")
            if self.engine.checkpoint_tag_validation_enabled():
                log.warning("%s; all of them are saved under %r", text, tags[0])
        return tags[0]

    def _stepped(self) -> set[int]:
        """Where everything lies that nothing but a step of the optimizer changes. Of frozen parameters that is not known: they
        may be an average that the user takes.
        """
        engine = self.engine
        if steps_elsewhere(engine.optimizer):
            return set()
        trained = (parameter for parameter in engine.module.parameters() if parameter.requires_grad)
        found = {parameter.untyped_storage().data_ptr() for parameter in trained}
        base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for group in getattr(base, "param_groups", ()):
            found |= {parameter.untyped_storage().data_ptr() for parameter in group["params"]}
        for state in getattr(base, "state", {}).values():
            found |= {value.untyped_storage().data_ptr() for value in state.values() if isinstance(value, torch.Tensor)}
        return found
