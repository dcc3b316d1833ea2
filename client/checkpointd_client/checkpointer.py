"""Checkpointer: what a training script holds. It wires snapshot, writer, commit and loading together.

Invariants
  H1  save() never raises for what the storage does; that ends up in the handle, the status and the log.
  H2  Once save() was entered with a valid tag, this rank votes on the attempt, whatever happens: nobody waits for it in vain.
  H3  One Checkpointer per root and process; its epoch fences every earlier incarnation of the job.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from types import TracebackType
from typing import Any, Self, get_args

from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkpointd.codec import Compression
from checkpointd.commit.decide import OnStale
from checkpointd.commit.retention import Retention
from checkpointd.config import MIB, CommitConfig, LoadConfig, PersistConfig
from checkpointd.errors import CheckpointdError, ClosedError, FormatError, StoreError, UsageError, WaitTimeoutError
from checkpointd.layout.files import check_names, check_place
from checkpointd.layout.keys import SERVICE, check_tag, default_tag
from checkpointd.pipeline import catalog
from checkpointd.pipeline.attempt import COORDINATOR, WriterState
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.pipeline.showing import unseen_of
from checkpointd.pipeline.verify import verify_ranks
from checkpointd.store import open_store
from checkpointd_client.arena import Arena
from checkpointd_client.calls import DeepSpeedCalls
from checkpointd_client.choosing import Chooser
from checkpointd_client.handle import SaveHandle
from checkpointd_client.lifetime import at_exit, check_apart, claim_root
from checkpointd_client.loading import Loaded, Loader
from checkpointd_client.meetings import Meetings
from checkpointd_client.preemption import Preemption
from checkpointd_client.ranks import find_ranks, open_board
from checkpointd_client.saving import TIDY_TIMEOUT_S, Request, Saver, WhenBusy, check_metrics, check_step
from checkpointd_client.sidecar import OnSidecarLoss, Sidecar
from checkpointd_client.snapshot import Stager, StagingMode
from checkpointd_client.start import begin_epoch, check_shared, reach_sidecars
from checkpointd_client.status import Status
from checkpointd_client.turns import Turns
from checkpointd_client.writer import Writer

log = logging.getLogger("checkpointd")

_SLICE_S = 0.25

START_TIMEOUT_S = 120.0
SIDECAR_PATIENCE_S = 30.0


class Checkpointer(DeepSpeedCalls):
    """Saves and loads the state of one training job below `root`. Make it on every rank, after init_process_group.

    `root` is a directory that every rank sees. Sizes in bytes, times in seconds. `staging`: "lazy" copies beside the next
    forward and backward pass, "eager" inside save(). `when_busy`: what a third save does while two are in flight.
    `commit_timeout_s`: how long the ranks wait for each other before a save is given up. `preempt_signal`: see `preempted`;
    `grace_s` is what the machine gives you after it. `sidecar`: the socket of this node's `checkpointd serve`, which then
    persists the snapshots and outlives this process; `on_sidecar_loss`: without it, "inline" persists here until it is back,
    "wait" waits for it as long as the save may take, "raise" fails the save. `dedup`: what did not change since the last
    checkpoint, such as frozen layers, is not written again; a checkpoint then needs older ones' objects, which stay as long as
    that. `retention`: which checkpoints stay, applied after each commit; None: all. `on_stale`: where the step moved on and no
    tensor that requires grad changed, "warn", "abort" the save, or "ignore" it. `pickle_client_state`: values in client_state
    that are no plain ones are stored as pickles, whose code runs when they are loaded; else they are refused by name.

    Raises UsageError (bad arguments, a root that is a file, a second Checkpointer at the root), RootNotSharedError, StoreError,
    SidecarError (it refuses this rank, or is not there and `on_sidecar_loss` is not "inline").
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
        sidecar: str | os.PathLike[str] | None = None,
        on_sidecar_loss: OnSidecarLoss = "inline",
        dedup: bool = True,
        retention: Retention | None = None,
        on_stale: OnStale = "warn",
        pickle_client_state: bool = False,
    ) -> None:
        if staging not in ("lazy", "eager"):
            raise UsageError(f"staging is {staging!r}; choose 'lazy' or 'eager'")
        if when_busy not in ("wait", "skip"):
            raise UsageError(f"when_busy is {when_busy!r}; choose 'wait' or 'skip'")
        if on_sidecar_loss not in get_args(OnSidecarLoss):
            raise UsageError(f"on_sidecar_loss is {on_sidecar_loss!r}; choose one of {', '.join(get_args(OnSidecarLoss))}")
        self._closed = True  # until everything below has worked, so that close() and the exit hook have nothing to do
        persist = PersistConfig(compression=compression, chunk_bytes=chunk_bytes, budget_bytes=budget_bytes, dedup=dedup)
        commit = CommitConfig(timeout_s=commit_timeout_s, retention=retention or Retention(), on_stale=on_stale)
        self._ranks = find_ranks()
        self._give_back_root = claim_root(root)
        self._writer = Writer(threads=persist.encoders + persist.writes)
        try:
            self._store = open_store(root)
            if self._store.capabilities.shared:
                check_apart(self._store.url)
            self._sidecar = self._reach(sidecar, on_sidecar_loss)
            self._epoch = begin_epoch(self._writer, self._store, self._ranks, commit, self._start_sidecar)
            self._board = open_board(self._ranks, self._epoch.nonce)
            check_shared(self._writer, self._store, self._ranks, self._board, self._epoch, START_TIMEOUT_S)
            self._begin_sidecar(persist, commit)
            self._preemption = (
                Preemption(signal.Signals(preempt_signal), grace_s, self._board) if preempt_signal is not None else None
            )
        except BaseException:
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
        )
        self._pickles = pickle_client_state
        self._history = self._saver.history
        self._meetings = Meetings(self._board, self._ranks, commit.timeout_s)
        self._turns = Turns(self._board, self._ranks, commit.timeout_s)
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
        joined = self._writer.call(self._sidecar.start(SIDECAR_PATIENCE_S), 2 * SIDECAR_PATIENCE_S)
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
        """Snapshot `state` and return; persisting and committing go on in the background. Call it on every rank.

        `state` maps names to modules, optimizers, schedulers, anything with state_dict and load_state_dict, and nested dicts
        and lists of tensors and plain values. `metrics` are kept with the checkpoint, for `Retention(best=...)` to choose by;
        those of rank 0 count. Raises UsageError for a bad tag, step or metric, StateError for what cannot be stored
        (the save is then aborted on all ranks at once), ClosedError after close().
        """
        self._check_open("save")
        check_step(step)
        tag = check_tag(default_tag(step) if tag is None else tag)
        request = Request(tag, step, save_latest, exclude_frozen_parameters, check_metrics(metrics))
        return self._saver.save(request, state, client_state)

    def save_files(
        self,
        step: int,
        files: Mapping[str, object],
        *,
        tag: str | None = None,
        at: str | None = None,
        save_latest: bool = True,
        stepped: Collection[int] = (),
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Snapshot the objects in `files`, by name, and return. Once the save has committed, the directory `at` beside the
        root, which is one named `.checkpointd`, holds what torch.save makes of them, uncompressed. `at` is a relative path, by
        default the tag; the directory in which it lies is there already, and who removes that one removes the checkpoint.

        Call it on every rank, each with files of its own names, or none. `stepped`: addresses of storages that nothing but
        optimizer steps change; all others are copied before this returns. Raises as `save` does.
        """
        self._check_open("save")
        check_step(step)
        tag = check_tag(default_tag(step) if tag is None else tag)
        if self._store.plain_files is None:
            raise UsageError(
                f"files are shown beside the root, which must be a directory named {SERVICE}: {self._store.url} is not"
            )
        at = tag if at is None else at
        try:
            check_place(at)
            check_names(files.keys())
        except FormatError as error:
            raise UsageError(str(error)) from error
        request = Request(tag, step, save_latest, False, check_metrics(metrics))
        return self._saver.save_files(request, at, files, stepped)

    def refuse(self, step: int, error: CheckpointdError, *, tag: str, save_latest: bool = True) -> SaveHandle:
        """Vote no on the save that the other ranks begin now, because of `error`: nobody waits for this rank in vain."""
        self._check_open("save")
        return self._saver.refuse(Request(check_tag(tag), step, save_latest, False), error)

    def meet(self, said: str, doing: str) -> dict[int, str]:
        """What every rank says, by rank, when all of them are `doing` the same; DeadlineError names those that do not come."""
        self._check_open("meet")
        return self._meetings.meet(said, doing)

    def fence(self) -> None:
        """Wait until the snapshots in flight have read everything: before you change parameters outside an optimizer step.

        On a GPU it costs the host nothing: the current stream waits for the copies instead.
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

        Call it on every rank. The number of ranks, and how tensors are sharded over them, may be others than when it was saved;
        what then is each rank's own and was not equal on all is left as it is, and named in `Loaded.per_rank_left`. `cast`:
        floating-point tensors may be of another floating dtype than the stored one, and are converted.

        A damaged newest checkpoint is logged as an error and the newest whole one is loaded, by all ranks together;
        `fallback=False` raises instead, as a named `tag` does. Raises MismatchError listing every difference (`strict=False`
        loads what fits and says what was left), NotFoundError for a named tag, DamagedError, DeadlineError
        naming ranks that did not take part. Nothing is touched before every rank has verified what it will read.
        """
        self._check_open("load")
        if tag is not None:
            check_tag(tag)
        self._saver.fence()
        self.settle()  # what is being committed may replace what would be read
        loader = Loader(
            store=self._store,
            writer=self._writer,
            ranks=self._ranks,
            config=LoadConfig(),
            turn=self._turns.begin(),
            timeout_s=self._commit.timeout_s,
            state=state,
            strict=strict,
            cast=cast,
            unpickle=self._pickles,
            sidecar=self._sidecar,
        )
        loaded = loader.load(tag, fallback=fallback)
        if not isinstance(state, Chooser):
            self._saver.prewarm(state)
        return loaded

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
        )

    def latest(self) -> str | None:
        """The tag that `latest` names in the store now, or None."""
        self._check_open("latest")
        return self._writer.call(catalog.latest(self._store), self._commit.timeout_s)

    def list(self) -> list[Checkpoint]:
        """All checkpoints in the store, newest first: `.tag`, `.outcome.step` and more of each."""
        self._check_open("list")
        return self._writer.call(catalog.checkpoints(self._store), self._commit.timeout_s)

    def damage(self, checkpoint: Checkpoint, ranks: Iterable[int]) -> tuple[str, ...]:
        """Read all that `ranks` stored of a checkpoint, and say what is not as it was written, or not shown where it is to be;
        empty where it is whole.
        """
        self._check_open("damage")
        unseen = self._writer.call(unseen_of(self._store, checkpoint.outcome), self._commit.timeout_s)
        if unseen is not None:
            return (unseen,)
        found = self._writer.call_while_moving(
            lambda on_bytes: verify_ranks(self._store, checkpoint, ranks, LoadConfig(), on_bytes), self._commit.timeout_s
        )
        return tuple(one.message for one in found)

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

    def settle(self) -> None:
        """Wait until no save of this rank is in flight, whatever becomes of it: its handle and the log say what."""
        for handle in self._history.in_flight():
            handle.ended_within(None)

    def close(self) -> None:
        """Wait for what is in flight, then release everything. A second call does nothing.

        Raises the error of the last save where it failed and nobody has looked at its handle. After a preemption signal it
        waits no longer than what is left of `grace_s`.
        """
        self._close(ends_well=True)

    def _close(self, *, ends_well: bool) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        try:
            self._drain()
        finally:
            self._release(ends_well=ends_well)
        last = self._history.last_failed
        error = last.peek() if last is not None and not last.observed else None
        if error is not None:
            raise error

    def _drain(self) -> None:
        """Wait for the saves in flight, without counting as having looked at their results."""
        for handle in self._history.in_flight():
            # In slices, since the signal that ends all patience may come while we wait.
            while not handle.ended_within(_SLICE_S):
                if self._grace_left_s() == 0:
                    self._saver.abandon("the grace period after the signal is over")

    def _grace_left_s(self) -> float | None:
        return self._preemption.grace_left_s() if self._preemption else None

    def _release(self, *, ends_well: bool) -> None:
        self._step_hook.remove()
        grace_s = self._grace_left_s()
        tidy_s = TIDY_TIMEOUT_S if grace_s is None else min(TIDY_TIMEOUT_S, grace_s)
        if self._preemption is not None:
            self._preemption.close()
        self._saver.close(tidy_s, ends_well=ends_well)
        try:
            self._writer.call(self._store.close(), max(tidy_s, _SLICE_S))
        except StoreError as error:
            log.error("closing %s: %s", self._store.url, error)
        finally:
            self._writer.close()
            self._arena.close()
            self._give_back_root()

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
