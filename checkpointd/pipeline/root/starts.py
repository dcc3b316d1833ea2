"""Starts: which start of the job runs at a root, and how older starts learn that they are fenced.

A start is the record `begin` in the root's log (`commit/log.py`). The newest one says which attempts of older starts go on.

Invariants
  START-1  A coordinator of an older start may commit an attempt only if the newest start spares it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from checkpointd.commit.log import check, check_all, fenced_by, may_be_spared
from checkpointd.errors import DamagedError, FencedError, FormatError, NotFoundError, UsageError
from checkpointd.layout.keys import LOG_ROOT, START_MAX, AttemptId
from checkpointd.layout.log_records import AbortRecord, BeginRecord, CommitRecord, LogState, Record
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root.log import RootLog, new_nonce
from checkpointd.pipeline.root_id import made_id
from checkpointd.store.base import Store
from checkpointd.store.identity import identity_of
from checkpointd.store.writers import new_writer


async def newest(store: Store) -> int:
    """The number of the newest start; 0 if no job ever ran here. Raises DamagedError if the log cannot be read to its end."""
    return (await _state(store, whole=False)).start


async def _state(store: Store, *, whole: bool) -> LogState:
    log = RootLog.of(store)
    state = await log.look(whole=whole)
    if log.fault:
        raise DamagedError(log.unreadable)
    return state


async def take(store: Store, world_size: int, surviving: Sequence[str] = (), *, commit_timeout_s: float = 0.0) -> BeginRecord:
    """Take the next start for a job of `world_size` ranks (0: for a recovery without a job), even if another job is alive.

    This fences every older start at the root. Only the attempts `surviving` (`<tag>/<attempt>`), whose writers have outlived
    their trainers, go on. A job calls `starting.begin` instead, which leaves a living job alone.
    """
    while True:
        begun = new(store, await newest(store) + 1, world_size)
        begun = msgspec.structs.replace(begun, spared=tuple(surviving), commit_timeout_s=commit_timeout_s)
        taken = await begin(store, begun)
        if taken is not None:
            return taken


def new(store: Store, number: int, world_size: int = 0) -> BeginRecord:
    """A start of this process, which nobody has taken yet. Raises FormatError if there can be none with this number."""
    if number > START_MAX:
        raise FormatError(f"start {number} has no name: somebody has put start {START_MAX} into {store.url}")
    return BeginRecord(start=number, nonce=new_nonce(), world_size=world_size, process=new_writer(), writer=writer())


async def begin(
    store: Store,
    begun: BeginRecord,
    *,
    decided: Sequence[CommitRecord | AbortRecord] = (),
    then: Sequence[Record] = (),
    seen: int | None = None,
) -> BeginRecord | None:
    """Take the start `begun`, as `take` does, in one entry with what is `decided` of older attempts (LOG-7), and what it does
    `then`. Returns it with what it spares; None if there is a newer one than `seen`, by default than the one before it. Raises
    NotFoundError if the log refuses `then`, and UsageError if the store does not tell names apart.
    """
    newest_seen, refused = begun.start - 1 if seen is None else seen, ""

    def wanted(state: LogState) -> list[Record]:
        nonlocal refused
        refused = ""
        if state.start > newest_seen:
            return []
        still = [one for one in map(partial(_with_start, begun), decided) if not check(state, one)]
        spared = tuple(one for one in begun.spared if may_be_spared(state, one))
        records = [*still, msgspec.structs.replace(begun, spared=spared), *then]
        refused = check_all(state, records) if then else ""
        return [] if refused else records

    await made_id(store)
    await _check_names(store)
    log = RootLog.of(store)
    state = await log.append(wanted)
    if refused:
        raise NotFoundError(f"nothing has changed at {store.url}: {refused}")
    return state.begin if is_taken(state, begun.start, begun.nonce) else None


def _with_start(begun: BeginRecord, decided: CommitRecord | AbortRecord) -> CommitRecord | AbortRecord:
    """`decided`, with the word that the start `begun` ended the attempt, if votes were missing."""
    if isinstance(decided, CommitRecord) or decided.error.phase != "recovery":
        return decided
    return msgspec.structs.replace(decided, error=fenced_by(begun, f": {decided.error.message}"))


async def _check_names(store: Store) -> None:
    """Raise UsageError if names that differ in case are one name at `store`."""
    with suppress(NotFoundError):
        if await identity_of(store, LOG_ROOT.upper()) is not None:
            raise UsageError(
                f"the file system at {store.url} does not tell small letters from capitals, so two tags such as best and Best "
                "would share a directory. Nothing was begun; put the root on a file system, or in a directory, that does"
            )


def is_taken(state: LogState, number: int, nonce: str) -> bool:
    """Whether start `number` with this nonce was taken at the root, as far back as the log tells."""
    return any((one.start, one.nonce) == (number, nonce) for one in state.begins)


async def read(store: Store, number: int) -> BeginRecord:
    """Start `number`. Raises NotFoundError if the log does not tell of it."""
    for whole in (False, True):
        for one in (await _state(store, whole=whole)).begins:
            if one.start == number:
                return one
    raise NotFoundError(f"the log of {store.url} does not tell of start {number}")


async def is_of_root(store: Store, number: int, nonce: str) -> bool:
    """Whether start `number` with `nonce` was taken at this root, and not at a root that was removed since. True if unknown."""
    log = RootLog.of(store)
    state = await log.look()
    oldest = state.begins[0].start if state.begins else 0
    return is_taken(state, number, nonce) or number < oldest or bool(log.fault)


async def check_fence(store: Store, number: int, attempt: str | None = None) -> None:
    """Raise FencedError if there is a newer start than `number` and it does not spare `attempt` (`<tag>/<attempt>`)."""
    refuse_fenced(store, await _state(store, whole=False), number, attempt)


def refuse_fenced(store: Store, state: LogState, number: int, attempt: str | None = None) -> None:
    """The same, as of `state`."""
    if state.begin is not None and state.start > number and attempt not in state.begin.spared:
        raise FencedError(fence_message(store, number, state.begin))


async def unfenced(store: Store, attempts: Collection[str]) -> tuple[str, ...]:
    """Those of `attempts` (`<tag>/<attempt>`) that the newest start has not fenced: they are of it, or it spares them."""
    state = await RootLog.of(store).look()
    return tuple(one for one in attempts if may_be_spared(state, one))


async def check_not_over(store: Store, number: int) -> None:
    """Raise FencedError if there is a newer start than `number`, and it spares no attempt of start `number`."""
    state = await _state(store, whole=False)
    if state.begin is None or state.start <= number:
        return
    spared = (AttemptId.parse(one.rpartition("/")[2]) for one in state.begin.spared)
    if not any(attempt is not None and attempt.start == number for attempt in spared):
        raise FencedError(fence_message(store, number, state.begin))


def fence_message(store: Store, number: int, newest: BeginRecord) -> str:
    """The message of FencedError for start `number`: who took the `newest` one, and what to do."""
    who = newest.writer
    return (
        f"another job has taken over {store.url}: start {newest.start}, by process {who.pid} on {who.host} at {who.time}. This "
        f"job is start {number}, and its further saves fail, too. Stop one of the two jobs and start the other one again, or "
        "give each its own root; a script that only reads a root calls open_checkpoint(), which takes no root over"
    )
