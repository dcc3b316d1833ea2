"""State that all connections of a daemon share: roots, save jobs, the memory tier, known ranks, and limits."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from checkpointd.bucket_urls import is_bucket_url
from checkpointd.commit.machine import FINAL, Phase
from checkpointd.config import ServeConfig
from checkpointd.daemon.accounts import Account
from checkpointd.daemon.jobs import EndedSaveJob, JobKey, SaveJob, SaveJobs, ended_fields, ended_inline
from checkpointd.daemon.memory.mapped import SlotMappings
from checkpointd.daemon.memory.tier import Tier
from checkpointd.daemon.process.logs import Rationed, Subject, about, regarding
from checkpointd.daemon.protocol.channel import LoopTurns
from checkpointd.daemon.protocol.peers import Peer
from checkpointd.daemon.served_roots import ServedRoots
from checkpointd.daemon.spool.own import OwnSpool
from checkpointd.daemon.status.model import CheckpointStatus, PastSave, SaveStatus, SpaceStatus, SpoolStatus
from checkpointd.daemon.status.tally import Tally, took
from checkpointd.daemon.tiers.exports import Exports
from checkpointd.daemon.tiers.mirrors import Mirrors
from checkpointd.errors import CheckpointdError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.read.readback import BackgroundReadBack
from checkpointd.store.posix.users import User

log = logging.getLogger("checkpointd")

COMMITS_KEPT = 64
INLINE_KEPT = 4096
FORGET_S = 86_400.0
"""How long the daemon remembers a root after its last trainer has left."""
REASONS = {"SidecarFullError": "full", "UsageError": "request", "WireError": "protocol", "ClosedError": "leaving"}
"""The reasons for refusals in the metrics, by the class of the error."""
OTHER = "other"
TRAINERS_SAID = 64
"""Log messages a minute about trainers of one user that join or leave."""
INLINE_SAID = 256
"""Log messages a minute about inline saves of one user."""
RANKS_KEPT = 4096
"""Ranks that are remembered; beyond that, the daemon forgets the rank that has been gone for longest."""


@dataclass(eq=False, slots=True)
class RankRecord:
    """One rank at one root, through all its trainers on this node."""

    root: str
    rank: int
    world_size: int
    pid: int
    user: User | None = None
    """The user with whose rights the daemon works for it; None: its own."""
    start: int | None = None
    begun: tuple[int, str] = (0, "")
    """The newest start that the rank told of, with its nonce."""
    since: float = field(default_factory=time.time)
    _connected: Counter[int] = field(default_factory=Counter, init=False)
    """The number of its connections, by user."""
    gone_at: float | None = None
    """When the last connection ended; None while there is one."""
    left_well: bool = False
    """Whether its trainer closed its Checkpointer."""
    tally: Tally = field(default_factory=Tally)
    commit_s: list[float] = field(default_factory=list)
    """On the coordinator: seconds from save() to the commit, the newest last."""

    @property
    def connections(self) -> int:
        return self._connected.total()

    def run_by(self, pid: int, world_size: int) -> None:
        """Process `pid` is its trainer now."""
        if (self.pid, self.world_size) != (pid, world_size):
            self.pid, self.world_size, self.since, self.start = pid, world_size, time.time(), None

    def connections_of(self, uid: int) -> int:
        return self._connected[uid]

    def connected(self, uid: int) -> None:
        self._connected[uid] += 1
        self.gone_at, self.left_well = None, False

    def disconnected(self, uid: int) -> None:
        self._connected[uid] -= 1
        if not self.connections:
            self.gone_at = time.time()


@dataclass(frozen=True, slots=True)
class RootScan:
    """The result of a root scan."""

    latest: str | None = None
    newest_step: int | None = None
    newest_committed_at: float | None = None
    checkpoints: tuple[CheckpointStatus, ...] = ()
    history: tuple[PastSave, ...] = ()
    space: SpaceStatus | None = None
    problem: ErrorReport | None = None


class HubSpool(Protocol):
    """The daemon's spool (`node_spool.py`)."""

    async def own(self, root: str, user: User | None, nonce: str, uid: int) -> OwnSpool | None: ...

    def path(self, root: str, user: User | None) -> str: ...

    def status(self) -> SpoolStatus: ...


class Hub:
    """One daemon's state. All of it is used on one loop, so it needs no locks."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.roots = ServedRoots(config.roots, config.bandwidth_bps, uids=config.uids)
        self.names = {
            self.roots.check(root) if is_bucket_url(root) else os.path.realpath(root): name
            for root, name in config.names.items()
        }
        self.jobs = SaveJobs()
        self.memory = SlotMappings()
        self.account = Account(config.memory_bytes_max)
        """The memory that all clients use together."""
        self._accounts: dict[int, Account] = {}
        self.turns = LoopTurns()
        self.said = Rationed(log)
        self.tier = Tier(config.held_bytes_max)
        self.mirrors = Mirrors(config.mirrors)
        self.exports = Exports(config.exports, lambda: any(not job.has_voted for job in self.jobs.all()))
        self.spool: HubSpool | None = None
        self.started_at = time.time()
        self.clients = 0
        """Connections of ranks, which `clients_max` bounds."""
        self.refusals = dict.fromkeys((*REASONS.values(), OTHER), 0)
        self.leaving = False
        self.root_scans: dict[str, RootScan] = {}
        self.looking_at: set[str] = set()
        self.not_looked_after: Sequence[str] = ()
        """The roots beyond those that the daemon can look after."""
        self.on_news: Callable[[str], None] = lambda _: None
        """Called with a root after a client joined it or a save ended there."""
        self.on_remade: Callable[[str], None] = lambda _: None
        """Called with a root that was removed and made again, whose earlier scans no longer count."""
        self.readers: weakref.WeakValueDictionary[tuple[str, int, User | None], BackgroundReadBack] = (
            weakref.WeakValueDictionary()
        )
        """The background readers that read back checkpoints, by root, rank and user. A reader goes on after its trainer has
        left, until all is read, and serves the next trainer, whose saves pause it."""
        self.tidiers: weakref.WeakSet[Tidier] = weakref.WeakSet()
        """Those that remove what saves have replaced. A removal goes on after its saves have ended."""
        self.tallies: dict[str, Tally] = {}
        """By root: counts of all ranks that this daemon knew there, including forgotten ranks."""
        self._ranks: dict[tuple[str, int], RankRecord] = {}
        self._inline: OrderedDict[JobKey, None] = OrderedDict()
        """The inline saves that were counted."""

    @property
    def refused(self) -> int:
        """Connections and requests refused since the daemon started."""
        return sum(self.refusals.values())

    def refuse(self, error: CheckpointdError) -> None:
        """Count a connection or a request that is refused with `error`."""
        self.refusals[REASONS.get(error.code, OTHER)] += 1

    def account_of(self, uid: int) -> Account:
        """The account for the memory that a user's clients use."""
        account = self._accounts.get(uid)
        if account is None:
            account = self._accounts[uid] = Account(
                self.config.user_bytes,
                f"user {uid}",
                "raise memory_bytes_max (--memory-mib)"
                if self.config.user_bytes == self.config.memory_bytes_max
                else "raise user_bytes_max, or memory_bytes_max (--memory-mib)",
                self.account,
            )
        return account

    def _root(self, named: str) -> str:
        return self.roots.check(named) if is_bucket_url(named) else os.path.realpath(named)

    def rank(self, root: str, rank: int, *, world_size: int, pid: int, user: User | None = None) -> RankRecord:
        """The record of a rank that process `pid` of `user` joins as. If another trainer is connected, the record keeps its
        data until the new one has started.
        """
        record = self._ranks.get((root, rank))
        if record is None:
            self._forget_ranks()
            record = self._ranks[(root, rank)] = RankRecord(root, rank, world_size, pid)
            self.tallies.setdefault(root, Tally())
            self.on_news(root)
        if not record.connections or record.start is None:
            record.run_by(pid, world_size)
        record.user = user
        return record

    def came(self, record: RankRecord, peer: Peer) -> None:
        """A trainer has joined. From here on, the log records of this task name its rank."""
        record.connected(peer.uid)
        about(Subject(record.root, record.rank))
        self._say_trainer(logging.INFO, "joined", record, peer)

    def went(self, record: RankRecord, peer: Peer) -> None:
        """A trainer's connection is over."""
        record.disconnected(peer.uid)
        about(Subject(record.root, record.rank))
        if record.connections == 0 and record.left_well:
            self._say_trainer(logging.INFO, "closed its Checkpointer", record, peer)
        elif record.connections == 0 and not self.leaving:
            self._say_trainer(logging.WARNING, "went without closing its Checkpointer", record, peer)

    def _say_trainer(self, level: int, did: str, record: RankRecord, peer: Peer) -> None:
        who = f"rank {record.rank} (process {peer.pid})"
        self.said.say(level, f"a trainer {did}", peer.uid, "%s %s", who, did, most=TRAINERS_SAID)

    def _forget_ranks(self) -> None:
        """Make room for one more rank. Connected ranks stay; `clients_max` bounds them."""
        gone = {key: record.gone_at or 0.0 for key, record in self._ranks.items() if not record.connections}
        if len(self._ranks) >= RANKS_KEPT and gone:
            del self._ranks[min(gone, key=gone.__getitem__)]

    def roots_in_use(self) -> set[str]:
        """The roots with a connected rank, a save in flight or a scan."""
        return set(self._joined_roots()) | {job.root for job in self.jobs.all()} | self.looking_at

    def _joined_roots(self) -> list[str]:
        return [record.root for record in self._ranks.values() if record.connections]

    def ranks_at(self, root: str) -> list[RankRecord]:
        return sorted((r for r in self._ranks.values() if r.root == root), key=lambda r: r.rank)

    def users_at(self, root: str) -> list[User | None]:
        """The users of the ranks at a root, the last to come at the end; None: the daemon's own."""
        return [record.user for record in sorted(self.ranks_at(root), key=lambda record: record.since)]

    def known_roots(self) -> list[str]:
        """Every root that a client joined, or that this daemon scanned."""
        return sorted({root for root, _ in self._ranks} | self.jobs.roots() | self.root_scans.keys())

    def roots_by_use(self) -> list[str]:
        """The roots that clients joined: first those in use, then the others, last joined first."""
        joined = sorted(self._ranks.values(), key=lambda record: record.since, reverse=True)
        in_use = [*self._joined_roots(), *(job.root for job in self.jobs.all())]
        return list(dict.fromkeys([*in_use, *(record.root for record in joined)]))

    def begun(self, record: RankRecord, start: int, nonce: str, removed: Collection[str] = ()) -> None:
        """A client has told of its start. `removed`: the nonces of starts whose root was removed and replaced by this one.

        A new nonce means a new start, although the pid may be the same: in a container it is often 1, or 0 for this daemon.
        """
        known = record.begun[1]
        if known and known != nonce:
            record.since = time.time()
        if known in removed:
            self.on_remade(record.root)
        record.start, record.begun = start, (start, nonce)

    def changed(self, job: SaveJob) -> None:
        """A job entered a phase. Update the counters, and the phase of its retained snapshot."""
        if job.phase is Phase.PREPARED:
            for tally in self._tallies(job.root, job.info.rank):
                tally.persisted(job.progress.raw_done, job.progress.stored)
        if job.phase in FINAL:
            self._ended(job.root, job.status())
            self.on_news(job.root)
        kept = self.tier.of(job.root, job.uid, job.info.rank)
        if kept is not None and (kept.info, kept.nonce) == (job.info, job.nonce):
            kept.phase = str(job.phase)

    def _ended(self, root: str, save: SaveStatus) -> None:
        for tally in self._tallies(root, save.rank):
            tally.ended(save)
        record, took_s = self._ranks.get((root, save.rank)), took(save)
        if record is not None and took_s is not None:
            record.commit_s = [*record.commit_s[-COMMITS_KEPT + 1 :], took_s]

    def _tallies(self, root: str, rank: int) -> list[Tally]:
        record = self._ranks.get((root, rank))
        return [] if record is None else [record.tally, self.tallies[root]]

    def held_up(self, record: RankRecord, seconds: float) -> None:
        """A save of a rank held training for `seconds`."""
        record.tally.stall_s += seconds
        at_root = self.tallies[record.root]
        at_root.stall_s = max(at_root.stall_s, record.tally.stall_s)

    def inlined(self, key: JobKey, save: SaveStatus, *, held_s: float) -> None:
        """Count an inline save, once, although its trainer and its vote may both report it. It held training for `held_s`."""
        if key in self._inline or save.inline is None:
            return
        self._inline[key] = None
        if len(self._inline) > INLINE_KEPT:
            self._inline.popitem(last=False)
        root, tallies = key[0], self._tallies(key[0], save.rank)
        for tally in tallies:
            tally.inline[save.inline.reason] += 1
        if self.jobs.live(key) is None and self.jobs.ended(key) is None:  # otherwise its job counts it
            self.jobs.remember(EndedSaveJob(key, save))
            for tally in tallies:
                tally.persisted(save.raw_done, save.stored)
            if (record := self._ranks.get((root, save.rank))) is not None:
                self.held_up(record, held_s)
            self._ended(root, save)
            self._say_inline(root, save)
        self.on_news(root)

    def _say_inline(self, root: str, save: SaveStatus) -> None:
        record = self._ranks.get((root, save.rank))
        uid = os.geteuid() if record is None or record.user is None else record.user.uid
        with regarding(Subject(root, save.rank, save.tag, save.attempt)):
            words, fields = ended_inline(save), ended_fields(save)
            self.said.say(logging.WARNING, "saves inline", uid, "%s", words, most=INLINE_SAID, fields=fields)

    def is_counted(self, key: JobKey) -> bool:
        """Whether it is known who persisted this save, so its vote need not be read."""
        return key in self._inline or self.jobs.live(key) is not None or self.jobs.ended(key) is not None

    def forget_old(self, now: float) -> None:
        """Forget the ranks, the saves and the counts of roots that no trainer has used for FORGET_S."""
        for root in list(self.tallies):
            ranks = self.ranks_at(root)
            used = any(record.gone_at is None or now - record.gone_at < FORGET_S for record in ranks)
            if not used and not self.jobs.at(root):
                for record in ranks:
                    del self._ranks[(root, record.rank)]
                del self.tallies[root]
                self.jobs.forget(root)
                self.on_remade(root)  # the root may be removed and made again before a trainer joins, and nobody would notice

    def __iter__(self) -> Iterator[RankRecord]:
        return iter(self._ranks.values())
