"""Checkpointer: what a training script holds. It wires snapshot, writer, commit and loading together.

Invariants
  H1  save() never raises for what the storage does; that ends up in the handle, the status and the log.
  H2  Once save() was entered with a valid tag, this rank votes on the attempt, whatever happens: nobody waits for it in vain.
  H3  One Checkpointer per root and process; its epoch fences every earlier incarnation of the job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, MutableMapping
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Literal, Self

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkpointd.codec import Compression
from checkpointd.commit.machine import FINAL, Phase
from checkpointd.config import MIB, CommitConfig, LoadConfig, PersistConfig
from checkpointd.errors import (
    CheckpointdError,
    ClosedError,
    SkippedError,
    StagingError,
    UsageError,
    WaitTimeoutError,
)
from checkpointd.layout import tree
from checkpointd.layout.keys import AttemptId, check_tag, default_tag
from checkpointd.pipeline import catalog
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.pipeline.shard import AttemptInfo, Progress, Shard
from checkpointd.store import open_store
from checkpointd_client.arena import Arena, Slot
from checkpointd_client.handle import SaveHandle
from checkpointd_client.history import History, Save
from checkpointd_client.lifetime import at_exit, claim_root
from checkpointd_client.loading import Loaded, Loader
from checkpointd_client.preemption import Preemption
from checkpointd_client.prewarming import expected_bytes
from checkpointd_client.ranks import find_ranks, open_board
from checkpointd_client.snapshot import SlotLayout, Stager, Staging, StagingMode, plan_slot, signature_of
from checkpointd_client.start import begin_epoch, check_shared
from checkpointd_client.state import Captured, capture
from checkpointd_client.status import Status
from checkpointd_client.writer import Writer

log = logging.getLogger("checkpointd")

WhenBusy = Literal["wait", "skip"]
START_TIMEOUT_S = 120.0
TIDY_TIMEOUT_S = 10.0


class Checkpointer:
    """Saves and loads the state of one training job below `root`. Make it on every rank, after init_process_group.

    `root` is a directory that every rank sees. Sizes in bytes, times in seconds. `staging`: "lazy" copies beside the next
    forward and backward pass, "eager" inside save(). `when_busy`: what a third save does while two are in flight.
    `commit_timeout_s`: how long the ranks wait for each other before a save is given up. `preempt_signal`: see `preempted`;
    `grace_s` is what the machine gives you after it.

    Raises UsageError (bad arguments, a root that is a file, a second Checkpointer at the root), RootNotSharedError, StoreError.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        compression: Compression = "auto",
        staging: StagingMode = "lazy",
        when_busy: WhenBusy = "wait",
        commit_timeout_s: float = 600.0,
        chunk_bytes: int = 4 * MIB,
        budget_bytes: int = 256 * MIB,
        preempt_signal: signal.Signals | int | None = None,
        grace_s: float = 25.0,
    ) -> None:
        if staging not in ("lazy", "eager"):
            raise UsageError(f"staging is {staging!r}; choose 'lazy' or 'eager'")
        if when_busy not in ("wait", "skip"):
            raise UsageError(f"when_busy is {when_busy!r}; choose 'wait' or 'skip'")
        self._closed = True  # until everything below has worked, so that close() and the exit hook have nothing to do
        persist = PersistConfig(compression=compression, chunk_bytes=chunk_bytes, budget_bytes=budget_bytes)
        commit = CommitConfig(timeout_s=commit_timeout_s)
        self._when_busy = when_busy
        self._ranks = find_ranks()
        self._give_back_root = claim_root(root)
        self._writer = Writer(threads=persist.encoders + persist.writes)
        try:
            self._store = open_store(root)
            self._epoch = begin_epoch(self._writer, self._store, self._ranks)
            self._board = open_board(self._ranks, self._epoch.nonce)
            check_shared(self._writer, self._store, self._ranks, self._board, self._epoch, START_TIMEOUT_S)
            self._preemption = (
                Preemption(signal.Signals(preempt_signal), grace_s, self._board) if preempt_signal is not None else None
            )
        except BaseException:
            self._writer.close()
            self._give_back_root()
            raise
        self._state = WriterState(store=self._store, persist=persist, commit=commit)
        self._arena = Arena()
        self._stager = Stager(staging)
        self._stagings: list[Staging] = []
        self._layout: SlotLayout | None = None
        self._history = History()
        self._running: set[Future[None]] = set()
        self._saves_of_tag: Counter[str] = Counter()
        self._saves = 0
        self._loads = 0
        self._latest: str | None = self._epoch.latest
        self._prewarming: threading.Thread | None = None
        self._step_hook = register_optimizer_step_pre_hook(self._before_step)
        self._closed = False
        at_exit(self._leave)

    # --- saving ----------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        tag: str | None = None,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> SaveHandle:
        """Snapshot `state` and return; persisting and committing go on in the background. Call it on every rank.

        `state` maps names to modules, optimizers, schedulers, anything with state_dict and load_state_dict, and nested dicts
        and lists of tensors and plain values. Raises UsageError for a bad tag or step, StateError for what cannot be stored
        (the save is then aborted on all ranks at once), ClosedError after close().
        """
        began = time.perf_counter()
        self._check_open("save")
        info = self._next_attempt(step, tag, save_latest)
        progress = Progress()
        save = Save(SaveHandle(info.tag, str(info.attempt), step, progress))
        staged: Future[Shard] = Future()
        slot: Slot | None = None
        self._history.add(save)
        try:
            captured = capture(state, client_state, exclude_frozen_parameters=exclude_frozen_parameters)
            layout = self._layout_of(captured)
            slot = self._slot_for(layout, info)
            staging = self._stager.begin(captured, layout, slot)
            self._track(staging, staged, save.handle, layout, captured)
        except SkippedError as error:
            staged.set_exception(error)
        except BaseException as error:
            if slot is not None:
                self._arena.release(slot)
                slot = None
            staged.set_exception(error if isinstance(error, Exception) else StagingError(f"save() was interrupted: {error!r}"))
            self._submit(save, info, progress, staged, None)
            if isinstance(error, CheckpointdError) or not isinstance(error, Exception):
                raise
            raise StagingError(f"the snapshot of {info.tag} failed: {error}") from error
        self._submit(save, info, progress, staged, slot)
        save.handle.timings.call_s = time.perf_counter() - began
        return save.handle

    def _next_attempt(self, step: int, tag: str | None, save_latest: bool) -> AttemptInfo:
        if type(step) is not int or step < 0:
            raise UsageError(f"step is {step!r}; it must be a whole number, 0 or more")
        tag = check_tag(default_tag(step) if tag is None else tag)
        attempt = AttemptId(self._epoch.number, self._saves_of_tag[tag])
        info = AttemptInfo(
            tag=tag,
            attempt=attempt,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            step=step,
            n=self._saves,
            save_latest=save_latest,
        )
        self._saves_of_tag[tag] += 1
        self._saves += 1
        return info

    def _layout_of(self, captured: Captured) -> SlotLayout:
        """The cached layout while the state keeps its shape; planned anew when it changes."""
        if self._layout is None or self._layout.signature != signature_of(captured):
            self._layout = plan_slot(captured)
        return self._layout

    def _slot_for(self, layout: SlotLayout, info: AttemptInfo) -> Slot:
        if self._prewarming is not None:
            self._prewarming.join()
            self._prewarming = None
        if self._when_busy == "skip":
            slot = self._arena.acquire(layout.nbytes, timeout=0)
            if slot is None:
                raise SkippedError(
                    f"{info.tag} was skipped on rank {info.rank}: two saves are still in flight", ranks=(info.rank,)
                )
            return slot
        slot = self._arena.acquire(layout.nbytes, timeout=self._state.commit.timeout_s)
        if slot is None:
            raise SkippedError(
                f"{info.tag} was skipped on rank {info.rank}: two saves were still being written after "
                f"{self._state.commit.timeout_s:g} s; look at the storage",
                ranks=(info.rank,),
            )
        return slot

    def _track(
        self, staging: Staging, staged: Future[Shard], handle: SaveHandle, layout: SlotLayout, captured: Captured
    ) -> None:
        self._stagings.append(staging)
        shard = Shard(
            image=staging.slot.image[: layout.nbytes],
            tensors=layout.tensors,
            aliases=captured.aliases,
            excluded=captured.excluded,
            tree=tree.encode(captured.tree),
        )

        def taken(done: Future[None]) -> None:
            error = done.exception()
            if error is not None:
                staged.set_exception(error)
                return
            handle.snapshot_taken(staging.fence_s)
            staged.set_result(shard)

        staging.done.add_done_callback(taken)

    def _submit(self, save: Save, info: AttemptInfo, progress: Progress, staged: Future[Shard], slot: Slot | None) -> None:
        running = self._writer.submit(self._attempt(save, info, progress, staged, slot))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _attempt(
        self, save: Save, info: AttemptInfo, progress: Progress, staged: Future[Shard], slot: Slot | None
    ) -> None:
        """On the writer's thread: the attempt from snapshot to outcome. Its error belongs to the handle."""

        def entered(phase: Phase) -> None:
            save.handle.advance(phase, attempt.error)
            if phase in FINAL:
                self._ended(save, attempt, phase)

        attempt = Attempt(
            self._state,
            info,
            deadline=asyncio.get_running_loop().time() + self._state.commit.timeout_s,
            progress=progress,
            on_phase=entered,
            on_free=lambda: self._arena.release(slot) if slot is not None else None,
        )
        save.attempt = attempt
        try:
            await attempt.run(asyncio.wrap_future(staged))
        except Exception as error:
            log.exception("%s: the writer failed in an unforeseen way; please report it", info.prefix)
            save.handle.advance(Phase.FAILED, CheckpointdError(f"the writer failed: {error!r}; please report it"))
            self._ended(save, attempt, Phase.FAILED)

    def _ended(self, save: Save, attempt: Attempt, phase: Phase) -> None:
        self._history.end(save, phase)
        if phase is Phase.COMMITTED:
            if attempt.info.save_latest:
                self._latest = attempt.info.tag
        elif phase is Phase.SKIPPED:
            log.warning("%s", attempt.error)
        else:
            log.error("%s: %s", phase, attempt.error)

    def fence(self) -> None:
        """Wait until the snapshots in flight have read everything: before you change parameters outside an optimizer step.

        On a GPU it costs the host nothing: the current stream waits for the copies instead.
        """
        alive = [staging for staging in self._stagings if not staging.done.done()]
        for staging in alive:
            staging.fence()
        self._stagings = alive

    def _before_step(self, *_: object) -> None:
        self.fence()

    # --- loading ---------------------------------------------------------------------------------------------

    def load(
        self, state: MutableMapping[str, object], tag: str | None = None, *, strict: bool = True, fallback: bool = True
    ) -> Loaded | None:
        """Load the newest checkpoint, or `tag`, into the objects of `state`, in place; None where there is none.

        Call it on every rank.

        A damaged newest checkpoint is logged as an error and the newest whole one is loaded, by all ranks together;
        `fallback=False` raises instead, as a named `tag` does. Raises MismatchError listing every difference (`strict=False`
        loads what fits and says what was left), WorldSizeError, NotFoundError for a named tag, DamagedError, DeadlineError
        naming ranks that did not take part. Nothing is touched before every rank has verified what it will read.
        """
        self._check_open("load")
        if tag is not None:
            check_tag(tag)
        self.fence()
        self._loads += 1
        loader = Loader(
            store=self._store,
            writer=self._writer,
            board=self._board,
            ranks=self._ranks,
            config=LoadConfig(),
            turn=self._loads,
            timeout_s=self._state.commit.timeout_s,
            state=state,
            strict=strict,
        )
        loaded = loader.load(tag, fallback=fallback)
        self._prewarm(state)
        return loaded

    def _prewarm(self, state: Mapping[str, object]) -> None:
        """Allocate the arena's first slot in the background, for the size that the first save will probably have."""
        if self._saves or self._prewarming is not None:
            return
        nbytes, pin = expected_bytes(state), torch.cuda.is_available()
        self._prewarming = threading.Thread(
            target=self._arena.prewarm, args=(nbytes,), kwargs={"pin": pin}, name="checkpointd-prewarm", daemon=True
        )
        self._prewarming.start()

    # --- looking ---------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """This rank's saves in flight and the last ones; cheap, touches no storage."""
        statuses = self._history.statuses()
        return Status(
            root=self._store.url,
            epoch=self._epoch.number,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            latest=self._latest,
            in_flight=len(self._history.in_flight()),
            saves_committed=self._history.committed,
            saves_failed=self._history.failed,
            attempts=statuses,
        )

    def latest(self) -> str | None:
        """The tag that `latest` names in the store now, or None."""
        self._check_open("latest")
        return self._writer.call(catalog.latest(self._store))

    def list(self) -> list[Checkpoint]:
        """All checkpoints in the store, newest first: `.tag`, `.outcome.step` and more of each."""
        self._check_open("list")
        return self._writer.call(catalog.checkpoints(self._store))

    @property
    def preempted(self) -> bool:
        """Whether the loop should save once more and leave. Ask once per step on every rank: all get the same answer at the
        same step. Always False without `preempt_signal`.
        """
        return self._preemption.ask() if self._preemption else False

    # --- ending ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save of this rank is in flight. Raises the first error among those waited for, WaitTimeoutError."""
        until = None if timeout is None else time.monotonic() + timeout
        first: CheckpointdError | None = None
        for handle in self._history.in_flight():
            try:
                handle.wait(None if until is None else max(0.0, until - time.monotonic()))
            except WaitTimeoutError:
                raise
            except CheckpointdError as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Wait for what is in flight, then release everything. A second call does nothing.

        Raises the error of the last save where it failed and nobody has looked at its handle. After a preemption signal it
        waits no longer than what is left of `grace_s`.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._drain()
        finally:
            self._release()
        last = self._history.last_failed
        error = last.peek() if last is not None and not last.observed else None
        if error is not None:
            raise error

    def _drain(self) -> None:
        """Wait for the saves in flight, without counting as having looked at their results."""
        grace = self._preemption.grace_left_s() if self._preemption else None
        until = None if grace is None else time.monotonic() + grace
        for handle in self._history.in_flight():
            if not handle.ended_within(None if until is None else max(0.0, until - time.monotonic())):
                log.error("leaving while %s is still %s: the grace period is over", handle.tag, handle.phase)

    def _release(self) -> None:
        self._step_hook.remove()
        self._stager.close()
        if self._preemption is not None:
            self._preemption.close()
        if self._prewarming is not None:
            self._prewarming.join()
        # Handles end at the outcome; moving `latest` and tidying up may take a moment more.
        wait(set(self._running), TIDY_TIMEOUT_S)
        try:
            self._writer.call(self._store.close(), TIDY_TIMEOUT_S)
        finally:
            self._writer.close()
            self._arena.close()
            self._give_back_root()

    def _leave(self) -> None:
        """The interpreter is leaving without close(): finish what is in flight, and say so where it failed."""
        try:
            self.close()
        except CheckpointdError as error:
            # A handler may be gone or silent by now, and somebody must hear of this.
            sys.stderr.write(f"checkpointd: the last save failed: {error}\n")

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ClosedError(f"{call}() after close(): make a new Checkpointer for this root")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except CheckpointdError:
            if kind is None:
                raise
