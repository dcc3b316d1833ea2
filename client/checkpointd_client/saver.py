"""The saving half of a Checkpointer: from a request to an attempt that runs on the writer.

Invariants
  SAVE-1  Once `save` has begun, this rank votes on the attempt, whatever happens. So no other rank waits for it in vain.
  SAVE-2  Every slot that is acquired is released: by its attempt, or here if the snapshot failed. Ctrl-C at any point of a save
      loses no slot.
  SAVE-3  Each rank numbers the attempts of a tag by its own calls of save(), without asking other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from checkpointd import arguments
from checkpointd.arguments import shown
from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import KEEPS_NONE
from checkpointd.config import Ranks
from checkpointd.daemon.protocol.wire import METRICS_MAX
from checkpointd.errors import CheckpointdError, ClosedError, DeadlineError, SkippedError, StagingError, StoreError, UsageError
from checkpointd.layout import tree
from checkpointd.layout.keys import STEP_MAX, AttemptId, check_tag, default_tag
from checkpointd.layout.manifest import BRANCHES_MAX, Branches
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.pace import Pace
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress, finite
from checkpointd.pipeline.workers import uncollected
from checkpointd.waits import Waiting
from checkpointd_client.capture.pickled import packed
from checkpointd_client.capture.recapture.capturer import Capturer
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.capture.state import Captured
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses
from checkpointd_client.capture.torch_files import capture_files
from checkpointd_client.ranks.startup import Begun
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.matching.loadable import check_loadable
from checkpointd_client.saves.advice import SaveAdvice
from checkpointd_client.saves.governor import Governor
from checkpointd_client.saves.handle import OwnHandle
from checkpointd_client.saves.history import SaveHistory, SaveRecord
from checkpointd_client.saves.runner import Endings, InlineRunner, PendingSave, Runner
from checkpointd_client.sidecar.client import SidecarClient, SidecarRunner
from checkpointd_client.staging.arena import Arena, SlotHold
from checkpointd_client.staging.prewarming import expected
from checkpointd_client.staging.slot_layout import SlotLayout, plan_slot
from checkpointd_client.staging.stager import Stager, Staging

log = logging.getLogger("checkpointd")

WhenBusy = Literal["wait", "skip", "space"]
TIDY_TIMEOUT_S = 10.0
METRIC_NAME_MAX = 200
SLICE_S = 0.25
"""A wait for saves checks this often how much grace period is left."""
BUSY_S = 1.0
"""A save that has waited so long for earlier ones is worth a line in the log."""
OVERTIME_S = 60.0
"""How long a save may take to end after its deadline: the writer tries the abort a few times."""
ANNOUNCE_S = 0.1
"""How long save() waits until the sidecar knows of the snapshot. After that, a whole snapshot outlives this process. This takes
far less than a millisecond. A sidecar that hangs costs this much per save, until it counts as lost."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a save, except the state."""

    tag: str
    step: int
    save_latest: bool
    exclude_frozen_parameters: bool
    metrics: tuple[tuple[str, float], ...] = ()
    unfinished: str = ""
    required: bool = False
    """Whether it must not be skipped."""
    shown_at: str = ""
    training: str = ""
    """`training_of` the place where it will be shown."""


def asked(
    step: int,
    tag: str | None,
    save_latest: bool,
    metrics: Mapping[str, float] | None = None,
    *,
    exclude_frozen_parameters: bool = False,
    unfinished: str = "",
    required: bool = False,
) -> SaveRequest:
    """Check the arguments of a save. UsageError names a bad one. `tag`: None means global_step<step>."""
    step = arguments.counted("step", step, most=STEP_MAX)
    tag = check_tag(default_tag(step) if tag is None else tag)
    arguments.flag("save_latest", save_latest)
    arguments.flag("exclude_frozen_parameters", exclude_frozen_parameters)
    arguments.flag("required", required)
    numbers = check_metrics(metrics)
    return SaveRequest(tag, step, save_latest, exclude_frozen_parameters, numbers, unfinished, required=required)


def check_metrics(metrics: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    """`metrics` in the form of AttemptInfo. UsageError for a value that is not a number; NaN and infinities are left out."""
    checked: dict[str, float] = {}
    if not isinstance(metrics, Mapping | None):
        raise UsageError(f"metrics is {shown(metrics)}; it must map names to numbers, as in metrics={{'loss': loss}}")
    for name, value in (metrics or {}).items():
        if type(name) is not str or not 0 < len(name) <= METRIC_NAME_MAX or not _is_encodable(name):
            raise UsageError(
                f"{shown(name)} (a {type_name(name)}) cannot name a metric: use a str of 1 to {METRIC_NAME_MAX} characters "
                "that UTF-8 can encode"
            )
        try:
            if isinstance(value, bool | str | bytes):
                raise TypeError("not a number")
            checked[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(f"metric {name!r} is {shown(value)}; it must be a number") from error
    if len(checked) > METRICS_MAX:
        raise UsageError(f"{len(checked)} metrics are more than {METRICS_MAX}; pass only the metrics that retention uses")
    left_out = sorted(set(checked) - {name for name, _ in finite(checked)})
    if left_out:
        log.warning("metrics that are not finite numbers are not recorded: %s", ", ".join(left_out))
    return finite(checked)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Saver:
    """Takes snapshots and hands them to the writer; `history` records how the saves ended."""

    def __init__(
        self,
        *,
        writer: WriterThread,
        state: WriterState,
        ranks: Ranks,
        start: Begun,
        arena: Arena,
        stager: Stager,
        when_busy: WhenBusy,
        sidecar: SidecarClient | None = None,
        pickles: bool = False,
        afresh: bool = False,
        max_overhead: float | None = None,
        classes: TensorClasses = ONLY_BUILT_IN,
    ) -> None:
        self.history = SaveHistory()
        self.governor = Governor(
            max_overhead, lambda: [handle.pace for handle in self.history.in_flight() if not handle.was_spooled]
        )
        self.is_recorded = True
        """Whether every checkpoint that load() passed over has a record of that."""
        self._writer, self._state, self._ranks, self._start = writer, state, ranks, start
        self._arena, self._stager, self._when_busy = arena, stager, when_busy
        self._endings = Endings(self.history, start.latest, self._measured)
        inline = InlineRunner(state, self._endings)
        self._runner: Runner = inline if sidecar is None else SidecarRunner(sidecar, inline, self._endings, state)
        self._has_sidecar, self._pickles = sidecar is not None, pickles
        self._classes, self._capturer = classes, Capturer(classes, check_loadable)
        self._arrangement: object = None
        self._layout: SlotLayout | None = None
        self._stagings: list[tuple[Staging, OwnHandle]] = []
        self._running: dict[Future[None], OwnHandle] = {}
        self._saves_of_tag: Counter[str] = Counter()
        self._saves = 0
        self.fillings = itertools.count()
        """Numbers for unfinished directories. All ranks make them in the same order, so the numbers agree."""
        self._prewarming: threading.Thread | None = None
        self._hurried = threading.Event()
        """Set when somebody waits for the memory that is prewarmed."""
        self._has_prewarmed_another = False
        self._advice = SaveAdvice(state, ranks.rank, start, afresh=afresh)
        self.left: dict[str, Branches] = {}
        """The branches that the saves of each training have left (`training_of`)."""

    def take_up(self) -> None:
        """Allow this job to remove checkpoints of earlier ones, after a load or a start afresh. This does nothing if the record
        of a checkpoint that was passed over is missing (LOAD-5 in `loader.py`), or if the job saves old steps again.
        """
        if self.is_recorded:
            self._advice.take_up()

    def loaded(self, step: int | None, training: str, left: Branches) -> None:
        """Note that a load has ended, with a checkpoint of `step`; None if there was none. `left`: the branches that the saves
        of `training` (`training_of`) after it have left.
        """
        self.left[training] = left[-BRANCHES_MAX:]
        self._advice.loaded(step)
        self.take_up()

    @property
    def begun(self) -> int:
        """The number of saves that were begun."""
        return self._saves

    @property
    def has_taken_up(self) -> bool:
        """Whether this job may remove checkpoints of earlier ones, or found none when it began."""
        return self._state.tidier.keeps_before == KEEPS_NONE or not self._start.checkpoints

    @property
    def latest(self) -> str | None:
        """The newest tag that this process knows."""
        return self._endings.latest

    def deleted(self, tag: str, latest: str | None) -> None:
        """Note that `tag` was deleted, and that `latest` is the tag that a load would try first now."""
        if self._endings.latest == tag:
            self._endings.latest = latest

    @contextlib.contextmanager
    def reads_nothing_back(self) -> Iterator[None]:
        """No shard is read back in the background while the block runs (READBACK-4)."""
        reader, token = self._state.reader, object()
        try:  # a signal may come at any line
            self._writer.call_soon(reader.pause, token)
            yield
        finally:
            self._writer.call_soon(reader.resume, token)

    def save(self, request: SaveRequest, state: Mapping[str, object], client_state: Mapping[str, object] | None) -> OwnHandle:
        """Begin the snapshot of a state, and hand the attempt to the writer."""
        excluded = request.exclude_frozen_parameters

        def captured() -> Captured:
            client = packed(client_state, self._classes) if self._pickles and client_state is not None else client_state
            return self._capturer.capture(state, client, exclude_frozen_parameters=excluded)

        return self._save(request, captured)

    def save_files(
        self, request: SaveRequest, at: str, files: Mapping[str, object], optimizer_only: Collection[int]
    ) -> OwnHandle:
        """Do the same for files, which are shown in the directory `at`."""
        return self._save(request, lambda: self._capturer.arranged(capture_files(at, files, optimizer_only)))

    def refuse(self, request: SaveRequest, error: CheckpointdError) -> OwnHandle:
        """Vote no with `error`, without a snapshot."""
        job = self._new_job(request, Pace())
        job.staged.set_exception(error)
        self._submit(job)
        job.returned.set_result(None)
        return job.save.handle

    def _save(self, request: SaveRequest, captured_by: Callable[[], Captured]) -> OwnHandle:
        began = time.perf_counter()
        too_soon = self._too_soon(request)
        if too_soon is not None:
            return self.refuse(request, too_soon)
        hold = SlotHold(self._arena)
        job = self._new_job(request, self.governor.begin(self._state.commit.timeout_s))
        try:
            self._begin(job, request, captured_by, hold)
        finally:
            call_s = time.perf_counter() - began
            job.save.handle.held(call_s=call_s)
            self.governor.exclude(call_s)
            job.returned.set_result(None)
        return job.save.handle

    def _begin(
        self,
        job: PendingSave,
        request: SaveRequest,
        captured_by: Callable[[], Captured],
        hold: SlotHold,
        staging: Staging | None = None,
    ) -> None:
        # Nothing stands before the `try`, so that no signal comes before it (SAVE-1).
        try:
            captured = uncollected(captured_by)
            layout = self._layout_of(captured)
            # Forget the snapshots that are done: they keep the memory of their slots alive, even of replaced slots.
            self._stagings = [pair for pair in self._stagings if not pair[0].done.done()]
            self._take_slot(hold, layout, job, self._patience_s(request))
            staging = Staging(hold.slot, job.progress.pace)
            job = replace(job, lease=hold, shard=uncollected(partial(self._stage, job, captured, layout, staging)))
            self._submit(job)
        except BaseException as error:
            if not job.begun.acquire(blocking=False):
                raise  # the writer has the save already, and goes on with it
            try:
                self._let_go(hold, staging)
            finally:
                self._refuse(job, error)
            return
        if self._has_sidecar:
            self._prewarm_another(job)
            job.announced.wait(ANNOUNCE_S)

    def _let_go(self, hold: SlotHold, staging: Staging | None) -> None:
        """Release the hold of a save that was interrupted; later, if the stager's thread still copies into the slot."""
        if staging is None:
            hold.release()
            return
        staging.done.add_done_callback(lambda _: hold.release())
        staging.give_up()

    def _too_soon(self, request: SaveRequest) -> SkippedError | None:
        """The error of a save that comes sooner after the save before than `when_busy="space"` allows."""
        before = self.history.newest_kept()
        if self._when_busy != "space" or request.required or before is None:
            return None
        since, least = time.monotonic() - before, self.governor.spacing_s
        if since >= least:
            return None
        return SkippedError(
            f"{request.tag} was skipped on rank {self._ranks.rank}: it came {since:.1f} s after the save before, and saves are "
            f"spaced at least {least:.1f} s apart, so they take at most {self.governor.overhead_max:.0%} of the training time",
            ranks=(self._ranks.rank,),
        )

    def _new_job(self, request: SaveRequest, pace: Pace) -> PendingSave:
        self._advice.before(request.tag, request.step, dict(request.metrics), (self._start.number, self._saves))
        info = AttemptInfo(
            tag=request.tag,
            attempt=AttemptId(self._start.number, self._saves_of_tag[request.tag]),
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            step=request.step,
            n=self._saves,
            save_latest=request.save_latest,
            metrics=request.metrics,
            left=self.left.get(request.training, ()),
            unfinished=request.unfinished,
            shown_at=request.shown_at,
            required=request.required,
        )
        self._saves_of_tag[request.tag] += 1
        self._saves += 1
        progress = ShardProgress(pace=pace)
        save = SaveRecord(OwnHandle(info.tag, str(info.attempt), info.step, progress))
        self.history.add(save)
        return PendingSave(info, save, progress, Future())

    def _measured(self, handle: OwnHandle) -> None:
        handle.timings.overhead = self.governor.overhead
        if handle.phase == Phase.COMMITTED.value and handle.timings.durable_s is not None:
            lasted_s = handle.timings.durable_s if handle.timings.spooled_s is None else handle.timings.spooled_s
            self.governor.saved(held_s=handle.timings.held_s, lasted_s=lasted_s)

    def _refuse(self, job: PendingSave, error: BaseException) -> None:
        """Vote no with `error` (SAVE-1). Raise it if the caller must act: a state that cannot be stored, or an interruption.

        Other errors, such as a lack of memory or of a free slot, only end the handle, and training goes on.
        """
        told = error
        if not isinstance(error, CheckpointdError):
            told = StagingError(f"the snapshot of {job.info.tag} failed: {type(error).__name__}: {error}")
            told.__cause__ = error
        refused: Future[Shard] = Future()  # that of the job may have the snapshot already
        refused.set_exception(told)
        self._submit(replace(job, staged=refused, begun=threading.Lock(), lease=None, shard=None))
        if isinstance(error, SkippedError | DeadlineError):
            return
        if isinstance(error, CheckpointdError) or not isinstance(error, Exception):
            job.save.handle.observed = True  # the caller gets it here
            raise error

    def _layout_of(self, captured: Captured) -> SlotLayout:
        """The layout of the last save if the state is arranged as it was then, else a new one."""
        if self._layout is None or self._arrangement is not captured.arrangement:
            self._layout, self._arrangement = plan_slot(captured), captured.arrangement
        return self._layout

    def _patience_s(self, request: SaveRequest) -> float:
        """How long a save waits for a free slot."""
        return 0.0 if self._when_busy == "skip" and not request.required else self._state.commit.timeout_s

    def _take_slot(self, hold: SlotHold, layout: SlotLayout, job: PendingSave, patience_s: float) -> None:
        """Acquire a slot for `hold`. If none is free, SkippedError without patience, and DeadlineError after `patience_s`."""
        info, handle = job.info, job.save.handle
        if self._prewarming is not None:
            thread = self._prewarming
            self._hurried.set()
            Waiting(lambda: "the memory for snapshots is not allocated yet").until(lambda seconds: _joined(thread, seconds))
            self._prewarming = None
        waited_for = partial(self._arena.acquire, hold, layout.nbytes)
        if waited_for(0.0):
            return
        began = time.monotonic()
        waiting = Waiting(lambda: f"{info.tag} finds no free memory for its snapshot: {self._missing()}")
        try:
            acquired = waited_for(min(BUSY_S, patience_s))
            if not acquired and patience_s:
                self._advice.busy(info.tag, self.governor.overhead_max)
                acquired = waiting.until(waited_for, max(0.0, patience_s - BUSY_S))
        finally:
            self.history.waited(handle, time.monotonic() - began)
        if handle.timings.waited_s >= BUSY_S:
            log.info("rank %d: save() of %s waited %.1f s for earlier saves", info.rank, info.tag, handle.timings.waited_s)
        if not acquired:
            if not patience_s:
                message = f"{info.tag} was skipped on rank {info.rank}: two saves are still in flight"
                raise SkippedError(message, ranks=(info.rank,))
            waited = f"{info.tag} found no free memory for its snapshot on rank {info.rank} within {patience_s:g} s"
            raise DeadlineError(
                f"{waited}: {self._missing()}; look at the storage, and at the ranks that it names", ranks=(info.rank,)
            )

    def _missing(self) -> str:
        return "; ".join(save.missing() for save in self.history.live()) or "earlier snapshots are not released yet"

    def _stage(self, job: PendingSave, captured: Captured, layout: SlotLayout, staging: Staging) -> Shard:
        """Begin the snapshot, and return the shard that it will be."""
        encoded = tree.encode(captured.tree)
        self._stager.begin(staging, captured, layout)
        shard = Shard(
            buffer=staging.slot.buffer[: layout.nbytes],
            tensors=layout.tensors,
            aliases=captured.aliases,
            excluded=captured.excluded,
            tree=encoded,
        )

        def taken(done: Future[None]) -> None:
            error = done.exception()
            if error is not None:
                job.staged.set_exception(error)
            else:
                job.save.handle.held(fence_s=staging.fence_s)
                job.save.handle.snapshot_taken()
                job.staged.set_result(shard)

        self._stagings.append((staging, job.save.handle))
        staging.done.add_done_callback(taken)
        return shard

    def fence(self) -> None:
        """Wait until every snapshot in flight has read its sources. The time counts as `fence_s` of each save."""
        alive = [(staging, handle) for staging, handle in self._stagings if not staging.done.done()]
        for staging, handle in alive:
            staging.fence()
            handle.held(fence_s=staging.fence_s)
        self._stagings = alive

    def step_begins(self, optimizer: object) -> None:
        """An optimizer's step begins: wait as `fence`, and measure the step before."""
        began = time.perf_counter()
        self.fence()
        self.governor.exclude(time.perf_counter() - began)
        self.governor.stepped(optimizer)

    # --- on the writer -----------------------------------------------------------------------------------------

    def _submit(self, job: PendingSave) -> None:
        running = self._writer.submit(self._run(job))
        self._running[running] = job.save.handle
        running.add_done_callback(lambda _: self._running.pop(running, None))

    async def _run(self, job: PendingSave) -> None:
        if job.begun.acquire(blocking=False):  # otherwise save() was interrupted, and has refused the job
            await self._runner.run(job)

    # --- around ------------------------------------------------------------------------------------------------

    def prepare(self, state: Mapping[str, object]) -> None:
        """Walk `state` as the first save will, and allocate a slot in the background, with the size that this save probably
        needs. Raises StateError if the state cannot be stored.
        """
        if self._saves or self._prewarming is not None:
            return
        nbytes, device = uncollected(partial(self._expected, state))
        if nbytes:
            self._begin_prewarming(nbytes, slots=1, device=device)

    def _expected(self, state: Mapping[str, object]) -> tuple[int, torch.device | None]:
        captured = self._capturer.capture(state, None, exclude_frozen_parameters=False)
        self._layout_of(captured)
        return expected(state, captured)

    def _prewarm_another(self, job: PendingSave) -> None:
        """Allocate a second slot in the background: a sidecar retains the first snapshot in its slot."""
        if self._has_prewarmed_another or job.shard is None:
            return
        nbytes = len(job.shard.buffer)
        self._has_prewarmed_another = True
        device = self._stagings[-1][0].device if self._stagings else None
        job.staged.add_done_callback(lambda _: self._begin_prewarming(nbytes, slots=2, device=device))

    def _begin_prewarming(self, nbytes: int, *, slots: int, device: torch.device | None) -> None:
        self._hurried = threading.Event()
        work = partial(self._arena.prewarm, nbytes, self._hurried, device=device, slots=slots)
        thread = threading.Thread(target=work, name="checkpointd-prewarm", daemon=True)
        thread.start()
        self._prewarming = thread

    def drain(self, grace_left_s: Callable[[], float | None] = lambda: None, *, closes: bool = True) -> None:
        """Wait until no save is in flight, whether it commits or not.

        A save that has not ended OVERTIME_S after its deadline, or when `grace_left_s` gives 0, is left in flight. A save in
        the spool is left to the sidecar at once. `closes`: this process will save no more.
        """
        for save in self.history.live():
            waiting = Waiting(save.missing)
            until, slice_s = save.began + self._state.commit.timeout_s + OVERTIME_S, 0.0  # hundreds may be in the spool
            while not save.handle.ended_within(slice_s):
                slice_s = SLICE_S
                waiting.look()
                if save.handle.was_spooled:
                    if closes:
                        self._leave(save)
                    break
                if grace_left_s() == 0:
                    self._abandon(save, "the grace period after the signal is over")
                elif time.monotonic() >= until:
                    self._abandon(save, f"its deadline passed {OVERTIME_S:g} s ago, and the storage does not answer")

    def _leave(self, save: SaveRecord) -> None:
        """Leave a save that is in the spool to the sidecar."""
        tag = save.handle.tag
        log.warning("%s is in the spool of this node: the sidecar uploads it", tag)
        save.handle.leave(ClosedError(f"{tag} was in the spool when this process closed: the sidecar uploads it"))
        self.history.leave(save)

    def _abandon(self, save: SaveRecord, why: str) -> None:
        """End the handle of a save that is left in flight."""
        error = StoreError(f"{save.handle.tag} was left in flight: {why}; the next start decides it")
        save.handle.advance(Phase.FAILED, error, lambda: self.history.end(save, Phase.FAILED))

    def _busy(self) -> set[Future[None]]:
        """The writer's works that this process waits for."""
        return {work for work, handle in list(self._running.items()) if not handle.is_left}

    def close(self, left_s: Callable[[], float], *, ends_well: bool) -> None:
        """End the background threads. `left_s` gives the seconds that are left for each; the sidecar is told `ends_well`."""
        self._stager.close(left_s())
        if self._prewarming is not None:
            self._hurried.set()
            self._prewarming.join(left_s())
        began = time.monotonic()
        # Handles end at the decision. After it, the writer may still end the attempt, and remove what may go.
        while (busy := self._busy()) and time.monotonic() - began < left_s():
            wait(busy, min(SLICE_S, left_s()))
        try:
            self._writer.call(
                self._state.tidier.finish(),
                left_s(),
                lambda: "older checkpoints are being removed",
            )
        except CheckpointdError as error:
            log.warning(
                "some older checkpoints are still there, which the retention rules do not keep (%s); the next job at this root "
                "removes them",
                error,
            )
        with contextlib.suppress(CheckpointdError):
            self._writer.call(self._state.tidier.close(), left_s())
        try:
            self._writer.call(self._runner.close(ends_well=ends_well), left_s())
        except CheckpointdError as error:
            log.warning("the sidecar was not told that this trainer ends: %s", error)


def _joined(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()
