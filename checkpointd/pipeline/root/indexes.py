"""The indexes that votes name, and the plans that they begin with."""

from __future__ import annotations

from collections.abc import Sequence

from checkpointd.errors import CheckpointdError, DamagedError
from checkpointd.layout.indexes import Index, Plan, decode_index, decode_plan
from checkpointd.layout.keys import object_key, vote_name
from checkpointd.layout.manifest import IndexRef, Vote, digest
from checkpointd.pipeline.workers import uncollected
from checkpointd.store.base import Store, each

WHOLE_BYTES = 1 << 16
"""So small an index is read whole with others, since a read of its own would take longer than the bytes behind its plan."""


async def index_named_by(store: Store, prefix: str, vote: Vote) -> Index:
    """The index that `vote` names. Raises DamagedError if its bytes, rank, attempt or step are not those of the vote."""
    ref = _named(prefix, vote)
    return index_in(await store.get(object_key(prefix, ref.name), size_max=ref.size), prefix, vote, ref)


def index_in(data: bytes, prefix: str, vote: Vote, ref: IndexRef) -> Index:
    """The index with the bytes `data`, which `vote` names as `ref`. Raises DamagedError as `index_named_by`."""
    key = object_key(prefix, ref.name)
    if len(data) != ref.size or digest(data) != ref.digest:
        raise DamagedError(f"{key} is damaged: its bytes are not those that its vote names", key=key)
    index = uncollected(lambda: decode_index(data, ref.plan, key))
    if (index.tag, index.attempt, index.rank, index.step) != (vote.tag, vote.attempt, vote.rank, vote.step):
        raise DamagedError(f"{key} belongs to rank {index.rank} of {index.tag}/{index.attempt}, step {index.step}", key=key)
    return index


async def plans_named_by(store: Store, votes: Sequence[Vote]) -> list[Plan]:
    """The plans of the indexes that `votes` name. Raises NotFoundError if there is no such index, and DamagedError if the bytes
    of a plan are not those of its vote, or belong to another rank.
    """
    keys = {vote.rank: object_key(vote.prefix, _named(vote.prefix, vote).name) for vote in votes}
    small = [vote for vote in votes if _named(vote.prefix, vote).size <= WHOLE_BYTES]
    large = [vote for vote in votes if _named(vote.prefix, vote).size > WHOLE_BYTES]
    some = await store.get_each([keys[vote.rank] for vote in small], size_max=WHOLE_BYTES)
    others = await each(lambda vote: _head(store, keys[vote.rank], _named(vote.prefix, vote).plan.size), large)
    found = {vote.rank: data for vote, data in zip((*small, *large), (*some, *others), strict=True)}
    return uncollected(lambda: [_plan_in(found[vote.rank], vote, keys[vote.rank]) for vote in votes])


async def _head(store: Store, key: str, size: int) -> bytes | bytearray:
    data = bytearray(size)
    await store.get_range(key, 0, memoryview(data))
    return data


def _plan_in(data: bytes | bytearray | CheckpointdError, vote: Vote, key: str) -> Plan:
    if isinstance(data, CheckpointdError):
        raise data
    ref = _named(vote.prefix, vote).plan
    content = memoryview(data)[: ref.size]
    if digest(content) != ref.digest:
        raise DamagedError(f"{key} is damaged: the bytes of its plan are not those that its vote names", key=key)
    plan = decode_plan(content, key)
    if (plan.rank, plan.world_size) != (vote.rank, vote.world_size):
        raise DamagedError(f"{key} has the plan of rank {plan.rank} of {plan.world_size}, not of rank {vote.rank}", key=key)
    return plan


def _named(prefix: str, vote: Vote) -> IndexRef:
    if vote.index is None:
        raise DamagedError(f"{prefix}/{vote_name(vote.rank)} names no index")
    return vote.index
