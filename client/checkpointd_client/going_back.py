"""Going back to an older checkpoint, from which the next start of the job goes on."""

from __future__ import annotations

from checkpointd import arguments
from checkpointd.admin import rollback as admin
from checkpointd.admin.rollback import RollbackReport
from checkpointd_client.export.consolidate import Root, run_on_store
from checkpointd_client.lifetime import claim_root


def rollback(root: Root, tag: str, *, attempt: str | None = None, take_over: bool = False) -> RollbackReport:
    """Go back to the checkpoint `tag`: the next start of the job loads it, and so do readers.

    The checkpoints after it stay, and are left behind: no load takes them unless it names them, not even if `tag` is damaged.
    To undo this, go back to one of them. A job that runs goes back by itself: `load(state, tag=...)`, and then the next save.

    `attempt`: which one, as in `checkpointd list --all`, if two branches have saved the tag.

    Raises NotFoundError if there is no such checkpoint, DamagedError if it is recorded as damaged, RootInUseError if a job or a
    daemon is at work at the root (with `take_over` all later saves of that job fail), UsageError if a Checkpointer of this
    process is open there, StoreError.
    """
    arguments.path("root", root)
    arguments.flag("take_over", take_over)
    give_back = claim_root(root)
    try:
        return run_on_store(root, lambda store: admin.rollback(store, tag, attempt=attempt, take_over=take_over))
    finally:
        give_back()
