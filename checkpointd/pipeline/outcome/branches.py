"""Which branches are left by saves that go on from a checkpoint. What that means for others, `commit/log.py` decides.

Invariants
  BRANCH-3  A save that goes on from an older checkpoint leaves the branch only by its commit: an attempt that aborts changes
      nothing.
  BRANCH-4  If several trainings save in directories below one root, each has branches of its own (`training_of`).
"""

from __future__ import annotations

from checkpointd.commit.branches import training
from checkpointd.commit.facts import Order
from checkpointd.layout.manifest import Branches
from checkpointd.pipeline.root.candidates import known_state
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience


async def after(store: Store, patience: Patience, prefix: str, begins: Order) -> tuple[str, Branches]:
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
