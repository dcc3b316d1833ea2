"""Decides attempts in doubt at a root after only the daemon was restarted.

Invariants
  INDOUBT-1  The daemon commits only attempts of the newest start and surviving attempts, and only with a valid yes vote of
      every rank. Any other process would decide the same, and the log takes one decision.
  INDOUBT-2  The daemon aborts an attempt only if, as far as it can tell, nobody can vote any longer: the process that took the
      attempt's start ran on this machine and is dead, no save job here works at it, no other process holds its lease, and
      nothing in it has changed for `grace_s` or for its start's commit time-out, whichever is longer. A renewed lease is a
      change.
  INDOUBT-3  The daemon leaves attempts alone at which one of its save jobs works.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import vote_rank
from checkpointd.layout.log_records import BeginRecord, CommitRecord, LoggedAttempt
from checkpointd.pipeline.gc.retire import retire_tag
from checkpointd.pipeline.outcome.publish import Draft, append
from checkpointd.pipeline.outcome.recover import judge
from checkpointd.pipeline.root import leases, root_view, starts
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.tag_directories import show
from checkpointd.store import writers
from checkpointd.store.base import Store, each

log = logging.getLogger("checkpointd")


@dataclass(slots=True)
class InDoubtAttempt:
    """One attempt in doubt: the sizes of its objects, and when they last changed (loop time)."""

    sizes: dict[str, int]
    since: float
    renewed: tuple[int, float] | None = None
    """The last count seen in its lease, and when it changed."""
    said: str = ""
    """The last log message about it."""

    def say(self, prefix: str, words: str) -> None:
        """Log `words`, unless they are the same as last time."""
        if words != self.said:
            self.said = words
            log.warning("%s is in doubt: %s", prefix, words)


@dataclass(slots=True)
class InDoubtAttempts:
    """Watches the attempts in doubt of one root. Times in seconds.

    `patience_s`: how long an attempt with all its votes is left to its own coordinator. `grace_s`: see INDOUBT-2.
    """

    grace_s: float
    patience_s: float
    _known: dict[str, InDoubtAttempt] = field(default_factory=dict)

    @property
    def any(self) -> bool:
        return bool(self._known)

    async def settle(
        self, store: Store, attempts: Sequence[LoggedAttempt], busy: Collection[str], now: float
    ) -> list[LoggedAttempt]:
        """Decide those of the undecided `attempts` that may be decided at the time `now`; returns them. `busy`: see INDOUBT-3.
        An attempt without objects waits for its first one.
        """
        found = await each(partial(root_view.sizes_of, store), [one.prefix for one in attempts])
        sizes = {one.prefix: there for one, there in zip(attempts, found, strict=True) if there}
        self._see(sizes, now)
        if not sizes:
            return []
        newest = await _newest(store)
        if newest is None:
            return []
        waiting = [one for one in attempts if one.prefix in sizes and one.prefix not in busy and _may_decide(one, newest)]
        settled = [await self._settled(store, one, now) for one in waiting]
        return [one for one in settled if one is not None]

    def _see(self, seen: Mapping[str, dict[str, int]], now: float) -> None:
        for gone in self._known.keys() - seen.keys():
            del self._known[gone]
        for prefix, sizes in seen.items():
            known = self._known.get(prefix)
            if known is None:
                self._known[prefix] = InDoubtAttempt(sizes, now)
            elif known.sizes != sizes:
                known.sizes, known.since = sizes, now

    async def _settled(self, store: Store, one: LoggedAttempt, now: float) -> LoggedAttempt | None:
        doubt = self._known[one.prefix]
        lease = await leases.worker_of(store, one.prefix, Sight())
        if lease is not None and (doubt.renewed is None or doubt.renewed[0] != lease.count):
            doubt.renewed = lease.count, now
        quiet_s = now - doubt.since
        has_votes = any(vote_rank(name) is not None for name in doubt.sizes)
        if not has_votes or quiet_s < self.patience_s:
            draft = None
        else:
            draft = await judge(store, one.tag, one.id)
            if isinstance(draft.record, CommitRecord):
                return await _decide(store, draft)
        holder, why = await _holder(store, one)
        # A lease of this process is a leftover, because the attempts of its jobs are `busy`.
        if lease is not None and writers.is_alive(lease.process) and not writers.is_this_process(lease.process):
            why = f"process {lease.writer.pid} on {lease.writer.host} works at it"
        grace_s = max(self.grace_s, holder.commit_timeout_s if holder else 0.0)
        idle_s = min(quiet_s, now - doubt.renewed[1]) if doubt.renewed is not None else quiet_s
        if why is None and idle_s >= grace_s:
            return await _decide(store, draft or await judge(store, one.tag, one.id))
        doubt.say(one.prefix, why or f"its job has ended; it is decided when nothing in it has changed for {grace_s:g} s")
        return None


async def _newest(store: Store) -> BeginRecord | None:
    """The newest start's record; None if there is none, or it is damaged. Then nothing is decided."""
    try:
        return await starts.read(store, await starts.newest(store))
    except (NotFoundError, DamagedError):
        return None


def _may_decide(one: LoggedAttempt, newest: BeginRecord) -> bool:
    """Whether the attempt is of the newest start, or surviving. The next recovery decides all others."""
    return one.id.start == newest.start or one.prefix in newest.spared


async def _holder(store: Store, one: LoggedAttempt) -> tuple[BeginRecord | None, str | None]:
    """The record of the attempt's start, and the reason why somebody may still vote; None if nobody can."""
    try:
        holder = await starts.read(store, one.id.start)
    except (NotFoundError, DamagedError) as error:
        return None, f"the record of its start cannot be read ({error}), so the next start decides it"
    return holder, _why_wait(holder)


def _why_wait(holder: BeginRecord) -> str | None:
    who = f"process {holder.writer.pid} on {holder.writer.host}"
    if not writers.is_within_sight(holder.process):
        return f"its job ({who}) cannot be seen from here, so its own ranks, or the next start, decide it"
    if writers.is_alive(holder.process):
        return f"its job ({who}) lives, and decides it"
    return None


async def _decide(store: Store, draft: Draft) -> LoggedAttempt:
    """Append the decision of `draft` unless there is one, then act on the one that counts."""
    root_log = RootLog.of(store)
    stands = await append(root_log, draft)
    done, why = ("aborted", f": {stands.abort.error.message}") if stands.abort else ("committed", ": every rank had voted yes")
    log.warning("%s was left in doubt; %s%s", stands.prefix, done, why)
    if stands.committed:
        await show(store, stands.commit)
        await move_latest(root_log, is_start=True)
    await retire_tag(store, stands.tag, stands.id.start)
    return stands
