"""State that all connections of a daemon share: roots, save jobs, the memory tier, known ranks, and limits."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

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
from checkpointd.daemon.status.model import CheckpointStatus, PastSave, SaveStatus, SpaceStatus
from checkpointd.daemon.status.tally import Tally, took
from checkpointd.errors import CheckpointdError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.read.readback import BackgroundReadBack
from checkpointd.store.posix.users import User

log = logging.getLogger("checkpointd")

COMMITS_KEPT = 64
INLINE_KEPT = 4096
FORGET_S = 86_400.0
"""So long what is known of a root stays after its last trainer has left."""
REASONS = {"SidecarFullError": "full", "UsageError": "request", "WireError": "protocol", "ClosedError": "leaving"}
"""Why something is refused, by the error's class: no room, not allowed or not possible, not the protocol, the daemon leaves."""
OTHER = "other"
TRAINERS_SAID = 64
"""So many trainers of a user that come, close or go are said in the log each minute."""
INLINE_SAID = 256
"""So many inline saves of a user are said in the log each minute."""
RANKS_KEPT = 4096
"""Ranks that are remembered; beyond that, the daemon forgets the rank that has been gone for longest."""


@dataclass(eq=False, slots=True)
class RankRecord:
    """One rank at one root, through all its incarnations on this node."""

    root: str
    rank: int
    world_size: int
    pid: int
    user: User | None = None
    """With whose rights the daemon works for it; None: its own."""
    epoch: int | None = None
    begun: tuple[int, str] = (0, "")
    """The newest epoch that it began, with its nonce."""
    since: float = field(default_factory=time.time)
    _connected: Counter[int] = field(default_factory=Counter, init=False)
    """Its connections, by user."""
    gone_at: float | None = None
    """When the last connection ended; None while there is one."""
    left_well: bool = False
    """Its trainer said that it ends."""
    tally: Tally = field(default_factory=Tally)
    commit_s: list[float] = field(default_factory=list)
    """On the coordinator: from save() to the commit, the newest last."""

    @property
    def connections(self) -> int:
        return self._connected.total()

    def run_by(self, pid: int, world_size: int) -> None:
        """Process `pid` is its trainer now."""
        if (self.pid, self.world_size) != (pid, world_size):
            self.pid, self.world_size, self.since, self.epoch = pid, world_size, time.time(), None

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
    """What a root held when it was last looked at."""

    latest: str | None = None
    newest_step: int | None = None
    newest_committed_at: float | None = None
    checkpoints: tuple[CheckpointStatus, ...] = ()
    history: tuple[PastSave, ...] = ()
    space: SpaceStatus | None = None
    problem: ErrorReport | None = None


class Hub:
    """One daemon's state; everything on one loop, so nothing here locks."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.names = {os.path.realpath(root): name for root, name in config.names.items()}
        self.roots = ServedRoots(config.roots, config.bandwidth_bps, uids=config.uids)
        self.jobs = SaveJobs()
        self.memory = SlotMappings()
        self.account = Account(config.memory_bytes_max)
        """Everything that clients make this daemon hold."""
        self._accounts: dict[int, Account] = {}
        self.turns = LoopTurns()
        self.said = Rationed(log)
        self.tier = Tier(config.held_bytes_max)
        self.started_at = time.time()
        self.clients = 0
        """Connections of ranks, which `clients_max` bounds."""
        self.refusals = dict.fromkeys((*REASONS.values(), OTHER), 0)
        self.leaving = False
        self.root_scans: dict[str, RootScan] = {}
        self.looking_at: set[str] = set()
        self.not_looked_after: Sequence[str] = ()
        """The roots that are too many to be looked after."""
        self.on_news: Callable[[str], None] = lambda _: None
        """Called with a root that a client joined, or where a save ended."""
        self.on_remade: Callable[[str], None] = lambda _: None
        """Called with a root that was removed and made again: what was seen there is another one's."""
        self.readers: weakref.WeakValueDictionary[tuple[str, int, User | None], BackgroundReadBack] = (
            weakref.WeakValueDictionary()
        )
        """What reads back in the background, by root, rank and user. It goes on after the rank's trainer has left, until all is
        read, and is the next trainer's, too: the saves of that one pause it."""
        self.tallies: dict[str, Tally] = {}
        """Of all ranks that this daemon knew at a root, also of those that are forgotten."""
        self._ranks: dict[tuple[str, int], RankRecord] = {}
        self._inline: OrderedDict[JobKey, None] = OrderedDict()
        """The saves that were counted as persisted by their trainers."""

    @property
    def refused(self) -> int:
        """Connections and requests refused since the start."""
        return sum(self.refusals.values())

    def refuse(self, error: CheckpointdError) -> None:
        """Count a connection or a request that is refused with `error`."""
        self.refusals[REASONS.get(error.code, OTHER)] += 1

    def account_of(self, uid: int) -> Account:
        """What a user makes this daemon hold."""
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

    def rank(self, root: str, rank: int, *, world_size: int, pid: int, user: User | None = None) -> RankRecord:
        """The record of a rank that `pid` of `user` joins as. What it says of a connected trainer stays: whether the new one
        takes its place shows when it begins its epoch.
        """
        record = self._ranks.get((root, rank))
        if record is None:
            self._forget_ranks()
            record = self._ranks[(root, rank)] = RankRecord(root, rank, world_size, pid)
            self.tallies.setdefault(root, Tally())
            self.on_news(root)
        if not record.connections or record.epoch is None:
            record.run_by(pid, world_size)
        record.user = user
        return record

    def came(self, record: RankRecord, peer: Peer) -> None:
        """A trainer has joined. What its task logs from here on is about its rank."""
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
        """The roots that a connected rank, a save in flight or a look needs."""
        return set(self._joined_roots()) | {job.root for job in self.jobs.all()} | self.looking_at

    def _joined_roots(self) -> list[str]:
        return [record.root for record in self._ranks.values() if record.connections]

    def ranks_at(self, root: str) -> list[RankRecord]:
        return sorted((r for r in self._ranks.values() if r.root == root), key=lambda r: r.rank)

    def users_at(self, root: str) -> list[User | None]:
        """With whose rights the daemon works for the ranks at a root, for who came last at the end."""
        return [record.user for record in sorted(self.ranks_at(root), key=lambda record: record.since)]

    def known_roots(self) -> list[str]:
        """Every root that a client joined, or that this daemon looked at."""
        return sorted({root for root, _ in self._ranks} | self.jobs.roots() | self.root_scans.keys())

    def roots_by_use(self) -> list[str]:
        """The roots that clients joined: those that are in use first, then those that were joined last."""
        joined = sorted(self._ranks.values(), key=lambda record: record.since, reverse=True)
        in_use = [*self._joined_roots(), *(job.root for job in self.jobs.all())]
        return list(dict.fromkeys([*in_use, *(record.root for record in joined)]))

    def begun(self, record: RankRecord, epoch: int, nonce: str, removed: Collection[str] = ()) -> None:
        """A client began an epoch. `removed`: the nonces of epochs whose root was removed, and this one made in its place.

        Its process may have the number that the one before had: in a container both are 1, or 0 as this daemon sees them.
        """
        known = record.begun[1]
        if known and known != nonce:
            record.since = time.time()
        if known in removed:
            self.on_remade(record.root)
        record.epoch, record.begun = epoch, (epoch, nonce)

    def changed(self, job: SaveJob) -> None:
        """A job entered a phase: counters, and the phase of its snapshot in the tier."""
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
        """A save of a rank held training for so long."""
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
        if self.jobs.live(key) is None and self.jobs.ended(key) is None:  # else it is counted where it ends, or ended, here
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
        """Whether nothing can be learned of this save from the store: it is known who persisted it."""
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
                self.on_remade(root)  # a root that is removed and made again meanwhile would not be told from this one

    def __iter__(self) -> Iterator[RankRecord]:
        return iter(self._ranks.values())
