"""LOG-11: a start makes a log again that cannot be read to its end. Nothing that was put in the old one counts from then on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from checkpointd.commit.log_access import REBUILD_GAP, STATE_EVERY
from checkpointd.errors import FormatError, UnreadableError
from checkpointd.layout.log_records import (
    LogState,
    Record,
    entry_key,
    mark_key,
    state_key,
)
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Entry, Store
from checkpointd.store.memory import MemoryStore
from tests.logs import announce, begin, committed, made, name, names_in, objects_of

ENTRIES = 300


class Objects:
    """What a start finds at the root, whatever the log says: the checkpoints that are whole."""

    def __init__(self, truth: LogState) -> None:
        self.commits = [one.commit for one in truth.attempts.values() if one.committed]

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


class Overtaken(MemoryStore):
    """Before list number `at`, somebody else makes the log again."""

    at = lists = 0
    objects: Objects

    async def list(self, prefix: str) -> list[Entry]:
        self.lists += 1
        if self.lists == self.at:
            await RootLog(self).rebuild(self.objects.decide)
        return await super().list(prefix)


@pytest.mark.parametrize("before_the_end", range(5))
async def test_log_11_who_is_overtaken_by_another_rebuild_takes_what_that_has_made(before_the_end: int) -> None:
    store = Overtaken()
    _, store.objects = await broken(store, entry_key(280))
    log = RootLog(store)
    await log.look()
    store.at = store.lists + 5 - before_the_end  # three looks at what is damaged, and a list before and after the mark

    async def decide(_: LogState) -> list[Record]:
        raise AssertionError("somebody else has decided")

    state = await log.rebuild(decide)
    assert (state.number, log.fault) == (REBUILD_GAP, "")
    assert state == await RootLog(store).look()
    assert len(await names_in(store, ".rebuild")) == 1


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
