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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.log_records import BeginRecord, CommitRecord, LoggedAttempt
from checkpointd.pipeline.gc.retire import retire_tag
from checkpointd.pipeline.outcome.publish import Draft, append
from checkpointd.pipeline.outcome.recover import judge
from checkpointd.pipeline.root import leases, starts
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.root_view import AttemptView
from checkpointd.pipeline.root.tag_directories import show
from checkpointd.store import writers
from checkpointd.store.base import Store

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
        self, store: Store, attempts: Sequence[AttemptView], busy: Collection[str], now: float
    ) -> list[LoggedAttempt]:
        """Decide the `attempts` that may be decided at the time `now`; returns the outcomes. `busy`: see INDOUBT-3."""
        self._see(attempts, now)
        if not attempts:
            return []
        newest = await _newest(store)
        waiting = [view for view in attempts if view.prefix not in busy and newest is not None and _may_decide(view, newest)]
        found = [await self._settled(store, view, now) for view in waiting]
        return [outcome for outcome in found if outcome is not None]

    def _see(self, attempts: Iterable[AttemptView], now: float) -> None:
        seen = {view.prefix: dict(view.sizes) for view in attempts}
        for gone in self._known.keys() - seen.keys():
            del self._known[gone]
        for prefix, sizes in seen.items():
            known = self._known.get(prefix)
            if known is None:
                self._known[prefix] = InDoubtAttempt(sizes, now)
            elif known.sizes != sizes:
                known.sizes, known.since = sizes, now

    async def _settled(self, store: Store, view: AttemptView, now: float) -> LoggedAttempt | None:
        doubt = self._known[view.prefix]
        lease = await leases.worker_of(store, view.prefix, Sight())
        if lease is not None and (doubt.renewed is None or doubt.renewed[0] != lease.count):
            doubt.renewed = lease.count, now
        quiet_s = now - doubt.since
        if not view.vote_ranks or quiet_s < self.patience_s:
            draft = None
        else:
            draft = await judge(store, view.tag, view.attempt)
            if isinstance(draft.record, CommitRecord):
                return await _decide(store, draft)
        holder, why = await _holder(store, view)
        # A lease of this process is a leftover, because the attempts of its jobs are `busy`.
        if lease is not None and writers.is_alive(lease.process) and not writers.is_this_process(lease.process):
            why = f"process {lease.writer.pid} on {lease.writer.host} works at it"
        grace_s = max(self.grace_s, holder.commit_timeout_s if holder else 0.0)
        idle_s = min(quiet_s, now - doubt.renewed[1]) if doubt.renewed is not None else quiet_s
        if why is None and idle_s >= grace_s:
            return await _decide(store, draft or await judge(store, view.tag, view.attempt))
        doubt.say(view.prefix, why or f"its job has ended; it is decided when nothing in it has changed for {grace_s:g} s")
        return None


async def _newest(store: Store) -> BeginRecord | None:
    """The newest start's record; None if there is none, or it is damaged. Then nothing is decided."""
    try:
        return await starts.read(store, await starts.newest(store))
    except (NotFoundError, DamagedError):
        return None


def _may_decide(view: AttemptView, newest: BeginRecord) -> bool:
    """Whether the attempt is of the newest start, or surviving. The next recovery decides all others."""
    return view.attempt.start == newest.start or view.prefix in newest.spared


async def _holder(store: Store, view: AttemptView) -> tuple[BeginRecord | None, str | None]:
    """The record of the attempt's start, and the reason why somebody may still vote; None if nobody can."""
    try:
        holder = await starts.read(store, view.attempt.start)
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
    log.warning("%s was left in doubt; %s%s", stands.attempt, done, why)
    if stands.commit is not None:
        await show(store, stands.commit)
        await move_latest(root_log, is_start=True)
    await retire_tag(store, stands.tag, stands.id.start)
    return stands
