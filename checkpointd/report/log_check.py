"""Checks everything in the log of a root that a reader could use: its id, the newest states, and the entries after them and
between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import msgspec

from checkpointd.commit.log import following
from checkpointd.commit.log_access import STATES_KEPT
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError
from checkpointd.layout.keys import LOG, LOG_ROOT
from checkpointd.layout.log_records import (
    ENTRY_BYTES_MAX,
    STATE_BYTES_MAX,
    LogEntry,
    LogListing,
    LogState,
    decode_entry,
    decode_state,
    entry_key,
    mark_key,
    state_key,
)
from checkpointd.pipeline.read.verify import Damage
from checkpointd.pipeline.root_id import read_id
from checkpointd.pipeline.workers import uncollected
from checkpointd.store.base import Store


class LogCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a log, and what of it cannot be read now."""

    damage: tuple[Damage, ...] = ()
    unreadable: tuple[Damage, ...] = ()


async def check_log(store: Store) -> LogCheck:
    """Check the log of `store`, and once more if a job has written to it meanwhile."""
    listing = await _listing(store)
    while True:
        found = await _checked(store, listing)
        before, listing = listing, await _listing(store)
        if not found.damage or listing == before:
            return found


async def _listing(store: Store) -> LogListing:
    return LogListing.of(entry.name for entry in await store.list(LOG) if not entry.is_prefix)


async def _checked(store: Store, listing: LogListing) -> LogCheck:
    faults = list[CheckpointdError]()
    try:
        await read_id(store)
    except NotFoundError:
        if listing.last:
            faults.append(_damaged(LOG_ROOT, "is missing, so nobody can tell this root from another one"))
    except (DamagedError, StoreError) as error:
        faults.append(error)
    if listing.is_being_rebuilt:
        faults.append(_damaged(mark_key(listing.marks[-1]), "is there: the log is being made again, or that was interrupted"))
    # What lies below the mark of a rebuild that has ended counts for nobody.
    since = listing.marks[-1] if listing.marks and not listing.is_being_rebuilt else 0
    stated = [number for number in listing.states if number >= since]
    first = stated[-STATES_KEPT] if len(stated) >= STATES_KEPT else since
    stated = [number for number in stated if number >= first]
    states, entries = dict[int, LogState](), dict[int, LogEntry]()
    for number in stated:
        try:
            data = await store.get(state_key(number), size_max=STATE_BYTES_MAX)
            states[number] = uncollected(partial(decode_state, data, number))
        except (DamagedError, NotFoundError, StoreError) as error:
            faults.append(error)
    numbers = [number for number in listing.entries if number > first]
    found = await store.get_each([entry_key(number) for number in numbers], size_max=ENTRY_BYTES_MAX)
    for number, got in zip(numbers, found, strict=True):
        try:
            if isinstance(got, CheckpointdError):
                raise got
            entries[number] = decode_entry(got, number)
        except (DamagedError, NotFoundError, StoreError) as error:
            faults.append(error)
    for number in sorted({*range(first + 1, max((*numbers, *stated), default=0) + 1)} - {*numbers}):
        faults.append(_damaged(entry_key(number), "is missing, although the log goes on after it"))
    faults += _broken(states, entries, first)
    unreadable = tuple(Damage.of(one) for one in faults if isinstance(one, StoreError))
    return LogCheck(damage=tuple(Damage.of(one) for one in faults if not isinstance(one, StoreError)), unreadable=unreadable)


def _broken(states: Mapping[int, LogState], entries: Mapping[int, LogEntry], first: int) -> Iterator[DamagedError]:
    """The entries that do not follow the one before, and the states that do not say what the entries before them say."""
    state = states.get(first) if first else LogState()
    for number in range(first + 1, max((*states, *entries), default=0) + 1):
        entry = entries.get(number)
        if state is not None and entry is not None and entry.before != state.nonce:
            yield _damaged(entry_key(number), "does not follow the entry before it: somebody changed one of the two")
            entry = None
        state = None if state is None or entry is None else following(state, [entry])
        known = states.get(number)
        if state is not None and known is not None and state != known:
            yield _damaged(state_key(number), "does not say what the entries up to it say")
        state = known or state


def _damaged(key: str, what: str) -> DamagedError:
    return DamagedError(f"{key} {what}", key=key)
