"""Verifies a whole checkpoint: reads all of it, rank by rank, and lists all damage instead of stopping at the first."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, FormatError, NotFoundError, StoreError, UnreadableError
from checkpointd.layout import tree
from checkpointd.layout.files import check_files, pieces_of
from checkpointd.layout.keys import DAMAGED, OUTCOME, VERIFIED, plan_key, vote_name
from checkpointd.layout.manifest import Damaged, Index, Plan, PlanTensor, Verified, Vote, encode
from checkpointd.layout.plan import NumberedPlan, TensorNumbers, compared, cover_fault
from checkpointd.pipeline.read.duplicate_boxes import unequal
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.load import read_tensors
from checkpointd.pipeline.root.catalog import Checkpoint, read_plan, read_vote, view
from checkpointd.pipeline.root.identity import writer
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")

FAULTS_MAX = 8
"""So many faults stand in the record of a damaged checkpoint."""


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
class CheckpointVerdict:
    """What verification of one checkpoint found: bytes read, every damage, and what cannot be read now, which is no proof of
    damage. With neither it is whole.
    """

    tag: str
    attempt: str
    bytes_read: int = 0
    damage: list[Damage] = field(default_factory=list)
    unreadable: list[Damage] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return not self.damage and not self.unreadable

    def note(self, error: CheckpointdError, rank: int) -> None:
        """Count `error`, met at what `rank` stored."""
        (self.unreadable if isinstance(error, StoreError) else self.damage).append(Damage.of(error, rank))


async def verify(
    store: Store, checkpoint: Checkpoint, config: LoadConfig, on_bytes: Callable[[int], None] = lambda _: None
) -> CheckpointVerdict:
    """Verify outcome, votes, plans, indexes and every chunk of every rank, and that the ranks together stored a whole state.

    What cannot be read is tried again as `config` says, and then counts as unreadable. What is not there counts as damage when
    looks spread over `config.absence_s` have agreed on it.
    """
    verdict = CheckpointVerdict(checkpoint.tag, str(checkpoint.attempt))
    store = PatientStore(store, Patience(config.retry_s, config.absence_s))

    def count(nbytes: int) -> None:
        verdict.bytes_read += nbytes
        on_bytes(nbytes)

    names, stored = TensorNumbers(), dict[int, NumberedPlan]()
    for rank in range(checkpoint.outcome.world_size):
        try:
            plan = await _verify_rank(store, checkpoint, rank, config, count, verdict)
            stored[rank] = NumberedPlan.of(plan, names)
        except (DamagedError, NotFoundError, StoreError) as error:
            verdict.note(error, rank)
    if len(stored) == checkpoint.outcome.world_size:
        comparison = compared(stored, names)
        verdict.damage.extend(_union_damage(checkpoint, comparison.fault))
        if comparison.doubled:
            with suppress(DamagedError, NotFoundError, StoreError):  # noted
                fault = await unequal(partial(_read_again, store, checkpoint, verdict), comparison.doubled, config.reads)
                verdict.damage.extend(_union_damage(checkpoint, fault))
    return verdict


async def _read_again(store: Store, checkpoint: Checkpoint, verdict: CheckpointVerdict, rank: int) -> Index:
    try:
        return await read_index(store, checkpoint, rank)
    except (DamagedError, NotFoundError, StoreError) as error:
        verdict.note(error, rank)
        raise


async def verify_proved(
    store: Store, checkpoint: Checkpoint, config: LoadConfig, on_bytes: Callable[[int], None] = lambda _: None
) -> CheckpointVerdict:
    """The same for a verdict that is going to be recorded: what is damaged was read twice, past the cache."""
    verdict = await verify(store.uncached, checkpoint, config, on_bytes)
    return await verify(store.uncached, checkpoint, config, on_bytes) if verdict.damage else verdict


async def verify_ranks(
    store: Store,
    checkpoint: Checkpoint,
    ranks: Iterable[int],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
    left: Callable[[Index], Container[str]] = lambda _: (),
) -> list[Damage]:
    """What is damaged of what `ranks` stored. UnreadableError where something cannot be read now, and nothing is damaged.

    `left`: the tensors of a rank that the caller reads, and verifies, by itself.
    """
    verdict = CheckpointVerdict(checkpoint.tag, str(checkpoint.attempt))
    store = PatientStore(store, Patience(config.retry_s, config.absence_s))
    for rank in ranks:
        try:
            await _verify_rank(store, checkpoint, rank, config, on_bytes, verdict, left)
        except (DamagedError, NotFoundError, StoreError) as error:
            verdict.note(error, rank)
    if verdict.unreadable and not verdict.damage:
        raise UnreadableError(verdict.unreadable[0].message)
    return verdict.damage


async def record_verdict(store: Store, checkpoint: Checkpoint, verdict: CheckpointVerdict) -> None:
    """Leave the record that `checkpoint` was found whole, or that it is damaged, in place of the other one.

    `verdict` is of what `store.uncached` has. Where the root cannot be written, or be read, and where it is no checkpoint any
    more, all stays as it was.
    """
    whole, damaged = f"{checkpoint.prefix}/{VERIFIED}", f"{checkpoint.prefix}/{DAMAGED}"
    try:
        if (await view(store, checkpoint.tag, checkpoint.attempt)).state != "committed":
            return
        if verdict.whole:
            await store.put(whole, encode(Verified(nbytes=verdict.bytes_read, uncached=True, writer=writer())))
            await store.delete(damaged)
        elif verdict.damage:
            faults = tuple(damage.message for damage in verdict.damage[:FAULTS_MAX])
            await store.put(damaged, encode(Damaged(faults=faults, writer=writer())))
            await store.delete(whole)
    except StoreError as error:
        log.warning("%s: what reading it has shown cannot be recorded: %s", checkpoint.prefix, error)


async def _verify_rank(
    store: Store,
    checkpoint: Checkpoint,
    rank: int,
    config: LoadConfig,
    count: Callable[[int], None],
    verdict: CheckpointVerdict,
    left: Callable[[Index], Container[str]] = lambda _: (),
) -> Plan:
    """Everything of one rank; what its index says that it stored."""
    index = await read_index(store, checkpoint, rank)
    try:
        await _check_described(store, checkpoint, index)
    except CheckpointdError as error:
        verdict.note(error, rank)
    verdict.damage.extend([Damage.of(error, rank) async for error in _wrong_sizes(store, checkpoint, index)])
    others = left(index)
    wanted = {t.fqn: None for t in index.tensors if t.fqn not in others}
    found = await read_tensors(store, checkpoint.prefix, index, wanted, config, count)
    verdict.damage.extend(Damage.of(error, rank) for error in found)
    parts = tuple(PlanTensor(t.fqn, t.dtype, t.shape, t.box, t.scope) for t in index.tensors)
    return Plan(rank=rank, world_size=index.world_size, tensors=parts)


async def _wrong_sizes(store: Store, checkpoint: Checkpoint, index: Index) -> AsyncIterator[DamagedError]:
    """Objects that are longer than they were written: no chunk shows it, but a file that is such an object is another file."""
    for ref in index.objects:
        key = ref.key(checkpoint.prefix)
        size = await store.stat(key)
        if size is not None and size > ref.size:
            yield DamagedError(f"{key!r} in {store.url} has {size} bytes, and was written with {ref.size}", key=key)


async def checked_index(store: Store, checkpoint: Checkpoint, rank: int) -> Index:
    """The index of `rank`, verified along outcome, vote and index, which says what its plan says. DamagedError where not."""
    index = await read_index(store, checkpoint, rank)
    await _check_described(store, checkpoint, index)
    return index


async def _check_described(store: Store, checkpoint: Checkpoint, index: Index) -> None:
    vote = await read_vote(store, f"{checkpoint.prefix}/{vote_name(index.rank)}")
    _check_tree(index, f"{checkpoint.prefix}/{vote.index.name if vote.index else ''}")
    await _check_plan(store, checkpoint, vote, index)


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
