"""The catalog's log: CATALOG-1 to CATALOG-6."""

from __future__ import annotations

import asyncio

import pytest

from checkpointd.errors import StoreError
from checkpointd.layout.catalog_records import CATALOG, CatalogRecord, batch_key, summary_key
from checkpointd.pipeline.root import catalog_log
from checkpointd.pipeline.root.catalog_log import AnnouncementWatch, CatalogLog, note, record_of
from checkpointd.store.base import SMALL_BYTES_MAX, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from tests.builders import save_checkpoint


def intent(step: int) -> CatalogRecord:
    return record_of("intent", f"global_step{step}", "00000001-0", n=step, step=step)


def prefix(step: int) -> str:
    return f"global_step{step}/00000001-0"


async def known(store: Store) -> list[str]:
    log = CatalogLog(store)
    await log.refresh()
    assert log.fault == ""
    return list(log.state.entries)


async def names(store: Store) -> list[str]:
    return [entry.name for entry in await store.list(CATALOG)]


async def test_catalog_1_an_attempt_is_announced_before_its_first_object() -> None:
    store = Watched()
    await save_checkpoint(store)
    first = next(number for number, key in enumerate(store.written) if key.startswith("global_step1/"))
    assert batch_key(1) in store.written[:first]


async def test_catalog_2_a_close_comes_after_its_outcome() -> None:
    store = Watched()
    await save_checkpoint(store)
    log = CatalogLog(store)
    await log.refresh()
    assert log.state.entries["global_step1/00000001-0"].decoded is not None
    outcome = store.written.index("global_step1/00000001-0/outcome")
    assert not any(b'"kind": "close"' in data for data in store.put_before(outcome))


class Slow(MemoryStore):
    """A store whose calls let other tasks run first. Counts the puts, of which those at `fails` fail."""

    def __init__(self, *fails: int) -> None:
        super().__init__()
        self.puts, self.fails = 0, fails

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self.puts += 1
        number = self.puts
        await asyncio.sleep(0)
        if number in self.fails:
            raise StoreError(f"put {number} failed")
        return await super().put_if_absent(key, data)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        await asyncio.sleep(0)
        return await super().get(key, size_max=size_max)


async def test_catalog_3_of_processes_that_race_each_gets_a_number() -> None:
    store = Slow()
    processes = [PassingStore(store) for _ in range(10)]
    await asyncio.gather(*(CatalogLog(one).append(intent(step), intent(100 + step)) for step, one in enumerate(processes)))
    assert sorted(await known(store)) == sorted(map(prefix, [*range(10), *range(100, 110)]))
    assert await names(store) == [batch_key(n).rpartition("/")[2] for n in range(1, 11)]


def tags_of(log: CatalogLog) -> list[str]:
    return [entry.tag for entry in log.state.entries.values()]


async def test_records_that_many_tasks_add_at_once_take_few_puts() -> None:
    store = Slow()
    added = [record_of("intent", f"t{n}", "00000001-0") for n in range(50)]
    await asyncio.gather(*(CatalogLog(store).append(record) for record in added))
    log = CatalogLog(store)
    await log.refresh()
    assert tags_of(log) == [record.tag for record in added]
    assert store.puts <= 2


@pytest.mark.parametrize("fails", [1, 2])
async def test_if_adding_fails_it_fails_for_one_task_and_the_others_go_on(fails: int) -> None:
    store = Slow(fails)
    added = [record_of("intent", f"t{n}", "00000001-0") for n in range(9)]
    results = await asyncio.gather(*(CatalogLog(store).append(record) for record in added), return_exceptions=True)
    log = CatalogLog(store)
    await log.refresh()
    failed = [record.tag for record, result in zip(added, results, strict=True) if result is not None]
    assert len(failed) == 1
    assert {record.tag for record in added} - set(failed) <= set(tags_of(log))


async def test_if_who_adds_is_cancelled_the_others_go_on() -> None:
    store = Slow()
    added = [record_of("intent", f"t{n}", "00000001-0") for n in range(9)]
    tasks = [asyncio.ensure_future(CatalogLog(store).append(record)) for record in added]
    while store.puts < 1:
        await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[8].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    log = CatalogLog(store)
    await log.refresh()
    done = {record.tag for record, result in zip(added, results, strict=True) if result is None}
    assert done >= {f"t{n}" for n in range(1, 8)}
    assert done <= set(tags_of(log))


async def test_catalog_3_a_record_under_a_summary_is_put_again() -> None:
    """A writer is stopped between its look and its put; meanwhile others go on, and summaries cover its number."""
    store = Stopped()
    await CatalogLog(store).append(intent(1))
    store.meanwhile = lambda: many(PassingStore(store))  # those of another process
    await CatalogLog(store).append(intent(1000))
    assert prefix(1000) in await known(store)


async def many(store: Store) -> None:
    log = CatalogLog(store)
    for part in range(3):
        for step in range(10):
            await log.append(intent(10 * part + step))
        await log.refresh()
        await log.compact(every=10)


async def test_catalog_4_what_a_summary_covers_goes_after_the_next_one() -> None:
    store = MemoryStore()
    await many(store)
    records = [batch_key(n).rpartition("/")[2] for n in range(21, 31)]
    assert await names(store) == sorted(["000000000020.summary", "000000000030.summary", *records])
    assert len(await known(store)) == 30


async def test_what_is_covered_goes_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_log, "REMOVED_MAX", 4)
    store, left = MemoryStore(), []
    await many(store)
    log = CatalogLog(store)
    await log.refresh()
    for _ in range(6):
        left.append(len(await names(store)))
        await log.compact(every=10)
    assert left == [25, 21, 17, 13, 12, 12]


async def test_catalog_4_a_reader_goes_on_when_what_it_reads_is_removed() -> None:
    store = MemoryStore()
    log = CatalogLog(store)
    await log.append(intent(1))
    await log.refresh()
    await many(store)
    await log.refresh()
    assert (log.fault, len(log.state.entries), log.state.number) == ("", 30, 31)


async def test_catalog_6_of_a_damaged_summary_the_one_before_is_read() -> None:
    store = MemoryStore()
    await many(store)
    await store.put(summary_key(30), b"{}")
    assert len(await known(store)) == 30


@pytest.mark.parametrize("fault", ["damaged", "missing"])
async def test_catalog_6_a_record_that_is_lost_is_a_fault(fault: str) -> None:
    store = MemoryStore()
    for step in range(1, 4):
        await CatalogLog(store).append(intent(step))
    await (store.delete(batch_key(2)) if fault == "missing" else store.put(batch_key(2), b"{}"))
    log = CatalogLog(store)
    await log.refresh()
    assert batch_key(2) in log.fault
    assert not await log.compact(every=1)


async def test_making_the_catalog_again_counts_when_it_is_finished() -> None:
    store = MemoryStore()
    await CatalogLog(store).append(intent(1))
    log = CatalogLog(store)
    number = await log.begin_again()
    await note(store, intent(2))
    reader = CatalogLog(store)
    await reader.refresh()
    assert "was not finished" in reader.fault
    await log.end_again(number, {})
    assert await known(store) == [prefix(2)]
    await reader.refresh()
    assert (reader.fault, list(reader.state.entries)) == ("", [prefix(2)])


async def test_a_rank_finds_the_announcement_at_the_end() -> None:
    store = MemoryStore()
    watch = AnnouncementWatch(store)
    assert not await watch.has_announced(prefix(7))
    await many(store)
    assert await watch.has_announced(prefix(7)) is False, "summaries cover it: it is long over"
    await CatalogLog(store).append(intent(40))
    looks = [await watch.has_announced(prefix(40)) for _ in range(2 * catalog_log.READS)]
    assert looks[-1]


async def test_a_rank_finds_all_announcements_of_a_batch() -> None:
    store = MemoryStore()
    watch = AnnouncementWatch(store)
    await CatalogLog(store).append(intent(1), intent(2))
    assert [await watch.has_announced(prefix(step)) for step in (2, 1)] == [True, True]


async def test_ranks_of_several_attempts_that_look_at_once_skip_no_batch() -> None:
    store = Slow()
    watch = AnnouncementWatch(store)
    for step in (1, 2):
        await CatalogLog(store).append(intent(step))
    assert await asyncio.gather(*(watch.has_announced(prefix(step)) for step in (1, 2))) == [True, True]


async def test_a_catalog_that_was_removed_begins_again() -> None:
    store = MemoryStore()
    log = CatalogLog(store)
    for step in (1, 2):
        await log.append(intent(step))
    await log.refresh()
    for name in await names(store):
        await store.delete(f"{CATALOG}/{name}")
    await log.append(intent(3))
    await log.refresh()
    assert (log.fault, list(log.state.entries)) == ("", [prefix(3)])


class Watched(MemoryStore):
    """Notes what was put, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []
        self._data: list[bytes] = []

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self.written.append(key)
        self._data.append(data)
        return await super().put_if_absent(key, data, durable=durable)

    def put_before(self, place: int) -> list[bytes]:
        return self._data[:place]


class Stopped(MemoryStore):
    """Does something else between a listing of the catalog and the next put."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile = None

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if self.meanwhile is not None:
            work, self.meanwhile = self.meanwhile, None
            await work()
        return await super().put_if_absent(key, data, durable=durable)
