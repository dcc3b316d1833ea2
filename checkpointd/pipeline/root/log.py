"""The log of a root, over any store. `commit/log_access.py` decides what to do next; this does it.

Invariant
  LOG-11  Only a start makes a log again: one that cannot be read to its end, or that is older than the objects at its root.
      It puts a mark far above every number in use; nothing that is put below the mark counts from then on. Then it reads what
      is readable, looks at the objects, and puts the state of the mark's number, in which a start has begun that fences all
      others. What was undecided where entries are missing is judged by its objects, whichever starts have begun since.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar
from weakref import WeakMethod

from checkpointd.commands import command
from checkpointd.commit import log_access as steps
from checkpointd.commit.log import apply, check_all, reached, rebuilt
from checkpointd.commit.log_access import (
    ABSENT,
    NOTHING,
    Ended,
    KnownLog,
    LogAccess,
    Missing,
    Rebuild,
    Reply,
    Request,
    Unusable,
    Wanted,
)
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, RootGoneError, StoreError, UnreadableError
from checkpointd.layout.keys import LOG
from checkpointd.layout.log_records import (
    ENTRY_BYTES_MAX,
    STATE_BYTES_MAX,
    LogEntry,
    LogListing,
    LogState,
    Record,
    decode_entry,
    decode_state,
    encode_entry,
    encode_state,
    entry_key,
    mark_key,
    state_key,
)
from checkpointd.layout.manifest import is_of_another_version
from checkpointd.pipeline.root_id import OwnId
from checkpointd.pipeline.workers import uncollected
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

T = TypeVar("T")
CheckJob: TypeAlias = Callable[[], Awaitable[bool]]

LARGE_STATE = 1 << 20
"""A state of more bytes is decoded on a thread."""
FOLLOWS_IN_VAIN = 32
"""After so many follows that found no next entry, the log is listed."""
_KEPT_AS = "_root_log"
"""The attribute of a store in which its log is kept."""


def new_nonce() -> str:
    """A nonce for an entry or a start."""
    return secrets.token_hex(16)


@dataclass(slots=True, eq=False)
class _Part:
    """What one caller wants to append."""

    wanted: Wanted
    is_done: bool = False
    put: bool = False
    """Whether its records are in the entry that was put."""


@dataclass(slots=True, eq=False)
class RootLog:
    """The log of the root at `store`, as this process knows it. It reads what is new only.

    A process that has begun a job at the root says so with `belongs_to`. Without a job, the root is the one whose log was read
    last (LOG-12).
    """

    store: Store
    fault: str = ""
    """Why the log could not be read to its end at the last look; empty if it could."""
    _known: KnownLog = field(default_factory=KnownLog)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _parts: list[_Part] = field(default_factory=list)
    _own: OwnId = field(init=False)
    """The root whose log is known, once its id was seen."""
    _in_vain: int = 0
    """How many times in a row `follow` has found nothing."""
    _follows: int = 0
    """How many reads `follow` has begun."""
    _ended_at: int = 0
    """The number of the newest of these reads that has ended in vain."""
    _failure: StoreError | None = None
    """Why that one was in vain, if the storage failed."""
    _listing: LogListing = NOTHING
    """The last list."""
    _job: WeakMethod[CheckJob] | None = None

    def __post_init__(self) -> None:
        self._own = OwnId(self.store)

    def belongs_to(self, check_job: CheckJob | None) -> None:
        """Let the bound method `check_job` say whether this process has begun a job at the root, and raise RootGoneError if the
        path leads to another root now. It counts as long as its object lives, which this does not keep alive.
        """
        self._job = None if check_job is None else WeakMethod(check_job)

    async def _check_job(self) -> bool:
        check_job = None if self._job is None else self._job()
        return check_job is not None and await check_job()

    @staticmethod
    def of(store: Store) -> RootLog:
        """The log at `store`, one for each store of this process, which goes with the store."""
        kept = vars(store)
        if _KEPT_AS not in kept:
            kept[_KEPT_AS] = RootLog(store)
        found: RootLog = kept[_KEPT_AS]
        return found

    @property
    def state(self) -> LogState:
        """The state after the last entry that this process has read."""
        return self._known.state

    @property
    def root_id(self) -> str:
        """The id of the root, as this process saw it; empty if it has not."""
        return self._own.own

    # --- reading ------------------------------------------------------------------------------------------------------

    async def look(self, *, settles: bool = False, whole: bool = True) -> LogState:
        """Read the log to its end, and return the state there. If another root lies there since the last look, that one is
        read, unless this process has begun a job. `settles`: make durable what was read, for a caller that acts on it. Without
        `whole`, what was decided before `goes_on_from` may be missing. If the log is damaged, the state is what can be proved,
        and `fault` says so. Raises UnreadableError if the storage does not tell, RootGoneError if the job's root is not there,
        FormatError if another release wrote the log.
        """
        async with self._turn:
            await self._see_root()
            read = self.state.number
            if whole and not self._known.is_whole:
                self._known = KnownLog()
            await self._look(settles=settles)
            if self.state.number < read and not self.fault:  # the list was old, and what follows was read already
                self._took(await self._run(steps.follow(self._known, lambda state: state.number >= read)))
            return self.state

    async def _look(self, *, settles: bool) -> LogState:
        ended = await self._run(steps.look(self._known, settles=settles))
        if (ended.fault or self._listing.last < ended.known.state.number) and not await self._is_there(ended.known.state):
            ended = await self._anew(ended, settles=settles)
        self._took(ended)
        return self.state

    async def _is_there(self, state: LogState) -> bool:
        """Whether the entry of this state, or the state itself, is there. If it is, and was not listed, the list was old."""
        if not state.number:
            return True
        (entry,) = await self._entries((state.number,))
        if isinstance(entry, LogEntry):
            return entry.nonce == state.nonce
        found = await self._state(state.number)
        return isinstance(found, LogState) and found.nonce == state.nonce

    async def _anew(self, ended: Ended, *, settles: bool) -> Ended:
        """Read the log from its newest state, since it is not the one any more in which the known state was read."""
        anew, known = await self._run(steps.look(KnownLog(), settles=settles)), ended.known.state
        if anew.fault:
            return replace(ended, fault=ended.fault or anew.fault)
        if {one.nonce for one in known.begins}.isdisjoint(one.nonce for one in anew.known.state.begins):
            if anew.known.state.number:
                log.warning("another root lies at %s now; its log is read", self.store.url)
            else:
                log.warning("the log of %s is not there any more", self.store.url)
            return anew
        why = "somebody has removed the newest entries, or put an older copy of the log in its place"
        return replace(anew, fault=f"{entry_key(known.number)} was there, and is not any more: {why}")

    async def _see_root(self) -> None:
        """Forget the log of a root that is not there any more."""
        if await self._check_job():
            return
        try:
            found = await self._own.replaced()
        except (NotFoundError, DamagedError):
            return
        if found is not None:
            if self._own.own:
                log.info("%s is another root now", self.store.url)
                self._known = KnownLog()
            self._own = found

    async def check_root(self) -> None:
        """Raise RootGoneError if the path leads to another root than the one whose log is known (LOG-12)."""
        if not await self._check_job() and self._own.own:
            await self._own.check()

    async def follow(self, until: Callable[[LogState], bool]) -> bool:
        """Read the entries that have come, in few calls. Returns whether the state is as `until` asks, which is then proved and
        durable. Raises UnreadableError if the storage does not tell, or if the log cannot be read to its end.

        The next entry may have been removed since, if others have put hundreds. So after FOLLOWS_IN_VAIN calls in vain this
        lists the log. Callers that meet are served by one read: hundreds may wait for what becomes of their attempts.
        """
        asked = self._follows
        async with self._turn:
            if self._ended_at > asked and not until(self.state):  # a read that began after this call has found nothing more
                if self._failure is not None:
                    raise self._failure.with_traceback(None)
                return False
            self._follows += 1
            try:
                found = await self._follow(until)
            except StoreError as error:
                self._ended_at, self._failure = self._follows, error
                raise
            if not found:
                self._ended_at, self._failure = self._follows, None
            return found

    async def _follow(self, until: Callable[[LogState], bool]) -> bool:
        before = self.state.number
        ended = await self._run(steps.follow(self._known, until))
        self._took(ended)
        self._in_vain = 0 if ended.is_proved or self.state.number > before else self._in_vain + 1
        if self._in_vain == FOLLOWS_IN_VAIN:  # the log may go on elsewhere: it was made again, or this has slept for long
            self._in_vain = 0
            await self._look(settles=True)
        if self.fault:
            raise UnreadableError(self.unreadable)
        return until(self.state)  # if so, a list has proved it

    @property
    def ends_early(self) -> str:
        """Why the log cannot be read to its end, in words; empty if it can."""
        return f"the log of {self.store.url} cannot be read to its end: {self.fault}" if self.fault else ""

    @property
    def unreadable(self) -> str:
        """The same, with what to do."""
        return f"{self.ends_early}. The next start makes it again, or: {command('recover', self.store.url)}"

    async def goes_on_from(self, state: LogState) -> bool:
        """Follow the log from `state`, which another process has read, and which lacks what was decided before. Returns whether
        its last entry is there as that process saw it. If not, or if this process has read the log, nothing changes.
        """
        async with self._turn:
            reply = await self._do(steps.GetEntries((state.number,)))
            is_there = isinstance(reply, tuple) and isinstance(reply[0], LogEntry) and reply[0].nonce == state.nonce
            if is_there and not self.state.number:
                self._known = KnownLog(state, is_whole=False)
            return is_there

    # --- appending ----------------------------------------------------------------------------------------------------

    async def add(self, *records: Record) -> str:
        """Append `records` together, unless the log has already what they are put for. Returns why they were refused, as of
        the state that is known then; empty if the log has them. Raises as `append`.
        """
        part = await self._appended(lambda state: [one for one in records if not reached(state, one)])
        left = [] if part.put else [one for one in records if not reached(self.state, one)]
        refused = check_all(self.state, left)
        if refused and not self._known.is_whole:
            await self.look()
            return await self.add(*records)
        return refused

    async def append(self, wanted: Wanted) -> LogState:
        """Append the records that `wanted` gives for the state at the end of the log, if they are valid there. It is asked
        again whenever somebody else was faster. Returns the state afterwards, which is proved and durable.

        Callers that meet are served by one entry, or on slow storage they would wait for each other for longer than a save may
        take. Raises StoreError if the storage fails: the records may be there or not, so ask again. Raises UnreadableError if
        the log cannot be read to its end, RootGoneError if the root is another one.
        """
        await self._appended(wanted)
        return self.state

    async def _appended(self, wanted: Wanted) -> _Part:
        part = _Part(wanted)
        self._parts.append(part)
        try:
            async with self._turn:
                if not part.is_done:
                    await self._append([part, *(one for one in self._parts if one is not part and not one.is_done)])
            return part
        finally:
            self._parts.remove(part)

    async def _append(self, parts: Sequence[_Part]) -> None:
        if not self.state.number:
            await self._see_root()
        if self.fault:
            await self._look(settles=False)
            if self.fault:  # what is put might fill a gap
                raise UnreadableError(self.unreadable)
        ended = await self._run(steps.append(self._known, partial(_together, parts), new_nonce()))
        if not ended.put:
            await self.check_root()  # or another root's log has refused the records, or has them
        self._took(ended)
        if ended.fault:
            raise UnreadableError(self.unreadable)
        for part in parts:
            part.is_done = True
            part.put = part.put and ended.put

    async def compact(self) -> None:
        """If a state is due, put it, and remove what older states cover (LOG-6). Only logs what goes wrong."""
        async with self._turn:
            due, self._known = self._known.due, self._known.with_due(None)
            machine = None if due is None else steps.Compaction(due)
            try:
                while machine is not None:
                    machine = machine.after(await self._do(machine.request))
            except CheckpointdError as error:
                log.warning(
                    "old entries of the log of %s cannot be removed: %s; a later save tries again", self.store.url, error
                )

    # --- rebuilds -----------------------------------------------------------------------------------------------------

    async def rebuild(
        self, decide: Callable[[LogState], Awaitable[Sequence[Record]]], older: LogState | None = None
    ) -> LogState:
        """Make the log again (LOG-11), if it cannot be read to its end, or still ends with the state `older`. `decide`: what
        the objects show beyond a state, and the begin of a start. Returns the state afterwards, which is another's if somebody
        else was faster.
        """
        async with self._turn:
            await self._look(settles=False)
            if not self.fault and (older is None or self.state.number != older.number):
                return self.state
            found = Rebuild(seen=max(self._listing.states, default=0))
            while not found.is_done:
                found = found.after(await self._do(found.request))
            if not found.is_done_by_others:
                made = rebuilt(found.state, found.number, new_nonce(), await decide(found.state))
                await self._do(steps.PutState(made))
            self._known = KnownLog()
            return await self._look(settles=True)

    # --- operations of the store ----------------------------------------------------------------------------------------

    async def _run(self, access: LogAccess) -> Ended:
        failures, step = 0, access
        while True:
            request = step.request
            try:
                reply = await self._do(request)
            except StoreError as error:
                # The put may have had its effect; another try shows whether it cannot have one.
                failures += 1
                was_sent = isinstance(request, steps.PutEntry) and not isinstance(error, UnreadableError | RootGoneError)
                if not was_sent or failures > 1:
                    self._known = step.known  # the next call goes on from there
                    raise
                reply = False
            after = step.after(reply)
            if isinstance(after, Ended):
                return after
            step = after

    async def _do(self, request: Request) -> Reply:
        match request:
            case steps.ListLog():
                names = [entry.name for entry in await self.store.list(LOG) if not entry.is_prefix]
                self._listing = LogListing.of(names)
                return self._listing
            case steps.GetEntries(numbers):
                return await self._entries(numbers)
            case steps.GetState(number):
                return await self._state(number)
            case steps.PutEntry(entry):
                await self.check_root()
                return await self.store.put_if_absent(entry_key(entry.number), encode_entry(entry))
            case steps.PutState(state):
                await self.check_root()
                return await self.store.put_if_absent(state_key(state.number), await _aside(partial(encode_state, state)))
            case steps.PutMark(number):
                await self.check_root()
                return await self.store.put_if_absent(mark_key(number), b"")
            case steps.Settle(number):
                await self._settle(number)
            case steps.RemoveStates(numbers):
                await self._remove([state_key(number) for number in numbers])
            case steps.RemoveEntries(numbers):
                await self._remove([entry_key(number) for number in numbers])
        return True

    async def _entries(self, numbers: Sequence[int]) -> tuple[steps.Got, ...]:
        found = await self.store.get_each([entry_key(number) for number in numbers], size_max=ENTRY_BYTES_MAX)
        return tuple(map(_entry, found, numbers))

    async def _state(self, number: int) -> LogState | Missing | Unusable:
        data = b""
        try:
            data = await self.store.get(state_key(number), size_max=STATE_BYTES_MAX)
            return await _aside(partial(uncollected, partial(decode_state, data, number)), len(data))
        except NotFoundError:
            return ABSENT
        except DamagedError as error:
            if is_of_another_version(data):
                raise
            log.error("%s; the state before it and the entries after that one are read", error)
            return Unusable(error)

    async def _settle(self, number: int) -> None:
        for key in (entry_key(number), state_key(number)) if self.store.capabilities.can_lose else ():
            with suppress(NotFoundError):
                await self.store.settle(key)
                return

    async def _remove(self, keys: Sequence[str]) -> None:
        if keys:
            await self.check_root()
            await self.store.delete_each(keys)

    def _took(self, ended: Ended) -> None:
        known = ended.known
        if not ended.is_proved and not ended.fault:  # a follow on the same log, so what was due before stays due
            known = known.with_due(self._known.due)
        self._known = known
        is_new, self.fault = ended.fault != self.fault, ended.fault
        if self.fault and is_new:
            log.error("%s", self.unreadable)


def _entry(found: bytes | CheckpointdError, number: int) -> steps.Got:
    try:
        if isinstance(found, CheckpointdError):
            raise found
        return decode_entry(found, number)
    except NotFoundError:
        return ABSENT
    except DamagedError as error:
        if isinstance(found, bytes) and is_of_another_version(found):
            raise  # a rebuild would leave out what a newer release has written
        return Unusable(error)


def _together(parts: Sequence[_Part], state: LogState) -> list[Record]:
    """What `parts` want, one after the other. A part that is refused after those before it is left out."""
    found = list[Record]()
    for part in parts:
        own = part.wanted(state)
        part.put = bool(own) and not check_all(state, own)
        if part.put:
            found += own
            for record in own:
                state = apply(state, record)
    return found


async def _aside(work: Callable[[], T], nbytes: int = LARGE_STATE + 1) -> T:
    if nbytes <= LARGE_STATE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
