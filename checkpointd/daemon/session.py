"""One connection of a rank: from the handshake to its end. What it asked for goes on without it.

Invariants
  L1  Nothing that a client sends ends the daemon, or another client's session.
  L2  A client that does not read is left, never waited for: at most OUTBOX messages wait for it.
  L3  What a client holds (slots, layouts, saves in flight) is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import cast, get_args

from checkpointd.codec import Compression
from checkpointd.commit.machine import FINAL
from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.daemon import wire
from checkpointd.daemon.channel import Channel, Received
from checkpointd.daemon.hub import Hub, RankRecord
from checkpointd.daemon.jobs import Job
from checkpointd.daemon.layouts import shard_tensors, wire_tensors
from checkpointd.daemon.memory import Account, SlotMemory, map_slot
from checkpointd.errors import ERRORS, CheckpointdError, ClosedError, NotFoundError, StagingError, UsageError
from checkpointd.layout.keys import AttemptId, check_tag
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardTensor

log = logging.getLogger("checkpointd")

OUTBOX = 256
"""Messages that may wait for a client. Progress is left out once a quarter of it is filled."""
LAYOUTS_KEPT = 4


class Session:
    """Serves one rank's connection. `left` is called with the saves whose client went before their snapshot was whole."""

    def __init__(self, hub: Hub, channel: Channel, pid: int, left: Callable[[int, list[Job]], None]) -> None:
        self._hub, self._channel, self._pid, self._left = hub, channel, pid, left
        self._outbox: asyncio.Queue[tuple[wire.Message, int | None]] = asyncio.Queue(OUTBOX)
        self._account = Account(hub.config.client_bytes_max, hub.account)
        self._record: RankRecord | None = None
        self._state: WriterState | None = None
        self._epoch, self._nonce = -1, ""
        self._slots: dict[int, SlotMemory] = {}
        self._layouts: OrderedDict[int, tuple[int, tuple[ShardTensor, ...]]] = OrderedDict()
        self._saves: dict[int, Job] = {}
        self._shown: dict[int, tuple[int, int]] = {}

    # --- its life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the client goes, breaks the rules, or does not read."""
        sender = asyncio.create_task(self._send_on())
        teller = asyncio.create_task(self._tell_progress())
        receiver = asyncio.create_task(self._receive_on())
        try:
            done, _ = await asyncio.wait({sender, receiver}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
        finally:
            for task in (sender, teller, receiver):
                task.cancel()
            await asyncio.gather(sender, teller, receiver, return_exceptions=True)
            self._end()

    def _end(self) -> None:
        """The connection is over. Slots stay as long as a job or the tier reads them."""
        unstaged = [job for job in self._saves.values() if not job.has_snapshot]
        for job in self._saves.values():
            job.unlisten(self)
        self._saves.clear()
        for slot in self._slots.values():
            slot.on_idle = SlotMemory.unmap
            if not slot.in_use:
                slot.unmap()
        self._slots.clear()
        if self._record is not None:
            self._record.connections -= 1
            kept = self._hub.tier.of(self._record.root, self._record.rank)
            if kept is not None and self._record.connections == 0:
                self._hub.tier.drop_after(kept, self._hub.config.hold_s)
        self._left(self._pid, unstaged)

    async def _receive_on(self) -> None:
        while (received := await self._channel.receive()) is not None:
            await self._handle(received)

    async def _send_on(self) -> None:
        while True:
            message, descriptor = await self._outbox.get()
            try:
                await self._channel.send(message, descriptor)
            except (ConnectionError, BrokenPipeError):
                return
            finally:
                if descriptor is not None:
                    os.close(descriptor)

    def _post(self, message: wire.Message, descriptor: int | None = None) -> None:
        """Send `message` as soon as the client reads; a client that has left OUTBOX messages unread is left (L2)."""
        try:
            self._outbox.put_nowait((message, descriptor))
        except asyncio.QueueFull:
            if descriptor is not None:
                os.close(descriptor)
            log.error("process %d does not read what the daemon tells it; its connection is closed", self._pid)
            self._channel.close()

    async def _tell_progress(self) -> None:
        """Tell how far each save has come, a few times a second, where something has changed."""
        while True:
            await asyncio.sleep(self._hub.config.progress_interval_s)
            for number, job in self._saves.items():
                now = (job.progress.raw_done, job.progress.stored)
                if self._shown.get(number) == now or self._outbox.qsize() > OUTBOX // 4:
                    continue
                self._shown[number] = now
                missing = job.attempt.votes_missing
                told = wire.Progress(
                    save=number,
                    raw_total=job.progress.raw_total,
                    raw_done=job.progress.raw_done,
                    stored=job.progress.stored,
                    votes_missing=missing,
                )
                self._post(told)

    # --- what it is told -----------------------------------------------------------------------------------------

    async def _handle(self, received: Received) -> None:
        message, descriptor = received.message, received.descriptor
        try:
            if descriptor is not None and not isinstance(message, wire.Slot):
                os.close(descriptor)
                raise UsageError(f"a {type(message).__name__} message takes no descriptor")
            match message:
                case wire.Join():
                    self._join(message)
                case wire.Look():
                    self._show()
                case wire.Ping():
                    self._post(wire.Pong())
                case wire.Begin():
                    self._begin(message)
                case wire.Slot():
                    self._take_slot(message, descriptor)
                case wire.DropSlot():
                    self._drop_slot(message.slot)
                case wire.Layout():
                    self._take_layout(message)
                case wire.Save():
                    self._save(message)
                case wire.Staged():
                    self._staged(message)
                case wire.Spoiled():
                    self._spoiled(message)
                case wire.Fetch():
                    await self._fetch(message)
                case wire.Leave():
                    self._leave()
                case _:
                    raise UsageError(f"a {type(message).__name__} message does not belong here")
        except CheckpointdError as error:
            if isinstance(message, wire.Staged) and message.save in self._saves:
                self._saves[message.save].spoiled(error)
            self._refuse(error, getattr(message, "save", None))

    def _refuse(self, error: CheckpointdError, save: int | None) -> None:
        self._hub.refused += 1
        log.warning("process %d was refused: %s", self._pid, error)
        self._post(wire.Refused(error=ErrorReport(code=error.code, message=str(error)), save=save))

    def _join(self, message: wire.Join) -> None:
        if self._record is not None:
            raise UsageError("this connection has joined a root already")
        if message.rank >= message.world_size:
            raise UsageError(f"rank {message.rank} does not exist in a world of {message.world_size}")
        root = self._hub.roots.check(message.root)
        self._hub.roots.store(root)
        self._record = self._hub.rank(root, message.rank, world_size=message.world_size, pid=self._pid)
        self._record.connections += 1
        self._show()

    def _show(self) -> None:
        """What is held for this rank, and in flight at its root. The trainer is back: what is held stays until it has newer."""
        record = self._joined()
        kept = self._hub.tier.of(record.root, record.rank)
        if kept is not None:
            self._hub.tier.wanted(kept)
        jobs = self._hub.jobs.at(record.root)
        in_flight = tuple(wire.InFlight(tag=j.info.tag, attempt=str(j.info.attempt), rank=j.info.rank) for j in jobs)
        self._post(wire.Joined(held=(kept.described(),) if kept else (), in_flight=in_flight))

    def _joined(self) -> RankRecord:
        if self._record is None:
            raise UsageError("join a root first")
        return self._record

    def _begin(self, message: wire.Begin) -> None:
        record = self._joined()
        ours = self._hub.config
        persist = PersistConfig(
            compression=_compression(message.compression),
            chunk_bytes=message.chunk_bytes,
            budget_bytes=max(message.budget_bytes, 1)
            if ours.budget_bytes is None
            else min(message.budget_bytes, ours.budget_bytes),
            encoders=ours.encoders,
        )
        commit = CommitConfig(timeout_s=message.commit_timeout_s)
        self._state = WriterState(store=self._hub.roots.store(record.root), persist=persist, commit=commit)
        self._epoch = record.epoch = message.epoch
        self._nonce = message.nonce

    def _begun(self) -> WriterState:
        if self._state is None:
            raise UsageError("begin an epoch first")
        return self._state

    # --- memory --------------------------------------------------------------------------------------------------

    def _take_slot(self, message: wire.Slot, descriptor: int | None) -> None:
        if descriptor is None:
            raise UsageError("a slot message takes a descriptor")
        try:
            self._joined()
            if message.slot in self._slots:
                raise UsageError(f"slot {message.slot} is there already")
            if len(self._slots) >= self._hub.config.slots_max:
                raise UsageError(f"this client has {len(self._slots)} slots already; drop one first")
        except UsageError:
            os.close(descriptor)
            raise
        slot = map_slot(descriptor, message.nbytes, self._account)
        slot.on_idle = lambda _: self._post(wire.Free(slot=message.slot))
        self._slots[message.slot] = slot

    def _drop_slot(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is None:
            raise UsageError(f"there is no slot {number}")
        slot.on_idle = SlotMemory.unmap
        if not slot.in_use:
            slot.unmap()

    def _take_layout(self, message: wire.Layout) -> None:
        self._joined()
        self._layouts[message.layout] = (message.nbytes, shard_tensors(message))
        while len(self._layouts) > LAYOUTS_KEPT:
            self._layouts.popitem(last=False)

    # --- saves ---------------------------------------------------------------------------------------------------

    def _save(self, message: wire.Save) -> None:
        state, record = self._begun(), self._joined()
        attempt = AttemptId.parse(message.attempt)
        if attempt is None or attempt.epoch != self._epoch:
            raise UsageError(f"{message.attempt!r} is no attempt of epoch {self._epoch}")
        if message.save in self._saves:
            raise UsageError(f"save {message.save} is there already")
        info = AttemptInfo(
            tag=check_tag(message.tag),
            attempt=attempt,
            rank=record.rank,
            world_size=record.world_size,
            step=message.step,
            n=message.n,
            save_latest=message.save_latest,
            hand=message.hand,
            handed=True,
        )
        job = self._hub.jobs.find((record.root, info.tag, str(info.attempt), info.rank)) or self._new_job(
            state, record, info, message
        )
        self._saves[message.save] = job
        job.listen(self, lambda changed: self._tell(message.save, changed))
        self._tell(message.save, job)

    def _new_job(self, state: WriterState, record: RankRecord, info: AttemptInfo, message: wire.Save) -> Job:
        if self._hub.leaving:
            raise ClosedError("this daemon is leaving, and takes no new saves")
        if len(self._saves) >= self._hub.config.saves_max:
            raise UsageError(f"{len(self._saves)} saves of this client are in flight already; wait for one")
        job = Job(record.root, state, info, left_s=message.left_s, on_change=self._hub.changed)
        self._hub.jobs.add(job)
        return job

    def _of(self, save: int) -> Job:
        job = self._saves.get(save)
        if job is None:
            raise UsageError(f"there is no save {save}")
        return job

    def _staged(self, message: wire.Staged) -> None:
        job, slot = self._of(message.save), self._slots.get(message.slot)
        known = self._layouts.get(message.layout)
        if slot is None or known is None:
            raise UsageError(f"there is no slot {message.slot}, or no layout {message.layout}")
        nbytes, tensors = known
        if nbytes > slot.nbytes:
            raise UsageError(f"the layout needs {nbytes} bytes, and the slot has {slot.nbytes}")
        record = self._joined()
        record.stall_s += message.held_s
        if job.has_snapshot or job.phase in FINAL:  # of an earlier connection, whose memory holds the same
            if not slot.in_use:
                self._post(wire.Free(slot=message.slot))
            return
        self._layouts.move_to_end(message.layout)
        shard = Shard(
            image=slot.image[:nbytes], tensors=tensors, aliases=message.aliases, excluded=message.excluded, tree=message.tree
        )
        self._hub.tier.offer(record.root, job.info, slot, shard, self._nonce)
        job.staged(slot, shard)

    def _spoiled(self, message: wire.Spoiled) -> None:
        kind = ERRORS.get(message.error.code, StagingError)
        self._of(message.save).spoiled(kind(message.error.message))

    def _tell(self, save: int, job: Job) -> None:
        error = job.error
        ranks = tuple(getattr(job.attempt.error, "ranks", ()))
        self._post(wire.Phase(save=save, phase=str(job.phase), error=error, ranks=ranks))
        if job.phase in FINAL:
            job.unlisten(self)
            self._saves.pop(save, None)
            self._shown.pop(save, None)

    # --- what is held --------------------------------------------------------------------------------------------

    async def _fetch(self, message: wire.Fetch) -> None:
        record = self._joined()
        kept = self._hub.tier.of(record.root, record.rank)
        if kept is None or (kept.info.tag, str(kept.info.attempt)) != (message.tag, message.attempt):
            raise NotFoundError(f"no snapshot of {message.tag} ({message.attempt}) is held for rank {record.rank}")
        await asyncio.wait({kept.digests})
        if kept.digests.cancelled():
            raise NotFoundError(f"the snapshot of {message.tag} has just made room for a newer one")
        answer = wire.Snapshot(
            held=kept.described(),
            nbytes=len(kept.shard.image),
            tensors=wire_tensors(kept.shard.tensors),
            aliases=kept.shard.aliases,
            excluded=kept.shard.excluded,
            tree=kept.shard.tree,
            digests=kept.digests.result(),
        )
        self._post(answer, os.dup(kept.slot.descriptor))

    def _leave(self) -> None:
        """The client ends well: nobody will come back for its snapshot."""
        record = self._joined()
        kept = self._hub.tier.of(record.root, record.rank)
        if kept is not None:
            self._hub.tier.drop(kept)


def _compression(name: str) -> Compression:
    for known in get_args(Compression):
        if name == known:
            return cast(Compression, known)
    raise UsageError(f"compression is {name!r}; this daemon knows {', '.join(get_args(Compression))}")
