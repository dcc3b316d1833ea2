"""Damage to a log: a look gives the truth or an earlier part of it, and says so. Appends fail and change nothing.

What a look by a process that has not read the log before cannot notice, since nothing shows it:
- the newest entries were removed, and it ends earlier: at a state or after it (`test_what_nothing_shows`);
- all entries were removed, and the newest state is there: it ends at that state;
- the whole log was removed, or replaced by a whole older copy, or by the log of another root;
- the only entry of a log was exchanged for another root's first entry;
- the newest entry was exchanged for one that another copy of this root has put after the same entry;
- the newest state was exchanged for another root's, and neither the entry of its number nor the next one can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from checkpointd.commit.log_access import STATE_EVERY
from checkpointd.errors import DamagedError, UnreadableError
from checkpointd.layout import log_records
from checkpointd.layout.keys import LOG, LOG_ROOT
from checkpointd.layout.log_records import (
    LogListing,
    LogState,
    Record,
    decode_entry,
    encode_entry,
    encode_state,
    entry_key,
    state_key,
)
from checkpointd.layout.manifest import VERSION
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root_id import made_id
from checkpointd.store.memory import MemoryStore
from tests.logs import add_entry, announce, made, objects_of

Objects = dict[str, bytes]
LENGTHS = (5, 300)
"""Of the logs: without a state, and with four."""


_LOGS: dict[tuple[int, int], tuple[Objects, list[LogState]]] = {}


async def log_of(entries: int, root: int = 0) -> tuple[Objects, list[LogState]]:
    """The objects of the log of this root, and the state after each entry."""
    if (entries, root) not in _LOGS:
        store = MemoryStore()
        await made_id(store)
        states = await made(store, entries)
        _LOGS[entries, root] = await objects_of(store), states
    return _LOGS[entries, root]


def in_order(objects: Mapping[str, bytes]) -> list[str]:
    return sorted(objects.keys() - {LOG_ROOT})


def number_of(key: str) -> int:
    return int(key.removeprefix(f"{LOG}/").partition(".")[0])


async def store_of(objects: Mapping[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    for key, data in objects.items():
        await store.put(key, data)
    return store


async def seen(objects: Mapping[str, bytes], states: list[LogState]) -> tuple[int, str]:
    """What a look by a new process gives: up to which entry, and the fault. It gives nothing that is not true."""
    log = RootLog(await store_of(objects))
    state = await log.look()
    assert state == states[state.number]
    return state.number, log.fault


# --- damaged bytes --------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def exchanged(key: str, objects: Objects) -> bytes:
    """Another object of the same log and kind."""
    alike = [other for other in in_order(objects) if other != key and other[-4:] == key[-4:]]
    return objects[alike[0]]


DAMAGES: dict[str, Callable[[str, Objects, Objects], bytes | None]] = {
    "flipped": lambda key, objects, _: flipped(objects[key]),
    "cut": lambda key, objects, _: objects[key][: len(objects[key]) // 3],
    "empty": lambda *_: b"",
    "removed": lambda *_: None,
    "exchanged for another one of this log": lambda key, objects, _: exchanged(key, objects),
    "exchanged for another root's": lambda key, _, others: others[key],
}


async def damaged(key: str, how: str, entries: int) -> Objects:
    objects, _ = await log_of(entries)
    data = DAMAGES[how](key, objects, (await log_of(entries, 1))[0])
    left = {one: held for one, held in objects.items() if one != key}
    return left if data is None else {**left, key: data}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("entries", LENGTHS)
async def test_an_object_that_is_damaged(entries: int, how: str) -> None:
    """One after a state hides what comes after it, which is said. All else is covered by another object."""
    objects, states = await log_of(entries)
    newest = max((number_of(key) for key in objects if key.endswith(".state")), default=0)
    for key in in_order(objects):
        if key.endswith(".json") and number_of(key) < newest and number_of(key) % 8:
            continue  # a look does not read it
        number, fault = await seen(await damaged(key, how, entries), states)
        at = number_of(key)
        if key.endswith(".state") or at <= newest:
            assert (number, fault) == (entries, "")
        elif how == "removed" and at == entries:
            assert (number, fault) == (entries - 1, "")  # nothing shows it
        else:
            # Where an entry does not follow the one before, either of the two may be the wrong one.
            assert number in ({at - 1, at - 2, 0} if how.endswith("root's") else {at - 1})
            assert entry_key(at) in fault or entry_key(at + 1) in fault


async def test_states_that_are_damaged_together() -> None:
    objects, states = await log_of(300)
    kept = [key for key in in_order(objects) if key.endswith(".state")]
    for count in range(1, len(kept) + 1):
        broken = {**objects, **{key: flipped(objects[key]) for key in kept[-count:]}}
        number, fault = await seen(broken, states)
        assert (number, fault) == ((300, "") if count < len(kept) else (0, fault))
    words = f"{entry_key(1)} is missing, although {entry_key(65)} is there"
    assert fault == f"{kept[-1]} is damaged, and nothing else tells what it says"
    without = {key: data for key, data in objects.items() if key not in kept}
    assert await seen(without, states) == (0, words)


async def test_what_nothing_shows() -> None:
    """The newest entries, which are gone. A process that has read them says so (`test_log.py`)."""
    for entries, cuts in ((300, (299, 257, 256, 250, 64)), (5, (4, 1, 0))):
        objects, states = await log_of(entries)
        newest = max((number_of(key) for key in objects if key.endswith(".state")), default=0)
        for cut in cuts:
            left = {key: data for key, data in objects.items() if not key.endswith(".json") or number_of(key) <= cut}
            assert await seen(left, states) == (max(cut, newest), "")
    assert await seen({}, states) == (0, "")
    other, others = await log_of(5, 1)
    assert await seen({**objects, **other}, others) == (5, "")


async def test_a_state_that_entries_contradict_is_not_used() -> None:
    """Of another root: with a number that has just been reached, or with entries after it; or one entry is the wrong one."""
    for entries in (256, 257, 300):
        objects, states = await log_of(entries)
        others, _ = await log_of(entries, 1)
        foreign = {**objects, state_key(256): others[state_key(256)]}
        assert await seen(foreign, states) == (entries, "")
        without = {key: data for key, data in foreign.items() if key != entry_key(256)}
        number, fault = await seen(without, states) if entries > 256 else (255, entry_key(256))
        assert (number, f"{LOG}/000000000256." in fault) == (255, True)
        foreign = {**objects, entry_key(256): others[entry_key(256)]}
        number, fault = await seen(foreign, states)
        assert (number, bool(fault)) == ((entries, False) if entries > 256 else (254, True))


# --- other names ----------------------------------------------------------------------------------------------------


async def test_a_number_far_above_the_others_is_not_passed_over() -> None:
    """A rebuild may have put it."""
    objects, states = await log_of(5)
    number, fault = await seen({**objects, entry_key(999_999_999_999): b"x"}, states)
    assert (number, fault) == (5, f"{entry_key(6)} is missing, although {entry_key(999_999_999_999)} is there")
    number, fault = await seen({**objects, state_key(999_999_999_999): b"x"}, states)
    assert (number, fault) == (5, f"{state_key(999_999_999_999)} is damaged, and nothing else tells what it says")
    assert LogListing.of(["000000000000.json"]).entries == (0,)
    assert await seen({**objects, entry_key(0): b"x"}, states) == (5, "")


@pytest.mark.parametrize("kind", ["entry", "state"])
async def test_what_another_release_has_written_is_refused_and_no_damage(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rebuild would leave it out."""
    objects, states = await log_of(65)
    with monkeypatch.context() as patch:
        patch.setattr(log_records, "VERSION", VERSION + 1)
        entry = msgspec.structs.replace(decode_entry(objects[entry_key(65)], 65), version=VERSION + 1)
        newer = {entry_key(65): encode_entry(entry)} if kind == "entry" else {state_key(64): encode_state(states[64])}
    store = await store_of({**objects, **newer})
    log = RootLog(store)
    for call in (log.look(), log.add(announce(99)), log.rebuild(nothing)):
        with pytest.raises(DamagedError, match=f"has format version {VERSION + 1}, and this release reads version {VERSION}"):
            await call
    assert await objects_of(store) == {**objects, **newer}


async def nothing(_: LogState) -> list[Record]:
    raise AssertionError("nothing is decided")


# --- appends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("looks", [True, False])
async def test_an_append_to_a_damaged_log_fails_and_changes_nothing(how: str, *, looks: bool) -> None:
    for entries, at in ((5, 1), (5, 3), (300, 257), (300, 290)):
        objects = await damaged(entry_key(at), how, entries)
        store = await store_of(objects)
        log = RootLog(store)
        if looks:
            await log.look()
        with pytest.raises(UnreadableError, match=rf"the log of .* cannot be read to its end: {LOG}/.*`checkpointd recover"):
            await log.add(announce(500))
        assert await objects_of(store) == objects


@pytest.mark.parametrize("how", ["flipped", "removed"])
async def test_a_process_that_knew_the_entry_goes_on_and_its_next_state_covers_it(how: str) -> None:
    objects, states = await log_of(300)
    store = await store_of(objects)
    log = RootLog(store)
    await log.look()
    if how == "removed":
        await store.delete(entry_key(290))
    else:
        await store.put(entry_key(290), flipped(objects[entry_key(290)]))
    reader = RootLog(store)
    assert (await reader.look()).number == 289
    assert (await log.look(), log.fault) == (states[-1], "")
    for at in range(301, 5 * STATE_EVERY + 3):
        await add_entry(log, at)
    await log.compact()
    assert (await reader.look(), reader.fault) == (log.state, "")
    assert (await RootLog(store).look()).number == 322
