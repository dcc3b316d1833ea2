"""The sidecar as a trainer uses it: one connection that is made again when it is lost, and what becomes of the saves meanwhile.

Invariants
  D1  A save that the client still holds is never lost with the sidecar: it is taken over here, or handed over again, as
      `on_sidecar_loss` says, always as the next hand of the same attempt.
  D2  Nothing here holds training: all of it runs on the writer's loop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Literal

from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig, PersistConfig, Ranks
from checkpointd.daemon import wire
from checkpointd.errors import CheckpointdError, SidecarError, WireError
from checkpointd.pipeline.attempt import WriterState
from checkpointd.waits import Waiting
from checkpointd_client import link as links
from checkpointd_client.link import Link
from checkpointd_client.running import Endings, InlineRunner, Job
from checkpointd_client.track import LinkLost, NoAnswer

log = logging.getLogger("checkpointd")

OnSidecarLoss = Literal["inline", "wait", "raise"]
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.05, 2.0


@dataclass(frozen=True, slots=True)
class _Epoch:
    number: int
    nonce: str
    persist: PersistConfig
    commit: CommitConfig


class Sidecar:
    """The way to the daemon at `path` for one rank. All coroutines run on the writer's loop."""

    def __init__(self, path: str, root: str, ranks: Ranks, on_loss: OnSidecarLoss) -> None:
        self.path, self.on_loss = path, on_loss
        self._root, self._ranks = root, ranks
        self._epoch: _Epoch | None = None
        self._link: Link | None = None
        self._opening: asyncio.Lock | None = None
        self._silence: tuple[float, NoAnswer] | None = None
        """Until when the daemon, which did not answer, is not asked again."""
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection now; any thread may ask."""
        return self._link is not None and self._link.error is None

    async def link(self) -> Link:
        """The connection, made if there is none. SidecarError where it cannot be made now."""
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._link is not None and self._link.error is None:
                return self._link
            if self._closed:
                raise LinkLost("the checkpointer is closed")
            self._link = await self._joined(await self._opened())
            return self._link

    async def _opened(self) -> Link:
        """A new connection. One that hangs is not asked by each save anew, for that would hold each of them as long."""
        loop = asyncio.get_running_loop()
        if self._silence is not None and loop.time() < self._silence[0]:
            raise NoAnswer(str(self._silence[1]))
        try:
            return await Link.open(self.path)
        except NoAnswer as error:
            self._silence = (loop.time() + links.ANSWER_S, error)
            raise

    async def _joined(self, link: Link) -> Link:
        try:
            await link.join(self._root, self._ranks)
            if self._epoch is not None:
                epoch = self._epoch
                await link.begin(epoch.number, epoch.nonce, epoch.persist, epoch.commit)
        except BaseException:
            link.lose("the sidecar refused this rank")
            raise
        return link

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
                    log.warning("%s; this process persists its saves itself meanwhile", error)
                    return None
                if self.on_loss == "raise" or asyncio.get_running_loop().time() >= until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def begin(self, number: int, nonce: str, persist: PersistConfig, commit: CommitConfig) -> None:
        """Tell the daemon, now or when it is there, which epoch the saves belong to."""
        self._epoch = _Epoch(number, nonce, persist, commit)
        if self._link is not None and self._link.error is None:
            try:
                await self._link.begin(number, nonce, persist, commit)
            except SidecarError as error:
                log.warning("%s", error)

    async def held(self) -> tuple[wire.Held, ...]:
        """The snapshots that the daemon holds for this rank; none where it is out of reach."""
        try:
            return (await (await self.link()).look()).held
        except (SidecarError, WireError) as error:
            log.warning("%s", error)
            return ()

    async def in_flight(self) -> tuple[wire.InFlight, ...]:
        """The attempts at this root that the daemon works at; none where it is out of reach."""
        try:
            return (await (await self.link()).look()).in_flight
        except (SidecarError, WireError):
            return ()

    async def beside(self, held: wire.Held) -> tuple[wire.Held, ...]:
        """The snapshots of other ranks, of the attempt of `held`, that this daemon holds; none where it is out of reach."""
        try:
            others = (await (await self.link()).look()).beside
        except (SidecarError, WireError) as error:
            log.warning("%s", error)
            return ()
        same = (held.tag, held.attempt, held.nonce, held.world_size)
        return tuple(o for o in others if (o.tag, o.attempt, o.nonce, o.world_size) == same and o.rank is not None)

    async def fetch(self, held: wire.Held) -> tuple[wire.Snapshot, int]:
        """A held snapshot and the descriptor of its memory. SidecarError where it cannot be had."""
        return await (await self.link()).fetch(held)

    def drop_slot(self, number: int) -> None:
        """On the loop: a slot was replaced."""
        if self._link is not None:
            self._link.drop_slot(number)

    async def close(self, *, ends_well: bool) -> None:
        """Hang up. A trainer that `ends_well` has its snapshot let go; otherwise the sidecar holds it for the next one."""
        self._closed = True
        if self._link is not None:
            await self._link.close(ends_well=ends_well)


class SidecarRunner:
    """Hands jobs to the sidecar, and takes them back where it is lost."""

    def __init__(self, sidecar: Sidecar, inline: InlineRunner, endings: Endings, state: WriterState) -> None:
        self._sidecar, self._inline, self._endings, self._state = sidecar, inline, endings, state

    async def run(self, job: Job) -> None:
        try:
            await self._run(job)
        except Exception as error:  # a defect of ours must not hang the trainer that waits for the handle
            log.exception("%s: handing it to the sidecar failed in an unforeseen way; please report it", job.info.prefix)
            self._endings.entered(
                job, Phase.FAILED, CheckpointdError(f"the sidecar's client failed: {error!r}; please report it")
            )

    async def _run(self, job: Job) -> None:
        hand, pause_s = 0, _PAUSE_S_MIN
        waiting = Waiting(lambda: f"{job.info.prefix}: the sidecar at {self._sidecar.path} is not back")
        while True:
            waiting.look()
            try:
                link = await self._sidecar.link()
            except (SidecarError, WireError) as error:
                lost: CheckpointdError = error
            else:
                failed = await self._handed_over(job, link, hand)
                if failed is None:
                    return
                lost, hand = failed, hand + 1  # whatever that hand wrote bears its number
            job.announced.set()  # save() need not wait for a sidecar that is not there
            log.error("%s: %s", job.info.prefix, lost)
            if await self._without(job, lost, hand):
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    async def _handed_over(self, job: Job, link: Link, hand: int) -> CheckpointdError | None:
        """Let the daemon run `job`; None once it has ended there, else why it did not."""
        try:
            await link.persist(
                job,
                hand=hand,
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

    async def _without(self, job: Job, error: CheckpointdError, hand: int) -> bool:
        """What `on_sidecar_loss` says; True where the job has ended with it."""
        left_s = self._left_s(job)
        if not job.has_snapshot:
            told = SidecarError(f"{job.info.tag}: the sidecar had given its memory back before it was lost: {error}")
            await self._inline.refuse(job, told, hand=hand, left_s=left_s)  # where its vote stands, that counts
            return True
        if self._sidecar.on_loss == "inline":
            log.warning("%s: this process persists it itself", job.info.prefix)
            await self._inline.take(job, replace(job.info, hand=hand, handed=True), left_s=left_s)
            return True
        if self._sidecar.on_loss == "wait" and left_s > 0:
            return False
        told = SidecarError(f"{job.info.tag} was not persisted: {error}")
        await self._inline.refuse(job, told, hand=hand, left_s=left_s)
        return True

    def _entered(self, job: Job, phase: Phase, error: CheckpointdError | None) -> None:
        self._endings.entered(job, phase, error)

    def _left_s(self, job: Job) -> float:
        return job.left_s(self._state.commit.timeout_s)

    async def close(self, *, ends_well: bool) -> None:
        await self._inline.close(ends_well=ends_well)
        await self._sidecar.close(ends_well=ends_well)
