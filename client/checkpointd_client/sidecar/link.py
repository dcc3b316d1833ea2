"""One connection to the sidecar: the handshake, its saves, and the daemon's messages. Runs on the writer's loop.

Invariants
  LINK-1  Every save that was begun on a link ends with the daemon's word or with LinkLost, never without either.
  LINK-2  A slot that the daemon may read is not given back to the arena before the daemon says that it is free, or the link is
      lost; then it is marked lost, and never used again.
  LINK-3  A save that ends with an error leaves nothing behind here: its slot is the caller's again, whatever the daemon says
      later.
  LINK-4  A descriptor that comes is an answer's, or closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from checkpointd import __version__
from checkpointd.commands import MAY_NOT_OPEN, start_sidecar
from checkpointd.commit.machine import FINAL, Phase
from checkpointd.config import CommitConfig, PersistConfig, Ranks
from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel, Received, connect
from checkpointd.daemon.protocol.parts import contents_parts, layout_parts, snapshot_of
from checkpointd.errors import CheckpointdError, SidecarError, SidecarFullError, WireError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.shard import Shard, ShardProgress, ShardTensor
from checkpointd_client.saves.runner import PendingSave
from checkpointd_client.staging.arena import Slot


class LinkLost(SidecarError):
    """The connection to the sidecar ended, or the sidecar does not answer any more."""


class SidecarRefusal(LinkLost):
    """The sidecar is there, and will not take a save, or not its snapshot."""


class NoAnswer(LinkLost):
    """Somebody holds the socket, and says nothing: asking costs the whole patience each time."""


class PendingQuestion:
    """A question to the daemon. One that `closes_handing` follows what is answered only where it is refused."""

    def __init__(self, kind: type, *, closes_handing: bool = False) -> None:
        self.kind, self.closes_handing = kind, closes_handing
        self.answer: asyncio.Future[Received] = asyncio.get_running_loop().create_future()

    def refuse(self, error: CheckpointdError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # whoever asked hears it; they may have given up


class Track:
    """One save on a link: what the daemon said of it so far."""

    def __init__(self, job: PendingSave, on_phase: Callable[[Phase, CheckpointdError | None], None]) -> None:
        self.job = job
        self.votes_missing: tuple[int, ...] | None = None
        self.known = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_phase = on_phase

    def entered(self, message: wire.PhaseEntered) -> None:
        phase = Phase(message.phase)
        error = None if message.error is None else message.error.error(ranks=message.ranks)
        if error is None and phase in FINAL and phase is not Phase.COMMITTED:
            error = SidecarError(f"{self.job.info.tag}: the sidecar calls it {phase} and does not say why; see its log")
        self.known = True
        if phase in FINAL and not self.ended.done():
            self.ended.set_result(None)
        self._on_phase(phase, error)

    def moved(self, message: wire.Progress, progress: ShardProgress) -> None:
        progress.mirror(
            raw_total=message.raw_total,
            raw_done=message.raw_done,
            raw_kept=message.raw_kept,
            stored=message.stored,
            writing_s=message.writing_s,
            seconds=message.seconds,
        )
        progress.no_progress = message.no_progress
        self.votes_missing = message.votes_missing

    def lost(self, error: LinkLost) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # whoever waits hears it; nobody may


log = logging.getLogger("checkpointd")
T = TypeVar("T")
OnPhase = Callable[[Phase, CheckpointdError | None], None]

ANSWER_S = 10.0
"""How long the daemon may take to answer, or to show that it is there at all while saves are in flight."""
GOODBYE_S = 2.0
"""How long the daemon may take to hear that this trainer leaves."""
_LOOKS = 5
"""How often it is looked, within ANSWER_S, whether the daemon said anything."""
_LAYOUTS_KNOWN = 4
_ERROR_MAX = 8000
"""Characters of an error that the daemon is told."""


class Link:
    """See the module."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._saves: dict[int, Track] = {}
        self._slots: dict[int, Slot] = {}
        self._read: dict[int, PendingSave] = {}
        """Slots that the daemon was told to read, and has not freed."""
        self._layouts: deque[tuple[int, tuple[ShardTensor, ...]]] = deque(maxlen=_LAYOUTS_KNOWN)
        self._layout_numbers = itertools.count()
        self._answers: deque[PendingQuestion] = deque()
        self._snapshot: list[Received] = []
        """The parts of the snapshot that is being given back."""
        self._silent = 0
        """Looks since the daemon last said anything."""
        self._handing = asyncio.Lock()
        self._asking = asyncio.Lock()
        self._beside: set[asyncio.Task[None]] = set()
        self._pinging: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.error: LinkLost | None = None

    # --- its life ------------------------------------------------------------------------------------------------

    @staticmethod
    async def open(path: str, sidecar_uid: int | None = None) -> Link:
        """Connect and shake hands. SidecarError saying why not; LinkLost where nobody answers who may have the snapshots."""
        try:
            channel = await connect(path, sidecar_uid)
        except SidecarError as error:
            raise LinkLost(str(error)) from error
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise LinkLost(f"you may not open {path}: {MAY_NOT_OPEN}") from error
            raise LinkLost(f"no sidecar answers at {path} ({error.strerror or error}): {start_sidecar(path)}") from error
        link = Link(channel)
        try:
            await link._greet(path)
        except BaseException:
            channel.close()
            raise
        loop = asyncio.get_running_loop()
        link._tasks = [loop.create_task(link._receive_on()), loop.create_task(link._watch())]
        return link

    async def _greet(self, path: str) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                with contextlib.suppress(ConnectionError):  # turned away before it could say a word: the reason is there
                    await self._channel.send(wire.Hello(protocols=wire.PROTOCOLS, release=__version__, role="rank"))
                received = await self._channel.receive()
        except TimeoutError as error:
            raise NoAnswer(f"the sidecar at {path} does not answer") from error
        except OSError as error:
            raise LinkLost(f"the sidecar at {path} does not answer: {error}") from error
        except WireError as error:
            raise SidecarError(f"what listens at {path} is no sidecar: {error}") from error
        if received is None:
            raise LinkLost(f"the sidecar at {path} closed the connection at once")
        _close(received.descriptor)
        message = received.message
        if isinstance(message, wire.Refused):
            kind = SidecarRefusal if message.error.code == SidecarFullError.__name__ else SidecarError
            raise kind(f"the sidecar at {path} refused: {message.error.message}")
        if not isinstance(message, wire.Welcome):
            raise SidecarError(f"what listens at {path} is no sidecar: it answered with a {type(message).__name__}")
        self._channel.allow_frames(message.frame_bytes_max)

    def lose(self, why: str, kind: type[LinkLost] = LinkLost) -> None:
        """The connection is over: every save on it hears so, and the slots that the daemon may read are given up (LINK-2)."""
        if self.error is not None:
            return
        self.error = kind(why)
        self._channel.close()
        for part in self._snapshot:
            _close(part.descriptor)
        self._snapshot.clear()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for track in self._saves.values():
            track.lost(self.error)
        # Not those that ended just before: nobody will come for their slots.
        working = {id(track.job) for track in self._saves.values() if track.ended.exception() is not None}
        for asked in self._answers:
            asked.refuse(self.error)
        for job in self._read.values():
            _mark_lost(job)
            if id(job) not in working:
                self._freed(job)
        self._read.clear()

    async def close(self, *, ends_well: bool) -> None:
        """Say so where this trainer `ends_well`, and hang up."""
        if self.error is None:
            try:
                async with asyncio.timeout(GOODBYE_S):
                    if ends_well:
                        await self._send(wire.Leave())
                    await self._ask(wire.Look(), wire.Joined)  # heard, that is: nothing is lost in the buffer
            except (SidecarError, TimeoutError):
                pass
            self.lose("this trainer has closed the connection")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _receive_on(self) -> None:
        why = "the sidecar has closed the connection"
        try:
            while (received := await self._channel.receive()) is not None:
                self._silent = 0
                self._hear(received)
        except (OSError, CheckpointdError) as error:
            why = f"the connection to the sidecar broke: {error}"
        except Exception as error:  # a phase that a newer daemon has, say: whoever waits must hear of it
            why = f"what the sidecar said cannot be understood: {error!r}"
        self.lose(why)

    async def _watch(self) -> None:
        """While anything is waited for, see to it that the daemon answers; one that hangs is as lost as one that died.

        Looks are counted, not seconds: where this process was stopped for a while, the daemon's answers are there, unread.
        """
        while True:
            await asyncio.sleep(ANSWER_S / _LOOKS)
            self._silent += 1
            if not self._saves and not self._answers:
                self._silent = 0
            elif self._silent > _LOOKS:
                self.lose(f"the sidecar has not answered for {ANSWER_S:g} s", NoAnswer)
                return
            elif self._pinging is None or self._pinging.done():
                self._pinging = self._spawn(self._tell(wire.Ping()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def _tell(self, message: wire.Message) -> None:
        """Send what needs no answer; a link that is lost needs it no more."""
        try:
            await self._send(message)
        except LinkLost:
            return

    # --- what comes ----------------------------------------------------------------------------------------------

    def _hear(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, wire.Snapshot):
            _close(received.descriptor)
        match message:
            case wire.PhaseEntered():
                track = self._saves.get(message.save)
                if track is not None:
                    track.entered(message)
            case wire.Progress():
                track = self._saves.get(message.save)
                if track is not None:
                    track.moved(message, track.job.progress)
            case wire.Free():
                self._freed(self._read.pop(message.slot, None))
            case wire.Refused():
                self._refused(message)
            case wire.Pong():
                pass
            case wire.Snapshot():
                self._snapshot_part(received, message)
            case _:
                self._answered(received)

    def _snapshot_part(self, received: Received, part: wire.Snapshot) -> None:
        self._snapshot.append(received)
        if part.more:
            return
        parts, self._snapshot = self._snapshot, []
        for later in parts[1:]:
            _close(later.descriptor)
        whole = snapshot_of(one.message for one in parts if isinstance(one.message, wire.Snapshot))
        self._answered(Received(whole, parts[0].descriptor))

    def _freed(self, job: PendingSave | None) -> None:
        """The daemon reads the slot of `job` no more; the stager may still write to it."""
        if job is None:
            return
        if job.staged.done():
            job.free()
        else:
            self._spawn(job.free_when_copied())

    def _answered(self, received: Received) -> None:
        if not self._answers or not isinstance(received.message, self._answers[0].kind):
            _close(received.descriptor)
            raise SidecarError(f"the sidecar sent a {type(received.message).__name__} that nobody asked for")
        answer = self._answers.popleft().answer
        if answer.done():
            _close(received.descriptor)  # whoever asked has given up, or was refused what went before
        else:
            answer.set_result(received)

    def _refused(self, message: wire.Refused) -> None:
        error = SidecarError(f"the sidecar refused: {message.error.message}")
        if message.save is not None:
            self._save_refused(self._saves.get(message.save), SidecarRefusal(str(error)))
            return
        if self._answers:
            asked = self._answers[0]
            if not asked.closes_handing:  # else what came before it is refused, and its own answer still comes
                self._answers.popleft()
            asked.refuse(error)
            return
        self.lose(str(error))

    def _save_refused(self, track: Track | None, error: LinkLost) -> None:
        """The daemon will not take a save, or not its snapshot. Each message about one that it did not take is refused."""
        if track is None:
            return
        if not track.known:
            track.lost(error)
        elif self._take_back(track.job):
            self._freed(track.job)  # it votes no, and never reads what it refused

    def _take_back(self, job: PendingSave) -> bool:
        """Forget that the daemon was told to read the slot of `job`, which is not used again; False where it was not told."""
        if job.lease is None or self._read.get(job.lease.slot.number) is not job:
            return False
        del self._read[job.lease.slot.number]
        _mark_lost(job)
        return True

    # --- asking --------------------------------------------------------------------------------------------------

    async def _send(self, message: wire.Message, descriptor: int | None = None) -> None:
        if self.error is not None:
            raise self.error
        try:
            await self._channel.send(message, descriptor)
        except OSError as error:
            self.lose(f"the connection to the sidecar broke: {error}")
            assert self.error is not None
            raise self.error from error

    async def _ask(self, message: wire.Message, kind: type[T]) -> tuple[T, int | None]:
        """Send `message`; the answer of type `kind` and the descriptor that came with it. SidecarError where it is refused."""
        asked = PendingQuestion(kind)
        async with self._asking:  # answers come in the order of the questions
            self._answers.append(asked)
            await self._send(message)
        answer = asked.answer
        try:
            received = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                _close(answer.result().descriptor)  # it has come just now
            raise
        assert isinstance(received.message, kind)
        return received.message, received.descriptor

    async def join(self, root: str, ranks: Ranks) -> wire.Joined:
        """Say who this is; what the daemon holds and works at."""
        joined, _ = await self._ask(wire.Join(root=root, rank=ranks.rank, world_size=ranks.world_size), wire.Joined)
        return joined

    async def look(self) -> wire.Joined:
        """What the daemon holds and works at now."""
        joined, _ = await self._ask(wire.Look(), wire.Joined)
        return joined

    async def begin(self, epoch: int, nonce: str, persist: PersistConfig, commit: CommitConfig) -> None:
        """The epoch of the saves from here on, and how they are persisted. Returns when the daemon took it.

        SidecarError where it refuses, since it does not see that epoch at the root, say. The link is lost then.
        """
        begin = wire.Begin(
            epoch=epoch,
            nonce=nonce,
            compression=persist.compression,
            chunk_bytes=persist.chunk_bytes,
            budget_bytes=persist.budget_bytes,
            commit_timeout_s=commit.timeout_s,
            dedup=persist.dedup,
            on_no_progress=commit.on_no_progress,
            read_back=commit.read_back,
            retention=wire.Rules.of(commit.retention),
        )
        try:
            await self._hand([begin])
        except SidecarError as error:
            self.lose(str(error))
            raise

    async def fetch(self, held: wire.RetainedSnapshot) -> tuple[wire.Snapshot, int]:
        """A snapshot that the daemon holds, and the descriptor of its memory, which is the caller's to close."""
        snapshot, descriptor = await self._ask(wire.Fetch(tag=held.tag, attempt=held.attempt, rank=held.rank), wire.Snapshot)
        if descriptor is None:
            raise SidecarError("the sidecar gave a snapshot without its memory")
        return snapshot, descriptor

    def tell_inline(self, message: wire.Inlined) -> None:
        """Say of a save that it was not persisted over this link."""
        self._spawn(self._tell(message))

    # --- saves ---------------------------------------------------------------------------------------------------

    async def persist(self, job: PendingSave, *, takeover: int, left_s: float, keeps_before: int, on_phase: OnPhase) -> None:
        """Hand `job` over and follow it to its end. LinkLost where the daemon is lost before it said how it ended."""
        await self._hand_over(job)
        number, track = next(self._numbers), Track(job, on_phase)
        self._saves[number] = track
        job.save.voting = track
        try:
            await self._send(_save(number, job, takeover, left_s, keeps_before))
            await self._announce(number, job)
            await self._follow_staging(number, track)
            await track.ended
        except BaseException:
            self._take_back(job)  # LINK-3
            raise
        finally:
            job.save.voting = None
            del self._saves[number]

    async def _follow_staging(self, number: int, track: Track) -> None:
        """Say how the snapshot ended, unless the attempt ends before it."""
        job = track.job
        staging = asyncio.ensure_future(job.snapshot())
        waited: list[asyncio.Future[Any]] = [staging, track.ended]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if track.ended.done():
            staging.cancel()
            return
        error, held_s = staging.exception(), await job.held_s()
        if error is None:
            await self._send(wire.Staged(save=number, held_s=held_s))
            job.save.handle.advance(Phase.STAGED)
            return
        message = str(error) if isinstance(error, CheckpointdError) else f"the snapshot failed: {error!r}"
        report = ErrorReport.of(error, message=message[:_ERROR_MAX])
        await self._send(wire.Spoiled(save=number, error=report, held_s=held_s))

    async def _announce(self, number: int, job: PendingSave) -> None:
        """Tell all about the snapshot that is being taken: from here on it outlives this process as soon as it is whole."""
        if job.lease is not None and job.shard is not None:
            slot, shard = job.lease.slot, job.shard
            layout = await self._layout(shard)  # known by now, unless many others have come meanwhile
            for part in contents_parts(number, shard.aliases, shard.excluded, shard.tree):
                await self._send(part)
            self._read[slot.number] = job
            await self._send(wire.Announced(save=number, slot=slot.number, layout=layout, mark=slot.token))
        job.announced.set()

    async def _hand_over(self, job: PendingSave) -> None:
        """Give the daemon the slot and the layout of `job` where it has them not. SidecarError where it refuses one.

        Before the save, so that a daemon that has no room has begun nothing: whoever persists it then is the first to vote.
        """
        if job.lease is None or job.shard is None:
            return
        slot = job.lease.slot
        async with self._handing:
            if slot.number not in self._slots:
                await self._hand([wire.Slot(slot=slot.number, nbytes=slot.nbytes)], slot.fd)
                self._slots[slot.number] = slot
            await self._layout(job.shard)

    async def _layout(self, shard: Shard) -> int:
        """The number of the shard's layout, which the daemon is told once."""
        for known in self._layouts:
            if known[1] is shard.tensors:
                self._layouts.remove(known)
                self._layouts.append(known)  # the daemon, too, forgets first what was not used for longest
                return known[0]
        number = next(self._layout_numbers)
        await self._hand(layout_parts(number, len(shard.buffer), wire_tensors(shard.tensors)))
        self._layouts.append((number, shard.tensors))
        return number

    async def _hand(self, messages: Iterable[wire.Message], descriptor: int | None = None) -> None:
        """Send what is answered only where it is refused, and return when it was taken."""
        asked = PendingQuestion(wire.Joined, closes_handing=True)
        async with self._asking:
            self._answers.append(asked)
            for message in messages:
                await self._send(message, descriptor)
            await self._send(wire.Look())
        await asked.answer

    def drop_slot(self, number: int) -> None:
        """The arena has replaced a slot."""
        if self._slots.pop(number, None) is not None and self.error is None:
            self._spawn(self._tell(wire.DropSlot(slot=number)))


def _mark_lost(job: PendingSave) -> None:
    assert job.lease is not None
    job.lease.slot.lost = True


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _save(number: int, job: PendingSave, takeover: int, left_s: float, keeps_before: int) -> wire.Save:
    info = job.info
    return wire.Save(
        save=number,
        tag=info.tag,
        attempt=str(info.attempt),
        step=info.step,
        n=info.n,
        save_latest=info.save_latest,
        takeover=takeover,
        left_s=left_s,
        metrics=dict(info.metrics),
        keeps_before=keeps_before,
        unfinished=info.unfinished,
        leftovers=info.leftovers,
    )
