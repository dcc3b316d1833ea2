"""A shard in the spool: its record, its notes and its objects.

Invariants
  SPOOL-1  A record is durable only after all objects that its vote names are durable in the spool. So whoever finds
      a record can upload the shard and vote, without the process that took the snapshot.
  SPOOL-2  A record goes before its objects when a shard is dropped. Objects without a record are leftovers, and a start removes
      them.
  SPOOL-3  One daemon at a time uses a spool: it holds the kernel's lock on it, which ends with the process.
  SPOOL-4  A record stays until the attempt has an outcome, or until this rank has put its no. A process that ends before leaves
      the record to the next one on this node.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from dataclasses import fields as fields_of

import msgspec

from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig
from checkpointd.daemon.spool.record import SPOOLED, Note, SpooledRules, SpoolRecord, encode_record, note_key
from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.layout.keys import object_key
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


@dataclass(eq=False, slots=True)
class RootSpool:
    """The part of the spool for one root."""

    url: str
    name: str
    store: Store


@dataclass(eq=False, slots=True)
class SpooledShard:
    """One rank's shard of one attempt."""

    spool: RootSpool
    record: SpoolRecord
    notes: set[str] = field(default_factory=set)
    superseded_by: str = ""
    """The tag of the newer save for which it is dropped."""
    in_log: bool = False
    """Whether this process has seen the attempt announced in the log."""
    may_have_voted: bool = False
    """Whether this process has tried to put the yes vote."""

    @property
    def prefix(self) -> str:
        return self.record.prefix

    @property
    def is_announced(self) -> bool:
        """Whether its coordinator has announced the attempt in the log, so that others see it at the root."""
        return "announced" in self.notes

    @property
    def is_superseded(self) -> bool:
        return bool(self.superseded_by) or "superseded" in self.notes

    @property
    def must_stay(self) -> bool:
        """Whether no newer save replaces it (QUEUE-3 in `queue.py`)."""
        record, vote = self.record, self.record.vote
        rules = record.retention
        is_step = rules.every_steps is not None and vote.step % rules.every_steps == 0
        may_be_best = rules.best is not None
        return record.required or self.may_have_voted or not vote.save_latest or is_step or may_be_best

    @property
    def nbytes(self) -> int:
        """The bytes of its objects and its index."""
        vote = self.record.vote
        return sum(ref.size for ref in vote.objects) + (vote.index.size if vote.index is not None else 0)

    @property
    def info(self) -> AttemptInfo:
        """The attempt, as a process goes on with it."""
        record, vote = self.record, self.record.vote
        return AttemptInfo(
            tag=vote.tag,
            attempt=record.attempt,
            rank=vote.rank,
            world_size=vote.world_size,
            step=vote.step,
            n=vote.n,
            save_latest=vote.save_latest,
            metrics=tuple(vote.metrics.items()),
            left=vote.left,
            shown_at=vote.shown_at if vote.files is None else "",
            required=record.required,
        )

    @property
    def commit(self) -> CommitConfig:
        """The settings of its commit."""
        record = self.record
        return CommitConfig(
            timeout_s=record.commit_timeout_s,
            retention=Retention(**msgspec.structs.asdict(record.retention)),
            on_no_progress=record.on_no_progress,
            read_back=record.read_back,
        )

    async def note(self, note: Note | str) -> None:
        """Note durably beside the record."""
        if note not in self.notes:
            await self.spool.store.put_if_absent(note_key(self.record.key, note), b"\n")
            self.notes.add(note)

    async def try_to_note(self, note: Note | str) -> None:
        """Note beside the record, durably unless the disk takes no writes: then this process alone knows of it."""
        try:
            await self.note(note)
        except StoreError as error:
            log.warning("%s: the spool cannot note %s, so a restart looks again: %s", self.prefix, note, error)
            self.notes.add(note)

    async def forget_note(self, note: str) -> None:
        if note in self.notes:
            await self.spool.store.delete(note_key(self.record.key, note))
            self.notes.discard(note)

    async def drop_bytes(self) -> None:
        """Remove the objects, whose bytes nobody needs any more. The record stays."""
        for name in self._names():
            await self.spool.store.delete(object_key(self.prefix, name), durable=False)

    async def drop(self) -> None:
        """Remove all of it (SPOOL-2)."""
        store, key = self.spool.store, self.record.key
        await store.delete(key)
        for note in sorted(self.notes):
            await store.delete(note_key(key, note), durable=False)
        await self.drop_bytes()

    def _names(self) -> list[str]:
        vote = self.record.vote
        index = [] if vote.index is None else [vote.index.name]
        return [*index, *(ref.name for ref in vote.objects)]


async def put_record(spool: RootSpool, record: SpoolRecord) -> SpooledShard:
    """Put the record of a shard whose objects are durable in the spool (SPOOL-1)."""
    await drop_record(spool.store, record.key)  # if the root was removed and made again, names of attempts come again
    await spool.store.put_if_absent(record.key, encode_record(record))
    return SpooledShard(spool, record)


async def drop_record(store: Store, key: str) -> None:
    """Remove the record `key`, if there is one, and then all notes beside it."""
    name = key.rpartition("/")[2]
    beside = [entry.name for entry in await store.list(SPOOLED)]
    for found in sorted(one for one in beside if one == name or one.startswith(f"{name}.")):  # the record first
        await store.delete(f"{SPOOLED}/{found}")


def rules_of(rules: Retention) -> SpooledRules:
    return SpooledRules(**{field.name: getattr(rules, field.name) for field in fields_of(rules)})


async def drop_quietly(shard: SpooledShard) -> None:
    """Drop it. If the disk fails, the log says so, and the next start removes the rest."""
    try:
        await shard.drop()
    except CheckpointdError as error:
        log.warning("%s stays in the spool for now: %s", shard.prefix, error)
