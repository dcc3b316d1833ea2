"""The invariants of a simulated job, checked while it runs and at its end.

  one-outcome          All processes learn the same outcome of an attempt, and nothing overwrites it. An abort goes last, when
                       nothing else of its attempt is left; after that, nobody learns of a commit.
  starts-grow          The record of the newest start is never removed.
  ranks-agree          No rank's handle says committed while another rank's handle for the same attempt says aborted.
  latest-whole         `latest` only names tags with a durable commit, and these load with all digests, bit for bit.
  latest-forward       `latest` never goes back in order, and is never behind a commit after its move was reported. If a tag is
                       committed again just while `latest` moves off it, `latest` may go back, and is given back (POINTER-2).
  nothing-lost         An attempt that was seen as committed stays a checkpoint, or a newer one of the same tag replaced it.
  aborted-never-loaded No rank loads an attempt that anybody saw aborted.
  fenced               No coordinator commits an attempt of its start once a newer start's recovery has returned, unless that
                       start, or it survives in a newer one.
  surviving            A recovery neither decides a surviving attempt nor removes any of its objects, and then removes no
                       temporary file of a living process.
  plan-stands          A vote that is still to be decided names a plan that is there, unless a newer start fences the attempt.
  uploads-stand        Nobody aborts the upload of another process whose attempt is still to be decided, unless a newer start
                       fences it. After a start, no older attempt has an unfinished upload.
  outlived             No recovery aborts an attempt whose lease a living process held, and which the catalog announced, when
                       that start was taken, unless the start before it has fenced the attempt.
  left-alone           A start fences a living job with another name, or without one, only if it was told to take over.
  always-starts        A start waits at most the length of one lease for another job.
  always-ends          An attempt ends in a final phase, soon after its deadline. It may stay in doubt only if a fault hindered
                       it.
  always-commits       Without a fault, each save commits.
  catalog-tells        An attempt is announced in the catalog before its first object, and closed there after its outcome, both
                       durably. Nothing replaces a record, no summary misses one, and what goes is covered by two summaries.
  next-save-works      After the faults, the next incarnation loads and commits.
The ledger belongs to the test and not to the protocol: it also sees things that no process of the job could know.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from checkpointd.commit.facts import Order
from checkpointd.commit.machine import Phase
from checkpointd.errors import FormatError
from checkpointd.layout.keys import LATEST, LEASE, OUTCOME, PLANS, SERVICE, AttemptId, holder_of, start_of
from checkpointd.layout.manifest import Outcome, Start, Vote, decode
from checkpointd.pipeline.outcome.publish import RECOVERY
from checkpointd.pipeline.root.plans import key_named_by
from checkpointd.store.names import TEMPORARY
from checkpointd.testing.job.simcatalog import CatalogWatch
from checkpointd.testing.job.simlatest import LatestWatch, outcome_in
from checkpointd.testing.job.simroot import ObjectChange, SimRoot
from checkpointd.testing.simstorage import Effect

Contents: TypeAlias = Mapping[str, bytes]
"""The tensors of one rank: FQN to raw bytes."""
Key: TypeAlias = tuple[str, str]
"""An attempt: tag and attempt name."""

START_S = 8.0
"""The time of a start without its wait for a lease: some calls of the disk take 2 s, and so does a request that the bucket puts
off. A second wait would take longer."""


class InvariantError(AssertionError):
    """A run broke the invariant `name`."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name


@dataclass(slots=True)
class Ledger:
    """The record of one run: saves, reports, and the effects on the storage of `root`."""

    root: SimRoot
    saved: dict[tuple[Key, int], Contents] = field(default_factory=dict)
    """The tensors that each rank passed to save()."""
    outcomes: dict[Key, Outcome] = field(default_factory=dict)
    """The outcome of each attempt, by its first report."""
    refused: set[str] = field(default_factory=set)
    """Processes that met an injected error, which excuses their failures."""
    broken: Exception | None = None
    """The first violation, even if the code under test caught the exception."""
    hindered: bool = False
    """Whether any process may have been hindered: paused, waiting for a paused one, or its temporary files swept."""
    recovered: int = 0
    """The newest start whose recovery has returned."""
    surviving_commits: int = 0
    """Surviving attempts that their own coordinators committed after a newer start had recovered."""
    retires: bool = False
    """Whether newer checkpoints of other tags may lead to removals, too."""
    collected: int = 0
    """Attempts that lost objects to a collector."""
    readers: set[str] = field(default_factory=set)
    """Processes that only read (`simreader.py`)."""
    read: int = 0
    """Checkpoints that readers read completely."""
    forgotten: set[Key] = field(default_factory=set)
    """Aborted attempts whose outcome was removed."""
    _put: dict[str, Outcome] = field(default_factory=dict)
    """The outcome that was last put at each key."""
    _survives_in: dict[str, int] = field(default_factory=dict)
    """The newest start in which each attempt survives."""
    _named: dict[str, set[str]] = field(default_factory=dict)
    """The keys of the plans that the votes of each attempt name."""
    _recovering: dict[str, frozenset[str]] = field(default_factory=dict)
    """Processes that recover now, and the surviving attempts of their starts."""
    _starting: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Processes that start: the time at which they began, and whether they take the root over."""
    _living: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Processes that have begun a job and not ended it: the name and the start of the job."""
    _newest_start: int = 0
    _start_before: int = 0
    """The newest start before that."""
    _at_work: dict[str, tuple[str, float]] = field(default_factory=dict)
    """The process that put the lease of an attempt, and the time."""
    _catalog: CatalogWatch = field(init=False)
    latest: LatestWatch = field(init=False)
    latest_floor: Order | None = None
    """The order that `latest` durably has, by the reports."""

    def __post_init__(self) -> None:
        self._catalog = CatalogWatch(self.root)
        self.latest = LatestWatch(self.root, self.refused)

    # --- what the job reports ----------------------------------------------------------------------------------

    def save_called(self, key: Key, rank: int, contents: Contents) -> None:
        self.saved[key, rank] = contents

    def learned(self, key: Key, outcome: Outcome, who: str) -> None:
        """`who` acts on `outcome`: from here on it must be durable and the only one."""
        known = self.outcomes.setdefault(key, outcome)
        both_abort = known.outcome == outcome.outcome == "abort"
        if known != outcome and not (both_abort and key in self.forgotten):
            name = "one-outcome" if known.outcome == outcome.outcome else "ranks-agree"
            raise InvariantError(name, f"{who} learned {outcome.outcome} of {_shown(key)}, others {known.outcome}")

    def report(self, violation: Exception) -> None:
        """Record that the run is broken. The caller continues, and the run fails at its next check."""
        self.broken = self.broken or violation

    def ended(self, key: Key, process: str, rank: int, phase: Phase, outcome: Outcome | None) -> None:
        """An attempt ended on one rank's handle. If `outcome` is None, it is in doubt."""
        if outcome is None:
            if phase is Phase.COMMITTED:
                raise InvariantError("ranks-agree", f"{process} reports {_shown(key)} committed without an outcome")
            if not self.excuses(process):
                raise InvariantError("always-ends", f"{process} left {_shown(key)} in doubt, and nothing hindered it")
            return
        if (phase is Phase.COMMITTED) != (outcome.outcome == "commit"):
            raise InvariantError(
                "ranks-agree", f"{process} reports {phase} for {_shown(key)}, whose outcome is {outcome.outcome}"
            )
        self.learned(key, outcome, process)
        if phase is Phase.COMMITTED and rank == 0 and outcome.save_latest and not self.excuses(process):
            self.latest_stands(outcome.order, process)

    def _alive(self) -> list[str]:
        return self.root.storage.alive()

    @property
    def _now(self) -> float:
        return self.root.storage.loop.time()

    def excuses(self, process: str) -> bool:
        """Whether `process` is excused for missing work, so that only the work that it reports as done counts."""
        return self.hindered or process in self.refused

    def latest_stands(self, order: Order, who: str) -> None:
        """`who` relies on `latest` being at `order` or beyond, durably, but for the time until it is given back."""
        if fault := self.latest.fault_of_debts(who, order):
            raise InvariantError("latest-forward", fault)
        if not self.latest.stands(order):
            raise InvariantError("latest-forward", f"{who} reports order {order}, but latest stands at {self.latest.order()}")
        self.latest_floor = max(self.latest_floor or order, order)

    def start_began(self, process: str, now: float, *, take_over: bool) -> None:
        """`process` begins to look for other jobs at the root."""
        self._starting[process] = now, take_over

    def job_began(self, process: str, name: str, start: int, seconds: float, lease_s: float) -> None:
        """`process` has taken `start`, `seconds` after `start_began`."""
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

    def recovery_returned(self, start: int) -> None:
        """The recovery of `start` has returned, and no fault excuses its process for missing work."""
        self.recovered = max(self.recovered, start)

    def loaded(self, rank: int, outcome: Outcome, contents: Contents) -> None:
        """A rank loaded an attempt at its start."""
        key = (outcome.tag, outcome.attempt)
        self.whole(key, rank, contents)
        known = self.outcomes.get(key)
        if known is not None and known.outcome != "commit":
            raise InvariantError("aborted-never-loaded", f"rank {rank} loaded {_shown(key)}")

    def whole(self, key: Key, rank: int, contents: Contents) -> None:
        """The tensors read from an attempt must equal the saved ones."""
        if contents != self.saved.get((key, rank)):
            raise InvariantError("latest-whole", f"rank {rank} of {_shown(key)} loads other bytes than were saved")

    # --- what the storage shows --------------------------------------------------------------------------------

    def watch(self, effect: Effect) -> None:
        """Called after every effect that succeeded."""
        if effect.process in self.readers:
            raise InvariantError("reads-only", f"{effect.process} did {effect.kind} on {effect.path}")
        change = self.root.change(effect)
        if change is None:
            return
        self._recovery_acts(change)
        if fault := self._catalog.fault_after(change):
            raise InvariantError("catalog-tells", fault)
        process, what, key = change
        if what == "removed" and key.startswith(f"{PLANS}/"):
            self._plan_removed(key, process)
        elif what == "made" and key.endswith(".vote"):
            self._vote_put(key, process)
        elif what == "given up" and self._may_commit(holder_of(key)):
            raise InvariantError("uploads-stand", f"{process} aborted the upload of {key}, whose attempt may be committed")
        if key.endswith(f"/{OUTCOME}"):
            self._outcome_touched(change)
        elif key.startswith(f"{SERVICE}/starts/"):
            self._start_touched(change)
        elif key.endswith(f"/{LEASE}"):
            self._lease_touched(change)
        elif key == LATEST and what in ("made", "replaced"):
            self._latest_moved(process)
        elif (what, key) == ("synced", ""):
            self.latest.synced()

    def _outcome_touched(self, change: ObjectChange) -> None:
        process, what, key = change
        if what == "removed" and self._was_all(key):
            return
        if what in ("replaced", "removed", "written"):
            raise InvariantError("one-outcome", f"{process}: {key} was {what}")
        if what != "made":
            return
        outcome = outcome_in(self.root.settled(key), key)
        if outcome is not None:
            self._put[key] = outcome
        if outcome is not None and outcome.outcome == "commit":
            self.latest.committed(outcome)
        start = AttemptId.parse(outcome.attempt) if outcome else None
        by_rank = outcome is not None and outcome.decided_by != RECOVERY
        if outcome and outcome.outcome == "abort" and not by_rank:
            self._check_outlived(f"{outcome.tag}/{outcome.attempt}", process)
        if outcome and start and by_rank and outcome.outcome == "commit" and start.start < self.recovered:
            if self._survives_in.get(f"{outcome.tag}/{outcome.attempt}", 0) < self.recovered:
                raise InvariantError("fenced", f"{process} committed {key} after start {self.recovered} had recovered")
            self.surviving_commits += 1

    def _was_all(self, key: str) -> bool:
        """Whether the outcome at `key`, which has just been removed, was an abort, and the last object of its attempt. Notes
        that the attempt is forgotten.
        """
        put = self._put.get(key)
        if put is None or (put.outcome == "commit" and (put.tag, put.attempt) not in self.forgotten):
            return False
        self.forgotten.add((put.tag, put.attempt))
        return not any(name.endswith((".vote", ".index")) for name in self.root.names(key.rpartition("/")[0]))

    def _plan_removed(self, key: str, process: str) -> None:
        for attempt, votes in self._named.items():
            if key in votes and self._may_commit(attempt):
                raise InvariantError("plan-stands", f"{process} removed {key}, which a vote of {attempt} names")

    def _vote_put(self, key: str, process: str) -> None:
        try:
            vote = decode(self.root.visible(key) or b"", Vote, key)
        except FormatError:
            return
        if vote.vote != "yes":
            return
        plan = key_named_by(vote)
        self._named.setdefault(vote.prefix, set()).add(plan)
        if self._may_commit(vote.prefix) and self.root.visible(plan) is None:
            raise InvariantError("plan-stands", f"{process} voted for {vote.prefix} with the plan {plan}, which is gone")

    def _may_commit(self, attempt: str) -> bool:
        """Whether the coordinator of `attempt` may still commit it: it has no outcome, and no newer start fences it."""
        parsed = AttemptId.parse(attempt.rpartition("/")[2])
        runs = parsed is not None and parsed.start >= self._newest_start
        runs = runs or self._survives_in.get(attempt, 0) >= self._newest_start
        return runs and self.root.visible(f"{attempt}/{OUTCOME}") is None

    def _lease_touched(self, change: ObjectChange) -> None:
        prefix = change.key.removesuffix(f"/{LEASE}")
        if change.what == "removed":
            self._at_work.pop(prefix, None)
        elif change.what in ("made", "replaced"):
            before = self._at_work.get(prefix)
            same = before is not None and before[0] == change.process
            self._at_work[prefix] = before if before and same else (change.process, self._now)

    def _check_outlived(self, prefix: str, process: str) -> None:
        """The recovering `process` has aborted the attempt `prefix`."""
        worker, since = self._at_work.get(prefix, ("", 0.0))
        began, _ = self._starting.get(process, (0.0, False))
        since = max(since, self._catalog.announced_at(prefix))
        attempt = AttemptId.parse(prefix.rpartition("/")[2])
        if attempt is not None and self._survives_in.get(prefix, attempt.start) < self._start_before:
            return  # an older start has fenced it
        if worker in self._alive() and since < began and not self.excuses(worker) and not self.excuses(process):
            raise InvariantError("outlived", f"{process} aborted {prefix}, at which {worker} was at work")

    def _check_left_alone(self, start: Start, process: str) -> None:
        """`process` has taken `start`. This can fence only the job of the start before, which has fenced all older ones."""
        _, take_over = self._starting.get(process, (0.0, False))
        for other, (name, number) in self._living.items():
            is_newest = number == self._newest_start
            same = other == process or (name and name == start.job)
            if is_newest and not same and not take_over and other in self._alive() and not self.excuses(other):
                raise InvariantError("left-alone", f"{process} took start {start.start}, and {other} is alive in {number}")

    def _start_touched(self, change: ObjectChange) -> None:
        process, what, key = change
        if what == "removed" and start_of(key.rpartition("/")[2]) == self._newest_start:
            raise InvariantError("starts-grow", f"{process} removed {key}, the newest start")
        if what != "made":
            return
        start = decode(self.root.visible(key) or b"", Start, key)
        if start.start > self._newest_start:  # one that comes late is fenced from its beginning, and fences nobody
            self._check_left_alone(start, process)
            self._newest_start, self._start_before = start.start, self._newest_start
        self._survives_in.update(dict.fromkeys(start.surviving, start.start))

    def _recovery_acts(self, change: ObjectChange) -> None:
        process, what, key = change
        surviving = self._recovering.get(process)
        if not surviving or what not in ("made", "removed"):
            return
        attempt, _, name = key.rpartition("/")
        writer = name.rpartition(".")[0]
        foreign = attempt == TEMPORARY and writer != process and writer in self._alive()
        if attempt in surviving or foreign:
            raise InvariantError("surviving", f"during its recovery by {process}, {key} was {what}")

    def _latest_moved(self, process: str) -> None:
        if self.latest.order() is None:
            raise InvariantError("latest-whole", f"{process} moved latest to a tag without a durable commit")
        if fault := self.latest.fault_of_move(process):
            raise InvariantError("latest-forward", fault)
        if self.root.is_durable_at_once:
            self.latest.synced()

    def at_rest(self) -> None:
        """Every living process has come to its end."""
        if fault := self.latest.fault_of_debts():
            raise InvariantError("latest-forward", fault)

    def after_power_cut(self) -> None:
        """After a power cut, the storage must hold everything that was reported."""
        self.latest.look()
        floor = self.latest_floor
        if floor is not None and not self.latest.stands(floor):
            raise InvariantError("latest-forward", f"latest came back at {self.latest.order()}; it was reported at {floor}")

    # --- the end -----------------------------------------------------------------------------------------------

    def check_kept(self, now: Mapping[Key, Outcome | None], replaced: set[Key]) -> None:
        """`now` has the outcome of every attempt at the root, `replaced` the attempts that are marked as removed."""
        newest: dict[str, Order] = defaultdict(lambda: (-1, -1))
        for (tag, _), outcome in now.items():
            if outcome is not None and outcome.outcome == "commit":
                newest[tag] = max(newest[tag], outcome.order)
        for key, known in self.outcomes.items():
            found = now.get(key)
            if known.outcome == "abort":
                if found != known and not (key in self.forgotten and (found is None or found.outcome == "abort")):
                    raise InvariantError("one-outcome", f"{_shown(key)} was aborted and is {found and found.outcome} now")
            elif key in replaced:
                if max(newest.values() if self.retires else [newest[key[0]]], default=known.order) <= known.order:
                    raise InvariantError("nothing-lost", f"{_shown(key)} was removed, and nothing newer replaced it")
            elif found != known:
                raise InvariantError("nothing-lost", f"{_shown(key)} was committed and is {found and found.outcome} now")


def _shown(key: Key) -> str:
    return "/".join(key)
