"""The catalog's log at a root: reads its newest summary and the records after it, adds records, and puts summaries.

Records that are added together lie in one object, a batch.

Invariants
  CATALOG-1  A writer puts no object but a lease into an attempt before a durable record announces the attempt. So the catalog
      names every attempt that has other objects.
  CATALOG-2  The close of an attempt is put only after its outcome is durable.
  CATALOG-3  A batch is put if absent at the next number, so of two writers one takes the number after it. A writer that finds
      a summary of its batch's number or a later one puts the batch again, since that summary may have been made without it.
  CATALOG-4  A summary has the state after all batches up to its number. What a summary covers is removed only when a later
      summary is durable.
  CATALOG-5  The outcome and the marks of an attempt are the truth, and may be newer than the catalog. Whoever loads an attempt,
      removes it, or removes another one because of it, looks at its own objects first.
  CATALOG-6  A batch or summary that is damaged or missing hides nothing: the attempts' directories are read instead, and the
      next start makes the catalog again. It takes over every attempt that was announced before.
  CATALOG-7  Only an intent adds an attempt, and no close ends a removal. So a process that was stopped and puts a record late
      brings nothing back. Only a start forgets what somebody removed by hand: tags of which every attempt is decided, and of
      which the root and their own directory show nothing. If that was wrong, as on a file server that lags behind, the tag is
      one that the catalog does not name, so its directory is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakKeyDictionary

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError, UnreadableError
from checkpointd.layout.catalog_records import (
    CATALOG,
    SUMMARY_BYTES_MAX,
    CatalogEntry,
    CatalogRecord,
    CatalogState,
    Kind,
    RecordBatch,
    batch_key,
    batches,
    close_of,
    decode_batch,
    encode_batch,
    encode_summary,
    numbers,
    summary_key,
)
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.manifest import VERSION, Outcome
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.workers import uncollected
from checkpointd.store.base import Store, each

log = logging.getLogger("checkpointd")

SUMMARY_EVERY = 256
"""A summary follows this many batches."""
COMPACT_EVERY = 4
"""A writer looks after this many of its closes whether a summary is due, and removes what is covered."""
REMOVED_MAX = 32
"""A process removes at most this many objects at once, so that nobody waits long for it."""
LOOKS = 3
"""How many times to look for a batch that is missing: a summary may have covered it between the listing and the read."""
READS = 16
RACES_MAX = 10_000
WATCHED_MAX = 64
"""The number of newest batches in which a rank looks for the announcement of its attempt."""


@dataclass(slots=True, eq=False)
class CatalogLog:
    """The catalog of `store` as one process knows it. It reads what is new only."""

    store: Store
    state: CatalogState = field(default_factory=CatalogState)
    fault: str = ""
    """Why the catalog cannot be relied on; empty if it can (CATALOG-6)."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closed: int = 0
    """The closes that this process has added."""

    async def refresh(self) -> None:
        """Read what came since the last call. What is wrong goes into `fault`; nothing is raised for it."""
        async with self._turn:
            for _ in range(LOOKS):
                try:
                    self.fault = await self._look()
                except CheckpointdError as error:
                    self.fault = str(error)
                if not self.fault:
                    return
        log.error("the catalog of %s cannot be used, so all directories are read: %s", self.store.url, self.fault)

    async def _look(self) -> str:
        summaries, there = await _listed(self.store)
        newest = max([*summaries[-1:], *there[-1:]], default=0)
        if newest < self.state.number:
            self.state = CatalogState()  # somebody has removed the catalog, or put another one in its place
        if summaries and summaries[-1] > self.state.number:
            self.state = await self._summary(summaries)
        wanted = range(self.state.number + 1, newest + 1)
        for batch in await each(self._read, wanted, READS):
            if any(record.kind == "rebuilt" for record in batch.records):
                return f"it was being made again, and that was not finished; see {batch_key(batch.number)}"
            self.state.apply(batch)
        return ""

    async def _summary(self, summaries: list[int]) -> CatalogState:
        """The newest summary that is whole. Before the first one, the state is empty."""
        for number in reversed(summaries):
            key = summary_key(number)
            try:
                data = await self.store.get(key, size_max=SUMMARY_BYTES_MAX)
                return uncollected(partial(CatalogState.read, data, number))
            except DamagedError as error:
                log.error("%s; the summary before it and the records after that one are read", error)
        return CatalogState()

    async def _read(self, number: int) -> RecordBatch:
        try:
            return decode_batch(await self.store.get(batch_key(number)), number)
        except NotFoundError as error:
            raise UnreadableError(f"{batch_key(number)} is missing, although the catalog goes on after it") from error

    async def append(self, *records: CatalogRecord) -> None:
        """Add `records`, durably (CATALOG-3). Those of several calls that meet are added by the first of them, in one batch: if
        hundreds of attempts end at once, each would otherwise try hundreds of numbers that others of this process take.
        """
        if records:
            await _Adder.of(self.store).add(records, self._append)

    async def _append(self, records: Sequence[CatalogRecord]) -> None:
        first = await self._put(records)
        while (await _listed(self.store))[0][-1:] >= [first]:
            first = await self._put(records)

    async def _put(self, records: Sequence[CatalogRecord]) -> int:
        """Put `records` at the next free numbers. Returns the first number."""
        summaries, taken = await _listed(self.store)
        number = max([*summaries[-1:], *taken[-1:]], default=0)
        first = 0
        for batch in batches(records):
            for _ in range(RACES_MAX):
                number += 1
                data = encode_batch(RecordBatch(version=VERSION, number=number, writer=writer(), records=batch))
                if await self.store.put_if_absent(batch_key(number), data):
                    break
            first = first or number
        return first

    async def compact(self, *, every: int | None = None) -> None:
        """If `every` batches came since the last summary, put one of the state that this process knows. Remove some of what the
        summary before it covers (CATALOG-4).
        """
        summaries, there = await _listed(self.store)
        covered, number = max(summaries, default=0), self.state.number
        if self.fault:
            return
        if number - covered >= (SUMMARY_EVERY if every is None else every):
            await self.store.put_if_absent(summary_key(number), encode_summary(self.state))
        elif len(summaries) > 1:
            covered = summaries[-2]
        else:
            return
        old = [batch_key(n) for n in there if n <= covered] + [summary_key(n) for n in summaries if n < covered]
        if old and covered in summaries[:-1]:
            await self.store.settle(summary_key(summaries[-1]))  # whoever puts it may die before it is durable
        for key in old[:REMOVED_MAX]:
            await self.store.delete(key, durable=False)  # if one comes back, it is covered as before

    async def decided(self, outcome: Outcome, check_root: Callable[[], Awaitable[None]]) -> None:
        """Add the close of an attempt, as `note_outcome`, and now and then keep the catalog small. Does nothing if `check_root`
        raises: the root may have gone since the outcome was put (OWNROOT-1). Raises no CheckpointdError.
        """
        try:
            await check_root()
            await self.append(close_of(outcome))
            self._closed += 1
            if self._closed % COMPACT_EVERY == 1:
                await self.refresh()
                await self.compact()
        except CheckpointdError as error:
            log.warning("the catalog of %s cannot be continued: %s; the next start mends it", self.store.url, error)

    async def begin_again(self) -> int:
        """Put the record that all batches before it, as far as they can be read, are about to be replaced by a summary of its
        number (see `end_again`). Returns that number.
        """
        return await self._put([record_of("rebuilt")])

    async def announced_before(self, number: int) -> dict[str, CatalogEntry]:
        """The undecided attempts that the batches before `number` announce, as far as these are there and whole."""
        state = CatalogState()
        for old in (await _listed(self.store))[1]:
            if old < number:
                with suppress(NotFoundError, DamagedError):
                    state.apply(decode_batch(await self.store.get(batch_key(old)), old))
        return {prefix: entry for prefix, entry in state.entries.items() if not entry.is_decided}

    async def end_again(self, number: int, entries: Mapping[str, CatalogEntry]) -> None:
        """Put the summary `number`, after `begin_again`."""
        state = CatalogState(number, dict(entries))
        if not await self.store.put_if_absent(summary_key(number), encode_summary(state)):
            raise StoreError(f"{summary_key(number)} at {self.store.url} is there already: another process makes the catalog")
        self.state, self.fault = state, ""


@dataclass(slots=True, eq=False)
class _Addition:
    """The records of one call, and whether they are durable."""

    records: tuple[CatalogRecord, ...]
    is_done: bool = False


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Adder:
    """The additions to the catalog that wait at one store of this process."""

    _waiting: list[_Addition] = field(default_factory=list)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @staticmethod
    def of(store: Store) -> _Adder:
        return _ADDERS.setdefault(store, _Adder())

    async def add(
        self, records: tuple[CatalogRecord, ...], append: Callable[[Sequence[CatalogRecord]], Awaitable[None]]
    ) -> None:
        """Return when `records` are durable. If adding fails, each call tries its own, and raises its own error."""
        own = _Addition(records)
        self._waiting.append(own)
        try:
            async with self._turn:
                if own.is_done:
                    return
                together = [own] if own not in self._waiting else self._waiting[:]
                self._waiting = [one for one in self._waiting if one not in together]
                await append([record for one in together for record in one.records])
                for one in together:
                    one.is_done = True
        finally:
            if own in self._waiting:
                self._waiting.remove(own)


_ADDERS: WeakKeyDictionary[Store, _Adder] = WeakKeyDictionary()


async def _listed(store: Store) -> tuple[list[int], list[int]]:
    return numbers(entry.name for entry in await store.list(CATALOG) if not entry.is_prefix)


# --- records --------------------------------------------------------------------------------------------------------


def record_of(
    kind: Kind,
    tag: str = "",
    attempt: AttemptId | str = "",
    *,
    n: int = 0,
    step: int = -1,
    reason: str = "",
    kept: Iterable[str] = (),
) -> CatalogRecord:
    return CatalogRecord(
        kind=kind,
        tag=tag,
        attempt=str(attempt),
        n=n,
        step=step,
        reason=reason,
        kept=tuple(kept),
    )


async def note(store: Store, *records: CatalogRecord) -> None:
    """Add `records` of what is durable already. A failure is logged only, since whoever comes next finds out by itself
    (CATALOG-5).
    """
    try:
        await CatalogLog(store).append(*records)
    except StoreError as error:
        log.warning("the catalog of %s cannot be continued: %s; the next start mends it", store.url, error)


async def note_outcome(store: Store, outcome: Outcome) -> None:
    """Add the close of an attempt whose `outcome` is durable (CATALOG-2)."""
    await note(store, close_of(outcome))


@dataclass(slots=True, eq=False)
class AnnouncementWatch:
    """Looks for the announcements of attempts at the end of the catalog, one open file a look."""

    store: Store
    _next: int | None = None
    _seen: set[str] = field(default_factory=set)
    """The attempts of the last batch that was looked for."""
    _misses: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def has_announced(self, prefix: str) -> bool:
        """Whether a durable record announces the attempt `prefix` (`<tag>/<attempt>`), as far as this look shows."""
        async with self._turn:  # of two attempts that look at once, one would skip a batch
            if prefix not in self._seen:
                await self._look(prefix)
            return prefix in self._seen

    async def _look(self, prefix: str) -> None:
        # A summary may cover the next batch before this process sees it, so now and then it lists the names.
        if self._next is None or self._misses >= READS:
            _, there = await _listed(self.store)
            newest = there[-1] if there else 0
            wanted = max(self._next or 1, newest - WATCHED_MAX)
            self._next = next((number for number in there if number >= wanted), newest + 1)
            self._misses = 0
        while prefix not in self._seen:
            try:
                batch = decode_batch(await self.store.get(batch_key(self._next)), self._next)
            except NotFoundError:
                self._misses += 1
                return
            except DamagedError:
                self._next += 1
                continue
            named = {record.prefix for record in batch.records}
            if prefix in named:
                await self.store.settle(batch_key(self._next))  # its writer may die before it is durable
                self._seen = named
            self._next += 1
