"""One connection to the sidecar: the handshake, the saves, and the daemon's messages. Runs on the writer's loop.

Invariants
  LINK-1  Every save on a link ends with the daemon's final phase, with WriterLost if the daemon may have begun it, or with
      another LinkLost if it has not.
  LINK-2  A slot that the daemon may read returns to the arena only after the daemon has freed it, or after the link was lost.
      After a loss the slot is marked lost, and the arena never uses it again.
  LINK-3  If `persist` raises, the link has forgotten the save and its slot. Later messages of the daemon change neither.
  LINK-4  A descriptor that arrives belongs to an answer, or is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import msgspec

from checkpointd import __version__
from checkpointd.commands import start_sidecar
from checkpointd.commit.machine import FINAL, Phase
from checkpointd.config import Ranks
from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import Channel, Received, connect
from checkpointd.daemon.protocol.parts import contents_parts, layout_parts, snapshot_of
from checkpointd.errors import (
    ERRORS,
    CheckpointdError,
    DeadlineError,
    NotFoundError,
    SidecarError,
    SidecarFullError,
    StoreError,
    WireError,
)
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.shard import Shard, ShardProgress, ShardTensor
from checkpointd.system_errors import in_words
from checkpointd_client.saves.runner import PendingSave

log = logging.getLogger("checkpointd")
T = TypeVar("T")
OnPhase = Callable[[Phase, CheckpointdError | None], None]

ANSWER_S = 10.0
"""How long the daemon may take to answer a question, or a ping while saves are in flight."""
GOODBYE_S = 2.0
"""How long the daemon may take to answer when this trainer leaves."""
_LOOKS = 5
"""How often, within ANSWER_S, the link checks whether the daemon has sent anything."""
_LAYOUTS_KNOWN = 4
_ERROR_MAX = 8000
"""The most characters of an error that the daemon is sent."""


class LinkLost(SidecarError):
    """The connection to the sidecar ended, or the sidecar does not answer any more."""


class SidecarRefusal(LinkLost):
    """The sidecar is there, but does not take a save or its snapshot."""


class WriterLost(LinkLost):
    """The connection ended while a save was in the sidecar's hands: nobody else may write its shard."""


class SpoolForgot(SidecarRefusal):
    """The sidecar has not got a shard that an earlier one had in its spool."""


class NoAnswer(LinkLost):
    """A process holds the socket and does not answer: each try costs the whole time-out."""


class PendingQuestion:
    """A question to the daemon. With `closes_handing`, it follows messages that the daemon answers only if it refuses them."""

    def __init__(self, kind: type, *, closes_handing: bool = False) -> None:
        self.kind, self.closes_handing = kind, closes_handing
        self.answer: asyncio.Future[Received] = asyncio.get_running_loop().create_future()


class Track:
    """The state of one save on a link, as the daemon's messages tell it."""

    def __init__(self, job: PendingSave, on_phase: OnPhase) -> None:
        self.job = job
        self.votes_missing: tuple[int, ...] | None = None
        self.known = False
        """Whether the daemon has taken the save."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_phase = on_phase

    def entered(self, message: wire.PhaseEntered) -> None:
        phase = Phase(message.phase)
        error = None if message.error is None else self._explained(message.error).error(ranks=message.ranks)
        if error is None and phase in FINAL and phase is not Phase.COMMITTED:
            error = SidecarError(f"{self.job.info.tag}: the sidecar calls it {phase} and does not say why; see its log")
        self.known = True
        if phase in FINAL and not self.ended.done():
            self.ended.set_result(None)
        self._on_phase(phase, error)

    def _explained(self, report: ErrorReport) -> ErrorReport:
        """`report`, with the trouble that the daemon has with the root."""
        handle, kind = self.job.save.handle, ERRORS.get(report.code, CheckpointdError)
        if handle.trouble in report.message or not issubclass(kind, StoreError | DeadlineError):
            return report
        return msgspec.structs.replace(report, message=f"{report.message}{handle.trouble_words}")

    def moved(self, message: wire.Progress, progress: ShardProgress) -> None:
        progress.mirror(
            raw_total=message.raw_total,
            raw_done=message.raw_done,
            raw_kept=message.raw_kept,
            stored=message.stored,
            writing_s=message.writing_s,
            seconds=message.seconds,
            rested_s=message.rested_s,
        )
        progress.uploaded, progress.upload_total = message.uploaded, message.upload_total
        progress.no_progress = message.no_progress
        self.job.save.handle.trouble = message.trouble
        self.votes_missing = message.votes_missing


class Link:
    """A connection to the sidecar; `open` makes it. `error` is set when it is lost."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._saves: dict[int, Track] = {}
        self._slots: set[int] = set()
        """The slots that the daemon has."""
        self._read: dict[int, PendingSave] = {}
        """By slot, the jobs whose slots the daemon was told to read and has not freed."""
        self._layouts: deque[tuple[int, tuple[ShardTensor, ...]]] = deque(maxlen=_LAYOUTS_KNOWN)
        """The layouts that the daemon knows; the one that was used last is the last."""
        self._layout_numbers = itertools.count()
        self._answers: deque[PendingQuestion] = deque()
        self._snapshot: list[Received] = []
        """The parts that have come of a snapshot that was asked for."""
        self._silent = 0
        """The number of looks since the daemon last sent anything."""
        self._handing = asyncio.Lock()
        self._asking = asyncio.Lock()
        self._beside: set[asyncio.Task[None]] = set()
        self._pinging: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.error: LinkLost | None = None
        self.trouble = ""
        """Why the daemon does not reach the root now; empty if it does, as far as it has told."""

    # --- its life ------------------------------------------------------------------------------------------------

    @staticmethod
    async def open(path: str, sidecar_uid: int | None = None) -> Link:
        """Connect and shake hands. Raises LinkLost if no process answers that may have the snapshots, else SidecarError."""
        try:
            channel = await connect(path, sidecar_uid)
        except SidecarError as error:
            raise LinkLost(str(error)) from error
        except OSError as error:
            raise LinkLost(f"no sidecar answers at {path}: {in_words(error, 'socket')}; or {start_sidecar(path)}") from error
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
                with contextlib.suppress(ConnectionError):  # a daemon that refused at once has sent its reason before it closed
                    await self._channel.send(wire.Hello(protocols=wire.PROTOCOLS, release=__version__, role="rank"))
                received = await self._channel.receive()
        except TimeoutError as error:
            raise NoAnswer(f"the sidecar at {path} does not answer") from error
        except OSError as error:
            raise LinkLost(f"the sidecar at {path} does not answer: {error}") from error
        except WireError as error:
            raise SidecarError(f"the process that listens at {path} is not a sidecar: {error}") from error
        if received is None:
            raise LinkLost(f"the sidecar at {path} closed the connection at once")
        _close(received.descriptor)
        message = received.message
        if isinstance(message, wire.Refused):
            kind = SidecarRefusal if message.error.code == SidecarFullError.__name__ else SidecarError
            raise kind(f"the sidecar at {path} refused: {message.error.message}")
        if not isinstance(message, wire.Welcome):
            name = type(message).__name__
            raise SidecarError(f"the process that listens at {path} is not a sidecar: it answered with a {name}")
        self._channel.allow_frames(message.frame_bytes_max)

    def lose(self, why: str, kind: type[LinkLost] = LinkLost) -> None:
        """End the connection: every save on it ends with LinkLost, and the slots that the daemon may read are lost (LINK-2)."""
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
            _fail(track.ended, self.error)
        # The caller releases the slots of these saves. It does not for a save that had ended before.
        working = {id(track.job) for track in self._saves.values() if track.ended.exception() is not None}
        for asked in self._answers:
            _fail(asked.answer, self.error)
        for job in self._read.values():
            _mark_lost(job)
            if id(job) not in working:
                self._freed(job)
        self._read.clear()

    async def close(self, *, ends_well: bool) -> None:
        """Close the connection; tell the daemon first if this trainer `ends_well`."""
        if self.error is None:
            with contextlib.suppress(SidecarError, TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    if ends_well:
                        await self._send(wire.Leave())
                    await self.look()  # the answer shows that the daemon has read everything
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
        except Exception as error:  # such as an unknown phase of a newer daemon: every waiting save must end
            why = f"the sidecar sent a message that this process does not understand: {error!r}"
        self.lose(why)

    async def _watch(self) -> None:
        """While a save or a question is open, check that the daemon answers: one that hangs is lost, like one that died.

        This counts looks, not seconds: after this process was stopped for a while, the daemon's answers are there, unread.
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
        """Send a message that needs no answer, unless the link is lost."""
        with contextlib.suppress(LinkLost):
            await self._send(message)

    # --- messages of the daemon ----------------------------------------------------------------------------------

    def _hear(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, wire.Snapshot):
            _close(received.descriptor)
        if isinstance(message, wire.Joined | wire.Progress):
            self._heed(message.trouble)
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

    def _heed(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            log.warning("the sidecar does not reach the root: %s", trouble)
        elif self.trouble and not trouble:
            log.warning("the sidecar reaches the root again")
        self.trouble = trouble

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
        """Release the slot of `job`, which the daemon does not read any more. The stager may still write to it."""
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
            _close(received.descriptor)  # the caller has given up, or the messages before the question were refused
        else:
            answer.set_result(received)

    def _refused(self, message: wire.Refused) -> None:
        error = SidecarError(f"the sidecar refused: {message.error.message}")
        if message.save is not None:
            kind = SpoolForgot if message.error.code == NotFoundError.__name__ else SidecarRefusal
            self._save_refused(self._saves.get(message.save), kind(str(error)))
        elif self._answers:
            asked = self._answers[0]
            if not asked.closes_handing:  # else a message before the question was refused, and the answer still comes
                self._answers.popleft()
            _fail(asked.answer, error)
        else:
            self.lose(str(error))

    def _save_refused(self, track: Track | None, error: LinkLost) -> None:
        """The daemon refuses a save, or only its snapshot. After it refused a save, it refuses each message about it."""
        if track is None:
            return
        if not track.known:
            _fail(track.ended, error)
        elif self._take_back(track.job):
            self._freed(track.job)  # the daemon votes no, and never reads a refused snapshot

    def _take_back(self, job: PendingSave) -> bool:
        """Mark the slot of `job` lost if the daemon was told to read it; False if it was not."""
        if job.lease is None or self._read.get(job.lease.slot.number) is not job:
            return False
        del self._read[job.lease.slot.number]
        _mark_lost(job)
        return True

    # --- questions to the daemon ---------------------------------------------------------------------------------

    async def _send(self, message: wire.Message, descriptor: int | None = None) -> None:
        if self.error is not None:
            raise self.error
        try:
            await self._channel.send(message, descriptor)
        except OSError as error:
            self._channel.expect_no_more()  # what the daemon has said before is heard; then the link is lost
            raise LinkLost(f"the connection to the sidecar broke: {error}") from error

    async def _ask(self, message: wire.Message, kind: type[T]) -> tuple[T, int | None]:
        """Send `message`; returns the answer of type `kind`, and its descriptor. SidecarError if the daemon refuses."""
        asked = PendingQuestion(kind)
        async with self._asking:  # answers come in the order of the questions
            self._answers.append(asked)
            await self._send(message)
        answer = asked.answer
        try:
            received = await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                _close(answer.result().descriptor)  # the answer came just before the cancellation
            raise
        assert isinstance(received.message, kind)
        return received.message, received.descriptor

    async def join(self, root: str, ranks: Ranks) -> wire.Joined:
        """Tell the daemon the root and the rank."""
        joined, _ = await self._ask(wire.Join(root=root, rank=ranks.rank, world_size=ranks.world_size), wire.Joined)
        return joined

    async def look(self) -> wire.Joined:
        """The snapshots that the daemon retains, and the attempts that it works at."""
        joined, _ = await self._ask(wire.Look(), wire.Joined)
        return joined

    async def begin(self, begin: wire.Begin) -> None:
        """Tell the daemon the start of the saves on this link. Returns when the daemon has accepted it.

        If the daemon refuses, for example because it does not see that start at the root, the link is lost and SidecarError is
        raised.
        """
        try:
            await self._hand([begin])
        except SidecarError as error:
            self.lose(str(error))
            raise

    async def fetch(self, held: wire.RetainedSnapshot) -> tuple[wire.Snapshot, int]:
        """A retained snapshot, and the descriptor of its memory, which the caller closes."""
        snapshot, descriptor = await self._ask(wire.Fetch(tag=held.tag, attempt=held.attempt, rank=held.rank), wire.Snapshot)
        if descriptor is None:
            raise SidecarError("the sidecar gave a snapshot without its memory")
        return snapshot, descriptor

    def tell_inline(self, message: wire.Inlined) -> None:
        """Tell the daemon of a save that this process persisted itself."""
        self._spawn(self._tell(message))

    # --- saves ---------------------------------------------------------------------------------------------------

    async def persist(
        self,
        job: PendingSave,
        *,
        left_s: float,
        keeps_before: tuple[int, int],
        on_phase: OnPhase,
    ) -> None:
        """Hand `job` over and follow it to its end. SidecarError if the daemon does not take it, WriterLost if the link is lost
        after that.

        If an earlier daemon had the snapshot in its spool, the next one has it there. SpoolForgot if it has not.
        """
        was_spooled = job.save.handle.was_spooled
        if not was_spooled:
            await self._hand_over(job)
        number, track = next(self._numbers), Track(job, on_phase)
        self._saves[number] = track
        job.save.voting, job.save.handle.trouble = track, self.trouble
        is_told = False
        try:
            await self._send(_save(number, job, left_s, keeps_before))
            is_told = True  # before that, the daemon cannot know of the save
            if not was_spooled:
                await self._announce(number, job)
                self._follow_pace(number, job)
                await self._follow_staging(number, track)
            await track.ended
        except BaseException as error:
            self._take_back(job)  # LINK-3
            if is_told and isinstance(error, LinkLost) and not isinstance(error, SidecarRefusal):
                raise WriterLost(str(error)) from error
            raise
        finally:
            job.save.voting, job.save.handle.trouble = None, ""
            job.progress.pace.on_change = None
            del self._saves[number]

    def _follow_pace(self, number: int, job: PendingSave) -> None:
        """Tell the daemon the pace now, unless it is full speed, and at each change."""
        loop, pace = asyncio.get_running_loop(), job.progress.pace

        def tell() -> None:
            share, left_s = pace.asked
            if number in self._saves:
                self._spawn(self._tell(wire.Paced(save=number, share=share, left_s=left_s)))

        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody persists any more
                loop.call_soon_threadsafe(tell)

        pace.on_change = changed
        if pace.share < 1.0:
            tell()

    async def _follow_staging(self, number: int, track: Track) -> None:
        """Tell the daemon how the snapshot ended, unless the attempt ends first."""
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
        report = ErrorReport.of(error, str(Phase.STAGING), message[:_ERROR_MAX])
        await self._send(wire.Spoiled(save=number, error=report, held_s=held_s))

    async def _announce(self, number: int, job: PendingSave) -> None:
        """Describe the snapshot while it is taken: from here on it outlives this process as soon as it is whole."""
        if job.lease is not None and job.shard is not None:
            slot, shard = job.lease.slot, job.shard
            layout = await self._layout(shard)  # sent already by _hand_over, unless many other layouts have come meanwhile
            for part in contents_parts(number, shard.aliases, shard.excluded, shard.tree):
                await self._send(part)
            self._read[slot.number] = job
            await self._send(wire.Announced(save=number, slot=slot.number, layout=layout, mark=slot.token))
        job.announced.set()

    async def _hand_over(self, job: PendingSave) -> None:
        """Give the daemon the slot and the layout of `job` if it lacks them. SidecarError if it refuses one of them.

        This comes before the save: a daemon without room has then begun nothing, and this process may write the shard.
        """
        if job.lease is None or job.shard is None:
            return
        slot = job.lease.slot
        async with self._handing:
            if slot.number not in self._slots:
                await self._hand([wire.Slot(slot=slot.number, nbytes=slot.nbytes)], slot.fd)
                self._slots.add(slot.number)
            await self._layout(job.shard)

    async def _layout(self, shard: Shard) -> int:
        """The number of the shard's layout, which is sent if the daemon does not know it."""
        for known in self._layouts:
            if known[1] is shard.tensors:
                self._layouts.remove(known)
                self._layouts.append(known)  # the daemon, too, forgets the layout that was not used for longest
                return known[0]
        number = next(self._layout_numbers)
        await self._hand(layout_parts(number, len(shard.buffer), wire_tensors(shard.tensors)))
        self._layouts.append((number, shard.tensors))
        return number

    async def _hand(self, messages: Iterable[wire.Message], descriptor: int | None = None) -> None:
        """Send `messages`, which the daemon answers only if it refuses them; returns when it has accepted them."""
        asked = PendingQuestion(wire.Joined, closes_handing=True)
        async with self._asking:
            self._answers.append(asked)
            for message in messages:
                await self._send(message, descriptor)
            await self._send(wire.Look())
        await asked.answer

    def drop_slot(self, number: int) -> None:
        """Tell the daemon that the arena has replaced a slot."""
        if number in self._slots:
            self._slots.remove(number)
            self._spawn(self._tell(wire.DropSlot(slot=number)))


def _fail(future: asyncio.Future[Any], error: CheckpointdError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # if nobody waits for it any more, asyncio must not log it


def _mark_lost(job: PendingSave) -> None:
    assert job.lease is not None
    job.lease.slot.lost = True


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _save(number: int, job: PendingSave, left_s: float, keeps_before: tuple[int, int]) -> wire.Save:
    return wire.Save(
        save=number,
        tag=(info := job.info).tag,
        attempt=str(info.attempt),
        step=info.step,
        n=info.n,
        save_latest=info.save_latest,
        left_s=left_s,
        metrics=dict(info.metrics),
        left=info.left,
        keeps_before=keeps_before,
        unfinished=info.unfinished,
        shown_at=info.shown_at,
        required=info.required,
        spooled=job.save.handle.was_spooled,
    )
