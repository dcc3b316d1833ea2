"""Which indexes a load needs: those of the ranks that stored a box it wants, by the joint plan of the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.joint_plan import JointPlan, decode_joint_plan, joint_plan_ref
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import LISTING_BYTES_MAX
from checkpointd.pipeline.read.plan import BoxRequest
from checkpointd.pipeline.root.ballots import joint_plan_key
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


async def read_joint_plan(store: Store, checkpoint: LoggedAttempt) -> JointPlan | None:
    """The joint plan of `checkpoint`; None if it has none, or if it is damaged: then a load reads all indexes."""
    if checkpoint.commit.plan is None:
        return None
    try:
        return await checked_joint_plan(store, checkpoint)
    except (DamagedError, NotFoundError) as error:
        log.error("%s: all indexes are read instead, as its joint plan cannot be used: %s", checkpoint.prefix, error)
        return None


async def checked_joint_plan(store: Store, checkpoint: LoggedAttempt) -> JointPlan:
    """The joint plan that the commit of `checkpoint` names. Raises DamagedError or NotFoundError if it is not there whole."""
    key = joint_plan_key(checkpoint.commit)
    data = await store.get(key, size_max=LISTING_BYTES_MAX)
    if joint_plan_ref(data) != checkpoint.commit.plan:
        raise DamagedError(f"{key} is damaged: its bytes are not those that the commit names", key=key)
    plan = decode_joint_plan(data, key)
    if plan.world_size != checkpoint.commit.world_size:
        raise DamagedError(f"{key} is of {plan.world_size} ranks, not {checkpoint.commit.world_size}", key=key)
    return plan


def ranks_with(plan: JointPlan, wants: Iterable[BoxRequest]) -> set[int]:
    """The ranks that stored elements of the boxes `wants`. Of tensors that the plan does not name, nobody did."""
    return {rank for want in wants if want.fqn in plan.tensors for rank in plan.ranks_of(want.fqn, want.box)}
