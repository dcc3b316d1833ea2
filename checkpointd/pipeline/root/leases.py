"""Leases: they show others that a job or a daemon is at work at a root or an attempt.

A job's lease lies at `.checkpointd/leases/<start>`. Rank 0 puts it before the record of the start, renews it until the job is
closed, and then removes it. The lease of an attempt lies at `.checkpointd/leases/attempts/`. A daemon that may outlive the
trainer puts it, on behalf of the attempt's coordinator, once the snapshot is whole, and removes it when the attempt is decided.

Invariants
  LEASE-1  Leases decide only how long a start waits and which attempts it leaves alone. Commits depend on starts and on
      put-if-absent, so a lease that is lost, late or wrong costs a wait, or the save in flight.
  LEASE-2  Clocks of different machines are never compared. A process that looks at a lease watches its count for the lease's
      length, on its own monotonic clock. It does not wait for a process that the kernel knows to have ended.
  LEASE-3  A job puts its lease before the record of its start, so a process that sees the record also sees the lease.
  LEASE-4  A look at a lease ends at the first renewal, when the lease or its process is gone, or when it has stayed the same
      for its length while the storage answered; in any case after twice that length, and then its holder counts as alive.
  LEASE-5  A job begins beside a living job only if both have the same name, or if the user says that it takes over the root. A
      process that mirrors to the root begins beside none, whatever its name. A start that can read the lease no more fails.
  LEASE-6  A lease counts as gone only if its name is not listed either, so a stale directory entry makes no holder look dead.
  LEASE-7  A renewal that fails is logged and tried again; it ends no save. If somebody removes a lease, its holder puts it
      again only while it still matters: the job's start is the newest, or the attempt is undecided. A holder puts no lease at
      another root, and removes no lease of another process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError
from checkpointd.layout.keys import ATTEMPT_LEASES, LEASES, attempt_lease_key, is_attempt, job_lease_key, start_of
from checkpointd.layout.log_records import BeginRef, LogState, Record
from checkpointd.layout.manifest import Lease, decode, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.workers import answered
from checkpointd.store.base import Store, each
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.store.writers import Life, is_this_process, life_of, new_writer
from checkpointd.system_errors import lasts

log = logging.getLogger("checkpointd")

LENGTH_S = 30.0
RENEWALS = 3
"""The number of renewals within a lease's length."""
LOOKS = 30
"""The number of looks within a lease's length by a process that watches it."""
LOOK_S_MAX = 0.5
RUNNING_LENGTHS = 4
ANSWER_S = 10.0
"""How long a process that ends waits for the removal of its lease, and how long a listed lease may be unreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The process that looks: its unique name, a function that tells whether another process lives, and its leases' length."""

    process: str = field(default_factory=lambda: new_writer())
    life: Callable[[str], Life] = life_of
    length_s: float = field(default_factory=lambda: LENGTH_S)


# --- one's own ---------------------------------------------------------------------------------------------------


class HeldLease:
    """A lease of this process. `counts` says whether the lease still matters after somebody has removed it. `check` raises if
    the lease must not be put now.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        lease: Lease,
        counts: Callable[[], Awaitable[bool]],
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.key, self.lease = key, lease
        self._store, self._counts, self._check = store, counts, check
        self._over, self._putting = asyncio.Event(), asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the lease is renewed."""
        return self._task is not None and not self._task.done()

    async def change(self, lease: Lease) -> None:
        """Put the lease with the content of `lease` now, and renew it from now on. Raises StoreError."""
        self.lease = msgspec.structs.replace(lease, count=self.lease.count)
        await self._put()
        if not self.is_kept:  # it may have been removed with the root, which is there again
            self._task = None
            self.keep(is_put=True)

    def keep(self, *, is_put: bool = False) -> None:
        """Put and renew the lease from now on, in a task of this loop. `is_put`: the lease exists already."""
        if self._task is None and not self._over.is_set():
            self._task = asyncio.get_running_loop().create_task(self._keep_on(is_put))

    def lapse(self) -> None:
        """Renew the lease no more, and leave it there: the next process of this node takes the work up before it ends."""
        self._over.set()

    async def release(self) -> None:
        """Remove the lease if it was kept, so that nobody waits for this process any more. Raises nothing."""
        self._over.set()  # the task is not cancelled: a cancelled put may still take place after the removal
        if self._task is None:
            return
        try:
            await answered(self._remove(), ANSWER_S)
        except CheckpointdError as error:
            log.warning(
                "%s cannot be removed (%s): processes on other machines count its holder as running for up to %g s",
                self.key,
                error,
                self.lease.length_s,
            )

    async def _remove(self) -> None:
        assert self._task is not None
        await self._task
        with suppress(NotFoundError):  # and whoever has put its own lease there since keeps that
            if decode(await self._store.get(self.key), type(self.lease), self.key).process == self.lease.process:
                await self._store.delete(self.key)

    async def _keep_on(self, is_put: bool) -> None:
        said, was_there = "", is_put
        while True:
            if is_put:
                await self._pause()
            if self._over.is_set():
                return
            try:
                if was_there and await self._store.stat(self.key) is None and not await self._counts():
                    log.info("%s was removed by another process, and is not renewed any more", self.key)
                    return
                await self._put()
                is_put, was_there, said = True, True, ""
            except CheckpointdError as error:
                if str(error) != said:
                    log.warning("%s cannot be renewed: %s; trying again", self.key, error)
                is_put, said = True, str(error)

    async def _put(self) -> None:
        if self._check is not None:
            await self._check()
        async with self._putting:  # so that no older content comes after a newer one
            self.lease = msgspec.structs.replace(self.lease, count=self.lease.count + 1)
            await self._store.put(self.key, encode(self.lease))

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self.lease.length_s / RENEWALS):
                await self._over.wait()
        except TimeoutError:
            return


def of_attempt(
    store: Store, prefix: str, sight: Sight | None = None, check: Callable[[], Awaitable[None]] | None = None
) -> HeldLease:
    """A lease of the attempt `prefix` (`<tag>/<attempt>`), not put yet, for a process that may outlive the trainer."""

    async def counts() -> bool:
        return not await _is_decided(store, prefix)

    return HeldLease(store, attempt_lease_key(prefix), _new(sight or Sight(), ""), counts, check)


def _new(sight: Sight, job: str) -> Lease:
    return Lease(process=sight.process, job=job, count=0, length_s=sight.length_s, writer=writer())


async def _is_decided(store: Store, prefix: str) -> bool:
    """Whether the attempt is decided. One that was not announced is not."""
    known = (await RootLog.of(store).look()).attempts.get(prefix)
    return known is not None and known.status != "undecided"


# --- others' -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watch:
    """A lease that another process may hold, and the time since which its bytes are the same (seconds of the loop's clock)."""

    store: Store
    key: str
    sight: Sight
    lease: Lease | None = None
    """The lease as it was last read; None if there is none, or if its bytes are damaged."""
    since: float = 0.0
    _data: bytes | None = None
    _looked: float | None = None

    async def look(self) -> bool:
        """Read the lease, and say whether it was renewed since the look before. Raises StoreError if the storage fails.

        If there was no look for half of the lease's length, the time begins anew: what kept this process from looking, such as
        storage that did not answer, may have kept the holder from renewing.
        """
        data, before = await self._read(), self._data
        now = asyncio.get_running_loop().time()
        if data != before:
            self._data, self.lease = data, _understood(data, self.key)
            self.since = now
        elif self._looked is not None and now - self._looked >= self.length_s / 2:
            self.since = now
        self._looked = now
        return before is not None and data != before and self.lease is not None

    @property
    def data(self) -> bytes | None:
        """The bytes of the lease as they were last read; None if there was none."""
        return self._data

    @property
    def length_s(self) -> float:
        """How long the lease must stay the same before its holder counts as gone."""
        return self.lease.length_s if self.lease is not None else LENGTH_S

    def has_ended(self) -> bool:
        """Whether nobody holds the lease, by the last look."""
        if self._data is None or (self.lease is not None and self.sight.life(self.lease.process) == "ended"):
            return True
        return asyncio.get_running_loop().time() - self.since >= self.length_s

    def is_of_running(self) -> bool:
        """Whether the kernel knows that the lease's holder runs."""
        return self.lease is not None and self.sight.life(self.lease.process) == "running"

    def is_abandoned(self) -> bool:
        """Whether nobody holds the lease, by the last look, as far as this process can tell. A holder that runs on this machine
        is believed for RUNNING_LENGTHS: its storage may be slow, or the lease may be left over.
        """
        idle_s = asyncio.get_running_loop().time() - self.since
        return self.has_ended() and (not self.is_of_running() or idle_s >= RUNNING_LENGTHS * self.length_s)

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look."""
        left = self.since + self.length_s - asyncio.get_running_loop().time()
        return max(0.0, min(self.length_s / LOOKS, LOOK_S_MAX, left))

    async def _read(self) -> bytes | None:
        try:
            return await PatientStore(self.store, Patience(ANSWER_S, absence_s=0.0)).get(self.key)
        except NotFoundError:
            return None


def _understood(data: bytes | None, key: str) -> Lease | None:
    try:
        return None if data is None else decode(data, Lease, key)
    except DamagedError as error:
        log.warning("%s; it counts for as long as it is renewed", error)
        return None


async def _seen_alive(watch: Watch, about: str) -> Lease | None:
    """The lease of `watch`, which was looked at once, if its holder renews it. Takes at most the lease's length, and as long
    again if the storage did not answer meanwhile (LEASE-4). Raises StoreError if it can be read no more by then, or if no wait
    can help, since the holder may renew it all the same.
    """
    if watch.has_ended():
        return None
    loop = asyncio.get_running_loop()
    until = loop.time() + watch.length_s
    log.warning("%s may be at work at %s: watching its lease for up to %g s", _named(watch.lease), about, watch.length_s)
    while True:
        await asyncio.sleep(watch.pause_s)
        try:
            if await watch.look():
                return watch.lease
        except StoreError as error:
            if lasts(error) or loop.time() >= until:
                raise
            log.warning("%s cannot be looked at: %s; trying again", watch.key, error)
            continue
        if watch.has_ended():
            return None
        if loop.time() >= until + watch.length_s:
            return watch.lease  # the storage is too slow to tell


def _named(lease: Lease | None) -> str:
    if lease is None:
        return "a process whose lease cannot be read"
    return f"process {lease.writer.pid} on {lease.writer.host}"


async def attempts_at_work(store: Store, sight: Sight, known: Collection[str] = ()) -> tuple[str, ...]:
    """The undecided attempts (`<tag>/<attempt>`) at which a living process works, without the `known` ones.

    Takes at most a lease's length. What daemons have announced meanwhile counts, too, without another wait.
    """
    found = [prefix for prefix in await leased(store) if prefix not in known]
    held = await asyncio.gather(*(_works_at(store, prefix, sight) for prefix in found))
    at_work = [prefix for prefix, works in zip(found, held, strict=True) if works]
    later = [prefix for prefix in await leased(store) if prefix not in (*known, *found)] if found else []
    return (*at_work, *[prefix for prefix in later if await worker_of(store, prefix, sight) is not None])


async def _works_at(store: Store, prefix: str, sight: Sight) -> bool:
    """Whether somebody works at an attempt. A process that runs on this machine counts as at work, without a wait."""
    watch = Watch(store, attempt_lease_key(prefix), sight)
    await watch.look()
    if watch.is_of_running():
        return True
    return await _seen_alive(watch, prefix) is not None


async def leased(store: Store) -> list[str]:
    """The undecided attempts with a lease, announced or not, whether its holder lives or not."""
    tags = [entry.name for entry in await store.list(ATTEMPT_LEASES) if entry.is_prefix]
    names = await each(lambda tag: store.list(f"{ATTEMPT_LEASES}/{tag}"), tags)
    found = [f"{tag}/{entry.name}" for tag, entries in zip(tags, names, strict=True) for entry in entries]
    attempts = (await RootLog.of(store).look()).attempts if found else {}
    return [one for one in found if is_attempt(one) and (one not in attempts or attempts[one].status == "undecided")]


async def worker_of(store: Store, prefix: str, sight: Sight) -> Lease | None:
    """The lease of an attempt, unless its holder is known to have ended. Does not wait."""
    watch = Watch(store, attempt_lease_key(prefix), sight)
    await watch.look()
    return None if watch.has_ended() else watch.lease


async def living_job(store: Store, job: str, sight: Sight) -> Lease | None:
    """The lease of a living job that is not `job`; None if there is none. Takes at most a lease's length."""
    newest = await starts.newest(store)
    keys = [job_lease_key(number) for number in await job_numbers(store) if number >= newest]
    found = await asyncio.gather(*(_stranger(store, key, job, sight) for key in keys))
    return next((lease for lease in found if lease is not None), None)


async def _stranger(store: Store, key: str, job: str, sight: Sight) -> Lease | None:
    watch = Watch(store, key, sight)
    await watch.look()
    lease = watch.lease
    if lease is not None and (is_this_process(lease.process) or (job and lease.job == job)):
        return None
    return await _seen_alive(watch, store.url)


async def job_numbers(store: Store) -> list[int]:
    """The starts with a job's lease."""
    return [number for entry in await store.list(LEASES) if (number := start_of(entry.name)) is not None]


# --- beginning ---------------------------------------------------------------------------------------------------


def anything(_: LogState) -> None:
    """Admit any state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginner:
    """A job, or a mirror, that wants to start. `job`: its name, or empty. `instead`: what its user can do instead, in words."""

    world_size: int
    job: str = ""
    take_over: bool = False
    alone: bool = False
    """Whether it is refused beside a living process of the same name, too."""
    commit_timeout_s: float = 0.0
    surviving: tuple[str, ...] = ()
    """Attempts at which its own daemon works."""
    origin: str = ""
    """Of a mirror: the id of the root that it follows."""
    origin_begin: BeginRef = (0, "")
    """Of a mirror: the newest start of that root. Its own is newer."""
    admits: Callable[[LogState], None] = anything
    """Raises if it may not begin after this state."""
    instead: str = ""
    then: tuple[Record, ...] = ()
    """Records that its entry has after the begin."""
    sight: Sight = field(default_factory=Sight)


async def refusing(store: Store, beginner: Beginner) -> Lease | None:
    """The lease of a living job beside which `beginner` may not begin (LEASE-5); None if it may."""
    if beginner.take_over:
        return None
    return await living_job(store, "" if beginner.alone else beginner.job, beginner.sight)


def of_job(store: Store, number: int, beginner: Beginner) -> HeldLease:
    """The lease of the job that takes start `number`, not put yet."""

    async def counts() -> bool:
        await check_root()
        return await starts.newest(store) == number

    check_root = RootLog.of(store).check_root  # after an unmount, the lease is renewed again when the root is back
    return HeldLease(store, job_lease_key(number), _new(beginner.sight, beginner.job), counts, check_root)


async def drop_older(store: Store, number: int) -> None:
    """Remove the leases of older starts, which mean nothing any more."""
    try:
        for old in await job_numbers(store):
            if old < number:
                await store.delete(job_lease_key(old))
    except StoreError as error:
        log.warning("leases of ended jobs at %s cannot be removed: %s", store.url, error)


def refusal(store: Store, lease: Lease, instead: str) -> str:
    """The message of RootInUseError: who holds `lease`, and what to do."""
    who, named = lease.writer, f"job {lease.job!r}" if lease.job else "a job without a name"
    return (
        f"{store.url} is in use: process {who.pid} on {who.host} runs {named} there since {who.time}, and is alive. {instead}"
    )
