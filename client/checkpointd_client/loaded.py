"""The result of a load, and what follows from it for the log and for the saves after it.

What a branch that is left means for others, `commit/log.py` decides.

Invariants
  BRANCH-3  A save that goes on from an older checkpoint leaves the branch only by its commit: an attempt that aborts changes
      nothing.
  BRANCH-4  If several trainings save in directories below one root, each has branches of its own (`training_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from checkpointd.commit.branches import training
from checkpointd.commit.facts import Order
from checkpointd.errors import CheckpointdError
from checkpointd.layout.manifest import Branches
from checkpointd.pipeline.root.candidates import known_state
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load. The log of one rank has the first ten values that `strict=False` left alone.

    `missing`: FQNs that only the objects have. `unexpected`: FQNs that only the checkpoint has; no rank has a place for them.
    `mismatched`: values that differ in shape, dtype or kind, each as a line that begins with its FQN.
    """

    tag: str
    step: int
    client_state: dict[str, Any]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    fell_back_from: tuple[str, ...] = ()
    """Newer checkpoints that were damaged, in words."""
    source: Literal["store", "memory", "spool"] = "store"
    """memory: the snapshot that the sidecar retained. spool: this node's own disk. Other ranks may have read elsewhere."""
    per_rank_left: tuple[str, ...] = ()
    """Per-rank values that were left alone, because the number of ranks is not the one of the save."""


def say_loaded(loaded: Loaded | None, root: str, took_s: float) -> None:
    """Log what was loaded, on one rank."""
    if loaded is None:
        log.info("nothing is loaded: there is no checkpoint at %s, so training begins at its first step", root)
        return
    near = {"store": "", "memory": ", out of the sidecar's memory", "spool": ", out of this node's spool"}[loaded.source]
    log.info("loaded %s (step %d) from %s in %.1f s%s", loaded.tag, loaded.step, root, took_s, near)


def left_after(
    store: Store,
    prefix: str,
    begins: Order,
    look: Callable[[Callable[[Patience], Coroutine[Any, Any, tuple[str, Branches]]]], tuple[str, Branches]],
) -> tuple[str, Branches]:
    """The training of the checkpoint `prefix`, and the branches that were left by saves that go on from it
    (`CommitRecord.left`). `begins`: the order of the first of them. `look` runs a look at the root patiently.
    """
    try:
        return look(lambda patience: _after(store, patience, prefix, begins))
    except CheckpointdError as error:  # the objects are filled
        log.error("%s is loaded, but whether newer ones are left behind cannot be told: %s", prefix, error)
        return "", ()


async def _after(store: Store, patience: Patience, prefix: str, begins: Order) -> tuple[str, Branches]:
    """The training of the checkpoint `prefix`, and `CommitRecord.left` of the saves that go on from it. `begins`: the order of
    the first of them.
    """
    state = await known_state(store, patience)
    one = state.attempts.get(prefix)
    if one is None or one.committed is None:
        return "", ()  # it lies in memory or in a spool, and is the newest
    own = training(one.commit)
    commits = [a for a in state.attempts.values() if a.status == "checkpoint" and a.commit.save_latest]
    is_back = any(one.order < a.order < begins for a in commits if training(a.commit) == own)
    return own, (*one.commit.left, (one.order, begins)) if is_back else one.commit.left
