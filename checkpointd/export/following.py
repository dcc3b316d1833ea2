"""Exports a root until it is stopped: looks for new commits, exports those that are due, and tries again after failures.

Invariants
  EXPORT-1  Only commits are exported, each in whole or not at all (OUTPUT-1, BUCKETOUT-1), and every byte is verified on the
      way.
  EXPORT-2  One process at a time exports to a place (EXPORTHOLD-1). What one leaves unfinished, because it is killed, the next
      one to hold the place removes or replaces.
  EXPORT-3  Nothing is written at the root but a lease, and no save waits for an export. A checkpoint that is removed, damaged
      or not exportable is named, and holds up no other.
  EXPORT-4  A whole export is removed only by `keep_last`, when that many newer ones are there.
  EXPORT-5  Before a checkpoint is read, the lease at the root names it, so retention leaves it until its export has ended
      (EXPORTLEASE-1). Where this process may not write at the root, the log says that it cannot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Literal

from checkpointd.config import ABSENCE_S, ExportConfig
from checkpointd.errors import CheckpointdError, DamagedError, StoreError, UsageError
from checkpointd.export.beside import check_beside, read_beside
from checkpointd.export.consolidate import Consolidation, ExportRequest, Safetensors, check_outside, export_checkpoint
from checkpointd.export.hold import ExportHold
from checkpointd.export.output import on_thread
from checkpointd.export.own_lease import OwnExportLease
from checkpointd.export.planning import ExportAgenda, planned
from checkpointd.export.progress import ExportProgress, LeftReason
from checkpointd.export.record import ExportRecord
from checkpointd.export.stream import Turn, at_once
from checkpointd.export.target import ExportTarget, records_at
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import ErrorReport
from checkpointd.phrases import byte_count, byte_size, lasting
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.limited import TokenBucket
from checkpointd.store.patient import Patience, PatientStore

log = logging.getLogger("checkpointd")

RETRY_S = 60.0
"""How long a failed read is tried again within one export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPace:
    """How often the root is looked at; seconds."""

    poll_s: float = 5.0
    """Between two looks for a new entry of the root's log."""
    look_s: float = 60.0
    """Between two looks at root and place without news. What could not be exported is tried again then."""
    pause_max_s: float = 60.0
    """The longest pause after failures."""


class Exporter:
    """Exports one root to one place. Any thread may read `progress`.

    `turn`: see `Turn`. `slot`: entered for each export, so that those of several rules take turns. `fails` gets each new error
    after which it tries again.
    """

    def __init__(
        self,
        root: Store,
        target: ExportTarget,
        config: ExportConfig,
        pace: ExportPace | None = None,
        *,
        turn: Turn = at_once,
        slot: AbstractAsyncContextManager[object] | None = None,
        fails: Callable[[CheckpointdError], None] = lambda _: None,
        sight: Sight | None = None,
    ) -> None:
        check_outside(root, config.to)
        self.pace = pace or ExportPace()
        self.progress = ExportProgress(root=root.url, to=config.to)
        self._root, self._target, self._config = root, target, config
        self._turn, self._slot, self._fails = turn, slot or nullcontext(), fails
        self._bucket = None if config.limit_bps is None else TokenBucket(config.limit_bps)
        self._sight = sight or Sight()
        self._hold = ExportHold(target.store, root.url, self._sight)
        self._lease: OwnExportLease | None = None
        """The lease at the root, while this process holds the place."""
        self._log = RootLog.of(root)
        self._there: dict[str, ExportRecord | None] = {}
        self._tried: dict[str, LeftReason] = {}
        """The attempts that could not be exported, with the reason."""
        self._due: tuple[LoggedAttempt, ...] = ()
        """Those that were due at the last look."""
        self._staying: set[str] = set()
        """The exports that cannot be removed."""
        self._at: tuple[int, str] | None = None
        """The entry of the root's log up to which nothing is left to do, and its fault."""
        self._looked_at = float("-inf")
        self._last = asyncio.Event()

    def finish(self) -> None:
        """Let `run` look once more, export what is due, and return."""
        self._last.set()

    async def run(self) -> None:
        """Export until cancelled, or until `finish`. Raises UsageError if the rule cannot work."""
        failed = 0
        try:
            while True:
                is_last = self._last.is_set()
                try:
                    await self.round(again=failed > 0 or is_last)
                    failed, pause_s = 0, self.pace.poll_s
                except UsageError as error:
                    self._problem("over", error)
                    raise
                except CheckpointdError as error:
                    failed += 1
                    pause_s = min(self.pace.pause_max_s, self.pace.poll_s * 2 ** min(failed, 16))
                    self._problem("failing", error)
                if is_last:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._last.wait()
        finally:
            await self.close()

    async def close(self) -> None:
        """Give up the place, and the lease at the root. Raises nothing."""
        if self._lease is not None:
            with suppress(StoreError):
                await self._hold.check()
                await self._lease.release()
        self._leave_lease()
        await self._hold.release()

    def _leave_lease(self) -> None:
        if self._lease is not None:
            self._lease.lapse()  # if another process exports to the place, it has put its own there
        self._lease = None

    async def round(self, *, again: bool = False) -> bool:
        """Export all that is due now, if this process holds the place or can take it; returns whether it does. `again`: look at
        everything.
        """
        if not await self._holds():
            return False
        now = asyncio.get_running_loop().time()
        await self._log.look()
        if again or now - self._looked_at >= self.pace.look_s:
            await on_thread(lambda: check_beside(self._config.files))  # told before the first export is due
            self._tried = {prefix: why for prefix, why in self._tried.items() if why == "damaged"}
            self._there = await records_at(self._target.store)
            self._looked_at = now
        elif self._at == self._now and not self._log.fault:
            return True
        while True:
            agenda = await self._see()
            await self._let_go(agenda.going)  # before the next export, which may need their space
            if not agenda.due:
                break
            await self._export(agenda.due[0])
        self._up_to_date(agenda)
        return True

    async def _holds(self) -> bool:
        if self._hold.is_held:
            await self._hold.check()
            return True
        self._leave_lease()
        await self._target.begin()
        if not await self._hold.take():
            holder = self._hold.holder
            who = f"process {holder.writer.pid} on {holder.writer.host}" if holder is not None else "another process"
            self.progress.state, self.progress.holder, self.progress.problem = "waiting", who, None
            return False
        self.progress.holder = ""
        self._lease = OwnExportLease(self._root, self._config.to, self._config.every_steps, self._sight, self._hold.check)
        await self._target.clean()
        self._looked_at = float("-inf")
        return True

    @property
    def _now(self) -> tuple[int, str]:
        return self._log.state.number, self._log.fault

    async def _see(self) -> ExportAgenda:
        """What is to be done now."""
        self._at = None
        state = await root_view.state_of(self._root)
        at = self._now
        newest_first = root_view.checkpoints_of(state.attempts.values())
        agenda = planned(newest_first, self._there, self._config, self._root.url, self._tried)
        for one in agenda.blocked:
            self._leave(
                one, "blocked", UsageError(f"{self._target.place(one.tag)} is not an export of {self._root.url}: move it away")
            )
        there = {one.tag for one in newest_first}
        for one in self._due:
            if one.tag not in there:
                self._lose(one)
        self._due, self.progress.due = agenda.due, len(agenda.due)
        if self._lease is not None and self._log.state.number:  # else no job has begun, and the root may not be there
            seen = max((one.commit.order for one in newest_first), default=(0, 0))
            await self._lease.keep((one.prefix for one in agenda.due[:2]), seen)
        if not agenda.due:
            self._at = at
        return agenda

    async def _export(self, checkpoint: LoggedAttempt) -> None:
        shown, began = self.progress, time.monotonic()
        shown.state, shown.tag, shown.done_bytes, shown.total_bytes = "exporting", checkpoint.tag, 0, 0
        try:
            async with self._slot:
                done = await self._exported(checkpoint)
        except (StoreError, asyncio.CancelledError):
            raise
        except CheckpointdError as error:
            await self._failed(checkpoint, error)
            return
        finally:
            shown.tag, shown.done_bytes, shown.total_bytes = "", 0, 0
        shown.exported, shown.exported_bytes = shown.exported + 1, shown.exported_bytes + done.bytes
        shown.last_s = time.monotonic() - began
        log.info("%s exported to %s: %s in %s", checkpoint.tag, done.out, byte_size(done.bytes), lasting(shown.last_s))

    async def _exported(self, checkpoint: LoggedAttempt) -> Consolidation:
        config, shown = self._config, self.progress
        request = ExportRequest(
            only=config.only,
            dtype=config.dtype,
            memory_bytes=byte_count(config.memory, "memory"),
            plain_names=True,
            beside=await on_thread(lambda: read_beside(config.files, config.dtype)),
        )
        container = Safetensors("", byte_count(config.max_shard_size, "max_shard_size"))
        # Past the page cache, which belongs to those who train.
        root = PatientStore(self._root.uncached, Patience(RETRY_S, ABSENCE_S))

        def on_progress(done: int, total: int) -> None:
            shown.done_bytes, shown.total_bytes = done, total

        async with self._target.output(checkpoint.tag, self._hold.check) as output:
            done = await export_checkpoint(root, checkpoint, output, container, request, on_progress, turn=self._give_way)
        self._there.update(await records_at(self._target.store, [checkpoint.tag]))
        return done

    async def _give_way(self, nbytes: int) -> None:
        await self._hold.check()
        await self._turn(nbytes)
        while self._bucket is not None and nbytes > 0:
            piece = min(nbytes, self._bucket.piece_bytes)
            await self._bucket.take(piece)
            nbytes -= piece
        await self._hold.check()

    async def _failed(self, checkpoint: LoggedAttempt, error: CheckpointdError) -> None:
        now = await root_view.logged(self._root, checkpoint.prefix)
        if now is None or now.status != "checkpoint":
            self._lose(checkpoint)
        else:
            self._leave(checkpoint, "damaged" if isinstance(error, DamagedError) else "blocked", error)

    def _leave(self, checkpoint: LoggedAttempt, why: LeftReason, error: CheckpointdError) -> None:
        if self._is_news(checkpoint, why):
            log.error("%s cannot be exported to %s: %s", checkpoint.tag, self._config.to, error)
            self.progress.problem = ErrorReport.of(error)
            self._fails(error)

    def _lose(self, checkpoint: LoggedAttempt) -> None:
        if self._is_news(checkpoint, "removed"):
            words = "%s was removed before its export had ended: keep more checkpoints at %s, or export fewer (every_steps)"
            log.warning(words, checkpoint.tag, self._root.url)

    def _is_news(self, checkpoint: LoggedAttempt, why: LeftReason) -> bool:
        """Count a checkpoint that is not exported, unless that was done."""
        if checkpoint.prefix in self._tried:
            return False
        self._tried[checkpoint.prefix], left = why, self.progress.left
        self.progress.left = {**left, why: left.get(why, 0) + 1}
        return True

    async def _let_go(self, going: Sequence[ExportRecord]) -> None:
        for record in going:
            await self._hold.check()
            if await self._target.remove(record.tag, record):
                what = "an old" if record.complete else "an unfinished"
                log.info("removed %s export: %s at %s", what, record.tag, self._config.to)
                del self._there[record.tag]
            elif record.tag not in self._staying:
                log.warning("the export of %s at %s stays: it holds files of other programs", record.tag, self._config.to)
                self._staying.add(record.tag)

    def _up_to_date(self, agenda: ExportAgenda) -> None:
        shown = self.progress
        ours = [record for tag, record in self._there.items() if record is not None and record.complete and record.tag == tag]
        newest = max(ours, key=lambda record: record.order, default=None)
        shown.newest_tag = newest.tag if newest is not None else None
        shown.newest_step = newest.step if newest is not None else None
        if not self._log.state.number:  # no job has begun at the root, or it is not there
            shown.state = "beginning"
        elif {"damaged", "blocked"}.isdisjoint(self._tried.values()):
            shown.state, shown.problem, shown.up_to_date_at = "up to date", None, time.time()
        else:
            shown.state = "failing"

    def _problem(self, state: Literal["failing", "over"], error: CheckpointdError) -> None:
        before = self.progress.problem
        if before is None or before.message != str(error):
            log.error("%s cannot be exported to %s: %s", self.progress.root, self.progress.to, error)
            self._fails(error)
        self.progress.state, self.progress.problem = state, ErrorReport.of(error)
