"""Is a checkpoint whole? Read all of it, rank by rank, and list every damage instead of stopping at the first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import ERRORS, CheckpointdError, DamagedError, FormatError, NotFoundError, StoreError
from checkpointd.layout import tree
from checkpointd.layout.files import check_files, pieces_of
from checkpointd.layout.keys import OUTCOME, VERIFIED, plan_key, vote_name
from checkpointd.layout.manifest import Index, Plan, PlanTensor, Verified, Vote, encode
from checkpointd.layout.plan import Listing, Names, cover_fault, listings_fault
from checkpointd.pipeline.catalog import Checkpoint, read_plan, read_vote
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.load import read_index, read_tensors
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it was written: the class of the error, its words, and the object, FQN and rank where known."""

    code: str
    message: str
    key: str = ""
    fqn: str = ""
    rank: int | None = None

    @staticmethod
    def of(error: CheckpointdError, rank: int | None = None) -> Damage:
        """`rank` where the error itself does not know it; the words then end in it."""
        key, fqn, known = (error.key, error.fqn, error.rank) if isinstance(error, DamagedError) else ("", "", None)
        where = f" (rank {rank})" if known is None and rank is not None and f"rank {rank}" not in str(error) else ""
        return Damage(code=error.code, message=f"{error}{where}", key=key, fqn=fqn, rank=rank if known is None else known)


@dataclass(slots=True)
class Verdict:
    """What verification of one checkpoint found: bytes read, and every damage (none: it is whole)."""

    tag: str
    attempt: str
    bytes_read: int = 0
    damage: list[Damage] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.damage


async def verify(
    store: Store, checkpoint: Checkpoint, config: LoadConfig, on_bytes: Callable[[int], None] = lambda _: None
) -> Verdict:
    """Verify outcome, votes, plans, indexes and every chunk of every rank, and that the ranks together stored a whole state.

    What the storage cannot read is damage as well.
    """
    verdict = Verdict(checkpoint.tag, str(checkpoint.attempt))

    def count(nbytes: int) -> None:
        verdict.bytes_read += nbytes
        on_bytes(nbytes)

    names, stored = Names(), dict[int, Listing]()
    for rank in range(checkpoint.outcome.world_size):
        try:
            plan = await _verify_rank(store, checkpoint, rank, config, count, verdict.damage)
            stored[rank] = Listing.of(plan, names)
        except (DamagedError, NotFoundError, StoreError) as error:
            verdict.damage.append(Damage.of(error, rank))
    if len(stored) == checkpoint.outcome.world_size:
        verdict.damage.extend(_union_damage(checkpoint, listings_fault(stored, names)))
    return verdict


async def verify_ranks(
    store: Store,
    checkpoint: Checkpoint,
    ranks: Iterable[int],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[Damage]:
    """What is damaged of what `ranks` stored."""
    damage: list[Damage] = []
    for rank in ranks:
        try:
            await _verify_rank(store, checkpoint, rank, config, on_bytes, damage)
        except (DamagedError, NotFoundError, StoreError) as error:
            damage.append(Damage.of(error, rank))
    return damage


async def record_verdict(store: Store, checkpoint: Checkpoint, verdict: Verdict) -> None:
    """Leave the record that `checkpoint` was found whole, or take it back where it is damaged now: retention must not keep it
    instead of one that is whole. Where the root cannot be written, or be read, all stays as it was.
    """
    key = f"{checkpoint.prefix}/{VERIFIED}"
    try:
        if verdict.whole:
            await store.put_if_absent(key, encode(Verified(nbytes=verdict.bytes_read, writer=writer())))
        elif any(issubclass(ERRORS.get(damage.code, DamagedError), DamagedError | NotFoundError) for damage in verdict.damage):
            await store.delete(key)
    except StoreError as error:
        log.info("%s: what verifying it has shown cannot be recorded: %s", checkpoint.prefix, error)


async def _verify_rank(
    store: Store,
    checkpoint: Checkpoint,
    rank: int,
    config: LoadConfig,
    count: Callable[[int], None],
    damage: list[Damage],
) -> Plan:
    """Everything of one rank; what its index says that it stored."""
    index = await read_index(store, checkpoint, rank)
    try:
        vote = await read_vote(store, f"{checkpoint.prefix}/{vote_name(rank)}")
        _check_tree(index, f"{checkpoint.prefix}/{vote.index.name if vote.index else ''}")
        await _check_plan(store, checkpoint, vote, index)
    except CheckpointdError as error:
        damage.append(Damage.of(error, rank))
    found = await read_tensors(store, checkpoint.prefix, index, {t.fqn: None for t in index.tensors}, config, count)
    damage.extend(Damage.of(error, rank) for error in found)
    parts = tuple(PlanTensor(t.fqn, t.dtype, t.shape, t.box, t.scope) for t in index.tensors)
    return Plan(rank=rank, world_size=index.world_size, tensors=parts)


def _check_tree(index: Index, key: str) -> None:
    files = tree.files_of(index.tree, key)
    if files is None:
        tree.decode(index.tree, key)
        return
    check_files(files)
    sizes = {entry.fqn: entry.box.numel() for entry in index.tensors}
    for file in files.files:
        pieces_of(file, sizes)


def _union_damage(checkpoint: Checkpoint, fault: str | None) -> Iterator[Damage]:
    """The coordinator let no such checkpoint pass; it may have been put together since."""
    if fault is not None:
        message = f"the ranks of {checkpoint.tag} did not store one whole state: {fault}"
        yield Damage.of(FormatError(message, key=f"{checkpoint.prefix}/{OUTCOME}"))


async def _check_plan(store: Store, checkpoint: Checkpoint, vote: Vote, index: Index) -> None:
    rank = vote.rank
    key = plan_key(vote.plan or "")
    try:
        plan = await read_plan(store, vote.plan or "")
    except NotFoundError as error:
        raise DamagedError(f"{error}, which the vote of rank {rank} names", key=key, rank=rank) from error
    fault = cover_fault(plan, index)
    if fault:
        raise DamagedError(f"the index of {checkpoint.tag} is not what its plan says: {fault}", key=key, rank=rank)
