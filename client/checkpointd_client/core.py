"""The inside of a Checkpointer, which integrations use as well: it wires snapshot, writer, commit and loading together.

Invariants
  CHECKPOINTER-1  save() never raises an error of the storage: the handle, the status and the log have it.
  CHECKPOINTER-2  Once save() has begun with a valid tag, this rank votes on the attempt, whatever happens. So no other rank
      waits for it in vain.
  CHECKPOINTER-3  A process has one Checkpointer per root. Its start fences every earlier start of the job.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkpointd import arguments
from checkpointd.admin.gc import delete_if_survived, delete_once
from checkpointd.bucket_urls import directory_of
from checkpointd.commands import start_sidecar
from checkpointd.config import CommitConfig, ExportConfig, PersistConfig, Ranks, check_job
from checkpointd.errors import CheckpointdError, ClosedError, StateError, StoreError, UsageError, WaitTimeoutError
from checkpointd.layout.files import WHOLE, training_of
from checkpointd.layout.keys import LATEST, AttemptId, check_tag
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import Branches
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.candidates import listed, named, newest, note_passed_over
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.pipeline.root.tag_directories import abandoned
from checkpointd.pipeline.shard import COORDINATOR
from checkpointd.store import open_store
from checkpointd.store.requests import requests_of
from checkpointd_client.examining import Examination, Nobody, Taker
from checkpointd_client.lifetime import at_exit, check_apart, claim_root
from checkpointd_client.loaded import Loaded, left_after
from checkpointd_client.loader import LOOK_S, Loader, call_patiently, leave_record
from checkpointd_client.ranks.board import find_ranks, group_store, open_board
from checkpointd_client.ranks.load_rounds import LoadRounds
from checkpointd_client.ranks.preemption import Preemption
from checkpointd_client.ranks.rendezvous import Meetings
from checkpointd_client.ranks.startup import START_TIMEOUT_S, Started, begin_start, check_shared, end, instead, reach_sidecars
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.candidate import Candidate
from checkpointd_client.restore.plan import LoadOptions
from checkpointd_client.restore.spool_source import NodeSpoolView
from checkpointd_client.restore.target_chooser import TargetChooser
from checkpointd_client.saver import SLICE_S, TIDY_TIMEOUT_S, Saver, SaveRequest, asked
from checkpointd_client.saves.exports import OwnExports
from checkpointd_client.saves.handle import OwnHandle
from checkpointd_client.saves.status import Status
from checkpointd_client.saves.unfinished import Unfinished, check_shows
from checkpointd_client.settings import Options, check_load
from checkpointd_client.sidecar.client import SidecarClient
from checkpointd_client.sidecar.own_daemon import AUTO, OwnDaemon
from checkpointd_client.staging.arena import Arena
from checkpointd_client.staging.stager import Stager

log = logging.getLogger("checkpointd")
T = TypeVar("T")

SIDECAR_PATIENCE_S = 30.0


class Core:
    """One rank's part in a job at `root`. Raises as Checkpointer does, which documents the options.

    `ranks`: the ranks that save; by default, all ranks of the process group.
    """

    def __init__(self, root: str | os.PathLike[str], options: Options, ranks: Ranks | None = None) -> None:
        self._closed = True  # until everything below has worked: close() and the exit hook then do nothing
        arguments.path("root", root)
        self._options, persist, commit, graces = options, options.persist, options.commit, options.graces
        self._ranks = find_ranks(options.process_group) if ranks is None else ranks
        self._started: Started | None = None
        with ExitStack() as undo:
            self._give_back_root = claim_root(root)
            undo.callback(self._give_back_root)
            self._writer = WriterThread(threads=persist.encoders + persist.writes)
            undo.callback(self._writer.close)
            self._store = open_store(root)
            undo.callback(lambda: self._writer.call(self._store.close(), SLICE_S))
            undo.callback(lambda: end(self._writer, self._started))
            if directory_of(self._store.url) is not None:
                check_apart(self._store.url)
            self._sidecar = self._reach(options)
            beginner = Beginner(
                world_size=self._ranks.world_size,
                job=check_job(options.job),
                take_over=options.take_over,
                commit_timeout_s=commit.timeout_s,
                instead=instead(self._store.url),
            )
            store = None if options.process_group is None else group_store(options.process_group)
            self._start, self._started = begin_start(
                self._writer, self._store, self._ranks, beginner, self._start_sidecar, store, create=options.create
            )
            self._board = open_board(self._ranks, self._start.nonce)
            check_shared(self._writer, self._store, self._ranks, self._board, self._start, START_TIMEOUT_S)
            state = WriterState(store=self._store, persist=persist, commit=commit)
            self._own_root = state.own_root
            self._writer.call(state.own_root.begun(self._start.number, self._start.nonce), 2 * SIDECAR_PATIENCE_S)
            self._begin_sidecar(persist, commit)
            self._preemption = Preemption(graces, self._board).listen() if graces else None
            if self._preemption is not None:
                undo.callback(self._preemption.close)
            self._arena = Arena(on_gone=self._slot_is_gone)
            self._saver = Saver(
                writer=self._writer,
                state=state,
                ranks=self._ranks,
                start=self._start,
                arena=self._arena,
                stager=Stager(options.staging, device_checksums=options.device_checksums),
                when_busy=options.when_busy,
                sidecar=self._sidecar,
                pickles=options.pickle_client_state,
                afresh=options.afresh,
                max_overhead=options.max_overhead,
                classes=options.classes,
            )
            self._exports = self._begin_exports(options.export)
            undo.pop_all()
        self._process = os.getpid()
        self._history = self._saver.history
        self._meetings = Meetings(self._board, self._ranks, commit.timeout_s)
        self._load_rounds = LoadRounds(
            self._board, self._ranks, commit.timeout_s, options.load.retry_s + options.load.absence_s
        )
        self.step_begins = self._saver.step_begins  # for steps that torch does not report
        self._step_hook = register_optimizer_step_pre_hook(lambda optimizer, *_: self._saver.step_begins(optimizer))
        self._closed = False
        at_exit(self._leave)

    # --- the sidecar -----------------------------------------------------------------------------------------

    def _reach(self, options: Options) -> SidecarClient | None:
        if options.sidecar is None:
            return None
        if not self._store.capabilities.shared:
            raise UsageError(f"{self._store.url} exists only in this process: a sidecar cannot write there")
        is_own = options.sidecar == AUTO
        place = OwnDaemon(self._store.url, options.spooling) if is_own else os.path.abspath(options.sidecar)
        return SidecarClient(place, self._store, self._ranks, options.on_sidecar_loss, options.sidecar_uid)

    def _begin_exports(self, config: ExportConfig | None) -> OwnExports | None:
        if config is None or self._ranks.rank != COORDINATOR:
            return None
        return OwnExports(self._store.url, config, lambda: bool(self._saver.history.in_flight()))

    def _start_sidecar(self) -> tuple[str, ...]:
        """Connect to the sidecar; returns the attempts of earlier starts ("tag/attempt") that it still works at."""
        if self._sidecar is None:
            return ()
        joined = self._ask_sidecar(self._sidecar, self._sidecar.start())
        flights = () if joined is None else self._ask_sidecar(self._sidecar, self._sidecar.at_root(joined))
        return tuple(f"{flight.tag}/{flight.attempt}" for flight in flights if flight.rank == COORDINATOR)

    def _begin_sidecar(self, persist: PersistConfig, commit: CommitConfig) -> None:
        sidecar = self._sidecar
        if sidecar is None:
            return

        def begin() -> None:
            self._start_sidecar()
            self._ask_sidecar(sidecar, sidecar.begin(self._start.number, self._start.nonce, persist, commit))

        reach_sidecars(self._ranks, self._board, begin, START_TIMEOUT_S)

    def _ask_sidecar(self, sidecar: SidecarClient, asking: Coroutine[Any, Any, T]) -> T:
        doing = f"the sidecar at {sidecar.path} has not answered; if it is not running, {start_sidecar(sidecar.path)}"
        return self._writer.call(asking, 2 * SIDECAR_PATIENCE_S, lambda: doing)

    def _slot_is_gone(self, number: int) -> None:
        if self._sidecar is not None:
            self._writer.call_soon(self._sidecar.drop_slot, number)

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
        metrics: Mapping[str, float] | None = None,
        required: bool = False,
        shown_at: str = "",
    ) -> OwnHandle:
        """Snapshot `state` and return; it is persisted and committed in the background. Raises as Checkpointer.save().

        `shown_at`: the path of an empty directory that appears at the commit and goes with the checkpoint, relative to the
        directory in which the root lies. The root must be a directory `.checkpointd`, and the parent directory must exist.
        """
        self._check_open("save")
        request = asked(step, tag, save_latest, metrics, exclude_frozen_parameters=exclude_frozen_parameters, required=required)
        if shown_at:
            check_shows(self._store, shown_at)
            request = replace(request, shown_at=shown_at, training=training_of(shown_at))
        return self._saver.save(self._preempted(request), state, client_state)

    def _preempted(self, request: SaveRequest) -> SaveRequest:
        """`request`, which must not be skipped if the job is about to leave."""
        may_skip = self._options.when_busy != "wait" and not request.required
        return replace(request, required=True) if may_skip and self.preempting else request

    def prepare(self, state: Mapping[str, object]) -> None:
        """Allocate the memory for the first save in the background. Raises as Checkpointer.prepare()."""
        self._check_open("prepare")
        self._saver.prepare(state)

    def refuse(
        self, step: int, error: CheckpointdError, *, tag: str, save_latest: bool = True, unfinished: str = ""
    ) -> OwnHandle:
        """Vote no, because of `error`, on the save that the other ranks begin now: they need not wait for this rank."""
        self._check_open("save")
        return self._saver.refuse(asked(step, tag, save_latest, unfinished=unfinished), error)

    def meet(self, said: str, doing: str) -> dict[int, str]:
        """Meet when all ranks are `doing` the same; returns the message of each. DeadlineError names the missing ranks."""
        self._check_open("meet")
        return self._meetings.meet(said, doing)

    def fence(self) -> None:
        """Wait until the snapshots in flight are copied; on a GPU the current stream waits, not the host. Call it before you
        change parameters outside an optimizer step.
        """
        self._saver.fence()

    # --- loading ---------------------------------------------------------------------------------------------

    def load(
        self,
        state: MutableMapping[str, Any] | TargetChooser,
        tag: str | None = None,
        *,
        strict: bool = True,
        fallback: bool = True,
        cast: bool = False,
        verify_first: bool = False,
        share_reads: bool = False,
    ) -> Loaded | None:
        """Load the newest checkpoint, or `tag`, into the objects of `state`, or into targets of a TargetChooser. Raises as
        Checkpointer.load().
        """
        self._check_open("load")
        tag = None if tag is None or tag == LATEST else check_tag(tag)
        check_load(state, strict=strict, fallback=fallback, cast=cast, verify_first=verify_first, share_reads=share_reads)
        self._saver.fence()
        self.settle()  # a save that commits now may replace the checkpoint to load
        loader = Loader(
            store=self._store,
            writer=self._writer,
            ranks=self._ranks,
            config=self._options.load,
            load_round=self._load_rounds.begin(),
            timeout_s=self._options.commit_timeout_s,
            state=state,
            options=LoadOptions(
                strict, cast, self._options.pickle_client_state, verify_first, share_reads, classes=self._options.classes
            ),
            sidecar=self._sidecar,
            surviving=self._started.surviving if self._started is not None else (),
            afresh=self._options.afresh,
            check_root=partial(self._own_root.check, self._start.number),
            near=self._spool_near(),
        )
        try:
            with self._saver.reads_nothing_back():
                loaded = loader.load(tag, fallback=fallback)
        finally:
            if loader.near is not None:
                loader.near.close()
        if self._preemption is not None:
            self._preemption.loaded()
        self._saver.is_recorded &= loader.is_recorded
        self._go_on(None if loaded is None else loaded.step, loader.taken)
        if not isinstance(state, TargetChooser):
            with suppress(StateError):  # save() will raise it
                self._saver.prepare(state)
        return loaded

    def _spool_near(self) -> NodeSpoolView | None:
        """The spool of this node for this root; None if there is none."""
        told = None if self._sidecar is None else self._sidecar.spool
        return NodeSpoolView(told.path, self._writer) if told is not None and os.path.isdir(told.path) else None

    def take_up(self, left: Mapping[str, Branches] | None = None) -> None:
        """Act as after a load: from here on, this job may remove checkpoints of earlier ones. `left`: that of the Checkpointer
        which this one goes on for.
        """
        self._saver.left.update(left or {})
        self._saver.take_up()

    def go_on_from(self, checkpoint: LoggedAttempt) -> None:
        """Act as after a load of `checkpoint`, whose files the caller has loaded. Call it on every rank."""
        self._go_on(checkpoint.commit.step, checkpoint)

    def _go_on(self, step: int | None, taken: Candidate | LoggedAttempt | None) -> None:
        left: tuple[str, Branches] = "", ()
        if taken is not None and self._ranks.rank == COORDINATOR:  # which decides
            look = partial(call_patiently, self._writer, self._options.load)
            left = left_after(self._store, taken.prefix, (self._start.number, self._saver.begun), look)
        self._saver.loaded(step, *left)

    @property
    def left(self) -> Mapping[str, Branches]:
        """The branches that the next saves of each training leave."""
        return self._saver.left

    @property
    def has_taken_up(self) -> bool:
        """Whether this job may remove checkpoints of earlier ones, or found none when it began."""
        return self._saver.has_taken_up

    @property
    def closed(self) -> bool:
        return self._closed

    # --- looking ---------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """This rank's saves in flight and the last ones; cheap, touches no storage."""
        statuses = self._history.statuses()
        return Status(
            root=self._store.url,
            start=self._start.number,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            latest=self._saver.latest,
            in_flight=len(self._history.in_flight()),
            saves_committed=self._history.committed,
            saves_failed=self._history.failed,
            saves_superseded=self._history.superseded,
            waited_s=self._history.waited_s,
            attempts=statuses,
            sidecar=self._sidecar.path if self._sidecar is not None else None,
            sidecar_connected=self._sidecar is not None and self._sidecar.connected,
            sidecar_trouble="" if self._sidecar is None else self._sidecar.trouble,
            overhead=self._saver.governor.overhead,
            pace=self._saver.governor.share,
            requests=requests_of(self._store),
            export=None if self._exports is None else self._exports.progress,
        )

    def latest(self) -> str | None:
        """The tag of the checkpoint that a load would try first, or None."""
        found = self._newest("latest")
        return None if found is None else found.tag

    def latest_step(self) -> int | None:
        """The step of the checkpoint that a load would try first, or None."""
        found = self._newest("latest_step")
        return None if found is None else found.commit.step

    def _newest(self, asked: str) -> LoggedAttempt | None:
        self._check_open(asked)
        return self._writer.call(self._at_own_root(newest(self._store)), self._options.commit_timeout_s)

    def delete(self, tag: str, *, force: bool) -> None:
        """Remove the checkpoint `tag`. Raises as Checkpointer.delete()."""
        self._check_open("delete")
        arguments.flag("force", force)
        tag = tag if tag == LATEST else check_tag(tag)

        async def delete() -> None:
            await starts.check_fence(self._store, self._start.number)
            meant = await named(self._store, tag)
            await delete_once(self._store, meant, force=force)
            left = await newest(self._store)
            self._saver.deleted(meant, None if left is None else left.tag)

        self._writer.call(self._at_own_root(delete()), LOOK_S)

    def let_go(self, tag: str) -> bool:
        """Remove `tag` if it is the only checkpoint, or one that stays is read back whole (READBACK-3). Whether it is gone."""
        self._check_open("let_go")

        async def let_go() -> bool:
            await starts.check_fence(self._store, self._start.number)
            return await delete_if_survived(self._store, tag)

        return self._writer.call(self._at_own_root(let_go()), self._options.commit_timeout_s)

    def checkpoints(self) -> list[LoggedAttempt]:
        """All checkpoints in the store, newest first. Raises UnreadableError if failed reads hide which one is the newest."""
        self._check_open("list")
        return call_patiently(
            self._writer, self._options.glance, lambda patience: self._at_own_root(listed(self._store, patience))
        )

    async def _at_own_root(self, look: Coroutine[Any, Any, T]) -> T:
        """The answer of `look`; RootGoneError in its place if the path no longer leads to the root of this job."""
        try:
            return await look
        finally:
            await self._own_root.check(self._start.number)

    def pass_over(self, prefix: str, why: str) -> None:
        """On rank 0, record that the checkpoint `prefix` (`<tag>/<attempt>`) is damaged and was passed over."""
        self._check_open("pass_over")
        if self._ranks.rank == COORDINATOR:
            self._saver.is_recorded &= leave_record(self._writer, note_passed_over(self._store, prefix, why), prefix)

    def damage(self, checkpoint: LoggedAttempt, ranks: Iterable[int], taker: Taker | None = None) -> tuple[str, ...]:
        """Read all files that `ranks` stored and list the damage, and files that are not shown; empty if all are whole. `taker`
        may load files on the way. Raises UnreadableError if a read fails for now.
        """
        self._check_open("damage")
        examination = Examination(self._store, self._writer, self._options.glance, self._options.commit_timeout_s, checkpoint)
        with self._saver.reads_nothing_back():
            return examination.damage(ranks, taker or Nobody())

    def preempted(self, step: int) -> bool:
        """Whether all ranks should now save `step` and leave. Answers as Checkpointer.preempted()."""
        step = arguments.counted("step", step)
        return self._preemption.ask(step) if self._preemption else False

    @property
    def preempting(self) -> bool:
        """Whether a signal has come to any rank."""
        return self._preemption.begun if self._preemption else False

    # --- ending ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save of this rank is in flight. Raises the first error of these saves, or WaitTimeoutError."""
        self._check_process("wait")
        if timeout is not None:
            arguments.seconds("timeout", timeout, most=arguments.TIMEOUT_S_MAX, zero=True)
        until = None if timeout is None else time.monotonic() + timeout
        first: CheckpointdError | None = None
        for handle in self._history.in_flight():
            try:
                handle.wait(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except WaitTimeoutError:
                raise
            except CheckpointdError as error:
                first = first or error
        if first is not None:
            raise first

    def settle(self) -> None:
        """Wait until no save of this rank is in flight, or those that are lie in the spool. This raises no error of a save: the
        handles and the log have them.
        """
        self._saver.drain(closes=False)

    def close(self, *, ends_well: bool = True) -> None:
        """Wait for the saves in flight, then release everything. A second call does nothing. Raises as Checkpointer.close().

        `ends_well`: whether the job has ended without an error. If not, the sidecar keeps its snapshot for the next start.
        """
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        try:
            self._saver.drain(self._grace_left_s)
        finally:
            self._release(ends_well=ends_well)
        last = self._history.last_failed
        error = last.peek() if last is not None and not last.observed else None
        if error is not None:
            raise error

    def _grace_left_s(self) -> float | None:
        return self._preemption.grace_left_s() if self._preemption else None

    def _release(self, *, ends_well: bool) -> None:
        self._step_hook.remove()
        try:
            self._saver.close(self._tidy_left_s, ends_well=ends_well)
            if self._exports is not None:
                self._exports.close(finishes=ends_well and self._grace_left_s() is None)
            end(self._writer, self._started, max(self._tidy_left_s(), SLICE_S))
            self._writer.call(self._store.close(), max(self._tidy_left_s(), SLICE_S))
        except StoreError as error:
            log.error("closing %s: %s", self._store.url, error)
        finally:
            self._writer.close()
            self._arena.close()
            self._give_back_root()
            if self._preemption is not None:
                self._preemption.close()  # last: a signal that comes while this closes must not end the process

    def _tidy_left_s(self) -> float:
        grace_s = self._grace_left_s()
        return TIDY_TIMEOUT_S if grace_s is None else min(TIDY_TIMEOUT_S, grace_s)

    def _leave(self) -> None:
        """Finish the saves in flight when the interpreter exits without close(), maybe because of an error."""
        try:
            self.close(ends_well=False)
        except CheckpointdError as error:
            # Log handlers may be gone by now, so write to stderr.
            sys.stderr.write(f"checkpointd: the last save failed: {error}\n")

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ClosedError(f"{call}() after close(): make a new Checkpointer for this root")
        self._check_process(call)

    def _check_process(self, call: str) -> None:
        if os.getpid() != self._process:
            raise ClosedError(
                f"{call}() in a forked process, which lacks the Checkpointer's threads: call it in the process that made it"
            )

    # --- files beside the root ----------------------------------------

    def save_files(
        self,
        step: int,
        files: Mapping[str, object],
        *,
        tag: str | None = None,
        at: str | None = None,
        save_latest: bool = True,
        optimizer_only: Collection[int] = (),
        metrics: Mapping[str, float] | None = None,
        unfinished: str = "",
    ) -> OwnHandle:
        """Snapshot the objects in `files`, by file name, and return. The root must be a directory `.checkpointd`. Once the
        save has committed, the directory `at` beside the root holds these files as torch.save writes them, uncompressed. `at`
        is a relative path, by default the tag. Its parent directory must exist; removing the parent removes the checkpoint.

        Call it on every rank, each with its own file names, or with none. `optimizer_only`: addresses of storages that only
        optimizer steps change; all others are copied before this returns. `unfinished`: the name from `fill`, if every rank has
        filled that directory. It gets its place, with the files in it, when they are shown. Raises as `save` does.
        """
        self._check_open("save")
        request = asked(step, tag, save_latest, metrics, unfinished=unfinished)
        at = request.tag if at is None else at
        request = replace(request, training=training_of(at, unfinished))
        check_shows(self._store, at, files.keys())
        return self._saver.save_files(self._preempted(request), at, files, optimizer_only)

    def fill(self, folder: str, *, whole: bool = False) -> Unfinished:
        """Make an unfinished directory for the next save. Call it on every rank before the save; every rank fills it. When the
        files of the save are shown, it gets the place `folder` (relative, as `at`). If the save aborts, it is removed.

        `whole`: the save's own files are shown in `folder` itself, not in a directory in it, and no `latest` is written.
        """
        self._check_open("fill")
        plain = check_shows(self._store, folder)
        name = f"{AttemptId(self._start.number, next(self._saver.fillings))}{WHOLE if whole else ''}"
        return Unfinished(name, plain.unfinished.path(name, folder))

    def removed(self) -> frozenset[str]:
        """The checkpoints (`<tag>/<attempt>`) whose tag directory somebody has removed. They are removed with it, and do not
        count as damaged. Raises StoreError if the storage cannot be read.
        """
        self._check_open("removed")
        return frozenset(self._writer.call(abandoned(self._store), LOOK_S))
