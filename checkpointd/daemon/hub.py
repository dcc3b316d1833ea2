"""What all connections of a daemon share: roots, jobs, the memory tier, what is known of each rank, and the bounds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from checkpointd.commit.machine import FENCED, FINAL, Phase
from checkpointd.config import ServeConfig
from checkpointd.daemon.histogram import Durations
from checkpointd.daemon.jobs import Job, Jobs
from checkpointd.daemon.memory import Memory
from checkpointd.daemon.roots import Roots
from checkpointd.daemon.status import CheckpointStatus
from checkpointd.daemon.tier import Tier
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.readback import Reader

COMMITS_KEPT = 64
RANKS_KEPT = 4096
"""Ranks that are remembered; those that are gone for longest are forgotten."""


@dataclass(eq=False, slots=True)
class RankRecord:
    """One rank at one root, through all its incarnations on this node."""

    root: str
    rank: int
    world_size: int
    pid: int
    epoch: int | None = None
    begun: tuple[int, str] = (0, "")
    """The newest epoch that it began, with its nonce."""
    since: float = field(default_factory=time.time)
    connections: int = 0
    committed: int = 0
    failed: int = 0
    """Every save that ended without a commit; `aborted`, `fenced` and `skipped` are among them."""
    aborted: int = 0
    fenced: int = 0
    """A newer epoch had begun; not among those aborted."""
    skipped: int = 0
    stale: int = 0
    """Of those committed: the step had moved on, and nothing that is trained had changed."""
    bytes_persisted: int = 0
    bytes_stored: int = 0
    stall_s: float = 0.0
    commit_s: list[float] = field(default_factory=list)
    """On the coordinator: from save() to the commit, the newest last."""
    commits: Durations = field(default_factory=Durations)
    """The same of all commits since the daemon began."""

    def ended(self, job: Job) -> None:
        """Count a save that came to its end."""
        if job.phase is not Phase.COMMITTED:
            self.failed += 1
            is_fenced = job.shown == FENCED
            self.fenced += is_fenced
            self.aborted += job.phase is Phase.ABORTED and not is_fenced
            self.skipped += job.phase is Phase.SKIPPED
            return
        self.committed += 1
        self.stale += job.progress.stale
        if self.rank == 0 and job.times.ended is not None:
            seconds = max(0.0, job.times.ended - job.times.began)
            self.commit_s = [*self.commit_s[-COMMITS_KEPT + 1 :], seconds]
            self.commits.add(seconds)

    def persisted(self, job: Job) -> None:
        """Count the bytes of a shard whose vote is durable."""
        self.bytes_persisted += job.progress.raw_done
        self.bytes_stored += job.progress.stored


@dataclass(frozen=True, slots=True)
class Look:
    """What a root held when it was last looked at."""

    latest: str | None = None
    newest_step: int | None = None
    newest_committed_at: float | None = None
    checkpoints: tuple[CheckpointStatus, ...] = ()
    problem: ErrorReport | None = None


class Hub:
    """One daemon's state; everything on one loop, so nothing here locks."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.roots = Roots(config.roots, config.bandwidth_bps)
        self.jobs = Jobs()
        self.memory = Memory(config.memory_bytes_max)
        self.account = self.memory.account
        self.tier = Tier(config.held_bytes_max)
        self.started_at = time.time()
        self.clients = 0
        self.refused = 0
        self.leaving = False
        self.looks: dict[str, Look] = {}
        self.looking_at: set[str] = set()
        self.on_news: Callable[[str], None] = lambda _: None
        """Called with a root that a client joined, or where a save ended."""
        self.on_remade: Callable[[str], None] = lambda _: None
        """Called with a root that was removed and made again: what was seen there is another one's."""
        self.readers: weakref.WeakValueDictionary[tuple[str, int], Reader] = weakref.WeakValueDictionary()
        """What reads back in the background, by root and rank. It goes on after the rank's trainer has left, until all is read,
        and is the next trainer's, too: the saves of that one pause it."""
        self._ranks: dict[tuple[str, int], RankRecord] = {}

    def rank(self, root: str, rank: int, *, world_size: int, pid: int) -> RankRecord:
        """The record of a rank, which `pid` runs now."""
        record = self._ranks.get((root, rank))
        if record is None:
            self._forget_ranks()
            record = self._ranks[(root, rank)] = RankRecord(root, rank, world_size, pid)
            self.on_news(root)
        if record.pid != pid or record.world_size != world_size:
            record.pid, record.world_size, record.since, record.epoch = pid, world_size, time.time(), None
        return record

    def _forget_ranks(self) -> None:
        """Make room for one more rank. Those that are connected stay, and `clients_max` bounds them."""
        if len(self._ranks) >= RANKS_KEPT:
            idle = next((key for key, record in self._ranks.items() if not record.connections), None)
            if idle is not None:
                del self._ranks[idle]

    def roots_in_use(self) -> set[str]:
        """The roots that a connected rank, a save in flight or a look needs."""
        return set(self._joined_roots()) | {job.root for job in self.jobs.all()} | self.looking_at

    def _joined_roots(self) -> list[str]:
        return [record.root for record in self._ranks.values() if record.connections]

    def ranks_at(self, root: str) -> list[RankRecord]:
        return sorted((r for r in self._ranks.values() if r.root == root), key=lambda r: r.rank)

    def known_roots(self) -> list[str]:
        """Every root that a client joined, or that this daemon looked at."""
        return sorted({root for root, _ in self._ranks} | self.jobs.roots() | self.looks.keys())

    def roots_by_use(self) -> list[str]:
        """The roots that clients joined: those that are in use first, then those that were joined last."""
        joined = sorted(self._ranks.values(), key=lambda record: record.since, reverse=True)
        in_use = [*self._joined_roots(), *(job.root for job in self.jobs.all())]
        return list(dict.fromkeys([*in_use, *(record.root for record in joined)]))

    def begun(self, record: RankRecord, epoch: int, nonce: str) -> None:
        """A client began an epoch. Where that is not newer than one of another nonce, the root was removed and made again."""
        before, known = record.begun
        if known and known != nonce and epoch <= before:
            self.on_remade(record.root)
        record.epoch, record.begun = epoch, (epoch, nonce)

    def changed(self, job: Job) -> None:
        """A job entered a phase: counters, and the phase of its snapshot in the tier."""
        record = self._ranks.get((job.root, job.info.rank))
        if record is not None:
            if job.phase is Phase.PREPARED:
                record.persisted(job)
            if job.phase in FINAL:
                record.ended(job)
        if job.phase in FINAL:
            self.on_news(job.root)
        kept = self.tier.of(job.root, job.info.rank)
        if kept is not None and (kept.info, kept.nonce) == (job.info, job.nonce):
            kept.phase = str(job.phase)

    def __iter__(self) -> Iterator[RankRecord]:
        return iter(self._ranks.values())
