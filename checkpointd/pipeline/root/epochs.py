"""Epochs: which start of the job runs at a root, and how older starts learn that they are fenced.

Invariant
  EPOCH-1  Of the epochs before the newest, only surviving attempts of the newest one's record may still be committed by their
      own coordinator.
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
    """The number of the newest epoch; 0 where no job ever ran here."""
    entries = await store.list(f"{SERVICE}/epochs")
    return max((number for entry in entries if (number := epoch_of(entry.name)) is not None), default=0)


async def take(store: Store, world_size: int, surviving: Sequence[str] = (), *, commit_timeout_s: float = 0.0) -> Epoch:
    """Begin the next epoch, for a job of `world_size` ranks (0: for a recovery without one), whoever else runs one.

    Whoever ran an older one at this root is fenced from here on, but for the attempts `surviving` (`<tag>/<attempt>`), whose
    writers have outlived their trainers and go on. A job begins one with `leases.begin`, which leaves a living job alone.
    """
    number = await following(store)
    while True:
        epoch = await begin(store, number, world_size, surviving, commit_timeout_s=commit_timeout_s)
        if epoch is not None:
            return epoch
        number += 1


async def following(store: Store) -> int:
    """The first number that no epoch has had."""
    return max(await newest(store), await _newest_named(store)) + 1


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
    """Begin epoch `number`, as `take` does; None where somebody has begun it. `process`: the holder, by default this one."""
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


async def _newest_named(store: Store) -> int:
    """The newest epoch that the name of an attempt bears; 0 where there is none.

    An epoch's own record may be lost. Begun again, it would write into attempts that exist.
    """
    names = [entry.name for tag in await catalog.tags(store) for entry in await store.list(tag)]
    return max((attempt.epoch for name in names if (attempt := AttemptId.parse(name))), default=0)


async def read(store: Store, number: int) -> Epoch:
    """Who runs epoch `number`. NotFoundError where this store does not show it."""
    key = epoch_key(number)
    return decode(await store.get(key), Epoch, key)


async def is_of_root(store: Store, number: int, nonce: str) -> bool:
    """Whether epoch `number` with `nonce` began at this root, and not at one that was removed since; where that cannot be told,
    it did.
    """
    from checkpointd.config import ABSENCE_S  # brings in numpy, which no listing needs

    patient = PatientStore(store, Patience(ABSENCE_S, ABSENCE_S))
    try:
        return (await read(patient, number)).nonce == nonce
    except NotFoundError:
        return False
    except (StoreError, DamagedError):
        return True


async def check_fence(store: Store, number: int, attempt: str | None = None, *, proved: bool = False) -> None:
    """Raise FencedError where an epoch newer than `number` has begun in which `attempt` (`<tag>/<attempt>`) does not survive.

    `proved`: where the newer epoch's record cannot be read, raise NotFoundError or DamagedError instead.
    """
    current = await newest(store)
    if current > number and not (attempt and await _survives(store, current, attempt, proved=proved)):
        raise FencedError(await fence_message(store, number, current))


async def check_not_over(store: Store, number: int) -> None:
    """Raise FencedError where an epoch newer than `number` has begun and none of its attempts survives.

    NotFoundError or DamagedError where the newer one's record cannot be read.
    """
    current = await newest(store)
    if current <= number:
        return
    surviving = (AttemptId.parse(one.rpartition("/")[2]) for one in (await read(store, current)).surviving)
    if not any(attempt is not None and attempt.epoch == number for attempt in surviving):
        raise FencedError(await fence_message(store, number, current))


async def _survives(store: Store, current: int, attempt: str, *, proved: bool) -> bool:
    """Whether `attempt` survives in epoch `current`: no, if its record cannot be read; `proved` raises that error instead."""
    try:
        return attempt in (await read(store, current)).surviving
    except (NotFoundError, DamagedError):
        if proved:
            raise
        return False


async def fence_message(store: Store, number: int, current: int) -> str:
    """Who took over, in words; the fence holds although its record cannot be read."""
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
