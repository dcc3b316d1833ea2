"""LOG-11: a start makes a log again that cannot be read to its end. Nothing that was put in the old one counts from then on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TypeVar

import pytest

from checkpointd.commit.log_access import REBUILD_GAP, STATE_EVERY
from checkpointd.errors import CheckpointdError, FormatError, StoreError, UnreadableError
from checkpointd.layout.log_records import (
    BeginRecord,
    CommitRecord,
    LogState,
    Record,
    entry_key,
    mark_key,
    state_key,
)
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Entry, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd.testing import simloop
from tests.logs import Unruly, announce, begin, commit, committed, made, name, names_in, objects_of

T = TypeVar("T")

ENTRIES = 300


class Objects:
    """What a start finds at the root, whatever the log says: the checkpoints that are whole."""

    def __init__(self, truth: LogState) -> None:
        self.commits = [one.commit for one in truth.attempts.values() if one.commit is not None]

    async def decide(self, state: LogState) -> Sequence[Record]:
        """Commit what is whole and is no checkpoint yet, and begin a start."""
        found = [one for one in self.commits if one.attempt not in committed(state)]
        return [*found, begin(max(state.start, 1) + 1)]


async def broken(
    store: Store, *damage: str, entries: int = ENTRIES, others: dict[str, bytes] | None = None
) -> tuple[LogState, Objects]:
    """Make a log, and damage the objects `damage`: they are exchanged for `others`, or else they become unreadable."""
    truth = (await made(store, entries))[-1]
    for key in damage:
        await store.put(key, b"x" if others is None else others[key])
    return truth, Objects(truth)


DAMAGES: dict[str, tuple[str, ...]] = {
    "one entry": (entry_key(280),),
    "the newest entry": (entry_key(300),),
    "several entries": tuple(entry_key(number) for number in range(260, 270)),
    "all entries and the newest state": (*(entry_key(number) for number in range(129, 301)), state_key(256)),
    "all states": tuple(state_key(number) for number in (64, 128, 192, 256)),
    "all": (*(entry_key(number) for number in range(65, 301)), *(state_key(number) for number in (64, 128, 192, 256))),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("exchanged", [False, True])
async def test_log_11_a_log_that_was_made_again_is_whole(damage: str, *, exchanged: bool) -> None:
    """What other objects show is in it, and nothing of another root. Numbers go on above the mark."""
    store, other = MemoryStore(), MemoryStore()
    await made(other, ENTRIES, first=1000)
    others = await objects_of(other) if exchanged else None
    if exchanged and damage.startswith("all"):
        return  # most is of the other root then
    truth, objects = await broken(store, *DAMAGES[damage], others=others)
    log = RootLog(store)
    await log.look()
    assert log.fault
    state = await log.rebuild(objects.decide)
    assert (state.number, state.start, log.fault) == (REBUILD_GAP, 2, "")
    assert committed(state) == committed(truth)
    assert await log.add(announce(1, start=2)) == ""
    reader = RootLog(store)
    assert (await reader.look(), reader.fault) == (log.state, "")
    assert reader.state.number == REBUILD_GAP + 1
    if damage == "one entry":
        assert state.attempts.keys() == truth.attempts.keys()


async def test_a_log_that_was_made_again_is_compacted_and_can_be_made_again_again() -> None:
    store = MemoryStore()
    truth, objects = await broken(store, entry_key(280))
    log = RootLog(store)
    await log.rebuild(objects.decide)
    for number in range(1, 1 + 5 * STATE_EVERY):
        await log.add(announce(number, start=2))
        await log.compact()
    assert await names_in(store, ".state") == [f"{REBUILD_GAP + at * STATE_EVERY:012d}.state" for at in (2, 3, 4, 5)]
    assert await names_in(store, ".json") == [f"{REBUILD_GAP + at:012d}.json" for at in range(129, 321)]
    await store.put(entry_key(REBUILD_GAP + 321), b"x")
    again = RootLog(store)
    state = await again.rebuild(objects.decide)
    assert (state.number, state.start, again.fault) == (2 * REBUILD_GAP, 3, "")
    assert committed(state) == committed(truth)
    assert name(320, start=2) in state.attempts


async def test_a_log_that_is_whole_is_not_made_again() -> None:
    store = MemoryStore()
    truth, objects = await broken(store)
    before = await objects_of(store)
    assert await RootLog(store).rebuild(objects.decide) == truth
    assert await objects_of(store) == before


@pytest.mark.parametrize("appends", [True, False])
async def test_log_11_an_old_process_appends_nothing_that_counts_and_is_fenced(*, appends: bool) -> None:
    """It knows the old log to its end, which others cannot read."""
    store = MemoryStore()
    truth, objects = await broken(store)
    old = RootLog(store)
    await old.look()
    await store.put(entry_key(ENTRIES), b"x")
    new = RootLog(store)
    state = await new.rebuild(objects.decide)
    if appends:
        assert "start 2" in await old.add(announce(500))
        assert await RootLog(store).look() == state
    else:
        assert not await old.follow(lambda _: False)
        assert old.state == truth
        await old.look()
    assert (old.state, old.fault) == (state, "")
    await new.add(announce(1, start=2))
    assert await old.follow(lambda known: name(1, start=2) in known.attempts)
    assert old.state == new.state == await RootLog(store).look()


async def test_while_a_log_is_made_again_appends_fail_and_looks_say_so() -> None:
    store = MemoryStore()
    truth, objects = await broken(store)
    old, reader = RootLog(store), RootLog(store)
    await old.look()
    await store.put(mark_key(REBUILD_GAP), b"")
    assert (await old.look(), await reader.look()) == (truth, LogState())
    for log in (old, reader):
        assert log.fault == f"it is being made again; see {mark_key(REBUILD_GAP)}"
        with pytest.raises(
            UnreadableError, match=r"it is being made again; .*The next start makes it again, or: `checkpointd rec"
        ):
            await log.add(announce(500))
    assert len(await names_in(store, ".json")) == ENTRIES - STATE_EVERY
    state = await reader.rebuild(objects.decide)
    assert (state.number, await old.look()) == (REBUILD_GAP, state)


class Ending(PassingStore):
    """Each call beyond the first `left` ones fails: before it has its effect, or after it."""

    def __init__(self, store: Store, left: int, *, after: bool) -> None:
        super().__init__(store)
        self.left, self.after = left, after

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        ends = self._ends()
        done = await super().put_if_absent(key, data, durable=durable) if self.after or not ends else False
        return self._end(done, ends)

    async def get_each(self, keys: Sequence[str], *, size_max: int = 0) -> list[bytes | CheckpointdError]:
        return self._end(await super().get_each(keys, size_max=size_max), self._ends())

    async def get(self, key: str, *, size_max: int = 0) -> bytes:
        return self._end(await super().get(key, size_max=size_max), self._ends())

    async def list(self, prefix: str) -> list[Entry]:
        return self._end(await super().list(prefix), self._ends())

    def _ends(self) -> bool:
        self.left -= 1
        return self.left < 0

    @staticmethod
    def _end(found: T, ends: bool) -> T:
        if ends:
            raise StoreError("killed")
        return found


@pytest.mark.parametrize("after", [True, False])
async def test_log_11_a_rebuild_that_was_killed_is_finished_by_the_next(*, after: bool) -> None:
    """At each of its calls."""
    whole = MemoryStore()
    truth, objects = await broken(whole, entry_key(280))
    made_at_first = await objects_of(whole)
    left, ended = 0, False
    while not ended:
        store = MemoryStore()
        for key, data in made_at_first.items():
            await store.put(key, data)
        old = RootLog(store)
        await old.goes_on_from(truth)
        try:
            await RootLog(Ending(store, left, after=after)).rebuild(objects.decide)
            ended = True
        except StoreError:
            left += 1
        reader = RootLog(store)
        await reader.look()
        is_done = reader.state.number == REBUILD_GAP
        assert is_done == (not reader.fault)
        log = RootLog(store)
        state = await log.rebuild(objects.decide)
        assert (state.number, log.fault, committed(state)) == (REBUILD_GAP, "", committed(truth))
        assert len(await names_in(store, ".rebuild")) == 1
        assert "start 2" in await old.add(announce(500))
    assert left > 8


def test_log_11_two_rebuilds_at_once_and_two_that_go_on_appending() -> None:
    """All come to one log: of the two starts, one has begun, and what was reported as appended is in it."""

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        memory = MemoryStore()
        await broken(memory, entries=70)
        store = Unruly(memory, rng)
        old = [RootLog(store) for _ in range(2)]
        for one in old:
            await one.look()
        await memory.put(entry_key(70), b"x")
        appended, starts = set[str](), set[str]()

        async def append(log: RootLog, first: int) -> None:
            for number in range(first, first + 8):
                try:
                    if not await log.add(announce(number)):
                        appended.add(name(number))
                except UnreadableError:
                    await asyncio.sleep(0.1)

        async def start() -> None:
            begun = begin(2)

            async def decide(_: LogState) -> list[BeginRecord]:
                return [begun]

            await asyncio.sleep(rng.random() * 2)
            state = await RootLog(store).rebuild(decide)
            assert state.number >= REBUILD_GAP
            starts.add(state.begins[-1].nonce)

        await asyncio.gather(append(old[0], 100), append(old[1], 200), start(), start())
        state = await RootLog(memory).look()
        assert starts == {state.begins[-1].nonce}
        assert appended <= state.attempts.keys()
        for one in old:
            assert await one.look() == state

    for seed in range(40):
        simloop.run(seed, main(seed))


async def test_a_name_that_leaves_no_number_is_said() -> None:
    store = MemoryStore()
    truth, objects = await broken(store, entries=5)
    await store.put(entry_key(999_999_999_999), b"x")
    before = await objects_of(store)
    log = RootLog(store)
    with pytest.raises(FormatError, match=r"999999999999\.\* has a number that no log reaches; move it away"):
        await log.rebuild(objects.decide)
    assert await objects_of(store) == before
    await store.delete(entry_key(999_999_999_999))
    assert await log.look() == truth


async def test_a_state_of_a_rebuild_that_is_damaged_is_named() -> None:
    store = MemoryStore()
    _, objects = await broken(store, entry_key(280))
    log = RootLog(store)
    state = await log.rebuild(objects.decide)
    for appends in (False, True):
        if appends:
            await log.add(announce(1, start=2))
        data = await store.get(state_key(REBUILD_GAP))
        await store.put(state_key(REBUILD_GAP), b"x")
        reader = RootLog(store)
        await reader.look()
        assert reader.fault.startswith(state_key(REBUILD_GAP))
        await store.put(state_key(REBUILD_GAP), data)
    await store.put(state_key(REBUILD_GAP), b"x")
    again = await RootLog(store).rebuild(objects.decide)
    assert (again.number, again.start) == (2 * REBUILD_GAP, 2)
    assert committed(again) == committed(state)
    assert commit(1).attempt in committed(again)
    assert isinstance(objects.commits[0], CommitRecord)
