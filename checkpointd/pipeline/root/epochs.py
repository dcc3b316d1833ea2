"""Epochs: which start of the job runs at a root, and how older starts learn that they are fenced.

Invariant
  EPOCH-1  A coordinator of an older epoch may commit an attempt only if the record of the newest epoch lists it as surviving.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from checkpointd.errors import DamagedError, FencedError, NotFoundError, StoreError
from checkpointd.layout.keys import SERVICE, AttemptId, epoch_key, epoch_of
from checkpointd.layout.manifest import Epoch, decode, encode
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.identity import writer
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.store.writers import new_writer


async def newest(store: Store) -> int:
    """The number of the newest epoch; 0 if no job ever ran here."""
    entries = await store.list(f"{SERVICE}/epochs")
    return max((number for entry in entries if (number := epoch_of(entry.name)) is not None), default=0)


async def take(store: Store, world_size: int, surviving: Sequence[str] = (), *, commit_timeout_s: float = 0.0) -> Epoch:
    """Begin the next epoch for a job of `world_size` ranks (0: for a recovery without a job), even if another job is alive.

    This fences every older epoch at the root. Only the attempts `surviving` (`<tag>/<attempt>`), whose writers have outlived
    their trainers, go on. A job calls `leases.begin` instead, which leaves a living job alone.
    """
    number = await following(store)
    while True:
        epoch = await begin(store, number, world_size, surviving, commit_timeout_s=commit_timeout_s)
        if epoch is not None:
            return epoch
        number += 1


async def following(store: Store) -> int:
    """The first number that no epoch has used."""
    # An epoch's record may be lost. A start that took the same number again would write into existing attempts.
    _, named = await catalog.may_be_undecided(store)
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
) -> Epoch | None:
    """Begin epoch `number`, as `take` does; None if it exists already. `process`: the holder, by default this process."""
    epoch = Epoch(
        epoch=number,
        nonce=secrets.token_hex(16),
        world_size=world_size,
        process=new_writer() if process is None else process,
        surviving=tuple(surviving),
        commit_timeout_s=commit_timeout_s,
        job=job,
        writer=writer(),
    )
    return epoch if await store.put_if_absent(epoch_key(number), encode(epoch)) else None


async def read(store: Store, number: int) -> Epoch:
    """The record of epoch `number`. Raises NotFoundError if the store does not show it."""
    key = epoch_key(number)
    return decode(await store.get(key), Epoch, key)


async def is_of_root(store: Store, number: int, nonce: str) -> bool:
    """Whether epoch `number` with `nonce` began at this root, and not at a root that was removed since. True if unknown."""
    from checkpointd.config import ABSENCE_S  # brings in numpy, which no listing needs

    patient = PatientStore(store, Patience(ABSENCE_S, ABSENCE_S))
    try:
        return (await read(patient, number)).nonce == nonce
    except NotFoundError:
        return False
    except (StoreError, DamagedError):
        return True


async def check_fence(store: Store, number: int, attempt: str | None = None, *, proved: bool = False) -> None:
    """Raise FencedError if a newer epoch than `number` has begun and `attempt` (`<tag>/<attempt>`) does not survive in it.

    `proved`: if the newer epoch's record cannot be read, raise NotFoundError or DamagedError instead.
    """
    current = await newest(store)
    if current > number and not (attempt and await _survives(store, current, attempt, proved=proved)):
        raise FencedError(await fence_message(store, number, current))


async def check_not_over(store: Store, number: int) -> None:
    """Raise FencedError if a newer epoch than `number` has begun and no attempt of epoch `number` survives in it.

    Raises NotFoundError or DamagedError if the newer epoch's record cannot be read.
    """
    current = await newest(store)
    if current <= number:
        return
    surviving = (AttemptId.parse(one.rpartition("/")[2]) for one in (await read(store, current)).surviving)
    if not any(attempt is not None and attempt.epoch == number for attempt in surviving):
        raise FencedError(await fence_message(store, number, current))


async def _survives(store: Store, current: int, attempt: str, *, proved: bool) -> bool:
    """Whether `attempt` survives in epoch `current`. If the record cannot be read, False, or with `proved` that error."""
    try:
        return attempt in (await read(store, current)).surviving
    except (NotFoundError, DamagedError):
        if proved:
            raise
        return False


async def fence_message(store: Store, number: int, current: int) -> str:
    """The message of FencedError: who began epoch `current`, and what to do."""
    try:
        found = (await read(store, current)).writer
        who = f"process {found.pid} on {found.host} at {found.time}"
    except (NotFoundError, DamagedError) as error:
        who = f"a process whose record cannot be read ({error})"
    return (
        f"epoch {number} of {store.url} is over: epoch {current} was begun by {who}. Every further save of this job fails, "
        "too. Stop one of the two jobs and start the other one again, or give each its own root; a script that only reads this "
        "root calls open_checkpoint(), which begins no epoch"
    )
