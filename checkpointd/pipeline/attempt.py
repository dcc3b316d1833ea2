"""One rank's run through one attempt: it drives `commit/machine.py`, and always ends.

Invariants
  ATTEMPT-1  `run` always returns with a final phase, and never raises because of the storage.
  ATTEMPT-2  The phase `committed` is reported only after the log has shown the commit, proved and durable.
  ATTEMPT-3  The attempt does not use the snapshot's memory after it has called `on_free`, once, before `run` returns.
  ATTEMPT-4  A rank that has voted no waits NO_S for the coordinator's abort, which names all failed ranks. Then it puts the
      abort itself, since the coordinator may have died. It tries that until the deadline if there are other ranks to tell.
  ATTEMPT-5  A trainer that has lost its sidecar in the middle of a save writes nothing of the shard, and votes no. If the
      sidecar's yes stands, that vote counts, and this process follows the attempt to its end in place of the sidecar.
  ATTEMPT-6  If a rank finds a newer start that does not spare the attempt, it writes nothing of its shard.
  ATTEMPT-7  A rank puts no vote and appends nothing if the root is not the one in which the job began (OWNROOT-1 in
      `own_root.py`).
  ATTEMPT-8  A rank puts the first object of an attempt only after the log has announced it (LOG-8). The coordinator announces
      it when there is room for it, if possible while the snapshot is taken (TIDY-3 in `tidying.py`). Another rank does so if it
      sees no announcement for some time.
  ATTEMPT-9  A rank does not wait for the storage when no wait can help (`system_errors.lasts`), as on a full disk. It puts the
      abort at once, in place of the ballast if need be. If that is refused, too, its save ends there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import ClassVar

from checkpointd.commit import decide as decisions
from checkpointd.commit.decide import Decision
from checkpointd.commit.log import is_admitted, pinned_by
from checkpointd.commit.machine import FINAL, Event, Phase, step
from checkpointd.errors import CheckpointdError, FencedError, SkippedError, StoreError, StoreFullError
from checkpointd.layout.indexes import Index
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.announcement import Announcement, base_of
from checkpointd.pipeline.attempt_errors import error_of, is_out_of_reach, lost_error
from checkpointd.pipeline.awaited import Awaited, stirred
from checkpointd.pipeline.outcome.after_commit import point_latest, show_files
from checkpointd.pipeline.outcome.publish import Ballot, append, draft_of, missing_ranks
from checkpointd.pipeline.pauses import pauses
from checkpointd.pipeline.root import leases, reserve, root_view, starts
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo, Shard, ShardProgress
from checkpointd.pipeline.workers import Stopped, answered, unless
from checkpointd.pipeline.write.dedup import Base, base_in_time
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import persist
from checkpointd.pipeline.write.vote import (
    VoteUncertain,
    drop_shard,
    drop_unfinished,
    tried,
    vote_no,
)
from checkpointd.pipeline.writer_state import WriterState as WriterState
from checkpointd.system_errors import lasts

log = logging.getLogger("checkpointd")

GIVE_UP_TRIES = 3
NO_S = 10.0
"""How long a rank that has voted no leaves the abort to the coordinator."""
ANSWER_S = 10.0
"""How long a store may take once the deadline has passed."""
SLOW_S = 1.0
"""A look at the store that has taken so long is said."""


class Attempt:
    """One attempt on one rank, whose shard goes straight to the root. `SpooledAttempt` of `daemon/spool/` is the other kind.

    Called on the writer's thread: `on_phase` at every change of phase, and `on_free` when the snapshot is not read any more.
    The coordinator puts a commit only when `may_commit` returns True, and keeps a lease if this process may outlive the trainer
    (`outlives`; SAVEJOB-5 in `jobs.py`). `lost`: why this rank votes no, if the process that was to write the shard is lost
    (ATTEMPT-5).
    """

    begins_early: ClassVar[bool] = True
    """Whether room is made at the root, and the attempt is announced, while the snapshot is taken."""
    base_s: ClassVar[float | None] = None
    """How long a save waits for the root to tell the checkpoint before; None: as long as it takes."""

    def __init__(
        self,
        state: WriterState,
        info: AttemptInfo,
        *,
        deadline: float,
        progress: ShardProgress | None = None,
        on_phase: Callable[[Phase], None] = lambda _: None,
        on_free: Callable[[], None] = lambda: None,
        may_commit: Callable[[], bool] = lambda: True,
        outlives: bool = False,
        lost: ErrorReport | None = None,
    ) -> None:
        self.info, self.phase = info, Phase.STAGING
        self.error: CheckpointdError | None = None
        self.outcome: LoggedAttempt | None = None
        """The attempt once it is decided."""
        self.progress = progress or ShardProgress()
        self.progress.spent.begin()
        self._state, self._store, self._log = state, state.store, state.log
        self._began, self._deadline = asyncio.get_running_loop().time(), deadline
        self._on_phase, self._on_free, self._may_commit = on_phase, on_free, may_commit
        self._check_root = partial(state.own_root.check, info.attempt.start)
        self._lease = leases.of_attempt(state.store, info.prefix, state.sight, self._check_root)
        self._on_root: Callable[[], None] = self._lease.keep if outlives and info.rank == COORDINATOR else lambda: None
        self._ballot = Ballot(state.store, info.tag, info.attempt)
        self._writer_lost = lost
        self.own_error: BaseException | None = None if lost is None else lost.error()
        self._given_up: Decision | None = None
        self._hopeless: Exception | None = None
        self._doubted: Decision | None = None
        """The abort that this rank asks for at every look, since its yes vote may exist or not."""
        self._no: tuple[Decision, float] | None = None
        """The abort that follows from this rank's no, and the time at which this rank puts it itself (ATTEMPT-4)."""
        self._bases_forgotten = 0
        self._stands: LoggedAttempt | None = None  # as this rank's append has found it
        self._unseen = ""  # the error of the last look that failed
        self._index: Index | None = None  # the durable index of this rank's shard
        self._missing, self._stirred = Awaited(info, self.progress), asyncio.Event()
        self._over = asyncio.Event()
        """Set when nothing more needs to be written."""
        self._announcement = Announcement(info, state.log, state.commit, self._check_root, partial(base_of, state.persist))
        self._timeout_s = state.commit.timeout_s

    @property
    def votes_missing(self) -> tuple[int, ...] | None:
        """The ranks whose vote was not seen yet; None if this rank does not gather votes."""
        if self.info.rank != COORDINATOR:
            return None
        return tuple(rank for rank in range(self.info.world_size) if rank not in self._ballot.votes)

    def give_up(self, why: str) -> None:
        """End this attempt as if its deadline had passed, for the reason `why`. Call it on the writer's thread."""
        self._end_now(decisions.abort("AbortedError", why))

    def _end_now(self, decision: Decision) -> None:
        self._given_up, self._deadline = decision, asyncio.get_running_loop().time()

    async def run(self, staged: Awaitable[Shard] | None) -> None:
        """Persist the shard that `staged` gives, vote, and follow the attempt to its outcome.

        If `staged` raises SkippedError, the save was skipped; any other error means a failed snapshot. Both vote no. None: the
        writer is lost.
        """
        reader = self._state.reader
        reader.pause(self)
        try:
            await self._run_tidily(staged)
        finally:
            reader.resume(self)
            await self._leave()
        if self.phase is Phase.COMMITTED and self.outcome is not None and self._state.commit.read_back:
            self._state.reader.committed(self.outcome, self.info.rank)

    async def _leave(self) -> None:
        """This process works at the attempt no more, decided or not."""
        await self._lease.release()

    async def _run_tidily(self, staged: Awaitable[Shard] | None) -> None:
        """Run the attempt, and then have dead attempts and old entries of the log removed, which this does not wait for
        (TIDY-1).
        """
        tidier, showing = self._state.tidier, self._state.showing
        if self.begins_early:
            tidier.expect(self.info)
        showing.expect(self.info)
        try:
            await self._run(staged)
        finally:
            showing.end(self.info)
            tidier.end(self.info)
        if self.info.rank == COORDINATOR and self.outcome is not None:
            tidier.ask(self.info)

    async def _run(self, staged: Awaitable[Shard] | None) -> None:
        work = asyncio.ensure_future(self._work(staged))
        try:
            outcome = await self._follow()
        except Exception as error:  # ATTEMPT-1: an unforeseen error ends the attempt on this rank, too
            self._lost(error)
            self._state.showing.end(self.info)  # so that later saves do not wait for a storage that may hang
            self._over.set()
            await work
            if isinstance(error, FencedError):
                await self._ended(committed=False)
            return
        self._over.set()
        if outcome.committed:
            await self._voted(work, outcome)
        self.outcome = outcome
        await show_files(self._state.showing, self.info, outcome.committed)
        if self.info.rank == COORDINATOR and outcome.committed:
            await point_latest(self._log, outcome.commit)
        self._conclude(outcome)
        await work
        if outcome.committed is None:
            await tried(drop_shard, self._store, self.info)
            if self.info.rank == COORDINATOR:
                await tried(drop_unfinished, self._store, self.info)
                await reserve.take_aboard(self._store)
        await self._ended(committed=outcome.committed is not None)

    async def _ended(self, *, committed: bool) -> None:
        """The attempt is decided."""

    # --- this rank's shard -----------------------------------------------------------------------------------

    async def _work(self, staged: Awaitable[Shard] | None) -> None:
        if self._writer_lost is not None:
            await self._refused(self._writer_lost)
            return
        assert staged is not None
        is_early = self.begins_early and self._state.tidier.begins_early(self.info)
        early = asyncio.ensure_future(self._announcement.make_early()) if is_early else None
        try:
            await self._ended_well(self._persist(staged))
        finally:
            if early is not None:
                early.cancel()
            self._let_go()

    def _let_go(self) -> None:
        """Nobody reads the snapshot any more (ATTEMPT-3)."""
        on_free, self._on_free = self._on_free, lambda: None
        on_free()

    async def _ended_well(self, work: Awaitable[None]) -> None:
        """Run this rank's part, and vote no if it fails."""
        try:
            await work
        except Stopped:
            return
        except VoteUncertain as error:
            await self._doubt(error)
        except Exception as error:  # ATTEMPT-1: an unforeseen error becomes this rank's no, too
            await self._fail(error, self._event_of(error))

    async def _persist(self, staged: Awaitable[Shard]) -> None:
        shard = await staged
        if self.outcome is not None:
            return
        self._fire(Event.SNAPSHOT_TAKEN)
        persisting = self._persist_at_root(shard)
        del shard  # `persisting` drops its own as soon as the shard is in a spool, where it may wait for hours
        await persisting

    async def _persist_at_root(self, shard: Shard) -> None:
        self._on_root()
        await unless(self._over, self._check_root())
        tidier = self._state.tidier
        if not self.begins_early:
            tidier.expect(self.info)
        await unless(self._over, tidier.room_for(self.info, self._deadline, shard.nbytes))
        if self.phase is Phase.STAGED:
            self._fire(Event.PERSIST_STARTED)
        freed = tidier.freed
        try:
            await unless(self._over, self._announcement.awaited(self._deadline))
            await persist(await self._job(shard))
        except StoreFullError as error:
            await drop_shard(self._store, self.info)
            if not await unless(self._over, tidier.more_room_for(self.info, self._deadline, freed)):
                raise
            log.warning("%s: rank %d writes it once more, as space has come free: %s", self.info.prefix, self.info.rank, error)
            self.progress.raw_done = self.progress.stored = 0
            await unless(self._over, self._announcement.awaited(self._deadline))
            await persist(await self._job(shard))
        self._fire(Event.VOTED_YES)

    async def _job(self, shard: Shard) -> PersistJob:
        state = self._state
        self._bases_forgotten = state.bases.forgotten
        compares = state.persist.dedup or state.persist.full_every is not None or state.commit.on_no_progress != "ignore"
        return PersistJob(
            store=self._store,
            info=self.info,
            shard=shard,
            config=state.persist,
            rates=state.rates,
            progress=self.progress,
            stopped=self._is_decided,
            base=await self._known_base() if compares else None,
            on_stored=self._keep,
            before_vote=self._check_vote,
        )

    async def _known_base(self) -> Base | None:
        """This rank's part of the checkpoint before, as far as the save may refer to it."""
        base = await unless(self._over, base_in_time(self._state.bases, self.info, self.base_s))
        state, seen = self._log.state, self._announcement.seen
        return base and base.within(pinned_by(state, base_of(self._state.persist, state) if seen is None else seen.base))

    def _is_decided(self) -> bool:
        return self.outcome is not None or self._over.is_set()

    async def _check_vote(self) -> None:
        await self._check_root()

    def _keep(self, index: Index) -> None:
        self._index = index

    def _event_of(self, error: Exception) -> Event:
        if self.phase is not Phase.STAGING:
            return Event.SHARD_FAILED
        return Event.SKIP if isinstance(error, SkippedError) else Event.SNAPSHOT_FAILED

    async def _fail(self, error: BaseException, event: Event) -> None:
        if self._is_decided():
            return  # so this failure does not matter
        self.own_error = error
        if (phase := self.phase) in FINAL:
            return
        self._fire(event)
        report = ErrorReport.of(error, str(phase), decisions.shortened(str(error) or repr(error)))
        if event is not Event.SKIP:
            log.info("%s: rank %d failed while %s: %s", self.info.prefix, self.info.rank, phase, error)
        await self._vote_no(report)

    async def _vote_no(self, report: ErrorReport) -> None:
        await self._refused(report)

    def _tries_again(self, report: ErrorReport, why: Exception) -> bool:
        """Whether the no of `report`, which `why` has prevented, is tried again."""
        return False

    def _is_in_vain(self, why: Exception | None) -> bool:
        """Whether `why` keeps this rank from the storage, and no wait can help (ATTEMPT-9)."""
        return lasts(why)

    async def _refused(self, report: ErrorReport) -> bool:
        """Vote no. False if that is tried again."""
        try:
            await self._check_root()
            await self._announcement.make()
            has_no = await vote_no(self._store, self.info, report, has_written=self._writer_lost is None)
            if has_no or not self._may_find_yes:
                if self._writer_lost is not None:
                    self._fire(Event.SNAPSHOT_FAILED)
                self._no = decisions.refused({self.info.rank: report}), asyncio.get_running_loop().time() + NO_S
            else:
                self.own_error = None
                self._fire(Event.YES_FOUND)
        except FencedError as fenced:
            self._hopeless = fenced
        except Exception as why:  # ATTEMPT-1
            if self._tries_again(report, why):
                log.warning("%s: rank %d cannot store its no: %s; trying again", self.info.prefix, self.info.rank, why)
                return False
            log.error("%s: rank %d cannot store its no: %s; it tries to store the abort", self.info.prefix, self.info.rank, why)
            refused = await self._put_abort(report)
            if not self._may_find_yes or is_out_of_reach(refused) or self._is_in_vain(refused):
                # Without this rank's yes there can be no commit, so its save has failed even if no other rank hears of it.
                self._hopeless = refused
        return True

    async def _doubt(self, error: VoteUncertain) -> None:
        """The yes vote may exist or not, so nothing may be removed before there is an outcome."""
        self.own_error = error.__cause__
        self._fire(Event.VOTE_UNCERTAIN)
        report = ErrorReport.of(error.__cause__ or error, str(Phase.PERSISTING), str(error))
        self._doubted = Decision(report, (self.info.rank,))

    async def _put_abort(self, report: ErrorReport) -> Exception | None:
        """Put the abort for this rank's error unless there is an outcome. Returns the error that prevented it."""
        try:
            await self._put(Decision(report, (self.info.rank,)))
        except Exception as error:  # ATTEMPT-1
            log.error("%s: the abort cannot be stored: %s", self.info.prefix, error)
            return error
        return None

    async def _voted(self, work: asyncio.Future[None], commit: LoggedAttempt) -> None:
        """Return when this rank has entered `prepared`, since `commit` counts its vote."""
        if self._may_find_yes:
            self.outcome = commit  # stops the upload, since the vote counts already
        await work  # otherwise the vote is of this process, and its put is about to return
        if self._may_find_yes and self.phase is not Phase.PREPARED:
            self._fire(Event.YES_FOUND)

    @property
    def _may_find_yes(self) -> bool:
        """Whether another process may have voted for this rank before this one (PHASE-5)."""
        return self._writer_lost is not None

    # --- the outcome -----------------------------------------------------------------------------------------

    async def _follow(self) -> LoggedAttempt:
        """Wait for the outcome. The coordinator puts it when the votes are in; any rank puts an abort after the deadline."""
        loop = asyncio.get_running_loop()
        delays = self._delays()
        while True:
            hopeless = self._hopeless  # a look that began before may have missed the outcome
            outcome = self._stands or await self._look_in_time()
            if outcome is not None:
                return outcome
            if hopeless is not None:
                raise hopeless
            if loop.time() >= self._deadline and self._hopeless is None:
                return await self._give_up()
            self._missing.look(self.phase, self.votes_missing, stands_in=self._announcement.stands_in)
            pause_s = max(0.0, min(next(delays), self._deadline - loop.time()))
            if await stirred(self._stirred, self._longer(pause_s)):
                delays = self._delays()

    def _delays(self) -> Iterator[float]:
        return pauses(self._state.commit, self._store.capabilities, self.info.world_size)

    def _longer(self, pause_s: float) -> float:
        """How long to pause before the next look, at least `pause_s`."""
        return pause_s

    async def _look_in_time(self) -> LoggedAttempt | None:
        """One look, which ends at the deadline even if the store does not answer."""
        left_s = max(self._deadline - asyncio.get_running_loop().time(), self._state.commit.poll_min_s)
        try:
            return await answered(self._look(), left_s)
        except StoreError as error:
            if left_s >= SLOW_S:  # a look that begins just before the deadline tells nothing of the store
                log.error("%s: %s", self.info.prefix, error)
            return None

    async def _look(self) -> LoggedAttempt | None:
        no = self._no if self._no is not None and asyncio.get_running_loop().time() >= self._no[1] else None
        try:
            if self._doubted is not None:
                return await self._put(self._doubted)
            if no is not None:
                return await self._put(no[0])
            if self.info.rank == COORDINATOR:
                return await self._coordinate()
            return await self._seen()
        except FencedError as error:
            self.own_error = self.own_error or error
            self._hopeless = error
            return None
        except CheckpointdError as error:
            if (cause := str(error)) != self._unseen:  # else the look before has logged it
                log.warning("%s: cannot look for the outcome: %s", self.info.prefix, error)
            self._unseen = cause
            if self._is_in_vain(error) and (self._no is None or self.info.world_size == 1):
                self._end_in_vain(error)
            elif no is not None and self.info.world_size == 1:
                self._hopeless = error
            return None  # the storage may come back before the deadline

    def _end_in_vain(self, error: CheckpointdError) -> None:
        """`error` keeps this rank from seeing or putting the outcome, and no wait can help (ATTEMPT-9)."""
        self.own_error = self.own_error or error
        report = ErrorReport.of(error, str(self.phase), decisions.shortened(str(error)))
        self._end_now(decisions.refused({self.info.rank: report}))

    async def _seen(self) -> LoggedAttempt | None:
        if not await self._log.follow(self._is_told_by):
            return None
        if self._announcement.seen is None:
            await starts.check_fence(self._store, self.info.attempt.start, self.info.prefix)
        return self._announcement.seen

    def _is_told_by(self, state: LogState) -> bool:
        """Whether the attempt is decided, or can be none any more, since a start has begun before it was announced."""
        seen = state.attempts.get(self.info.prefix)
        return not is_admitted(state, self.info.prefix) if seen is None else seen.status != "undecided"

    async def _coordinate(self) -> LoggedAttempt | None:
        outcome = await self._seen()
        if outcome is not None:
            return outcome
        await self._ballot.look(self.info.world_size)
        decision = self._ballot.decide(self.info.world_size)
        if decision is None or (decision.commit and not self._may_commit()):
            return None
        if decision.commit and (fault := await self._state.plans.fault(self._ballot.votes)) is not None:
            decision = fault
        if decision.commit and self._state.commit.on_no_progress == "abort" and decisions.has_no_progress(self._ballot.votes):
            decision = decisions.no_progress(self.info.step)
        return await self._put(decision)

    async def _give_up(self) -> LoggedAttempt:
        """Put the abort after the deadline. Returns the outcome that counts. Raises if the store does not answer."""
        self._fire(Event.DEADLINE)
        for tries in range(1, GIVE_UP_TRIES + 1):
            try:
                return await answered(self._abort_late(), ANSWER_S)
            except CheckpointdError as error:
                if tries == GIVE_UP_TRIES or lasts(error):
                    raise
                log.warning("%s: the abort cannot be put: %s; trying again", self.info.prefix, error)
                await asyncio.sleep(self._state.commit.poll_max_s * tries)
        raise AssertionError("unreachable")

    async def _abort_late(self) -> LoggedAttempt:
        return await self._put(await self._too_late())

    async def _too_late(self) -> Decision:
        if self._given_up is not None:
            return self._given_up
        silent = {COORDINATOR: "coordinator: all ranks have voted, but it put no outcome"}
        missing = missing_ranks(await root_view.objects_of(self._store, self.info.prefix), self.info.world_size) or silent
        return decisions.deadline(missing, timeout_s=self._timeout_s)

    async def _put(self, decision: Decision) -> LoggedAttempt:
        await self._check_root()
        try:
            await self._announcement.make()
        except StoreFullError:
            if decision.commit:
                raise
            await reserve.drop(self._store)
            await self._announcement.make()
        took_s = asyncio.get_running_loop().time() - self._began
        plan = self._state.plans.joint(self._ballot.votes) if decision.commit else b""
        draft = draft_of(self.info, decision, self._ballot, decided_by=self.info.rank, plan=plan, took_s=took_s)
        self._stands = await append(self._log, draft)
        return self._stands

    # --- the end ---------------------------------------------------------------------------------------------

    def _conclude(self, outcome: LoggedAttempt) -> None:
        if (commit := outcome.committed) is not None:
            if self._index is not None:
                self._state.bases.saw(self._index, commit.order, self._bases_forgotten)
            if commit.no_progress and self._state.commit.on_no_progress != "ignore":
                self.progress.no_progress = True
                if self.info.rank == COORDINATOR:
                    log.warning("%s: %s", self.info.prefix, decisions.no_progress_words(commit.step))
            self._fire(Event.SAW_COMMIT)
            return
        self.error = error_of(self.info, outcome, self.own_error)
        self._fire(Event.SAW_ABORT)

    def _lost(self, error: Exception) -> None:
        if not isinstance(error, CheckpointdError):
            log.error("%s: unforeseen, please report it", self.info.prefix, exc_info=error)
        self.error = lost_error(self.info, self.own_error, error)
        self._fire(Event.LOG_LOST)

    def _fire(self, event: Event) -> None:
        if self.phase not in FINAL and (phase := step(self.phase, event)) is not self.phase:
            self._enter(phase)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is Phase.PREPARED:
            if self.info.rank == COORDINATOR:
                self._stirred.set()  # it may have all votes
            self._outlast(self._state.outlast_s)
        self.progress.spent.entered(phase)
        self._on_phase(phase)

    def _outlast(self, seconds: float) -> None:
        """Wait for the outcome for so long from now on, if that is longer; 0: do not."""
        self._timeout_s = max(self._timeout_s, seconds)
        if seconds:
            self._deadline = max(self._deadline, asyncio.get_running_loop().time() + seconds)
