"""Starts: which start of the job runs at a root, and how older starts learn that they are fenced.

Invariants
  START-1  A coordinator of an older start may commit an attempt only if the record of the newest start lists it as surviving.
  START-2  The record of the newest start stays, so that the next number is greater. Each new start removes the records of
      starts that are KEPT and more starts older, except those in which an attempt runs that survives.
  START-3  No number is used twice. A process that was stopped between its choice of a number and its put may find that the
      number was used and its record removed. So it looks after the put. If the newest start is so far ahead, the put does not
      count.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Sequence

from checkpointd.errors import DamagedError, FencedError, NotFoundError, StoreError
from checkpointd.layout.keys import SERVICE, AttemptId, start_key, start_of
from checkpointd.layout.manifest import Start, decode, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.store.writers import new_writer
from checkpointd.waits import ABSENCE_S

log = logging.getLogger("checkpointd")

KEPT = 16
"""The number of newest starts whose records stay, for people and for ranks and daemons of ended starts."""
REMOVED_MAX = 64
"""A start removes at most this many records, since each removal takes a sync."""


async def newest(store: Store) -> int:
    """The number of the newest start; 0 if no job ever ran here."""
    return max(await _numbers(store), default=0)


async def _numbers(store: Store) -> list[int]:
    entries = await store.list(f"{SERVICE}/starts")
    return sorted(number for entry in entries if (number := start_of(entry.name)) is not None)


async def take(store: Store, world_size: int, surviving: Sequence[str] = (), *, commit_timeout_s: float = 0.0) -> Start:
    """Take the next start for a job of `world_size` ranks (0: for a recovery without a job), even if another job is alive.

    This fences every older start at the root. Only the attempts `surviving` (`<tag>/<attempt>`), whose writers have outlived
    their trainers, go on. A job calls `leases.begin` instead, which leaves a living job alone.
    """
    number = await following(store)
    while True:
        start = await begin(store, number, world_size, surviving, commit_timeout_s=commit_timeout_s)
        if start is not None:
            return start
        number = max(number, await newest(store)) + 1


async def following(store: Store, known: CatalogLog | None = None) -> int:
    """The first number that no start has used."""
    # A start's record may be lost. A start that took the same number again would write into existing attempts.
    _, named = await catalog.may_be_undecided(store, known)
    return max(await newest(store), named) + 1


async def begin(
    store: Store,
    number: int,
    world_size: int,
    surviving: Sequence[str] = (),
    *,
    commit_timeout_s: float = 0.0,
    job: str = "",
    process: str | None = None,
) -> Start | None:
    """Take start `number`, as `take` does; None if it exists or did exist (START-3). `process`: the holder, by default this
    process.
    """
    start = Start(
        start=number,
        nonce=secrets.token_hex(16),
        world_size=world_size,
        process=new_writer() if process is None else process,
        surviving=tuple(surviving),
        commit_timeout_s=commit_timeout_s,
        job=job,
        writer=writer(),
    )
    if not await store.put_if_absent(start_key(number), encode(start)):
        return None
    if is_over(number, await newest(store)):
        return None
    try:
        await remove_older(store, number, surviving)
    except StoreError as error:
        log.warning("records of old starts at %s cannot be removed: %s; the next start tries again", store.url, error)
    return start


def is_over(number: int, current: int) -> bool:
    """Whether the record of start `number` may have been removed, when `current` is the newest start (START-2)."""
    return number <= current - KEPT


async def remove_older(store: Store, number: int, surviving: Collection[str] = (), *, most: int = REMOVED_MAX) -> None:
    """Remove at most `most` records that nobody needs beside that of start `number`, in which the attempts `surviving` survive
    (START-2).
    """
    staying = {attempt.start for one in surviving if (attempt := AttemptId.parse(one.rpartition("/")[2])) is not None}
    over = [old for old in await _numbers(store) if is_over(old, number) and old not in staying]
    for old in over[:most]:
        await store.delete(start_key(old))


async def read(store: Store, number: int) -> Start:
    """The record of start `number`. Raises NotFoundError if the store does not show it."""
    key = start_key(number)
    return decode(await store.get(key), Start, key)


async def is_of_root(store: Store, number: int, nonce: str) -> bool:
    """Whether start `number` with `nonce` was taken at this root, and not at a root that was removed since. True if unknown."""
    patient = PatientStore(store, Patience(ABSENCE_S, ABSENCE_S))
    try:
        return (await read(patient, number)).nonce == nonce
    except NotFoundError:
        return False
    except (StoreError, DamagedError):
        return True


async def check_fence(store: Store, number: int, attempt: str | None = None, *, proved: bool = False) -> None:
    """Raise FencedError if there is a newer start than `number` and `attempt` (`<tag>/<attempt>`) does not survive in it.

    `proved`: if the newer start's record cannot be read, raise NotFoundError or DamagedError instead.
    """
    current = await newest(store)
    if current > number and not (attempt and await _survives(store, current, attempt, proved=proved)):
        raise FencedError(await fence_message(store, number, current))


async def unfenced(store: Store, attempts: Collection[str]) -> tuple[str, ...]:
    """Those of `attempts` (`<tag>/<attempt>`) that the newest start has not fenced: they are of it, or survive in it."""
    current = await newest(store)
    parsed = {one: AttemptId.parse(one.rpartition("/")[2]) for one in attempts}
    older = {one for one, attempt in parsed.items() if attempt is None or attempt.start < current}
    try:
        surviving = set((await read(store, current)).surviving) if older else set()
    except (NotFoundError, DamagedError) as error:
        log.error("%s, so no attempt of an older start survives", error)
        surviving = set()
    return tuple(one for one in attempts if one not in older or one in surviving)


async def check_not_over(store: Store, number: int) -> None:
    """Raise FencedError if there is a newer start than `number` and no attempt of start `number` survives in it.

    Raises NotFoundError or DamagedError if the newer start's record cannot be read.
    """
    current = await newest(store)
    if current <= number:
        return
    surviving = (AttemptId.parse(one.rpartition("/")[2]) for one in (await read(store, current)).surviving)
    if not any(attempt is not None and attempt.start == number for attempt in surviving):
        raise FencedError(await fence_message(store, number, current))


async def _survives(store: Store, current: int, attempt: str, *, proved: bool) -> bool:
    """Whether `attempt` survives in start `current`. If the record cannot be read, False, or with `proved` that error."""
    try:
        return attempt in (await read(store, current)).surviving
    except (NotFoundError, DamagedError):
        if proved:
            raise
        return False


async def fence_message(store: Store, number: int, current: int) -> str:
    """The message of FencedError: who took start `current`, and what to do."""
    try:
        found = (await read(store, current)).writer
        who = f"process {found.pid} on {found.host} at {found.time}"
    except (NotFoundError, DamagedError) as error:
        who = f"a process whose record cannot be read ({error})"
    return (
        f"another job has taken over {store.url}: start {current}, by {who}. This job is start {number}, and its further saves "
        "fail, too. Stop one of the two jobs and start the other one again, or give each its own root; a script that only "
        "reads a root calls open_checkpoint(), which takes no root over"
    )
