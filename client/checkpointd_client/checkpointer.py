"""Checkpointer: what a training script holds. It wires snapshot, writer, commit and loading together.

Invariants
  H1  save() never raises for what the storage does; that ends up in the handle, the status and the log.
  H2  Once save() was entered with a valid tag, this rank votes on the attempt, whatever happens: nobody waits for it in vain.
  H3  One Checkpointer per root and process; its epoch fences every earlier incarnation of the job.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self

from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkpointd import arguments
from checkpointd.codec import Compression
from checkpointd.commands import start_sidecar
from checkpointd.commit.decide import OnStale
from checkpointd.commit.retention import Retention
from checkpointd.config import ABSENCE_S, MIB, TIMEOUT_S_MAX, CommitConfig, LoadConfig, PersistConfig, check_job
from checkpointd.errors import CheckpointdError, ClosedError, StoreError, UsageError, WaitTimeoutError
from checkpointd.layout.keys import check_tag
from checkpointd.pipeline import catalog
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.candidates import listed, note_tag_passed_over
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.pipeline.leases import Beginner
from checkpointd.pipeline.shard import COORDINATOR
from checkpointd.store import open_store
from checkpointd_client.arena import Arena
from checkpointd_client.calls import DeepSpeedCalls
from checkpointd_client.choosing import Chooser
from checkpointd_client.examining import Examination, Nobody, Taker
from checkpointd_client.file_calls import FileCalls
from checkpointd_client.handle import SaveHandle
from checkpointd_client.lifetime import at_exit, check_apart, claim_root
from checkpointd_client.loading import Loaded, Loader, call_patiently, leave_record
from checkpointd_client.meetings import Meetings
from checkpointd_client.preemption import Preemption, PreemptSignals, graces_of
from checkpointd_client.ranks import find_ranks, open_board
from checkpointd_client.saving import SLICE_S, TIDY_TIMEOUT_S, Saver, WhenBusy, asked
from checkpointd_client.settings import check_choices, check_load, check_paths, check_times
from checkpointd_client.sidecar import OnSidecarLoss, Sidecar
from checkpointd_client.snapshot import Stager, StagingMode
from checkpointd_client.start import START_TIMEOUT_S, Started, begin_epoch, check_shared, end, instead, reach_sidecars
from checkpointd_client.status import Status
from checkpointd_client.turns import Turns
from checkpointd_client.writer import Writer

log = logging.getLogger("checkpointd")

SIDECAR_PATIENCE_S = 30.0


class Checkpointer(DeepSpeedCalls, FileCalls):
    """Saves and loads the state of one training job below `root`. Make it on every rank, after init_process_group.

    Sizes are in bytes, times in seconds.

    `root`: a directory that every rank sees.
    `compression`: "auto", "none", "zstd" or "planes".
    `staging`: "lazy" copies the state beside the next forward and backward pass, "eager" inside save().
    `when_busy`: what a third save does while two are in flight, "wait" or "skip".
    `commit_timeout_s`: how long the ranks wait for each other before they give a save up.
    `chunk_bytes`: the most raw bytes in a chunk. `budget_bytes`: host memory for each save in flight, beside its snapshot.
    `preempt_signals`: for `preempted_at`. One signal, several, or a mapping to the seconds that are left after each.
    `grace_s`: the seconds that are left after a signal, unless `preempt_signals` is a mapping.
    `sidecar`: the socket of this node's `checkpointd serve`. It persists the snapshots and outlives this process.
    `on_sidecar_loss`: "inline" persists here until it is back, "wait" waits until the save's deadline, "raise" fails the save.
    `dedup`: do not write unchanged data again; a checkpoint then refers to objects of older ones, which stay while needed.
    `retention`: which checkpoints stay, applied after each commit. A number keeps that many, None keeps all.
    `afresh`: this job will not load, and may remove checkpoints of earlier starts. Otherwise they all stay until load().
    `on_stale`: if the step moved on but no tensor that requires grad changed: "warn", "abort" the save, or "ignore" it.
    `pickle_client_state`: pickle values in client_state that are not plain; their code runs at the load. Else they are refused.
    `absence_s`: how long load() looks for a file that must be there before it counts as lost.
    `job`: the job's name. A start with the same name takes the root over. None: from CHECKPOINTD_JOB, torchrun or Slurm.
    `take_over`: begin even if another job is alive at the root; every save of that job then fails with FencedError.
    `read_back`: read new checkpoints back while no save is in flight. Else only before an older one is removed, if none was.

    Raises UsageError (bad arguments, a root that is a file, a second Checkpointer at the root in this process), RootInUseError
    (another job is alive at the root), RootNotSharedError, DeadlineError (ranks that did not come), StoreError, SidecarError
    (it refuses this rank; or it is not there, and `on_sidecar_loss` is not "inline").
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
        preempt_signals: PreemptSignals = None,
        grace_s: float = 25.0,
        sidecar: str | os.PathLike[str] | None = None,
        on_sidecar_loss: OnSidecarLoss = "inline",
        dedup: bool = True,
        retention: Retention | int | None = None,
        afresh: bool = False,
        on_stale: OnStale = "warn",
        pickle_client_state: bool = False,
        absence_s: float = ABSENCE_S,
        job: str | None = None,
        take_over: bool = False,
        read_back: bool = True,
    ) -> None:
        self._closed = True  # until everything below has worked, so that close() and the exit hook have nothing to do
        check_paths(root, sidecar)
        check_choices(staging, when_busy, on_sidecar_loss)
        check_times(commit_timeout_s, grace_s, absence_s)
        graces = graces_of(preempt_signals, grace_s)
        arguments.flag("pickle_client_state", pickle_client_state)
        arguments.flag("afresh", afresh)
        arguments.flag("take_over", take_over)
        arguments.flag("read_back", read_back)
        persist = PersistConfig(compression=compression, chunk_bytes=chunk_bytes, budget_bytes=budget_bytes, dedup=dedup)
        commit = CommitConfig(
            timeout_s=commit_timeout_s, retention=Retention.of(retention), on_stale=on_stale, read_back=read_back
        )
        self._load = LoadConfig(retry_s=commit_timeout_s, absence_s=absence_s)
        # Looking on behalf of an engine: the other ranks wait for it in a meeting.
        self._glance = LoadConfig(retry_s=commit_timeout_s / 2, absence_s=absence_s)
        name = check_job(job)
        self._ranks = find_ranks()
        self._give_back_root = claim_root(root)
        self._started: Started | None = None
        self._writer = Writer(threads=persist.encoders + persist.writes)
        try:
            self._store = open_store(root)
            if self._store.capabilities.shared:
                check_apart(self._store.url)
            self._sidecar = self._reach(sidecar, on_sidecar_loss)
            beginner = Beginner(
                world_size=self._ranks.world_size,
                job=name,
                take_over=take_over,
                commit_timeout_s=commit.timeout_s,
                instead=instead(self._store.url),
            )
            self._epoch, self._started = begin_epoch(self._writer, self._store, self._ranks, beginner, self._start_sidecar)
            self._board = open_board(self._ranks, self._epoch.nonce)
            check_shared(self._writer, self._store, self._ranks, self._board, self._epoch, START_TIMEOUT_S)
            self._begin_sidecar(persist, commit)
            self._preemption = Preemption(graces, self._board).listen() if graces else None
        except BaseException:
            end(self._writer, self._started)
            self._writer.close()
            self._give_back_root()
            raise
        self._commit = commit
        self._process = os.getpid()
        self._arena = Arena(on_gone=self._slot_is_gone)
        self._saver = Saver(
            writer=self._writer,
            state=WriterState(store=self._store, persist=persist, commit=commit),
            ranks=self._ranks,
            epoch=self._epoch,
            arena=self._arena,
            stager=Stager(staging),
            when_busy=when_busy,
            sidecar=self._sidecar,
            pickles=pickle_client_state,
            afresh=afresh,
        )
        self._pickles = pickle_client_state
        self._history = self._saver.history
        self._meetings = Meetings(self._board, self._ranks, commit.timeout_s)
        self._turns = Turns(self._board, self._ranks, commit.timeout_s, self._load.retry_s + self._load.absence_s)
        self._step_hook = register_optimizer_step_pre_hook(self._before_step)
        self._closed = False
        at_exit(self._leave)

    # --- the sidecar -----------------------------------------------------------------------------------------

    def _reach(self, path: str | os.PathLike[str] | None, on_loss: OnSidecarLoss) -> Sidecar | None:
        if path is None:
            return None
        if not self._store.capabilities.shared:
            raise UsageError(f"{self._store.url} lives in this process alone: a sidecar cannot write there")
        return Sidecar(os.path.abspath(path), os.path.realpath(self._store.url), self._ranks, on_loss)

    def _start_sidecar(self) -> tuple[str, ...]:
        """Connect; the attempts of earlier incarnations that the daemon still works at ("tag/attempt")."""
        if self._sidecar is None:
            return ()
        path = self._sidecar.path
        starting = f"the sidecar at {path} has not answered; if it is not running, {start_sidecar(path)}"
        joined = self._writer.call(self._sidecar.start(SIDECAR_PATIENCE_S), 2 * SIDECAR_PATIENCE_S, starting)
        flights = joined.in_flight if joined is not None else ()
        return tuple(f"{flight.tag}/{flight.attempt}" for flight in flights if flight.rank == COORDINATOR)

    def _begin_sidecar(self, persist: PersistConfig, commit: CommitConfig) -> None:
        if self._sidecar is None:
            return
        reach_sidecars(self._ranks, self._board, self._start_sidecar, START_TIMEOUT_S)
        begun = self._sidecar.begin(self._epoch.number, self._epoch.nonce, persist, commit)
        self._writer.call(begun, 2 * SIDECAR_PATIENCE_S)

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
    ) -> SaveHandle:
        """Snapshot `state` and return; it is persisted and committed in the background. Call it on every rank.

        `state` maps names to modules, optimizers, schedulers, anything with state_dict and load_state_dict, and nested dicts
        and lists of tensors and plain values. `metrics` are kept with the checkpoint, for `Retention(best=...)` to choose by;
        those of rank 0 count. Raises UsageError for a bad tag, step or metric, StateError for an object that cannot be stored
        (all ranks then abort the save at once), ClosedError after close().
        """
        self._check_open("save")
        request = asked(step, tag, save_latest, metrics, exclude_frozen_parameters=exclude_frozen_parameters)
        return self._saver.save(request, state, client_state)

    def refuse(
        self, step: int, error: CheckpointdError, *, tag: str, save_latest: bool = True, unfinished: str = ""
    ) -> SaveHandle:
        """Vote no on the save that the other ranks begin now, because of `error`: nobody waits for this rank in vain."""
        self._check_open("save")
        return self._saver.refuse(asked(step, tag, save_latest, unfinished=unfinished), error)

    def meet(self, said: str, doing: str) -> dict[int, str]:
        """What every rank says, by rank, when all of them are `doing` the same; DeadlineError names those that do not come."""
        self._check_open("meet")
        return self._meetings.meet(said, doing)

    def fence(self) -> None:
        """Wait until the snapshots in flight are copied. Call it before you change parameters outside an optimizer step.

        On a GPU the current stream waits for the copies, not the host.
        """
        self._saver.fence()

    def _before_step(self, *_: object) -> None:
        self._saver.fence()

    # --- loading ---------------------------------------------------------------------------------------------

    def load(
        self,
        state: MutableMapping[str, Any] | Chooser,
        tag: str | None = None,
        *,
        strict: bool = True,
        fallback: bool = True,
        cast: bool = False,
    ) -> Loaded | None:
        """Load the newest checkpoint, or `tag`, into the objects of `state`, in place; None where there is none.

        Call it on every rank. The number of ranks and the sharding may differ from the save's. Per-rank state that was not
        equal on all ranks is then left alone and listed in `Loaded.per_rank_left`. `cast`: convert between floating dtypes.

        If the newest checkpoint is damaged, the log says so and all ranks load the newest whole one; `fallback=False` or a
        named `tag` raises DamagedError instead. Nothing is touched before every rank has verified what it will read.

        Raises MismatchError listing every difference (`strict=False` loads what fits and lists the rest, and raises if nothing
        fits), StateError for the state_dict() of an optimizer or scheduler in place of the object, NotFoundError for a named
        tag, DeadlineError naming ranks that did not take part, UnreadableError if the storage could not be read until
        `commit_timeout_s` had passed, PartlyLoadedError if it failed after it had begun to fill the objects.
        """
        self._check_open("load")
        if tag is not None:
            check_tag(tag)
        check_load(state, strict=strict, fallback=fallback, cast=cast)
        self._saver.fence()
        self.settle()  # what is being committed may replace what would be read
        loader = Loader(
            store=self._store,
            writer=self._writer,
            ranks=self._ranks,
            config=self._load,
            turn=self._turns.begin(),
            timeout_s=self._commit.timeout_s,
            state=state,
            strict=strict,
            cast=cast,
            unpickle=self._pickles,
            sidecar=self._sidecar,
            spares=self._started.spares if self._started is not None else (),
        )
        loaded = loader.load(tag, fallback=fallback)
        if self._preemption is not None:
            self._preemption.loaded()
        self._saver.is_recorded &= loader.is_recorded
        self.take_up()
        if not isinstance(state, Chooser):
            self._saver.prewarm(state)
        return loaded

    def take_up(self) -> None:
        """Count as having loaded, by other means: from here on this job may remove checkpoints of earlier ones."""
        self._saver.take_up()

    @property
    def has_taken_up(self) -> bool:
        """Whether this job may remove checkpoints of earlier ones."""
        return self._saver.has_taken_up

    # --- looking ---------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """This rank's saves in flight and the last ones; cheap, touches no storage."""
        statuses = self._history.statuses()
        return Status(
            root=self._store.url,
            epoch=self._epoch.number,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            latest=self._saver.latest,
            in_flight=len(self._history.in_flight()),
            saves_committed=self._history.committed,
            saves_failed=self._history.failed,
            attempts=statuses,
            sidecar=self._sidecar.path if self._sidecar is not None else None,
            sidecar_connected=self._sidecar is not None and self._sidecar.connected,
            read_back=self._saver.read_back,
        )

    def latest(self) -> str | None:
        """The tag that `latest` names in the store now, or None."""
        self._check_open("latest")
        return self._writer.call(catalog.latest(self._store), self._commit.timeout_s)

    def list(self) -> list[Checkpoint]:
        """All checkpoints in the store, newest first, each with `.tag`, `.outcome.step` and more. Raises UnreadableError if the
        storage does not let it find out which one is the newest.
        """
        self._check_open("list")
        return call_patiently(self._writer, self._glance, lambda patience: listed(self._store, patience))

    def pass_over(self, tag: str, why: str) -> None:
        """Leave the record that `tag` is damaged and an older checkpoint is loaded instead; rank 0 does it."""
        self._check_open("pass_over")
        if self._ranks.rank == COORDINATOR:
            recorded = leave_record(self._writer, note_tag_passed_over(self._store, tag, why), tag)
            self._saver.is_recorded &= recorded

    def damage(self, checkpoint: Checkpoint, ranks: Iterable[int], taker: Taker | None = None) -> tuple[str, ...]:
        """Read everything that `ranks` stored of a checkpoint and list the damage, and files that are not shown; empty if it is
        whole. `taker` reads files for good on the way. Raises UnreadableError if something cannot be read now.
        """
        self._check_open("damage")
        examination = Examination(self._store, self._writer, self._glance, self._commit.timeout_s, checkpoint)
        return examination.damage(ranks, taker or Nobody())

    def preempted_at(self, step: int) -> bool:
        """Whether a signal has come and all ranks are to save `step` and leave. Ask it equally often about each step on every
        rank, in evaluation and warm-up as well: all get the same answer. Always False without `preempt_signals`.
        """
        return self._preemption.ask(step) if self._preemption else False

    @property
    def preempting(self) -> bool:
        """Whether a signal has come to any rank. Ask it anywhere, such as in an evaluation on rank 0 alone: leave that part
        without saving, and ask `preempted_at` next.
        """
        return self._preemption.begun if self._preemption else False

    # --- ending ----------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save of this rank is in flight. Raises the first error of these saves, or WaitTimeoutError."""
        if timeout is not None:
            arguments.seconds("timeout", timeout, most=TIMEOUT_S_MAX, zero=True)
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
        """Wait until no save of this rank is in flight. Does not raise the errors of saves: handles and the log have them."""
        self._saver.drain()

    def close(self) -> None:
        """Wait for the saves in flight, then release everything. A second call does nothing.

        Raises the error of the last save if it failed and nobody has looked at its handle. After a preemption signal it waits
        only until that signal's grace period ends.
        """
        self._close(ends_well=True)

    def _close(self, *, ends_well: bool) -> None:
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
        """The interpreter is leaving without close(), maybe for an error: finish what is in flight, and say where it failed."""
        try:
            self._close(ends_well=False)
        except CheckpointdError as error:
            # A handler may be gone or silent by now, and somebody must hear of this.
            sys.stderr.write(f"checkpointd: the last save failed: {error}\n")

    def _check_open(self, call: str) -> None:
        if self._closed:
            raise ClosedError(f"{call}() after close(): make a new Checkpointer for this root")
        if os.getpid() != self._process:
            raise ClosedError(f"{call}() in a forked process, which has none of the threads: call it in the one that made it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._close(ends_well=kind is None)
        except CheckpointdError:
            if kind is None:
                raise
