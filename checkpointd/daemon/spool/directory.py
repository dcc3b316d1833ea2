"""The spool of one process: the roots in it, its room, and what was left there.

Invariants
  SPOOL-5  The spool never takes more than `bytes_max`, nor the last of its disk. What does not fit goes straight to the root.
  SPOOL-6  Committed shards that stay for restarts go first when room is needed, the oldest first. No other shard goes for room.
  SPOOL-11  Nothing is removed in a directory that no spool has made: a spool may be given a directory in which a root lies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from checkpointd.commit.facts import Order
from checkpointd.config import SpoolConfig
from checkpointd.daemon.spool.places import RESERVE, DiskPlace, Room, SpoolPlace, name_of
from checkpointd.daemon.spool.queue import UploadQueue
from checkpointd.daemon.spool.record import SPOOLED, decode_record, record_key
from checkpointd.daemon.spool.shards import RootSpool, SpooledShard, drop_quietly
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError
from checkpointd.layout.keys import AttemptId, is_bulk, is_tag, object_key, object_rank
from checkpointd.pipeline.root.root_view import objects_of
from checkpointd.pipeline.shard import COORDINATOR
from checkpointd.store.base import Store
from checkpointd.store.limited import TokenBucket
from checkpointd.store.posix.users import User

log = logging.getLogger("checkpointd")

ROOT = "root"
"""The object in a root's part of the spool that has the root's URL, for people."""
QueueKey = tuple[str, int, int]
"""The root's name in the spool, user and rank."""


@dataclass(slots=True)
class SpoolCounts:
    """Counts since the process began."""

    spooled: int = 0
    uploaded: int = 0
    superseded: int = 0
    direct_full: int = 0
    """Saves that went straight to the root, since the spool was full."""
    direct_failed: int = 0
    """The same, since the spool's disk failed."""
    damaged: int = 0
    uploaded_bytes: int = 0
    resumed: int = 0


class SpoolDirectory:
    """The spool as one process uses it. `clock` gives seconds since 1970."""

    def __init__(self, config: SpoolConfig, place: SpoolPlace | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.config, self.clock = config, clock
        self.place: SpoolPlace = DiskPlace(config.directory) if place is None else place
        self.bucket = None if config.bandwidth_bps is None else TokenBucket(config.bandwidth_bps)
        self.counts = SpoolCounts()
        self.room: Room | None = None
        """The room when it was last looked at; None if it is not known."""
        self.live: set[SpooledShard] = set()
        """The shards of undecided attempts at which this process works."""
        self._retained: dict[QueueKey, SpooledShard] = {}
        self._roots: dict[str, RootSpool] = {}
        self._stores: dict[str, Store] = {}
        self._queues: dict[QueueKey, UploadQueue] = {}
        self._reserved = 0
        self._looking = asyncio.Lock()

    async def at(self, url: str, user: User | None = None) -> RootSpool:
        """The part of the spool for a root. Raises StoreError."""
        name = name_of(url, user)
        if name not in self._roots:
            spool = RootSpool(url, name, await self._opened(name, user))
            if name not in self._roots:
                await spool.store.put_if_absent(ROOT, f"{url}\n".encode())
                self._roots[name] = spool
        self._roots[name].url = url  # as it is reached from now on
        return self._roots[name]

    def queue(self, shard: SpooledShard) -> UploadQueue:
        """The queue of the rank to which `shard` belongs."""
        return self._queues.setdefault(_queue_key(shard), UploadQueue(shard.record.vote.rank == COORDINATOR))

    def hurry(self) -> None:
        """Limit nothing from here on: the process is told to leave, and should upload what it can."""
        if self.bucket is not None:
            self.bucket.lift()

    def led_here(self) -> Collection[str]:
        """The undecided attempts of which the coordinator's shard is in the spool."""
        return {one.prefix for one in self.live if one.record.vote.rank == COORDINATOR}

    # --- room ----------------------------------------------------------------------------------------------------

    async def reserve(self, nbytes: int) -> bool:
        """Reserve room for `nbytes` (SPOOL-5); False if there is too little. `give_back` ends it."""
        async with self._looking:
            while True:
                self.room = room = await self.place.room()
                if self._fits(room, nbytes):
                    self._reserved += nbytes
                    return True
                if not await self._drop_oldest():
                    return False

    async def measure(self) -> None:
        """Look at the room. It is not known while the disk fails."""
        try:
            self.room = await self.place.room()
        except StoreError:
            self.room = None

    def give_back(self, nbytes: int) -> None:
        self._reserved -= nbytes

    def _fits(self, room: Room, nbytes: int) -> bool:
        wanted, most = self._reserved + nbytes, self.config.bytes_max
        if most is not None:
            return room.used + wanted <= most and wanted <= room.free
        return room.free - wanted >= RESERVE * room.total

    async def _drop_oldest(self) -> bool:
        """Drop the oldest of the committed shards that stay (SPOOL-6)."""
        oldest = min(self._retained, key=lambda key: self._retained[key].record.spooled_at, default=None)
        if oldest is None:
            return False
        await drop_quietly(self._retained.pop(oldest))
        return True

    # --- shards --------------------------------------------------------------------------------------------------

    def began(self, shard: SpooledShard) -> None:
        """Note a shard at which this process works from now on."""
        self.live.add(shard)
        self.queue(shard).add(shard)

    def drop_older(self, key: QueueKey, order: Order, prefix: str) -> None:
        """A save of a rank that asked for `latest` has committed (QUEUE-3)."""
        if self.config.keep == "all" or key not in self._queues:
            return
        for older in self._queues[key].drop_older(order, prefix.partition("/")[0]):
            self.counts.superseded += 1
            log.warning("%s: rank %d drops it from the spool for the newer %s", older.prefix, key[2], prefix)

    async def ended(self, shard: SpooledShard, *, committed: bool) -> None:
        """The attempt of `shard` is decided. A commit stays for restarts, in place of the older one; all else goes."""
        self.live.discard(shard)
        self.queue(shard).ended(shard)
        self.counts.uploaded += committed
        is_newest = committed and shard.record.vote.save_latest
        if is_newest:
            self.drop_older(_queue_key(shard), shard.record.order, shard.prefix)
        if is_newest and self.config.retain:
            await self._retain(shard)
        else:
            await drop_quietly(shard)

    async def _retain(self, shard: SpooledShard) -> None:
        key = _queue_key(shard)
        before = self._retained.get(key)
        if before is not None and before.record.order > shard.record.order:
            await drop_quietly(shard)
            return
        try:
            await shard.note("committed")
        except CheckpointdError as error:
            log.info("%s does not stay in the spool: %s", shard.prefix, error)
            await drop_quietly(shard)
            return
        self._retained[key] = shard
        if before is not None:
            await drop_quietly(before)

    def leave(self, shard: SpooledShard) -> None:
        """This process works no longer at `shard`: the next one on this node does (SPOOL-4)."""
        self.live.discard(shard)
        self.queue(shard).ended(shard)

    # --- what was left -------------------------------------------------------------------------------------------

    async def found(self) -> list[SpooledShard]:
        """The shards that earlier processes have left, oldest first. Damaged records go."""
        shards: list[SpooledShard] = []
        for name in await self.place.names():
            try:
                shards += await self._found_in(name)
            except StoreError as error:
                log.error("what is left in the spool below %s cannot be read: %s", name, error)
        shards.sort(key=lambda one: one.record.order)
        for shard in [shard for shard in shards if "committed" in shard.notes]:
            before = self._retained.get(_queue_key(shard))
            self._retained[_queue_key(shard)] = shard
            if before is not None and before.record.key != shard.record.key:
                await drop_quietly(before)
        return [shard for shard in shards if "committed" not in shard.notes]

    async def _found_in(self, name: str) -> list[SpooledShard]:
        spool, user = self._roots.get(name), await self.place.owner(name)
        if spool is None:
            spool = RootSpool("", name, await self._opened(name, user))
        names = [entry.name for entry in await spool.store.list(SPOOLED) if not entry.is_prefix]
        records: dict[str, set[str]] = {one: set() for one in names if "." not in one}
        for one, _, note in [name.partition(".") for name in names if "." in name]:
            records.get(one, set()).add(note)
        shards = []
        for one, notes in records.items():
            key = f"{SPOOLED}/{one}"
            try:
                record = decode_record(await spool.store.get(key), key)
            except NotFoundError:
                continue
            except StoreError as error:
                log.error("%s cannot be read, so its shard stays in the spool: %s", key, error)
                continue
            except DamagedError as error:
                log.error("the spool has a damaged record, which is removed, and its save is lost: %s", error)
                self.counts.damaged += 1
                with contextlib.suppress(StoreError):  # a disk that takes no writes must not hide the other records
                    await spool.store.delete(key)
                continue
            if name_of(record.url, user) != name or record.uid != (os.geteuid() if user is None else user.uid):
                log.error("%s is not of the root and the user whose directory %s is, and is left alone", key, name)
                continue
            spool.url = spool.url or record.url
            shards.append(SpooledShard(spool, record, notes))
        if spool.url:
            self._roots.setdefault(name, spool)
        return shards

    async def sweep(self) -> int:
        """Remove objects without a record (SPOOL-2); returns how many. Only what a spool has made is touched (SPOOL-11)."""
        removed = 0
        for name in await self.place.names():
            try:
                user = await self.place.owner(name)
                store = await self._opened(name, user)
                if await _is_spool(store, name, user):
                    removed += await _swept(store) + await store.sweep()
            except CheckpointdError as error:
                log.warning("leftovers stay in the spool below %s: %s", name, error)
        return removed

    async def close(self) -> None:
        for store in self._stores.values():
            await store.close()
        self._roots.clear()
        self._stores.clear()

    async def _opened(self, name: str, user: User | None) -> Store:
        if name not in self._stores:
            store = await asyncio.get_running_loop().run_in_executor(None, self.place.open, name, user)
            if name in self._stores:
                await store.close()
            self._stores.setdefault(name, store)
        return self._stores[name]


async def _is_spool(store: Store, name: str, user: User | None) -> bool:
    """Whether the directory `name` is the part of a spool for the root whose URL it holds."""
    try:
        url = await store.get(ROOT)
    except (NotFoundError, DamagedError):
        return False
    return name_of(url.decode(errors="replace").removesuffix("\n"), user) == name


async def _swept(store: Store) -> int:
    records = {f"{SPOOLED}/{entry.name}" for entry in await store.list(SPOOLED)}
    removed = 0
    for tag in [entry.name for entry in await store.list("") if entry.is_prefix and is_tag(entry.name)]:
        for entry in await store.list(tag):
            if AttemptId.parse(entry.name) is None:
                continue
            prefix = f"{tag}/{entry.name}"
            for found in await objects_of(store, prefix):
                rank = object_rank(found.name)
                if rank is None or not is_bulk(found.name) or record_key(prefix, rank) in records:
                    continue
                await store.delete(object_key(prefix, found.name), durable=False)
                removed += 1
    return removed


def _queue_key(shard: SpooledShard) -> QueueKey:
    return (shard.spool.name, shard.record.uid, shard.record.vote.rank)
