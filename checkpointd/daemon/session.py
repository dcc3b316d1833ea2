"""One connection of a rank, from the handshake to its end. The rank's saves go on without it.

Invariants
  SESSION-1  No message of a client ends the daemon or another client's session.
  SESSION-2  The daemon never waits for a client that does not read: beyond OUTBOX messages, its connection is closed.
  SESSION-3  A client's slots, layouts and saves in flight are bounded, however many connections it makes.
  SESSION-4  The daemon answers every save that it took with the final phase, even if the save had ended before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from functools import partial
from itertools import islice

from checkpointd.commit.machine import FINAL
from checkpointd.commit.machine import Phase as JobPhase
from checkpointd.daemon import beginning, inline_saves
from checkpointd.daemon.accounts import Charge
from checkpointd.daemon.hub import Hub, RankRecord
from checkpointd.daemon.jobs import SPOOLED_MAX, VOTED_MAX, SaveJob, job_key
from checkpointd.daemon.memory.contents import ReceivedContents
from checkpointd.daemon.memory.layouts import KnownLayouts
from checkpointd.daemon.memory.mapped import SlotMemory
from checkpointd.daemon.memory.tier import Kept
from checkpointd.daemon.process.logs import told
from checkpointd.daemon.process.process_exit import death_of
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel, Received
from checkpointd.daemon.protocol.parts import snapshot_parts
from checkpointd.daemon.protocol.peers import Peer
from checkpointd.daemon.spool.own import OwnSpool
from checkpointd.daemon.users import user_of
from checkpointd.errors import (
    ERRORS,
    CheckpointdError,
    ClosedError,
    NotFoundError,
    SidecarFullError,
    StagingError,
    StoreError,
    UsageError,
)
from checkpointd.layout.files import check_place, check_unfinished
from checkpointd.layout.keys import AttemptId, check_tag
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.shard import PAGE, AttemptInfo, Shard, finite
from checkpointd.store.posix.users import User

log = logging.getLogger("checkpointd")

OUTBOX = 256
"""Messages that may wait for a client. Progress is not sent while more than a quarter are waiting."""
SAVES_REMEMBERED = 64
"""Ended saves that are remembered, since messages about them may still arrive."""
FRAME_S = 30.0
"""How long the rest of a frame may take to come."""
GOODBYE_S = 1.0
"""How long a client may take to read the last messages when its connection ends."""


class RankSession:
    """Serves one rank's connection."""

    def __init__(self, hub: Hub, channel: Channel, peer: Peer) -> None:
        self._hub, self._channel, self._peer = hub, channel, peer
        self._outbox: asyncio.Queue[wire.Message | None] = asyncio.Queue(OUTBOX)
        self._account = hub.account_of(peer.uid)
        self._record: RankRecord | None = None
        self._user: User | None = None
        """The user with whose rights the client's saves are made; None: the daemon's own."""
        self._state: WriterState | None = None
        self._spool: OwnSpool | None = None
        self._world_size, self._start, self._nonce = 0, -1, ""
        self._slots: dict[int, SlotMemory] = {}
        self._layouts = KnownLayouts(self._account)
        self._saves: dict[int, SaveJob] = {}
        self._contents: dict[int, ReceivedContents] = {}
        """The contents of saves that are not announced yet, by save."""
        self._over: deque[int] = deque(maxlen=SAVES_REMEMBERED)
        self._shown: dict[int, tuple[int, int, int, str]] = {}

    # --- its life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the client goes, violates the protocol, or does not read."""
        sender = asyncio.create_task(self._send_on())
        teller = asyncio.create_task(self._tell_progress())
        receiver = asyncio.create_task(self._receive_on())
        watcher = asyncio.create_task(self._watch())
        tasks = {sender, teller, receiver}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error
        finally:
            self._end()
            for task in (watcher, teller, receiver):
                task.cancel()
            await self._say_the_rest(sender)
            sender.cancel()
            await asyncio.gather(watcher, *tasks, return_exceptions=True)

    async def _watch(self) -> None:
        if await death_of(self._peer.pid):
            self._channel.expect_no_more()

    async def _say_the_rest(self, sender: asyncio.Task[None]) -> None:
        """Let the client read the last messages: the end of a save, or why it was refused."""
        try:
            self._outbox.put_nowait(None)
        except asyncio.QueueFull:
            return
        await asyncio.wait({sender}, timeout=GOODBYE_S)

    def _end(self) -> None:
        """The connection is over. A slot stays mapped as long as a job or the memory tier uses it."""
        for number, job in self._saves.items():
            job.unlisten((self, number))
            job.client_left(self._peer.pid)
        self._saves.clear()
        for number, slot in self._slots.items():
            slot.disown((self, number))
        self._slots.clear()
        self._layouts.clear()
        for contents in self._contents.values():
            contents.charge.release()
        if self._record is not None:
            self._hub.went(self._record, self._peer)
            kept = self._kept(self._record)
            if kept is not None and not self._record.connections_of(self._peer.uid):
                self._hub.tier.drop_after(kept, self._hub.config.hold_s)

    async def _receive_on(self) -> None:
        while (received := await self._channel.receive(FRAME_S)) is not None:
            await self._handle(received)

    async def _send_on(self) -> None:
        """Send the outbox. If the client cannot be reached, drop the messages, because its own are still read."""
        while (message := await self._outbox.get()) is not None:
            with contextlib.suppress(ConnectionError):
                await self._channel.send(message)
            self._outbox.task_done()

    def _post(self, message: wire.Message) -> None:
        """Send `message` when the client reads. Close the connection if OUTBOX messages are unread (SESSION-2)."""
        if self._channel.closed:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            log.error("process %d does not read the daemon's messages; its connection is closed", self._peer.pid)
            self._channel.close()

    async def _tell_progress(self) -> None:
        """Send the progress of each save a few times a second, if it has changed."""
        while True:
            await asyncio.sleep(self._hub.config.progress_interval_s)
            for number, job in self._saves.items():
                missing = job.attempt.votes_missing
                stored = job.progress.stored + job.progress.uploaded + job.progress.upload_total
                now = (job.progress.raw_done, stored, len(missing or ()), self._trouble)
                if self._shown.get(number) == now or self._outbox.qsize() > OUTBOX // 4:
                    continue
                self._shown[number] = now
                self._tell_bytes(number, job)

    def _tell_bytes(self, number: int, job: SaveJob) -> None:
        message = wire.Progress(
            save=number,
            raw_total=job.progress.raw_total,
            raw_done=job.progress.raw_done,
            raw_kept=job.progress.raw_kept,
            stored=job.progress.stored,
            writing_s=job.progress.writing_s,
            votes_missing=job.attempt.votes_missing,
            no_progress=job.progress.no_progress,
            seconds=job.progress.seconds if job.has_voted else None,
            rested_s=job.progress.pace.rested_s,
            uploaded=job.progress.uploaded,
            upload_total=job.progress.upload_total,
            trouble=self._trouble,
        )
        self._post(message)

    @property
    def _trouble(self) -> str:
        """Why the daemon does not reach the client's root now; empty if it does, as far as it knows."""
        look = self._hub.root_scans.get(self._joined().root)
        if look is None or look.problem is None or not issubclass(ERRORS.get(look.problem.code, Exception), StoreError):
            return ""
        return told(look.problem.message)[: wire.TROUBLE_MAX]

    # --- messages of the client ----------------------------------------------------------------------------------

    async def _handle(self, received: Received) -> None:
        message, descriptor = received.message, received.descriptor
        try:
            if descriptor is not None and not isinstance(message, wire.Slot):
                os.close(descriptor)
                raise UsageError(f"a {type(message).__name__} message takes no descriptor")
            match message:
                case wire.Join():
                    await self._join(message)
                case wire.Look():
                    if self._outbox.qsize() > OUTBOX // 32:
                        await self._outbox.join()  # the answer may be long, so only few may wait
                    self._show()
                case wire.Ping():
                    self._post(wire.Pong())
                case wire.Begin():
                    await self._begin(message)
                case wire.Slot():
                    self._take_slot(message, descriptor)
                case wire.DropSlot():
                    self._drop_slot(message.slot)
                case wire.Layout():
                    await self._take_layout(message)
                case wire.Save():
                    self._save(message)
                case wire.Contents():
                    self._take_contents(message)
                case wire.Announced():
                    self._announced(message)
                case wire.Staged():
                    self._staged(message)
                case wire.Paced():
                    self._paced(message)
                case wire.Spoiled():
                    self._spoiled(message)
                case wire.Inlined():
                    key, save = inline_saves.told(self._joined(), self._nonce, self._peer.uid, message)
                    self._hub.inlined(key, save, held_s=message.held_s)
                case wire.Fetch():
                    await self._fetch(message)
                case wire.Leave():
                    self._leave()
                case _:
                    raise UsageError(f"a {type(message).__name__} message does not belong here")
        except CheckpointdError as error:
            if isinstance(message, wire.Contents | wire.Announced | wire.Staged) and message.save in self._saves:
                self._saves[message.save].spoiled(error)
            self._refuse(error, getattr(message, "save", None))

    def _refuse(self, error: CheckpointdError, save: int | None) -> None:
        self._hub.refuse(error)
        text = told(str(error))
        self._hub.said.warning(f"refused {error.code}", self._peer.uid, "process %d was refused: %s", self._peer.pid, text)
        self._post(wire.Refused(error=ErrorReport.of(error, message=text), save=save))

    async def _join(self, message: wire.Join) -> None:
        if self._record is not None:
            raise UsageError("this connection has joined a root already")
        if message.rank >= message.world_size:
            raise UsageError(f"rank {message.rank} does not exist in a world of {message.world_size}")
        root = await self._hub.roots.checked(message.root)
        self._user = user_of(self._channel, self._peer)
        await self._hub.roots.check_writable(root, self._user)
        self._record = self._hub.rank(root, message.rank, world_size=message.world_size, pid=self._peer.pid, user=self._user)
        self._world_size = message.world_size
        self._hub.came(self._record, self._peer)
        await self._hub.roots.trim(self._hub.roots_in_use())
        self._show()

    def _show(self) -> None:
        """Send the retained snapshots and the attempts in flight. The trainer is back, so its snapshot stays for now."""
        record = self._joined()
        kept = self._kept(record)
        if kept is not None:
            self._hub.tier.wanted(kept)
        # A job in a final phase only removes leftovers or reads back, and nobody has to wait for it.
        jobs = [job for job in self._hub.jobs.at(record.root) if job.phase not in FINAL and job.uid == self._peer.uid]
        in_flight = tuple(
            wire.InFlight(tag=j.info.tag, attempt=str(j.info.attempt), rank=j.info.rank, phase=str(j.phase), nonce=j.nonce)
            for j in jobs[-wire.IN_FLIGHT_TOLD :]
        )
        others = (o for o in self._hub.tier.at(record.root, self._peer.uid) if o.info.rank != record.rank)
        beside = tuple(other.described() for other in islice(others, wire.BESIDE_TOLD))
        held = (kept.described(),) if kept else ()
        spool = self._spool_told(record)
        self._post(wire.Joined(held=held, in_flight=in_flight, beside=beside, spool=spool, trouble=self._trouble))

    def _spool_told(self, record: RankRecord) -> wire.SpoolPlaceTold | None:
        config, spool = self._hub.config.spool_config, self._hub.spool
        if config is None or spool is None:
            return None
        return wire.SpoolPlaceTold(path=spool.path(record.root, self._user), timeout_s=config.timeout_s)

    def _kept(self, record: RankRecord, rank: int | None = None) -> Kept | None:
        """The retained snapshot of this user's rank, or of another rank at the root."""
        return self._hub.tier.of(record.root, self._peer.uid, record.rank if rank is None else rank)

    def _joined(self) -> RankRecord:
        if self._record is None:
            raise UsageError("join a root first")
        return self._record

    async def _begin(self, message: wire.Begin) -> None:
        record = self._joined()
        # Checked again: somebody may have replaced the root by a link since then.
        store = await self._hub.roots.opened(record.root, self._user)
        say = partial(self._hub.said.warning, "a start was not seen", self._peer.uid)
        kept = self._kept(record)
        known = {record.begun} if kept is None else {record.begun, (kept.order[0], kept.nonce)}
        state, removed = await beginning.begun(message, store, self._hub.config, known, say)
        if self._hub.spool is not None:
            self._spool = await self._hub.spool.own(record.root, self._user, message.nonce, self._peer.uid)
            if self._spool is not None:
                state.waiting = self._spool.directory.led_here
        state.take_reader(self._hub.readers.setdefault((record.root, record.rank, self._user), state.reader))
        self._hub.tidiers.add(state.tidier)
        self._state, self._start, self._nonce = state, message.start, message.nonce
        # Otherwise a newer job has the rank, and this is an older one whose attempts survive.
        if record.begun[0] <= message.start or record.begun[1] in removed:
            record.run_by(self._peer.pid, self._world_size)
            self._hub.begun(record, message.start, message.nonce, removed)
        if kept is not None and kept.nonce in removed:
            self._hub.tier.drop(kept)  # its start would make it newer than all later saves

    def _begun(self) -> WriterState:
        if self._state is None:
            raise UsageError("send begin first")
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
        free = wire.Free(slot=message.slot)
        self._slots[message.slot] = self._hub.memory.map(
            descriptor, message.nbytes, self._account, (self, message.slot), lambda: self._post(free)
        )

    def _drop_slot(self, number: int) -> None:
        slot = self._slots.pop(number, None)
        if slot is None:
            raise UsageError(f"there is no slot {number}")
        slot.disown((self, number))

    async def _take_layout(self, message: wire.Layout) -> None:
        self._joined()
        await self._hub.turns.take_each(self._layouts.add(message))

    # --- saves ---------------------------------------------------------------------------------------------------

    def _save(self, message: wire.Save) -> None:
        state, record = self._begun(), self._joined()
        attempt = AttemptId.parse(message.attempt)
        if attempt is None or attempt.start != self._start:
            raise UsageError(f"{message.attempt!r} is not an attempt of start {self._start}")
        if message.save in self._saves or message.save in self._over:
            raise UsageError(f"save {message.save} is there already")
        info = AttemptInfo(
            tag=check_tag(message.tag),
            attempt=attempt,
            rank=record.rank,
            world_size=self._world_size,
            step=message.step,
            n=message.n,
            save_latest=message.save_latest,
            metrics=finite(message.metrics),
            left=message.left,
            unfinished=message.unfinished and check_unfinished(message.unfinished),
            shown_at=message.shown_at and check_place(message.shown_at),
            required=message.required,
        )
        state.tidier.keeps_before = message.keeps_before
        key = job_key(record.root, self._nonce, self._peer.uid, info)
        job, ended = self._hub.jobs.live(key), self._hub.jobs.ended(key)
        if ended is not None and ended.phase is None:
            ended = None  # its trainer said that it had persisted it by itself, which nobody believes
        if not message.spooled and (job is not None or ended is not None):
            raise UsageError(f"{info.prefix} was begun already, and a shard has one writer")
        if job is None and ended is not None:
            self._over.append(message.save)
            self._post(wire.PhaseEntered(save=message.save, phase=str(ended.phase), error=ended.save.error, ranks=ended.ranks))
            return
        if job is None and message.spooled:
            raise NotFoundError(f"the spool of this daemon does not have {info.prefix}, which an earlier daemon took in")
        unvoted = sum(not known.has_voted for known in self._saves.values())
        in_spool = sum(known.is_in_spool for known in self._saves.values())
        too_many = unvoted >= self._hub.config.saves_max or len(self._saves) - in_spool >= VOTED_MAX
        if too_many or in_spool >= SPOOLED_MAX:
            raise UsageError(f"{len(self._saves)} saves of this client are in flight already; wait for one")
        if job is None:
            job = self._new_job(state, record, info, message)
        self._saves[message.save] = job
        job.listen((self, message.save), lambda changed: self._tell(message.save, changed))
        self._tell(message.save, job)

    def _new_job(self, state: WriterState, record: RankRecord, info: AttemptInfo, message: wire.Save) -> SaveJob:
        if self._hub.leaving:
            raise ClosedError("this daemon is leaving, and takes no new saves")
        self._hub.jobs.check_room(record.root, info.rank, self._peer.uid, self._hub.config)
        job = SaveJob(
            record.root,
            self._nonce,
            self._peer.uid,
            state,
            info,
            left_s=message.left_s,
            on_change=self._hub.changed,
            spool=self._spool,
        )
        self._hub.jobs.add(job)
        return job

    def _of(self, save: int) -> SaveJob:
        job = self._saves.get(save)
        if job is None:
            raise UsageError(f"there is no save {save}")
        return job

    def _take_contents(self, message: wire.Contents) -> None:
        if message.save in self._over:
            return
        self._of(message.save)
        self._contents.setdefault(message.save, ReceivedContents(Charge(self._account))).add(message)

    def _announced(self, message: wire.Announced) -> None:
        slot = self._slots.get(message.slot)
        contents = self._contents.pop(message.save, None) or ReceivedContents(Charge(self._account))
        try:
            self._announce(message, slot, contents)
        finally:
            contents.charge.release()

    def _announce(self, message: wire.Announced, slot: SlotMemory | None, contents: ReceivedContents) -> None:
        if message.save in self._over:  # it ended before this message came
            self._free_unless_used(message.slot, slot)
            return
        job = self._of(message.save)
        known = self._layouts.get(message.layout)
        if slot is None or known is None:
            raise UsageError(f"there is no slot {message.slot}, or no layout {message.layout}")
        if known.nbytes > slot.nbytes - PAGE:
            raise UsageError(f"the layout needs {known.nbytes} bytes and a page, and the slot has {slot.nbytes}")
        shard = Shard(
            buffer=slot.buffer[: known.nbytes],
            tensors=known.tensors,
            aliases=tuple(contents.aliases),
            excluded=tuple(contents.excluded),
            tree=bytes(contents.tree),
        )
        # With the layout, which the snapshot keeps when the client replaces it or goes.
        cost = contents.charge.nbytes + known.cost
        job.announce(
            slot,
            shard,
            message.mark,
            Charge.of(self._account, cost),
            partial(self._hold, self._joined(), job, slot, shard, cost),
        )

    def _hold(self, record: RankRecord, job: SaveJob, slot: SlotMemory, shard: Shard, cost: int) -> None:
        """A snapshot is whole. Retain it for a restart, if a restart would load its checkpoint."""
        if not job.info.save_latest:
            return
        try:
            charge = Charge.of(self._account, cost)
        except SidecarFullError as error:
            log.warning("%s: its snapshot is not held for a restart: %s", job.info.prefix, error)
            return
        kept = self._hub.tier.offer(record.root, job.info, slot, shard, charge, nonce=job.nonce, uid=job.uid)
        if kept is not None and not record.connections_of(job.uid):
            self._hub.tier.drop_after(kept, self._hub.config.hold_s)

    def _free_unless_used(self, number: int, slot: SlotMemory | None) -> None:
        if slot is not None and not slot.in_use:
            self._post(wire.Free(slot=number))

    def _staged(self, message: wire.Staged) -> None:
        if message.save not in self._over:
            job = self._of(message.save)
            self._hub.held_up(self._joined(), job.held(message.held_s))
            job.staged()

    def _paced(self, message: wire.Paced) -> None:
        if message.save not in self._over:
            self._of(message.save).progress.pace.follow(message.share, message.left_s)

    def _spoiled(self, message: wire.Spoiled) -> None:
        if message.save in self._over:
            return
        job = self._of(message.save)
        self._hub.held_up(self._joined(), job.held(message.held_s))
        job.spoiled(message.error.error(told(message.error.message), unknown=StagingError))

    def _tell(self, save: int, job: SaveJob) -> None:
        if job.phase in FINAL or job.phase is JobPhase.PREPARED:
            self._tell_bytes(save, job)
        self._post(wire.PhaseEntered(save=save, phase=str(job.phase), error=job.error, ranks=job.ranks))
        if job.phase in FINAL:
            job.unlisten((self, save))
            self._saves.pop(save, None)
            self._over.append(save)
            self._shown.pop(save, None)
            if (contents := self._contents.pop(save, None)) is not None:
                contents.charge.release()

    # --- retained snapshots --------------------------------------------------------------------------------------

    async def _fetch(self, message: wire.Fetch) -> None:
        record = self._joined()
        kept = self._kept(record, message.rank)
        if kept is None or (kept.info.tag, str(kept.info.attempt)) != (message.tag, message.attempt):
            whose = record.rank if message.rank is None else message.rank
            raise NotFoundError(f"no snapshot of {message.tag} ({message.attempt}) is held for rank {whose}")
        user = object()
        kept.slot.use(user)  # keeps the slot, even if a newer snapshot replaces this one meanwhile
        try:
            await asyncio.wait({kept.digests})
            if kept.digests.cancelled():
                raise NotFoundError(f"the snapshot of {message.tag} has just made room for a newer one")
            # After the outbox, not through it: long messages are made only when the client has read the earlier ones.
            await self._outbox.join()
            with contextlib.suppress(ConnectionError):
                await self._give(kept)
        finally:
            kept.slot.leave(user)

    async def _give(self, kept: Kept) -> None:
        descriptor: int | None = kept.slot.descriptor
        for part in await self._hub.turns.take(lambda: snapshot_parts(kept.as_message())):
            await self._channel.send(part, descriptor)
            descriptor = None

    def _leave(self) -> None:
        """The client closed its Checkpointer, so nobody needs its snapshot. Keep that of a newer job that took over."""
        record = self._joined()
        if record.start is None or record.begun[0] <= self._start:
            record.left_well = True
        kept = self._kept(record)
        if kept is not None and kept.order[0] <= self._start:
            self._hub.tier.drop(kept)
