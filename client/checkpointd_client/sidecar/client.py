"""Keeps a connection to the sidecar, and handles the saves in flight when the connection is lost.

Invariants
  SIDECAR-1  A shard has one writer. If the sidecar is lost after it was told of a save, this process votes no, and writes
      nothing of that shard. If the sidecar has voted yes before, that vote counts. While no sidecar takes saves, this process
      persists its saves itself, or fails them, as `on_sidecar_loss` says.
  SIDECAR-3  A save whose shard is in the sidecar's spool needs this process no more. If the sidecar is lost, this process waits
      for the next one, which goes on with it. It votes no only if that one has not got it, or after the spool's time-out.
  SIDECAR-2  Nothing here delays training: all of it runs on the writer's loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import deque
from dataclasses import replace
from typing import Final, Literal

import msgspec

from checkpointd.bucket_urls import directory_of
from checkpointd.commit.decide import no_progress_words
from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig, PersistConfig, Ranks
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.spool.record import decode_record, record_key
from checkpointd.errors import CheckpointdError, NotFoundError, SidecarError, WireError
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.manifest import ErrorReport, Inline, InlineReason
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from checkpointd.waits import Waiting
from checkpointd_client.saves.runner import Endings, InlineRunner, PendingSave
from checkpointd_client.sidecar import link as links
from checkpointd_client.sidecar.link import Link, LinkLost, NoAnswer, SidecarRefusal, SpoolForgot, WriterLost
from checkpointd_client.sidecar.own_daemon import OwnDaemon

log = logging.getLogger("checkpointd")

OnSidecarLoss = Literal["inline", "raise"]
_MEANWHILE: Final[dict[OnSidecarLoss, str]] = {
    "inline": "this process persists its saves itself",
    "raise": "saves fail",
}
_NUMBER: Final = re.compile(r"\d+")
NEXT: Final[dict[OnSidecarLoss, str]] = {
    "inline": "training goes on, and this rank persists its next saves itself until the sidecar is back",
    "raise": "training goes on, and saves of this rank fail until the sidecar is back",
}
UNTOLD_MAX = 64
WHY_MAX = 500
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 2.0
_REJOIN_S_MIN, _REJOIN_S_MAX = 2.0, 30.0
"""The pause between two tries to connect again while no save needs the daemon."""
_REFUSED_S = 2 * _REJOIN_S_MAX
"""How long saves avoid a daemon that refused the start. The refusal takes the daemon seconds; `_rejoin` tries meanwhile."""
_LAST_WORD_S = 5.0
"""A rank that waits for the next sidecar votes no this long before the deadline, or a tenth of the commit time-out before it if
that is less. The vote tells the other ranks why the shard is missing.
"""


class SidecarClient:
    """One rank's connection to the daemon at the socket `place`, or to one that is started if none answers. All coroutines run
    on the writer's loop.
    """

    def __init__(
        self, place: str | OwnDaemon, store: Store, ranks: Ranks, on_loss: OnSidecarLoss, sidecar_uid: int | None = None
    ) -> None:
        self.on_loss, self._uid = on_loss, sidecar_uid
        directory = directory_of(store.url)
        self._store, self._ranks = store, ranks
        self._root = store.url if directory is None else os.path.realpath(directory)
        self._own = place if isinstance(place, OwnDaemon) else None
        self.path = place.path if isinstance(place, OwnDaemon) else place
        self._is_of_root: dict[tuple[int, str], bool] = {}
        """Whether a start (number and nonce) of the daemon's attempts belongs to this root."""
        self._begin: wire.Begin | None = None
        self._link: Link | None = None
        self._opening = asyncio.Lock()
        self._silence: tuple[float, SidecarError] | None = None
        """The time until which saves do not ask the daemon, and the error of the last try: no answer, or a refused start."""
        self._untold: deque[tuple[float, wire.Inlined]] = deque(maxlen=UNTOLD_MAX)
        """Inline saves that the daemon was not told of yet, each with the time of its end. It finds older ones in the store."""
        self._rejoining: asyncio.Task[None] | None = None
        self.spool: wire.SpoolPlaceTold | None = None
        """The sidecar's spool, as it was told last."""
        self._lost_as, self._loss = "", ""
        """The cause of the loss that was logged last, and the last error; empty while the daemon is there."""
        self._closed = False

    @property
    def _open_link(self) -> Link | None:
        link = self._link
        return None if link is None or link.error is not None else link

    @property
    def connected(self) -> bool:
        """Whether there is a connection now; any thread may ask."""
        return self._open_link is not None

    @property
    def trouble(self) -> str:
        """Why the daemon does not reach the root, as it told last, or why it takes nothing now; empty if all is well."""
        link, silence = self._open_link, self._silence
        return link.trouble if link is not None else self._loss if silence is None else str(silence[1])

    def say_lost(self, error: CheckpointdError) -> None:
        """Warn that the daemon takes nothing now, once per cause: errors that differ only in numbers have the same cause."""
        cause = _NUMBER.sub("", str(error))
        self._loss = str(error)
        if cause != self._lost_as and not self._closed:
            self._lost_as = cause
            log.warning("%s; %s meanwhile", error, _MEANWHILE[self.on_loss])

    def say_back(self) -> None:
        """Say that the daemon takes saves again, if its loss was said; the next loss is said again."""
        if self._lost_as and not self._closed:
            log.warning("the sidecar at %s is back, and takes the saves from here on", self.path)
        self._lost_as = self._loss = ""

    async def link(self) -> Link:
        """The connection; connects if there is none. Raises SidecarError if that fails.

        After a daemon did not answer, or refused the start, this fails at once for a while: otherwise each save would wait.
        """
        if not self.connected:
            self._check_silence(SidecarError)
        return await self._connection()

    def _check_silence(self, kind: type[SidecarError]) -> None:
        """Raise the error of the last try again if it is of `kind` and too recent for another try."""
        if self._silence is not None and asyncio.get_running_loop().time() < self._silence[0]:
            error = self._silence[1]
            if isinstance(error, kind):
                raise type(error)(str(error))

    async def _connection(self) -> Link:
        async with self._opening:
            if self._open_link is not None:
                return self._open_link
            if self._closed:
                raise LinkLost("the checkpointer is closed")
            self._check_silence(NoAnswer)
            try:
                link = await (Link.open(self.path, self._uid) if self._own is None else self._own.link())
            except NoAnswer as error:
                self._spare(error)
                raise
            await self._join(link)
            self._link, self._silence = link, None
            self.say_back()
            return link

    def _spare(self, error: SidecarError) -> None:
        """Ask the daemon no more for a while, because of `error`."""
        seconds = links.ANSWER_S if isinstance(error, NoAnswer) else _REFUSED_S
        self._silence = (asyncio.get_running_loop().time() + seconds, error)

    async def _begin_on(self, link: Link, begin: wire.Begin) -> None:
        try:
            await link.begin(begin)
        except SidecarError as error:
            if isinstance(error, NoAnswer) or not isinstance(error, LinkLost):
                self._spare(error)
            raise

    async def _join(self, link: Link) -> None:
        try:
            self._heard(await link.join(self._root, self._ranks))
            if self._begin is not None:
                await self._begin_on(link, self._begin)
                self._tell_untold(link)
        except BaseException:
            link.lose("the sidecar refused this rank")
            raise

    def _tell_untold(self, link: Link) -> None:
        now = asyncio.get_running_loop().time()
        while self._untold:
            since, message = self._untold.popleft()
            aged = {"began_s": message.began_s + now - since, "ended_s": message.ended_s + now - since}
            link.tell_inline(msgspec.structs.replace(message, **aged))

    async def start(self) -> wire.Joined | None:
        """Connect before the job takes its start; returns the daemon's snapshots and attempts.

        If the daemon is out of reach, "inline" returns None, and "raise" raises LinkLost. Raises SidecarError if the daemon
        refuses this rank, unless nobody has chosen it: then it counts as lost.
        """
        if self._own is not None and not self._own.has_root:
            return None
        try:
            return self._heard(await (await self.link()).look())
        except SidecarError as error:
            is_refused = not isinstance(error, LinkLost) and self._own is None
            if is_refused or self.on_loss == "raise":
                raise
            self.say_lost(error)
            return None

    async def begin(self, number: int, nonce: str, persist: PersistConfig, commit: CommitConfig) -> None:
        """Tell the daemon, now or when it is back, which start the saves belong to and how to persist them.

        If the daemon refuses or does not answer, "raise" raises SidecarError. Otherwise the daemon counts as lost for now.
        """
        self._begin = wire.Begin(
            start=number,
            nonce=nonce,
            compression=persist.compression,
            chunk_bytes=persist.chunk_bytes,
            budget_bytes=persist.budget_bytes,
            commit_timeout_s=commit.timeout_s,
            dedup=persist.dedup,
            full_every=persist.full_every,
            on_no_progress=commit.on_no_progress,
            read_back=commit.read_back,
            retention=wire.Rules.of(commit.retention),
        )
        self._rejoining = asyncio.create_task(self._rejoin())
        if self._open_link is not None:
            try:
                await self._begin_on(self._open_link, self._begin)
            except SidecarError as error:
                if self.on_loss == "raise":
                    raise
                self.say_lost(error)

    async def _rejoin(self) -> None:
        """Connect again after a loss, even between saves: a restarted daemon knows no trainer before it joins.

        Failures are not logged here: a save that needs the daemon logs them.
        """
        pause_s = _REJOIN_S_MIN
        while True:
            await asyncio.sleep(pause_s)
            try:
                link = await self._connection()
                if link.trouble:
                    await link.look()  # without a save in flight, the daemon does not tell by itself that it is over
                pause_s = _REJOIN_S_MIN
            except (SidecarError, WireError):
                pause_s = min(2 * pause_s, _REJOIN_S_MAX)

    async def _look(self) -> wire.Joined:
        """The daemon's snapshots and attempts; nothing if it is out of reach."""
        try:
            return self._heard(await (await self.link()).look())
        except (SidecarError, WireError) as error:
            self.say_lost(error)
            return wire.Joined(held=(), in_flight=())

    def _heard(self, joined: wire.Joined) -> wire.Joined:
        self.spool = joined.spool
        return joined

    async def held(self) -> tuple[wire.RetainedSnapshot, ...]:
        """The snapshots that the daemon retains for this rank; none if it is out of reach."""
        return (await self._look()).held

    async def in_flight(self) -> tuple[wire.InFlight, ...]:
        """The attempts at this root that the daemon works at; none if it is out of reach."""
        return await self.at_root(await self._look())

    async def at_root(self, joined: wire.Joined) -> tuple[wire.InFlight, ...]:
        """The attempts in flight at this root. Attempts of a removed root that lay at the same path are left out."""
        flights = []
        for flight in joined.in_flight:
            attempt = AttemptId.parse(flight.attempt)
            if attempt is None:
                continue
            start = (attempt.start, flight.nonce)
            if start not in self._is_of_root:
                self._is_of_root[start] = await starts.is_of_root(self._store, *start)
            if self._is_of_root[start]:
                flights.append(flight)
        return tuple(flights)

    async def beside(self, held: wire.RetainedSnapshot) -> tuple[wire.RetainedSnapshot, ...]:
        """The snapshots that this daemon retains of the same attempt for other ranks; none if it is out of reach."""
        others = (await self._look()).beside
        same = (held.tag, held.attempt, held.nonce, held.world_size)
        return tuple(o for o in others if (o.tag, o.attempt, o.nonce, o.world_size) == same and o.rank is not None)

    async def fetch(self, held: wire.RetainedSnapshot) -> tuple[wire.Snapshot, int]:
        """A retained snapshot and the descriptor of its memory. SidecarError if the daemon does not give it."""
        return await (await self.link()).fetch(held)

    async def has_spooled(self, info: AttemptInfo) -> bool:
        """Whether the spool of the sidecar that was there last has this rank's shard of the attempt."""
        if self.spool is None or self._begin is None:
            return False
        path, loop = self.spool.path, asyncio.get_running_loop()
        if not await loop.run_in_executor(None, os.path.isdir, path):
            return False
        store = PosixStore(path, anchor=os.path.dirname(path), read_only=True)
        key = record_key(info.prefix, info.rank)
        try:
            return decode_record(await store.get(key), key).nonce == self._begin.nonce
        except CheckpointdError as error:
            if not isinstance(error, NotFoundError):
                log.warning("%s: the spool cannot be read: %s", info.prefix, error)
            return False
        finally:
            await store.close()

    def drop_slot(self, number: int) -> None:
        """Tell the daemon that the arena has replaced a slot. Runs on the loop."""
        if self._link is not None:
            self._link.drop_slot(number)

    def tell_inline(self, message: wire.Inlined) -> None:
        """Tell the daemon, now or when it is back, of a save that this process persisted itself."""
        if self._open_link is not None:
            self._open_link.tell_inline(message)
        else:
            self._untold.append((asyncio.get_running_loop().time(), message))

    async def close(self, *, ends_well: bool) -> None:
        """Close the connection. If the trainer `ends_well`, the sidecar drops its snapshot; otherwise it keeps it for the next
        start.
        """
        self._closed = True
        if self._rejoining is not None:
            self._rejoining.cancel()
            await asyncio.wait({self._rejoining})
        if self._link is not None:
            await self._link.close(ends_well=ends_well)


def _reason(error: CheckpointdError) -> InlineReason:
    return "lost" if isinstance(error, LinkLost) and not isinstance(error, SidecarRefusal) else "refused"


def _inlined(job: PendingSave, why: Inline, held_s: float) -> wire.Inlined:
    handle, now = job.save.handle, time.monotonic()
    error = handle.peek()
    return wire.Inlined(
        tag=job.info.tag,
        attempt=str(job.info.attempt),
        step=job.info.step,
        phase=handle.phase,
        inline=why,
        raw_total=handle.bytes_total,
        stored=handle.bytes_stored,
        began_s=max(0.0, now - job.save.began),
        ended_s=0.0,
        held_s=held_s,
        no_progress=handle.no_progress,
        seconds=handle.seconds,
        error=ErrorReport.of(error, message=str(error)[:WHY_MAX]) if isinstance(error, CheckpointdError) else None,
    )


def _defect(job: PendingSave, error: Exception) -> SidecarError:
    """Log `error`, which only a defect of ours can raise, with its traceback; the error for the handle."""
    log.exception("%s: handing it to the sidecar failed in an unforeseen way; please report it", job.info.prefix)
    return SidecarError(f"the sidecar's client failed: {error!r}; please report it")


class SidecarRunner:
    """Hands jobs to the sidecar, and ends them if it is lost."""

    def __init__(self, sidecar: SidecarClient, inline: InlineRunner, endings: Endings, state: WriterState) -> None:
        self._sidecar, self._inline, self._endings, self._state = sidecar, inline, endings, state

    async def run(self, job: PendingSave) -> None:
        try:
            await self._run(job)
        except Exception as error:  # a defect of ours must not hang the trainer that waits for the handle
            self._endings.entered(job, Phase.FAILED, _defect(job, error))

    async def _run(self, job: PendingSave) -> None:
        pause_s, lost_in = _PAUSE_S_MIN, ""
        waiting = Waiting(lambda: f"{job.info.prefix}: the sidecar at {self._sidecar.path} is not back")
        while not job.save.handle.is_left:
            error = await self._handed_over(job)
            job.announced.set()  # save() need not wait for a sidecar that is not there
            if error is None or job.save.handle.is_left:
                return
            lost_in = lost_in or job.save.handle.phase
            self._sidecar.say_lost(error)
            if not await self._is_spooled(job, error):
                await self._without(job, error, lost_in)
                return
            waiting.look()
            await asyncio.sleep(min(pause_s, max(_PAUSE_S_MIN, self._left_to_wait_s(job))))
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _handed_over(self, job: PendingSave) -> CheckpointdError | None:
        """Let the daemon run `job`. Returns None when the job has ended there, else the error that prevented it."""
        try:
            link = await self._sidecar.link()
        except (SidecarError, WireError) as error:
            return error
        if self._sidecar.spool is not None:
            self._state.outlast_s = self._sidecar.spool.timeout_s
        try:
            await link.persist(
                job,
                left_s=self._left_s(job),
                keeps_before=self._state.tidier.keeps_before,
                on_phase=lambda p, e: self._entered(job, p, e),
            )
        except (SidecarError, WireError) as error:
            return error
        except Exception as error:  # a defect of ours: half a save may have been sent, so nothing more is sent on this link
            defect = _defect(job, error)
            link.lose(str(defect))
            return WriterLost(str(defect))
        self._sidecar.say_back()
        return None

    async def _is_spooled(self, job: PendingSave, error: CheckpointdError) -> bool:
        """Whether the next daemon goes on with the save from the spool (SIDECAR-3). The last one may have been lost before it
        said that the shard is there.
        """
        handle = job.save.handle
        if isinstance(error, WriterLost) and not handle.was_spooled and await self._sidecar.has_spooled(job.info):
            self._endings.entered(job, Phase.SPOOLED, None)
        if not handle.was_spooled or isinstance(error, SpoolForgot) or self._left_to_wait_s(job) <= 0:
            return False
        await job.free_when_copied()
        return True

    async def _without(self, job: PendingSave, error: CheckpointdError, lost_in: str) -> None:
        """End the job without a sidecar (SIDECAR-1)."""
        was_begun = isinstance(error, WriterLost) or job.save.handle.was_spooled
        if not was_begun and self._sidecar.on_loss == "inline":
            why = Inline(reason=_reason(error), why=str(error)[:WHY_MAX])
            await self._inline.take(replace(job, info=replace(job.info, inline=why)))
            self._sidecar.tell_inline(_inlined(job, why, await job.held_s()))
            return
        where, then = f"the sidecar at {self._sidecar.path}", NEXT[self._sidecar.on_loss]
        words = f"{where} was lost while this save was {lost_in}" if was_begun else f"{where} does not take this save"
        told = SidecarError(f"{words}: {str(error)[:WHY_MAX]}; {then}")
        await self._inline.refuse(job, ErrorReport.of(told, lost_in))

    def _entered(self, job: PendingSave, phase: Phase, error: CheckpointdError | None) -> None:
        ends = phase is Phase.COMMITTED and not job.save.handle.done()
        self._endings.entered(job, phase, error)
        if ends and job.progress.no_progress and job.info.rank == COORDINATOR:
            log.warning("%s: %s", job.info.prefix, no_progress_words(job.info.step))

    def _left_s(self, job: PendingSave) -> float:
        return job.left_s(self._state.commit.timeout_s)

    def _left_to_wait_s(self, job: PendingSave) -> float:
        last_word_s = min(_LAST_WORD_S, self._state.commit.timeout_s / 10)
        if job.save.handle.was_spooled and self._sidecar.spool is not None:
            return job.left_s(max(self._state.commit.timeout_s, self._sidecar.spool.timeout_s)) - last_word_s
        return self._left_s(job) - last_word_s

    async def close(self, *, ends_well: bool) -> None:
        await self._inline.close(ends_well=ends_well)
        await self._sidecar.close(ends_well=ends_well)
