"""The sidecar's connection, made again when it is lost, and the fate of the saves meanwhile.

Invariants
  SIDECAR-1  A save that the client still holds is never lost with the sidecar: it is taken over here, or handed over again, as
      `on_sidecar_loss` says, always as the next writer of the same attempt.
  SIDECAR-2  Nothing here holds training: all of it runs on the writer's loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, Literal

import msgspec

from checkpointd.commit.decide import no_progress_words
from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig, PersistConfig, Ranks
from checkpointd.daemon.protocol import wire
from checkpointd.errors import CheckpointdError, SidecarError, WireError
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.manifest import ErrorReport, Inline, InlineReason
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.root import epochs
from checkpointd.pipeline.shard import COORDINATOR
from checkpointd.store.base import Store
from checkpointd.waits import Waiting
from checkpointd_client.saves.runner import Endings, InlineRunner, PendingSave
from checkpointd_client.sidecar import link as links
from checkpointd_client.sidecar.link import Link, LinkLost, NoAnswer, SidecarRefusal

log = logging.getLogger("checkpointd")

OnSidecarLoss = Literal["inline", "wait", "raise"]
_MEANWHILE: Final[dict[OnSidecarLoss, str]] = {
    "inline": "this process persists its saves itself",
    "wait": "saves wait for it",
    "raise": "saves fail",
}
_NUMBER: Final = re.compile(r"\d+")
UNTOLD_MAX = 64
WHY_MAX = 500
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 2.0
_REJOIN_S_MIN, _REJOIN_S_MAX = 2.0, 30.0
"""How often a connection that was lost is made again where no save asks for it."""
_REFUSED_S = 2 * _REJOIN_S_MAX
"""How long saves do not ask a daemon that refused the epoch: proving that takes seconds, and it is asked beside them."""
_LAST_WORD_S = 5.0
"""How long before a save's deadline a rank that waits for its sidecar says why it has none, so that all ranks hear more than
that its vote is missing; at most a tenth of the whole time.
"""


@dataclass(frozen=True, slots=True)
class _Epoch:
    number: int
    nonce: str
    persist: PersistConfig
    commit: CommitConfig


class SidecarClient:
    """The way to the daemon at `path` for one rank. All coroutines run on the writer's loop."""

    def __init__(self, path: str, store: Store, ranks: Ranks, on_loss: OnSidecarLoss, sidecar_uid: int | None = None) -> None:
        self.path, self.on_loss, self._uid = path, on_loss, sidecar_uid
        self._store, self._root, self._ranks = store, os.path.realpath(store.url), ranks
        self._is_of_root: dict[tuple[int, str], bool] = {}
        """Of the epochs whose attempts the daemon works at, by number and nonce."""
        self._epoch: _Epoch | None = None
        self._link: Link | None = None
        self._opening: asyncio.Lock | None = None
        self._silence: tuple[float, SidecarError] | None = None
        """Until when no save asks the daemon, which did not answer or refused the epoch, and its error."""
        self._untold: deque[tuple[float, wire.Inlined]] = deque(maxlen=UNTOLD_MAX)
        """Since when it is known, and what was not told yet. What does not fit the daemon finds in the store."""
        self._rejoining: asyncio.Task[None] | None = None
        self._lost_as = ""
        """The cause of its loss that was said, until it is back."""
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection now; any thread may ask."""
        return self._link is not None and self._link.error is None

    def say_lost(self, error: CheckpointdError) -> None:
        """Warn that the daemon takes nothing now: once for a cause, however many saves and numbers it has."""
        cause = _NUMBER.sub("", str(error))
        if cause != self._lost_as:
            self._lost_as = cause
            log.warning("%s; %s meanwhile", error, _MEANWHILE[self.on_loss])

    def forget_loss(self) -> None:
        """It is back: the next loss is said anew."""
        self._lost_as = ""

    async def link(self) -> Link:
        """The connection, made if there is none. SidecarError where it cannot be made now.

        A daemon that does not answer, or refuses the epoch, is not asked by each save anew, for that would hold each as long.
        """
        if not self.connected:
            self._check_silence(SidecarError)
        return await self._connection()

    def _check_silence(self, kind: type[SidecarError]) -> None:
        """Raise the error of the last try, one of `kind`, where it is too soon for another."""
        if self._silence is not None and asyncio.get_running_loop().time() < self._silence[0]:
            error = self._silence[1]
            if isinstance(error, kind):
                raise type(error)(str(error))

    async def _connection(self) -> Link:
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._link is not None and self._link.error is None:
                return self._link
            if self._closed:
                raise LinkLost("the checkpointer is closed")
            self._check_silence(NoAnswer)
            try:
                link = await Link.open(self.path, self._uid)
            except NoAnswer as error:
                self._spare(error, links.ANSWER_S)
                raise
            self._link = await self._joined(link)
            self._silence = None
            self.forget_loss()
            return self._link

    def _spare(self, error: SidecarError, seconds: float) -> None:
        self._silence = (asyncio.get_running_loop().time() + seconds, error)

    async def _begin_on(self, link: Link, epoch: _Epoch) -> None:
        try:
            await link.begin(epoch.number, epoch.nonce, epoch.persist, epoch.commit)
        except NoAnswer as error:
            self._spare(error, links.ANSWER_S)
            raise
        except LinkLost:
            raise
        except SidecarError as error:
            self._spare(error, _REFUSED_S)
            raise

    async def _joined(self, link: Link) -> Link:
        try:
            await link.join(self._root, self._ranks)
            if self._epoch is not None:
                await self._begin_on(link, self._epoch)
                self._tell_untold(link)
        except BaseException:
            link.lose("the sidecar refused this rank")
            raise
        return link

    def _tell_untold(self, link: Link) -> None:
        now = asyncio.get_running_loop().time()
        while self._untold:
            since, message = self._untold.popleft()
            aged = {"began_s": message.began_s + now - since, "ended_s": message.ended_s + now - since}
            link.tell_inline(msgspec.structs.replace(message, **aged))

    async def start(self, patience_s: float) -> wire.Joined | None:
        """Before the epoch begins: what the daemon holds and works at. None where it is out of reach and that may be.

        With "wait", `patience_s` is how long it is waited for; with "raise" and "wait", LinkLost where it is not there.
        Raises SidecarError where it is there and refuses this rank, whatever `on_sidecar_loss` says.
        """
        until, pause_s = asyncio.get_running_loop().time() + patience_s, _PAUSE_S_MIN
        while True:
            try:
                return await (await self.link()).look()
            except LinkLost as error:
                if self.on_loss == "inline":
                    self.say_lost(error)
                    return None
                if self.on_loss == "raise" or asyncio.get_running_loop().time() >= until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def begin(self, number: int, nonce: str, persist: PersistConfig, commit: CommitConfig) -> None:
        """Tell the daemon, now or when it is there, which epoch the saves belong to.

        With "inline", one that refuses or does not answer counts as lost. Otherwise SidecarError where it refuses, and with
        "raise" also where it does not answer.
        """
        self._epoch = _Epoch(number, nonce, persist, commit)
        self._rejoining = asyncio.create_task(self._rejoin())
        if self._link is not None and self._link.error is None:
            try:
                await self._begin_on(self._link, self._epoch)
            except SidecarError as error:
                if self.on_loss == "raise" or (self.on_loss == "wait" and not isinstance(error, LinkLost)):
                    raise
                self.say_lost(error)

    async def _rejoin(self) -> None:
        """Connect again where the connection was lost: a daemon that was started anew knows of no trainer before it joins.

        In silence: a save that needs the daemon says why it is not there.
        """
        pause_s = _REJOIN_S_MIN
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._connection()
                pause_s = _REJOIN_S_MIN
            except (SidecarError, WireError):
                pause_s = min(2 * pause_s, _REJOIN_S_MAX)

    async def held(self) -> tuple[wire.RetainedSnapshot, ...]:
        """The snapshots that the daemon holds for this rank; none where it is out of reach."""
        try:
            return (await (await self.link()).look()).held
        except (SidecarError, WireError) as error:
            self.say_lost(error)
            return ()

    async def in_flight(self) -> tuple[wire.InFlight, ...]:
        """The attempts at this root that the daemon works at; none where it is out of reach."""
        try:
            return await self.at_root(await (await self.link()).look())
        except (SidecarError, WireError):
            return ()

    async def at_root(self, joined: wire.Joined) -> tuple[wire.InFlight, ...]:
        """What is in flight, but for attempts of a root that was removed, and in whose place this one was made."""
        flights = []
        for flight in joined.in_flight:
            attempt = AttemptId.parse(flight.attempt)
            if attempt is None:
                continue
            epoch = (attempt.epoch, flight.nonce)
            if epoch not in self._is_of_root:
                self._is_of_root[epoch] = await epochs.is_of_root(self._store, *epoch)
            if self._is_of_root[epoch]:
                flights.append(flight)
        return tuple(flights)

    async def beside(self, held: wire.RetainedSnapshot) -> tuple[wire.RetainedSnapshot, ...]:
        """The snapshots of other ranks, of the attempt of `held`, that this daemon holds; none where it is out of reach."""
        try:
            others = (await (await self.link()).look()).beside
        except (SidecarError, WireError) as error:
            self.say_lost(error)
            return ()
        same = (held.tag, held.attempt, held.nonce, held.world_size)
        return tuple(o for o in others if (o.tag, o.attempt, o.nonce, o.world_size) == same and o.rank is not None)

    async def fetch(self, held: wire.RetainedSnapshot) -> tuple[wire.Snapshot, int]:
        """A held snapshot and the descriptor of its memory. SidecarError where it cannot be had."""
        return await (await self.link()).fetch(held)

    def drop_slot(self, number: int) -> None:
        """On the loop: a slot was replaced."""
        if self._link is not None:
            self._link.drop_slot(number)

    def tell_inline(self, message: wire.Inlined) -> None:
        """Tell the daemon, now or when it is there, of a save that this process persisted itself."""
        if self._link is not None and self._link.error is None:
            self._link.tell_inline(message)
        else:
            self._untold.append((asyncio.get_running_loop().time(), message))

    async def close(self, *, ends_well: bool) -> None:
        """Hang up. A trainer that `ends_well` has its snapshot let go; otherwise the sidecar holds it for the next one."""
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


class SidecarRunner:
    """Hands jobs to the sidecar, and takes them back where it is lost."""

    def __init__(self, sidecar: SidecarClient, inline: InlineRunner, endings: Endings, state: WriterState) -> None:
        self._sidecar, self._inline, self._endings, self._state = sidecar, inline, endings, state

    async def run(self, job: PendingSave) -> None:
        try:
            await self._run(job)
        except Exception as error:  # a defect of ours must not hang the trainer that waits for the handle
            log.exception("%s: handing it to the sidecar failed in an unforeseen way; please report it", job.info.prefix)
            self._endings.entered(
                job, Phase.FAILED, CheckpointdError(f"the sidecar's client failed: {error!r}; please report it")
            )

    async def _run(self, job: PendingSave) -> None:
        takeover, pause_s = 0, _PAUSE_S_MIN
        waiting = Waiting(lambda: f"{job.info.prefix}: the sidecar at {self._sidecar.path} is not back")
        while True:
            waiting.look()
            try:
                link = await self._sidecar.link()
            except (SidecarError, WireError) as error:
                lost: CheckpointdError = error
            else:
                failed = await self._handed_over(job, link, takeover)
                if failed is None:
                    self._sidecar.forget_loss()
                    return
                lost, takeover = failed, takeover + 1  # whatever that writer wrote bears its number
            job.announced.set()  # save() need not wait for a sidecar that is not there
            self._sidecar.say_lost(lost)
            if await self._without(job, lost, takeover):
                return
            await asyncio.sleep(min(pause_s, max(_PAUSE_S_MIN, self._left_to_wait_s(job))))
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _handed_over(self, job: PendingSave, link: Link, takeover: int) -> CheckpointdError | None:
        """Let the daemon run `job`; None once it has ended there, else why it did not."""
        try:
            await link.persist(
                job,
                takeover=takeover,
                left_s=self._left_s(job),
                keeps_before=self._state.tidier.keeps_before,
                on_phase=lambda p, e: self._entered(job, p, e),
            )
        except (SidecarError, WireError) as error:
            return error
        except Exception as error:  # a defect of ours: the daemon may be told nonsense on this link, and is told no more
            log.exception("%s: handing it to the sidecar failed in an unforeseen way; please report it", job.info.prefix)
            link.lose(f"the sidecar's client failed: {error!r}")
            return SidecarError(f"the sidecar's client failed: {error!r}; please report it")
        return None

    async def _without(self, job: PendingSave, error: CheckpointdError, takeover: int) -> bool:
        """What `on_sidecar_loss` says; True where the job has ended with it."""
        left_s = self._left_s(job)
        if not job.has_snapshot:
            told = SidecarError(f"{job.info.tag}: the sidecar had given its memory back before it was lost: {error}")
            await self._inline.refuse(job, told, takeover=takeover, left_s=left_s)  # where its vote stands, that counts
            return True
        if self._sidecar.on_loss == "inline":
            why = Inline(reason=_reason(error), why=str(error)[:WHY_MAX])
            await self._inline.take(
                job, replace(job.info, takeover=takeover, may_be_taken_over=True, inline=why), left_s=left_s
            )
            self._sidecar.tell_inline(_inlined(job, why, await job.held_s()))
            return True
        if self._sidecar.on_loss == "wait" and self._left_to_wait_s(job) > 0:
            return False
        told = SidecarError(f"{job.info.tag} was not persisted: {error}")
        await self._inline.refuse(job, told, takeover=takeover, left_s=left_s)
        return True

    def _entered(self, job: PendingSave, phase: Phase, error: CheckpointdError | None) -> None:
        ends = phase is Phase.COMMITTED and not job.save.handle.done()
        self._endings.entered(job, phase, error)
        if ends and job.progress.no_progress and job.info.rank == COORDINATOR:
            log.warning("%s: %s", job.info.prefix, no_progress_words(job.info.step))

    def _left_s(self, job: PendingSave) -> float:
        return job.left_s(self._state.commit.timeout_s)

    def _left_to_wait_s(self, job: PendingSave) -> float:
        return self._left_s(job) - min(_LAST_WORD_S, self._state.commit.timeout_s / 10)

    async def close(self, *, ends_well: bool) -> None:
        await self._inline.close(ends_well=ends_well)
        await self._sidecar.close(ends_well=ends_well)
