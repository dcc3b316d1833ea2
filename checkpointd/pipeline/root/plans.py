"""The plans at a root: which boxes a rank writes, for the coordinator, which checks that all plans are whole together.

A plan is put when a layout changes, and the votes of later attempts name it as well. Nothing else depends on plans: recovery
and `verify` compare the indexes, which say their boxes themselves. So plans can go early.

Invariants
  PLAN-1  A plan belongs to one writer: it says the attempt and the takeover for which it was put first. So two writers never
      share a plan, and neither do two layouts of one writer in turn, even if the second is like one before. As long as the
      start runs, only this writer removes the plan.
  PLAN-2  A writer removes its plan only if it uses a newer one, and it has seen a durable outcome of each attempt for which it
      used the plan. So the plan of a vote that is still to be decided is there.
      A plan that comes from a spool stays until a start removes it: other processes of its node may upload shards that need it.
  PLAN-3  A start removes the plans of an older start only if none of its attempts survives.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from checkpointd.codec.packed import pack, unpack
from checkpointd.errors import CheckpointdError, CodecError, DamagedError, FormatError, UsageError
from checkpointd.layout.indexes import LISTED_MAX, Plan
from checkpointd.layout.keys import PLANS, AttemptId, plan_key, start_of
from checkpointd.layout.manifest import LISTING_BYTES_MAX, Header, Vote, check_header, digest
from checkpointd.pipeline.root.ballots import put_named
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardTensor
from checkpointd.pipeline.workers import aside, run_workers, uncollected
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

REMOVALS = 16
"""The number of plans removed at once."""


def encode_plan(plan: Plan) -> bytes:
    """The bytes of `plan`. Raises UsageError if a reader would refuse them."""
    content = msgspec.msgpack.encode(plan)
    if len(content) > LISTING_BYTES_MAX or len(plan.tensors) > LISTED_MAX:
        raise UsageError(
            f"the plan of {plan.attempt} has {len(plan.tensors)} parts of tensors in {len(content)} bytes, and {LISTED_MAX} in "
            f"{LISTING_BYTES_MAX} are the limit: use fewer tensors"
        )
    return pack(content)


def decode_plan(data: bytes, key: str) -> Plan:
    """The plan in `data`. Raises FormatError, which names `key` and the fault."""
    try:
        content = unpack(data, LISTING_BYTES_MAX)
        check_header(msgspec.msgpack.decode(content, type=Header), Plan, key)
        return msgspec.msgpack.decode(content, type=Plan)
    except (CodecError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{key} is damaged: {error}", key=key) from error


def key_named_by(vote: Vote) -> str:
    """The key of the plan that `vote` names. Raises FormatError if it names none, or names an attempt that cannot be."""
    attempt = AttemptId.parse(vote.attempt)
    if attempt is None:
        raise FormatError(f"{vote.attempt!r} is not the name of an attempt")
    return plan_key(attempt.start, vote.rank, vote.plan or "")


async def read_plan(store: Store, vote: Vote) -> Plan:
    """The plan that `vote` names. Raises FormatError if it names none, DamagedError if the bytes have another digest or belong
    to another rank.
    """
    [plan] = await read_plans(store, [vote])
    return plan


async def read_plans(store: Store, votes: Sequence[Vote]) -> list[Plan]:
    """The plans that `votes` name, as `read_plan`."""
    keys = [key_named_by(vote) for vote in votes]
    found = await store.get_each(keys, size_max=LISTING_BYTES_MAX)
    return uncollected(lambda: [_plan_of(vote, key, data) for vote, key, data in zip(votes, keys, found, strict=True)])


def _plan_of(vote: Vote, key: str, data: bytes | CheckpointdError) -> Plan:
    if isinstance(data, CheckpointdError):
        raise data
    if digest(data) != vote.plan:
        raise DamagedError(f"{key} is damaged: its digest is {digest(data)}", key=key)
    plan = decode_plan(data, key)
    if (plan.rank, plan.world_size) != (vote.rank, vote.world_size):
        raise DamagedError(f"{key} is the plan of rank {plan.rank} of {plan.world_size}, not of rank {vote.rank}", key=key)
    return plan


@dataclass(frozen=True, slots=True)
class OwnPlan:
    """A plan that is durable at `key`. It belongs to shards with this very tuple `tensors`."""

    tensors: tuple[ShardTensor, ...]
    start: int
    plan: Plan
    digest: str

    @property
    def key(self) -> str:
        return plan_key(self.start, self.plan.rank, self.digest)


@dataclass(slots=True)
class OwnPlans:
    """The plans that one writer of one rank has put, and the attempts that may need them."""

    _current: OwnPlan | None = None
    _undecided: dict[str, set[str]] = field(default_factory=dict)
    """Of each plan, by key: the attempts that use it and of which no outcome was seen."""

    async def use(self, store: Store, info: AttemptInfo, shard: Shard) -> OwnPlan:
        """The plan of `shard`, durable in the store. It is put only if the layout or the start has changed."""
        known = self._current
        if known is None or known.tensors is not shard.tensors or known.start != info.attempt.start:
            known = await _put_plan(store, info, shard)
        # From here on nothing is awaited: a plan that is not the current one gets no more attempts (PLAN-2).
        self._current = known
        self._undecided.setdefault(known.key, set()).add(info.prefix)
        return known

    def note(self, key: str, prefix: str) -> None:
        """Note that the attempt `prefix` may need the plan `key` until it is decided."""
        self._undecided.setdefault(key, set()).add(prefix)

    async def decided(self, store: Store, prefix: str) -> None:
        """Note that the attempt `prefix` has a durable outcome, and remove the plans that nothing needs any more (PLAN-2)."""
        for attempts in self._undecided.values():
            attempts.discard(prefix)
        current = self._current.key if self._current is not None else None
        for key in [key for key, attempts in self._undecided.items() if not attempts and key != current]:
            try:
                await store.delete(key)
            except CheckpointdError as error:
                log.info("%s stays for now: %s", key, error)
            else:
                self._undecided.pop(key, None)


async def _put_plan(store: Store, info: AttemptInfo, shard: Shard) -> OwnPlan:
    plan = shard.plan(info)
    data = await aside(len(shard.tensors), encode_plan, plan)
    made = OwnPlan(shard.tensors, info.attempt.start, plan, digest(data))
    await put_named(store, made.key, data)
    return made


async def remove_plans(store: Store, start: int, surviving: Collection[str] = ()) -> int:
    """Remove the plans of starts before `start` in which none of the attempts `surviving` runs (PLAN-3). Returns how many."""
    staying = {attempt.start for one in surviving if (attempt := AttemptId.parse(one.rpartition("/")[2])) is not None}
    over = [
        entry.name
        for entry in await store.list(PLANS)
        if (number := start_of(entry.name)) is not None and number < start and number not in staying
    ]
    parts = [f"{PLANS}/{name}/{part.name}" for name in over for part in await store.list(f"{PLANS}/{name}")]
    keys = [f"{part}/{entry.name}" for part in parts for entry in await store.list(part)]
    await run_workers([partial(store.delete, key) for key in keys], REMOVALS)
    return len(keys)
