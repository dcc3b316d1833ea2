"""Makes the steps of Lightning's ModelCheckpoint around a save wait for its commit.

Invariants
  FOLLOW-1  A save is in the background only while ModelCheckpoint saves during a training.
  FOLLOW-2  `save_last="link"` links to a checkpoint when that has committed.
  FOLLOW-3  `ckpt_path="last"` sees what an earlier job has committed, even if that died before the file was shown.
  FOLLOW-4  A name counts as taken while a save to it is in flight, and as free when its removal waits for a commit. So
      checkpoints get the names and versions that they would get without checkpointd.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from checkpointd_client.integrations.lightning.pending import Pending
from checkpointd_client.integrations.lightning.places import local_path
from checkpointd_client.integrations.lightning.showing import show_commits

log = logging.getLogger("checkpointd")

_IN_BACKGROUND: ContextVar[bool] = ContextVar("ModelCheckpoint saves during a training", default=False)


def is_in_background() -> bool:
    """Whether the save that is called now goes on in the background (FOLLOW-1)."""
    return _IN_BACKGROUND.get()


def follow() -> None:
    """Make ModelCheckpoint keep the invariants. It may be called again."""
    for name, wrap in (
        ("_save_checkpoint", _saving),
        ("file_exists", _existing),
        ("_find_last_checkpoints", _finding),
    ):
        _replace(name, wrap)
    linking = getattr(ModelCheckpoint, "_link_checkpoint", None)
    if linking is not None and not hasattr(linking, "checkpointd"):
        ModelCheckpoint._link_checkpoint = staticmethod(_marked(_linking(linking)))


def _replace(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(ModelCheckpoint, name, None)
    if original is None:
        log.warning(
            "this release of Lightning has no ModelCheckpoint.%s: docs/howto/LIGHTNING.md names the tested releases", name
        )
    elif not hasattr(original, "checkpointd"):
        setattr(ModelCheckpoint, name, _marked(wrap(original)))


def _marked(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    wrapped.checkpointd = True  # type: ignore[attr-defined]  # says that it is done
    return wrapped


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _save_checkpoint(self: Any, trainer: Any, filepath: str) -> Any:
        token = _IN_BACKGROUND.set(trainer.state.fn == TrainerFn.FITTING)
        try:
            return original(self, trainer, filepath)
        finally:
            _IN_BACKGROUND.reset(token)

    return _save_checkpoint


def _linking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> Any:
        pending = _pending_of(trainer.strategy)
        if pending is None:
            return original(trainer, filepath, linkpath)
        target, link = local_path(filepath), local_path(linkpath)
        if trainer.is_global_zero and target and link and target != link:
            pending.link(link, target)
        return trainer.strategy.barrier()

    return _link_checkpoint


def _pending_of(strategy: Any) -> Pending | None:
    """What waits for commits of this strategy; None if checkpointd does not save for it."""
    saves = getattr(strategy, "saves", None) or getattr(strategy._checkpoint_io, "saves", None)
    pending = getattr(saves, "pending", None)
    return pending if isinstance(pending, Pending) else None


def _existing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def file_exists(self: Any, filepath: Any, trainer: Any) -> Any:
        pending, path = _pending_of(trainer.strategy), local_path(filepath)
        will_exist = pending.will_exist(path) if pending is not None and path is not None and trainer.is_global_zero else None
        if will_exist is None:
            return original(self, filepath, trainer)
        return trainer.strategy.reduce_boolean_decision(will_exist, all=False)  # as the other ranks do

    return file_exists


def _finding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _find_last_checkpoints(self: Any, trainer: Any) -> Any:
        if _pending_of(trainer.strategy) is not None:
            show_commits(str(self._ModelCheckpoint__resolve_ckpt_dir(trainer)))
        return original(self, trainer)

    return _find_last_checkpoints
