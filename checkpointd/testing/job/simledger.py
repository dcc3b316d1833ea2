"""The invariants of a simulated job, checked while it runs and at its end. Those of the root's log are in `simlog.py`.

  durable              What anybody reports or loads is in the log, and stays there when the power fails.
  ranks-agree          No rank's handle says committed while another rank's handle for the same attempt says aborted.
  announced            No object of an attempt is there before the log has announced the attempt, durably.
  objects-stay         An object goes, or changes, only after its attempt was durably removed or aborted, and never if a
                       checkpoint refers to it, or the base of an undecided attempt (LOG-10). While an attempt is undecided,
                       its votes stay, and so does what a yes names.
  latest-whole         `latest` names a checkpoint that the log had durably. Every checkpoint loads with all digests, bit for
                       bit.
  latest-follows       At rest, and after each start, `latest` names the newest checkpoint that asked for it.
  nothing-lost         An attempt that was reported as committed stays a checkpoint, or the log removed it for a newer one. A
                       job or reader finds nothing older than the newest commit that was reported before it looked.
  aborted-never-loaded No rank loads an attempt that the log does not have as a checkpoint.
  surviving            A recovery does not decide a spared attempt, and then removes no temporary file of a living process.
  uploads-stand        Nobody aborts the upload of another process whose attempt is still to be decided. After a start, no
                       older attempt has an unfinished upload.
  outlived             No start aborts an attempt whose lease a living process held when that start began.
  left-alone           A start fences a living job with another name, or without one, only if it was told to take over.
  always-starts        A start waits at most the length of one lease for another job.
  always-ends          An attempt ends in a final phase, soon after its deadline. It may stay in doubt only if a fault hindered
                       it.
  always-commits       Without a fault, each save commits.
  next-save-works      After the faults, the next incarnation loads and commits.
The ledger belongs to the test and not to the protocol: it also sees things that no process of the job could know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from checkpointd.commit.branches import newest_of
from checkpointd.commit.facts import Order
from checkpointd.commit.machine import Phase
from checkpointd.layout.keys import ATTEMPT_LEASES, LATEST, LOG, AttemptId, holder_of, is_attempt
from checkpointd.layout.log_records import AbortRecord, AttemptStatus, BeginRecord, CommitRecord, LoggedAttempt
from checkpointd.pipeline.outcome.publish import RECOVERY
from checkpointd.store.names import TEMPORARY
from checkpointd.testing.job.simlog import InvariantError as InvariantError
from checkpointd.testing.job.simlog import LogWatch
from checkpointd.testing.job.simroot import ObjectChange, SimRoot
from checkpointd.testing.simstorage import Effect

Contents: TypeAlias = Mapping[str, bytes]
"""The tensors of one rank: FQN to raw bytes."""

START_S = 8.0
"""The time of a start without its wait for a lease: some calls of the disk take 2 s, and so does a request that the bucket puts
off. A second wait would take longer."""


@dataclass(slots=True)
class Ledger:
    """The record of one run: saves, reports, and the effects on the storage of `root`. Attempts are `<tag>/<attempt>`."""

    root: SimRoot
    saved: dict[tuple[str, int], Contents] = field(default_factory=dict)
    """The tensors that each rank passed to save(), by attempt and rank."""
    committed: set[str] = field(default_factory=set)
    """The attempts that were reported as committed."""
    refused: set[str] = field(default_factory=set)
    """Processes that met an injected error, which excuses their failures."""
    broken: Exception | None = None
    """The first violation, even if the code under test caught the exception."""
    hindered: bool = False
    """Whether any process may have been hindered: paused, waiting for a paused one, or its temporary files swept."""
    surviving_commits: int = 0
    """Spared attempts that their own coordinators committed after a newer start had begun."""
    retires: bool = False
    """Whether newer checkpoints of other tags may lead to removals, too."""
    collected: int = 0
    """Attempts that lost objects to a collector."""
    readers: set[str] = field(default_factory=set)
    """Processes that only read (`simreader.py`)."""
    read: int = 0
    """Checkpoints that readers read completely."""
    newest: Order | None = None
    """The order of the newest checkpoint that asked for `latest` and was reported."""
    log: LogWatch = field(init=False)
    _recovering: dict[str, frozenset[str]] = field(default_factory=dict)
    """Processes that recover now, and the attempts that their starts spare."""
    _starting: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Processes that start: the time at which they began, and whether they take the root over."""
    _living: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Processes that have begun a job and not ended it: the name and the start of the job."""
    _at_work: dict[str, tuple[str, float]] = field(default_factory=dict)
    """The process that put the lease of an attempt, and the time."""
    _mover: str = ""
    """The process that moved `latest` last."""

    def __post_init__(self) -> None:
        self.log = LogWatch(self.root, self.retires)

    # --- what the job reports ----------------------------------------------------------------------------------

    def save_called(self, attempt: str, rank: int, contents: Contents) -> None:
        if self.saved.setdefault((attempt, rank), contents) != contents:
            raise InvariantError("one-decision", f"{attempt} saves other tensors on rank {rank} than before")

    def learned(self, attempt: str, decided: LoggedAttempt | CommitRecord | AbortRecord, who: str) -> None:
        """`who` acts on the decision on `attempt`: from here on it must be durable."""
        commit = decided.committed if isinstance(decided, LoggedAttempt) else decided
        status: AttemptStatus = "checkpoint" if isinstance(commit, CommitRecord) else "aborted"
        self.log.rely_on(attempt, status, who)
        if isinstance(commit, CommitRecord):
            self.committed.add(attempt)
            if commit.save_latest:
                self.newest = max(self.newest or commit.order, commit.order)

    def report(self, violation: Exception) -> None:
        """Record that the run is broken. The caller continues, and the run fails at its next check."""
        self.broken = self.broken or violation

    def ended(self, attempt: str, process: str, phase: Phase, decided: LoggedAttempt | None) -> None:
        """An attempt ended on one rank's handle. If `decided` is None, it is in doubt."""
        if decided is None:
            if phase is Phase.COMMITTED:
                raise InvariantError("ranks-agree", f"{process} reports {attempt} committed, and it is not decided")
            if not self.excuses(process) and not self._is_fenced(attempt):
                raise InvariantError("always-ends", f"{process} left {attempt} in doubt, and nothing hindered it")
            return
        if (phase is Phase.COMMITTED) != (decided.committed is not None):
            raise InvariantError("ranks-agree", f"{process} reports {phase} for {attempt}, which is {decided.status}")
        self.learned(attempt, decided, process)

    def _is_fenced(self, attempt: str) -> bool:
        """Whether `attempt` was never announced, and can be announced no more."""
        return self.log.fate(attempt) is None and AttemptId.of(attempt).start < self.log.state.start

    def _alive(self) -> list[str]:
        return self.root.storage.alive()

    @property
    def _now(self) -> float:
        return self.root.storage.loop.time()

    def excuses(self, process: str) -> bool:
        """Whether `process` is excused for missing work, so that only the work that it reports as done counts."""
        return self.hindered or process in self.refused

    def start_began(self, process: str, now: float, *, take_over: bool) -> None:
        """`process` begins to look for other jobs at the root."""
        self._starting[process] = now, take_over

    def job_began(self, process: str, name: str, start: int, seconds: float, lease_s: float) -> None:
        """`process` has taken `start`, `seconds` after `start_began`."""
        self.log.rely_on_start(start, process)
        self._living[process] = name, start
        own_s = seconds - self.root.storage.lost_s(process)
        if own_s > lease_s + START_S and not self.excuses(process):
            raise InvariantError("always-starts", f"{process} took {seconds:.1f} s to begin; leases are of {lease_s:g} s")

    def job_ends(self, process: str) -> None:
        """`process` has no more saves and gives up its lease."""
        self._living.pop(process, None)

    def recovery_began(self, process: str, surviving: tuple[str, ...]) -> None:
        self._recovering[process] = frozenset(surviving)

    def recovery_ended(self, process: str) -> None:
        del self._recovering[process]

    def loaded(self, rank: int, checkpoint: LoggedAttempt, contents: Contents) -> None:
        """A rank loaded an attempt at its start."""
        known = self.log.fate(checkpoint.prefix)
        if known is None or known.status not in ("checkpoint", "removed"):
            raise InvariantError("aborted-never-loaded", f"rank {rank} loaded {checkpoint.prefix}, which is {known}")
        self.log.rely_on(checkpoint.prefix, "checkpoint", f"rank {rank}, which loads it,")
        self.whole(checkpoint.prefix, rank, contents)

    def whole(self, attempt: str, rank: int, contents: Contents) -> None:
        """The tensors read from an attempt must equal the saved ones."""
        if contents != self.saved.get((attempt, rank)):
            raise InvariantError("latest-whole", f"rank {rank} of {attempt} loads other bytes than were saved")

    def not_older(self, found: LoggedAttempt | None, floor: Order | None, who: str) -> None:
        """`who` has found `found`. Before it looked, the newest reported commit was that of `floor`."""
        if floor is not None and (found is None or found.commit.order < floor):
            raise InvariantError("nothing-lost", f"{who} finds {found and found.prefix}; order {floor} had been reported")

    # --- what the storage shows --------------------------------------------------------------------------------

    def watch(self, effect: Effect) -> None:
        """Called after every effect that succeeded."""
        self.log.put = ()
        if effect.process in self.readers:
            raise InvariantError("reads-only", f"{effect.process} did {effect.kind} on {effect.path}")
        change = self.root.change(effect)
        if change is None:
            return
        self._recovery_acts(change)
        process, what, key = change
        if what == "given up" and self.log.is_undecided(holder_of(key)):
            raise InvariantError("uploads-stand", f"{process} aborted the upload of {key}, whose attempt may be committed")
        if key.startswith(f"{LOG}/"):
            self._log_changed(change)
        elif key.startswith(f"{ATTEMPT_LEASES}/"):
            self._lease_touched(change)
        elif key == LATEST and what in ("made", "replaced"):
            self._latest_moved(process)
        elif key.count("/") >= 2 and is_attempt(holder_of(key)):
            self._object_changed(change)

    def _object_changed(self, change: ObjectChange) -> None:
        process, what, key = change
        attempt = holder_of(key)
        if what in ("synced", "given up"):
            return
        if what != "made" and (why := self.log.why_stays(key, attempt)):
            raise InvariantError("objects-stay", f"{process}: {key} was {what}, and {why}")
        known = self.log.fate(attempt)
        if what != "removed" and known is None:
            raise InvariantError("announced", f"{process}: {key} was {what}, and {attempt} is not announced")
        if what != "removed" and self.log.durable_fate(attempt) is None:
            raise InvariantError("announced", f"{process}: {key} was {what}, and that {attempt} is announced is not durable")

    def _log_changed(self, change: ObjectChange) -> None:
        before = self.log.state
        self.log.changed(change)
        spared = self._recovering.get(change.process, frozenset())
        for record in self.log.put:
            if isinstance(record, CommitRecord | AbortRecord) and record.attempt in spared:
                raise InvariantError("surviving", f"the recovery by {change.process} has decided {record.attempt}")
            if isinstance(record, BeginRecord):
                self._check_left_alone(record, before.start, change.process)
                for one in before.attempts.values():
                    if one.status == "undecided" and (now := self.log.fate(one.prefix)) and now.status == "aborted":
                        self._check_outlived(one.prefix, change.process)
            elif isinstance(record, CommitRecord):
                outlived = record.decided_by != RECOVERY and record.id.start < self.log.state.start
                self.surviving_commits += outlived

    def _lease_touched(self, change: ObjectChange) -> None:
        attempt = change.key.removeprefix(f"{ATTEMPT_LEASES}/")
        if change.what == "removed":
            self._at_work.pop(attempt, None)
        elif change.what in ("made", "replaced"):
            before = self._at_work.get(attempt)
            same = before is not None and before[0] == change.process
            self._at_work[attempt] = before if before and same else (change.process, self._now)

    def _check_outlived(self, attempt: str, process: str) -> None:
        """The start of `process` has aborted `attempt`."""
        worker, since = self._at_work.get(attempt, ("", 0.0))
        began, _ = self._starting.get(process, (0.0, False))
        if worker in self._alive() and since < began and not self.excuses(worker) and not self.excuses(process):
            raise InvariantError("outlived", f"{process} aborted {attempt}, at which {worker} was at work")

    def _check_left_alone(self, start: BeginRecord, newest: int, process: str) -> None:
        """`process` has taken `start`. This can fence only the job of the start before, which has fenced all older ones."""
        _, take_over = self._starting.get(process, (0.0, False))
        for other, (name, number) in self._living.items():
            same = other == process or (name and name == start.job)
            if number == newest and not same and not take_over and other in self._alive() and not self.excuses(other):
                raise InvariantError("left-alone", f"{process} took start {start.start}, and {other} is alive in {number}")

    def _recovery_acts(self, change: ObjectChange) -> None:
        process, what, key = change
        if what != "removed" or not self._recovering.get(process):
            return
        folder, _, name = key.rpartition("/")
        writer = name.rpartition(".")[0]
        if folder == TEMPORARY and writer != process and writer in self._alive():
            raise InvariantError("surviving", f"during its recovery by {process}, {key} was {what}")

    # --- latest ----------------------------------------------------------------------------------------------------

    @property
    def named(self) -> str | None:
        """The tag that `latest` names."""
        content = self.root.visible(LATEST)
        return None if content is None else content.decode(errors="replace").strip()

    def _latest_moved(self, process: str) -> None:
        self._mover = process
        if not self.log.had_checkpoint_of(self.named or ""):
            raise InvariantError("latest-whole", f"{process} moved latest to {self.named}, which is no durable checkpoint")

    def latest_fault(self) -> str:
        """How `latest` differs from what the log says; empty if it does not."""
        newest = newest_of(self.log.state)
        tag = None if newest is None else newest.tag
        return f"latest names {self.named}, and the newest is {newest and newest.prefix}" if self.named != tag else ""

    def at_rest(self) -> None:
        """Every living process has come to its end."""
        newest = newest_of(self.log.state)
        was_reported = newest is None or newest.prefix in self.committed
        hindered = self.hindered or self.refused or self._mover not in self._alive()
        if was_reported and not hindered and (fault := self.latest_fault()):
            raise InvariantError("latest-follows", fault)

    # --- the end -----------------------------------------------------------------------------------------------

    def check_kept(self) -> None:
        """What was reported as committed is in the log, as a checkpoint or as removed."""
        for attempt in sorted(self.committed):
            known = self.log.fate(attempt)
            if known is None or known.status not in ("checkpoint", "removed"):
                raise InvariantError("nothing-lost", f"{attempt} was committed and is {known} now")
