"""Verifies a checkpoint: reads all of it, rank by rank, and lists all damage instead of stopping at the first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, FormatError, NotFoundError, StoreError
from checkpointd.layout import tree
from checkpointd.layout.files import check_files, pieces_of
from checkpointd.layout.indexes import Index
from checkpointd.layout.joint_plan import joint_plan, joint_plan_ref
from checkpointd.layout.keys import object_key
from checkpointd.layout.log_records import DamageRecord, LoggedAttempt, VerifyRecord
from checkpointd.layout.manifest import StoredContent
from checkpointd.layout.plan import NumberedPlan, TensorNumbers, compared
from checkpointd.pipeline.read.checkpoint_view import checked_joint_plan
from checkpointd.pipeline.read.contents import content_of
from checkpointd.pipeline.read.duplicate_boxes import unequal
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.load import read_tensors
from checkpointd.pipeline.root.ballots import CountedVotes, ballot_key, joint_plan_key
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.wholeness import Loss
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


class CheckpointVerdict(msgspec.Struct):
    """The result of verifying one checkpoint: the bytes read, all damage, and everything that cannot be read now.

    A checkpoint without damage and without unreadable parts is whole. An unreadable part does not prove damage.
    """

    tag: str
    attempt: str
    bytes_read: int = 0
    damage: list[Damage] = []
    unreadable: list[Damage] = []
    state: Literal["whole", "damaged", "unreadable", "removed"] = "whole"
    """For a report. `removed`: while it was read, or while its root was copied, or somebody removed the directory that showed
    its files.
    """
    missing: Loss | None = None
    """For a report: what is missing, which causes some of the damage."""
    record_error: str = ""
    """Why the log did not take the record of the result."""

    @property
    def whole(self) -> bool:
        return not self.damage and not self.unreadable

    def note(self, error: CheckpointdError, rank: int) -> None:
        """Add `error`, which was found in the shard of `rank`."""
        (self.unreadable if isinstance(error, StoreError) else self.damage).append(Damage.of(error, rank))


async def verify(
    store: Store,
    checkpoint: LoggedAttempt,
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    ranks: Collection[int] | None = None,
    left: Callable[[Index], Container[str]] = lambda _: (),
) -> CheckpointVerdict:
    """Verify the commit, the votes, indexes and chunks of all ranks, and that the ranks together stored a whole state; or with
    `ranks`, only what these stored. `left`: the tensors of a rank to leave out, because the caller verifies them itself.

    A read that fails is tried again as `config` says; then the object counts as unreadable. An object counts as missing, which
    is damage, if looks spread over `config.absence_s` agree.
    """
    patient = PatientStore(store, Patience(config.retry_s, config.absence_s))
    verification = _Verifying(patient, checkpoint, config, on_bytes, left)
    for rank in range(checkpoint.commit.world_size) if ranks is None else ranks:
        await verification.rank(rank, together=ranks is None)
    await verification.together()
    return verification.verdict


@dataclass(slots=True)
class _Verifying:
    """The verification of one checkpoint. What it finds is noted in `verdict`, and raised by nobody."""

    store: Store
    checkpoint: LoggedAttempt
    config: LoadConfig
    on_bytes: Callable[[int], None]
    left: Callable[[Index], Container[str]]
    verdict: CheckpointVerdict = field(init=False)
    _votes: CountedVotes = field(init=False)
    _names: TensorNumbers = field(default_factory=TensorNumbers)
    _stored: dict[int, NumberedPlan] = field(default_factory=dict)
    _contents: list[StoredContent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verdict = CheckpointVerdict(self.checkpoint.tag, str(self.checkpoint.id))
        self._votes = CountedVotes(self.store, self.checkpoint.commit)

    async def rank(self, rank: int, *, together: bool) -> None:
        """Verify the shard of one rank. `together`: keep what is needed to verify that of all."""
        commit = self.checkpoint.commit
        try:
            if rank == COORDINATOR:
                await self._note_too_long({ballot_key(commit): commit.ballot.size}, rank)
            index = await read_index(self.store, self.checkpoint, rank, self._votes)
            try:
                await _check_described(self.checkpoint, index, self._votes)
            except CheckpointdError as error:
                self.verdict.note(error, rank)
            await self._note_too_long({ref.key(self.checkpoint.prefix): ref.size for ref in index.objects}, rank)
            others = self.left(index)
            wanted = {t.fqn: None for t in index.tensors if t.fqn not in others}
            found = await read_tensors(self.store, self.checkpoint.prefix, index, wanted, self.config, self._count)
            self.verdict.damage.extend(Damage.of(error, rank) for error in found)
            if together:
                self._stored[rank] = await aside(len(index.tensors), NumberedPlan.of, index, self._names)
            if together and commit.plan is not None:
                self._contents.append(await aside(len(index.tensors), content_of, index))
        except (DamagedError, NotFoundError, StoreError) as error:
            self.verdict.note(error, rank)

    async def together(self) -> None:
        """Verify that all ranks stored one whole state, if their indexes were read."""
        commit = self.checkpoint.commit
        if len(self._stored) < commit.world_size:
            return
        comparison = compared(self._stored, self._names)
        self._note_union(comparison.fault)
        if comparison.doubled:
            with suppress(DamagedError, NotFoundError, StoreError):  # `_read_again` has noted them
                self._note_union(await unequal(self._read_again, comparison.doubled, self.config.reads))
        if commit.plan is None or comparison.fault:
            return
        expected, key = joint_plan(self._stored, self._names).encode(self._contents), joint_plan_key(commit)
        try:
            await checked_joint_plan(self.store, self.checkpoint)
            if commit.plan != joint_plan_ref(expected):
                raise DamagedError(f"{key} does not say what the ranks stored", key=key)
        except (DamagedError, NotFoundError, StoreError) as error:
            self.verdict.note(error, COORDINATOR)

    def _count(self, nbytes: int) -> None:
        self.verdict.bytes_read += nbytes
        self.on_bytes(nbytes)

    async def _note_too_long(self, sizes: Mapping[str, int], rank: int) -> None:
        """Note the objects of `sizes` that are longer than they were written. The reads do not show that."""
        for key, written in sizes.items():
            size = await self.store.stat(key)
            if size is not None and size > written:
                text = f"{key!r} in {self.store.url} has {size} bytes, and was written with {written}"
                self.verdict.note(DamagedError(text, key=key), rank)

    def _note_union(self, fault: str | None) -> None:
        """Note that the ranks did not store one whole state. No coordinator commits such an attempt: it was changed since."""
        if fault is not None:
            text = f"the ranks of {self.checkpoint.tag} did not store one whole state: {fault}"
            self.verdict.damage.append(Damage.of(FormatError(text, key=ballot_key(self.checkpoint.commit))))

    async def _read_again(self, rank: int) -> Index:
        try:
            return await read_index(self.store, self.checkpoint, rank)
        except (DamagedError, NotFoundError, StoreError) as error:
            self.verdict.note(error, rank)
            raise


async def verify_proved(
    store: Store, checkpoint: LoggedAttempt, config: LoadConfig, on_bytes: Callable[[int], None] = lambda _: None
) -> CheckpointVerdict:
    """Verify past the cache, and once more if there is damage, for a verdict that will be recorded."""
    verdict = await verify(store.uncached, checkpoint, config, on_bytes)
    return await verify(store.uncached, checkpoint, config, on_bytes) if verdict.damage else verdict


async def record_verdict(store: Store, checkpoint: LoggedAttempt, verdict: CheckpointVerdict) -> None:
    """Record that `checkpoint` is whole, or that it is damaged; the later record counts.

    `verdict` must come from `store.uncached`. If the storage fails, it notes the error. If that happens, or if the attempt is
    not a checkpoint any more, nothing changes.
    """
    faults = "; ".join(damage.message for damage in verdict.damage[:FAULTS_MAX])
    if not faults and not verdict.whole:
        return
    whole = VerifyRecord(attempt=checkpoint.prefix, nbytes=verdict.bytes_read)
    try:
        await RootLog.of(store).add(DamageRecord(attempt=checkpoint.prefix, why=faults) if faults else whole)
    except StoreError as error:
        log.warning("%s: the result of reading it cannot be recorded: %s", checkpoint.prefix, error)
        verdict.record_error = str(error)


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
