"""Ranks other than rank 0 follow the log from the state that rank 0 sends, and do not read the root's history."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from checkpointd.commit.log import check, for_followers
from checkpointd.commit.log_access import STATE_EVERY, STATES_KEPT
from checkpointd.layout.log_records import AbortRecord, AnnounceRecord, VerifyRecord
from checkpointd.layout.manifest import NO_REASON
from checkpointd.pipeline import identity
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.pipeline.write.dedup import Bases
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd_client.ranks.startup import Begun, begin, root_fault
from checkpointd_client.ranks.writer import WriterThread
from tests.builders import begin_start, plan_save, save_checkpoint

_NUMBERS = count(1000)
START_1 = "00000001-0"


class Seen(PassingStore):
    """The root as another rank sees it, and the states of the log that this rank has read."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.states: list[str] = []

    async def get(self, key: str, *, size_max: int = 1 << 20) -> bytes:
        if key.endswith(".state"):
            self.states.append(key)
        return await super().get(key, size_max=size_max)


@pytest.fixture
def writer() -> Iterator[WriterThread]:
    thread = WriterThread(threads=1)
    yield thread
    thread.close()


async def _used(store: MemoryStore) -> None:
    """A root with a long history, of which a state was put, and a checkpoint from before."""
    await begin_start(store)
    await save_checkpoint(store, tag="first", start=1, n=0)
    await _grow(store, "old", STATE_EVERY)
    await RootLog.of(store).compact()


async def _grow(store: MemoryStore, tag: str, entries: int) -> None:
    log = RootLog.of(store)
    for number in range(entries):
        name = f"{tag}{number}/{log.state.start:08d}-0"
        assert not await log.add(AnnounceRecord(attempt=name, n=next(_NUMBERS), step=number))


def _begun(writer: WriterThread, store: MemoryStore) -> Begun:
    writer.call(_used(store), 60)
    started = writer.call(begin(store, Beginner(world_size=2, take_over=True)), 60)
    writer.call(started.lease.release(), 60)
    return started.begun


def test_a_rank_reads_no_state_to_see_the_start_the_base_and_the_fence(writer: WriterThread) -> None:
    store = MemoryStore()
    seen, begun = Seen(store), _begun(writer, store)
    assert root_fault(writer, seen, begun) == "ok"

    async def go_on() -> None:
        root = OwnRoot(seen)
        await root.begun(begun.number, begun.nonce)
        await root.check(begun.number)
        await starts.check_fence(seen, begun.number)
        save = await plan_save(store, tag="next", start=begun.number, n=0)
        base = await Bases(seen).newest(save.info(1))
        assert base is not None
        assert base.order == (1, 0)
        await save.announce()
        assert await RootLog.of(seen).follow(lambda state: save.info(1).prefix in state.attempts)

    writer.call(go_on(), 60)
    assert not seen.states


def test_a_rank_whose_entries_were_covered_meanwhile_reads_the_newest_state(writer: WriterThread) -> None:
    store = MemoryStore()
    seen, begun = Seen(store), _begun(writer, store)
    assert root_fault(writer, seen, begun) == "ok"

    async def go_on() -> None:
        for turn in range(STATES_KEPT + 1):
            await _grow(store, f"new{turn}-", STATE_EVERY)
            await RootLog.of(store).compact()
        last = RootLog.of(store).state
        log = RootLog.of(seen)
        assert not await log.follow(lambda state: state.number == begun.entry + 1), "that entry is gone"
        for _ in range(100):
            if await log.follow(lambda state: state.number == last.number):
                break
        assert log.state == last

    writer.call(go_on(), 60)
    assert seen.states


def test_a_rank_that_begins_after_the_entries_were_covered_sees_the_same_root(writer: WriterThread) -> None:
    store = MemoryStore()
    seen, begun = Seen(store), _begun(writer, store)

    async def cover() -> None:
        for turn in range(STATES_KEPT + 1):
            await _grow(store, f"new{turn}-", STATE_EVERY)
            await RootLog.of(store).compact()

    writer.call(cover(), 60)
    assert root_fault(writer, seen, begun) == "ok"
    assert RootLog.of(seen).state == RootLog.of(store).state


def test_what_asks_for_the_history_gets_all_of_it(writer: WriterThread) -> None:
    store = MemoryStore()
    seen, begun = Seen(store), _begun(writer, store)
    assert root_fault(writer, seen, begun) == "ok"

    async def ask() -> None:
        older = next(one for one in RootLog.of(store).state.attempts.values() if one.tag == "old3")
        assert await root_view.logged(seen, older.prefix) == older
        assert (await root_view.find(seen, "first")).prefix.startswith("first/")

    writer.call(ask(), 60)
    assert RootLog.of(seen).state == RootLog.of(store).state


def test_a_record_about_an_older_checkpoint_is_taken(writer: WriterThread) -> None:
    """A state without the history must not be the reason to refuse it."""
    store = MemoryStore()

    async def older() -> str:
        await begin_start(store)
        await save_checkpoint(store, tag="first", start=1, n=0)
        await save_checkpoint(store, tag="second", start=1, n=1)
        return (await root_view.find(store, "first")).prefix

    prefix = writer.call(older(), 60)
    started = writer.call(begin(store, Beginner(world_size=2, take_over=True)), 60)
    writer.call(started.lease.release(), 60)
    seen = Seen(store)
    assert root_fault(writer, seen, started.begun) == "ok"
    log = RootLog.of(seen)
    assert prefix not in log.state.attempts
    assert not writer.call(log.add(VerifyRecord(attempt=prefix, nbytes=1)), 60)
    assert writer.call(RootLog.of(store).look(), 60).attempts[prefix].verified


def test_a_copy_of_the_root_is_not_the_same_one(writer: WriterThread) -> None:
    """It was made before the start."""
    store, copy = MemoryStore(), MemoryStore()
    writer.call(_used(store), 60)

    async def copied() -> None:
        for entry in await store.list("log"):
            await copy.put(f"log/{entry.name}", await store.get(f"log/{entry.name}", size_max=1 << 20))

    writer.call(copied(), 60)
    started = writer.call(begin(store, Beginner(world_size=2, take_over=True)), 60)
    writer.call(started.lease.release(), 60)
    assert "does not have start 2" in root_fault(writer, Seen(copy), started.begun)


def test_the_message_does_not_grow_with_the_root(writer: WriterThread) -> None:
    sizes = []
    for entries in (1, 50):
        store = MemoryStore()
        writer.call(begin_start(store), 60)
        writer.call(save_checkpoint(store, tag="first", start=1, n=0), 60)
        writer.call(_grow(store, "old", entries), 60)
        started = writer.call(begin(store, Beginner(world_size=2, take_over=True)), 60)
        writer.call(started.lease.release(), 60)
        sizes.append(len(started.begun.log))
    assert abs(sizes[1] - sizes[0]) < 100


def test_a_rank_knows_what_became_of_spared_attempts(writer: WriterThread) -> None:
    """So it announces none of them again, and refers to what their base holds."""
    store = MemoryStore()

    async def spare() -> tuple[str, str]:
        await begin_start(store)
        await save_checkpoint(store, tag="base", start=1, n=0)
        save = await plan_save(store, tag="spared", start=1, n=1)
        await RootLog.of(store).add(AnnounceRecord(attempt=save.info(0).prefix, n=1, step=1, base=f"base/{START_1}"))
        await starts.take(store, 2, (save.info(0).prefix,))
        await save_checkpoint(store, tag="newest", start=2, n=0)
        return save.info(0).prefix, save.info(0).tag

    prefix, tag = writer.call(spare(), 60)
    for decided in (False, True):
        if decided:
            abort = AbortRecord(attempt=prefix, error=NO_REASON, decided_by=0, writer=identity.writer())
            assert not writer.call(RootLog.of(store).add(abort), 60)
        known = for_followers(RootLog.of(store).state)
        assert f"{tag}/{START_1} {'was aborted' if decided else 'is undecided'}" == check(
            known, AnnounceRecord(attempt=prefix, n=1, step=1)
        )
        assert f"base/{START_1}" in known.attempts
        again = AnnounceRecord(attempt=f"other/{START_1}", n=1, step=1)
        assert check(known, again) == check(RootLog.of(store).state, again) != ""
