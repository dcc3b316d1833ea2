"""Verifies a checkpoint: reads all of it, rank by rank, and lists all damage instead of stopping at the first."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, FormatError, NotFoundError, StoreError, UnreadableError
from checkpointd.layout import tree
from checkpointd.layout.files import check_files, pieces_of
from checkpointd.layout.indexes import Index
from checkpointd.layout.joint_plan import joint_plan, joint_plan_ref
from checkpointd.layout.keys import object_key
from checkpointd.layout.log_records import DamageRecord, LoggedAttempt, VerifyRecord
from checkpointd.layout.manifest import StoredContent
from checkpointd.layout.plan import NumberedPlan, TensorNumbers, compared
from checkpointd.pipeline.read.contents import content_of
from checkpointd.pipeline.read.duplicate_boxes import unequal
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.joint_plan import checked_joint_plan
from checkpointd.pipeline.read.load import read_tensors
from checkpointd.pipeline.root.ballots import CountedVotes, ballot_key, joint_plan_key
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import COORDINATOR
from checkpointd.pipeline.workers import aside
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")

FAULTS_MAX = 8
"""The most faults in the record of a damaged checkpoint."""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One damage: the class of the error, its message, and the object, FQN and rank if known."""

    code: str
    message: str
    key: str = ""
    fqn: str = ""
    rank: int | None = None

    @staticmethod
    def of(error: CheckpointdError, rank: int | None = None) -> Damage:
        """The damage of `error`. If the error does not know its rank, `rank` is added, also to the message."""
        key, fqn, known = (error.key, error.fqn, error.rank) if isinstance(error, DamagedError) else ("", "", None)
        where = f" (rank {rank})" if known is None and rank is not None and f"rank {rank}" not in str(error) else ""
        return Damage(code=error.code, message=f"{error}{where}", key=key, fqn=fqn, rank=rank if known is None else known)


@dataclass(slots=True)
class CheckpointVerdict:
    """The result of verifying one checkpoint: the bytes read, all damage, and everything that cannot be read now.

    A checkpoint without damage and without unreadable parts is whole. An unreadable part does not prove damage.
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
        """Add `error`, which was found in the shard of `rank`."""
        (self.unreadable if isinstance(error, StoreError) else self.damage).append(Damage.of(error, rank))


async def verify(
    store: Store, checkpoint: LoggedAttempt, config: LoadConfig, on_bytes: Callable[[int], None] = lambda _: None
) -> CheckpointVerdict:
    """Verify the outcome, the votes, indexes and chunks of all ranks, and that the ranks together stored a whole state.

    A read that fails is tried again as `config` says; then the object counts as unreadable. An object counts as missing, which
    is damage, if looks spread over `config.absence_s` agree.
    """
    verdict = CheckpointVerdict(checkpoint.tag, str(checkpoint.id))
    store = PatientStore(store, Patience(config.retry_s, config.absence_s))

    def count(nbytes: int) -> None:
        verdict.bytes_read += nbytes
        on_bytes(nbytes)

    names, stored, contents = TensorNumbers(), dict[int, NumberedPlan](), list[StoredContent]()
    votes = CountedVotes(store, checkpoint.commit)
    for rank in range(checkpoint.commit.world_size):
        try:
            if rank == COORDINATOR:
                ballot = {ballot_key(checkpoint.commit): checkpoint.commit.ballot.size}
                verdict.damage.extend([Damage.of(error, rank) async for error in _too_long(store, ballot)])
            index = await _verify_rank(store, checkpoint, rank, config, count, verdict, votes)
            stored[rank] = await aside(len(index.tensors), NumberedPlan.of, index, names)
            if checkpoint.commit.plan is not None:
                contents.append(await aside(len(index.tensors), content_of, index))
        except (DamagedError, NotFoundError, StoreError) as error:
            verdict.note(error, rank)
    if len(stored) == checkpoint.commit.world_size:
        comparison = compared(stored, names)
        verdict.damage.extend(_union_damage(checkpoint, comparison.fault))
        if comparison.doubled:
            with suppress(DamagedError, NotFoundError, StoreError):  # `_read_again` has noted them
                fault = await unequal(partial(_read_again, store, checkpoint, verdict), comparison.doubled, config.reads)
                verdict.damage.extend(_union_damage(checkpoint, fault))
        if checkpoint.commit.plan is not None and not comparison.fault:
            await _check_joint_plan(store, checkpoint, joint_plan(stored, names).encode(contents), verdict)
    return verdict


async def _check_joint_plan(store: Store, checkpoint: LoggedAttempt, expected: bytes, verdict: CheckpointVerdict) -> None:
    """Note it if the joint plan is damaged, or is not `expected`, which the indexes make."""
    key = joint_plan_key(checkpoint.commit)
    try:
        await checked_joint_plan(store, checkpoint)
        if checkpoint.commit.plan != joint_plan_ref(expected):
            raise DamagedError(f"{key} does not say what the ranks stored", key=key)
    except (DamagedError, NotFoundError, StoreError) as error:
        verdict.note(error, COORDINATOR)


async def _read_again(store: Store, checkpoint: LoggedAttempt, verdict: CheckpointVerdict, rank: int) -> Index:
    try:
        return await read_index(store, checkpoint, rank)
    except (DamagedError, NotFoundError, StoreError) as error:
        verdict.note(error, rank)
        raise


async def verify_proved(
    store: Store, checkpoint: LoggedAttempt, config: LoadConfig, on_bytes: Callable[[int], None] = lambda _: None
) -> CheckpointVerdict:
    """Verify past the cache, and once more if there is damage, for a verdict that will be recorded."""
    verdict = await verify(store.uncached, checkpoint, config, on_bytes)
    return await verify(store.uncached, checkpoint, config, on_bytes) if verdict.damage else verdict


async def verify_ranks(
    store: Store,
    checkpoint: LoggedAttempt,
    ranks: Iterable[int],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
    left: Callable[[Index], Container[str]] = lambda _: (),
) -> list[Damage]:
    """The damage in the shards of `ranks`. Raises UnreadableError if there is none, but something cannot be read now.

    `left`: the tensors of a rank to leave out, because the caller verifies them itself.
    """
    verdict = CheckpointVerdict(checkpoint.tag, str(checkpoint.id))
    store = PatientStore(store, Patience(config.retry_s, config.absence_s))
    votes = CountedVotes(store, checkpoint.commit)
    for rank in ranks:
        try:
            await _verify_rank(store, checkpoint, rank, config, on_bytes, verdict, votes, left)
        except (DamagedError, NotFoundError, StoreError) as error:
            verdict.note(error, rank)
    if verdict.unreadable and not verdict.damage:
        raise UnreadableError(verdict.unreadable[0].message)
    return verdict.damage


async def record_verdict(store: Store, checkpoint: LoggedAttempt, verdict: CheckpointVerdict) -> StoreError | None:
    """Record that `checkpoint` is whole, or that it is damaged; the later record counts.

    `verdict` must come from `store.uncached`. If the storage fails, its error is returned. If that happens, or if the attempt
    is not a checkpoint any more, nothing changes.
    """
    record: VerifyRecord | DamageRecord
    if verdict.whole:
        record = VerifyRecord(attempt=checkpoint.prefix, nbytes=verdict.bytes_read)
    elif verdict.damage:
        faults = "; ".join(damage.message for damage in verdict.damage[:FAULTS_MAX])
        record = DamageRecord(attempt=checkpoint.prefix, why=faults)
    else:
        return None
    try:
        await RootLog.of(store).add(record)
    except StoreError as error:
        log.warning("%s: the result of reading it cannot be recorded: %s", checkpoint.prefix, error)
        return error
    return None


async def _verify_rank(
    store: Store,
    checkpoint: LoggedAttempt,
    rank: int,
    config: LoadConfig,
    count: Callable[[int], None],
    verdict: CheckpointVerdict,
    votes: CountedVotes,
    left: Callable[[Index], Container[str]] = lambda _: (),
) -> Index:
    """Verify the shard of one rank. Returns its index."""
    index = await read_index(store, checkpoint, rank, votes)
    try:
        await _check_described(checkpoint, index, votes)
    except CheckpointdError as error:
        verdict.note(error, rank)
    sizes = {ref.key(checkpoint.prefix): ref.size for ref in index.objects}
    verdict.damage.extend([Damage.of(error, rank) async for error in _too_long(store, sizes)])
    others = left(index)
    wanted = {t.fqn: None for t in index.tensors if t.fqn not in others}
    found = await read_tensors(store, checkpoint.prefix, index, wanted, config, count)
    verdict.damage.extend(Damage.of(error, rank) for error in found)
    return index


async def _too_long(store: Store, sizes: Mapping[str, int]) -> AsyncIterator[DamagedError]:
    """The objects of `sizes` that are longer than they were written. The reads do not show that such a file has changed."""
    for key, written in sizes.items():
        size = await store.stat(key)
        if size is not None and size > written:
            yield DamagedError(f"{key!r} in {store.url} has {size} bytes, and was written with {written}", key=key)


async def checked_index(store: Store, checkpoint: LoggedAttempt, rank: int) -> Index:
    """The index of `rank`, verified along commit and vote, with its tree. Raises DamagedError if it does not agree."""
    votes = CountedVotes(store, checkpoint.commit)
    index = await read_index(store, checkpoint, rank, votes)
    await _check_described(checkpoint, index, votes)
    return index


async def _check_described(checkpoint: LoggedAttempt, index: Index, votes: CountedVotes) -> None:
    vote = await votes.of(index.rank)
    _check_tree(index, object_key(checkpoint.prefix, vote.index.name if vote.index else ""))


def _check_tree(index: Index, key: str) -> None:
    files = tree.files_of(index.tree, key)
    if files is None:
        tree.decode(index.tree, key)
        return
    check_files(files)
    sizes = {entry.fqn: entry.box.numel() for entry in index.tensors}
    for file in files.files:
        pieces_of(file, sizes)


def _union_damage(checkpoint: LoggedAttempt, fault: str | None) -> Iterator[Damage]:
    """The damage if the ranks did not store one whole state. No coordinator commits such an attempt, so it was changed
    since."""
    if fault is not None:
        message = f"the ranks of {checkpoint.tag} did not store one whole state: {fault}"
        yield Damage.of(FormatError(message, key=ballot_key(checkpoint.commit)))
