"""The catalog is mended by a start, and made again from the attempts."""

from __future__ import annotations

import pytest

from checkpointd.errors import StagingError
from checkpointd.layout.catalog_records import CATALOG, CatalogRecord, CatalogState, Kind, close_of
from checkpointd.layout.keys import DELETED, AttemptId
from checkpointd.layout.manifest import Deleted, encode
from checkpointd.pipeline.gc.collect import remove_records
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.root import catalog, catalog_mending, starts
from checkpointd.pipeline.root.catalog_log import CatalogLog, note, record_of
from checkpointd.store.base import Entry, Store
from checkpointd.store.memory import MemoryStore
from tests.builders import leave_in_doubt, save_checkpoint


async def started(store: Store) -> CatalogState:
    """What the catalog tells after a start."""
    start = await starts.take(store, 2)
    await recover(store, start.start)
    log = CatalogLog(store)
    await log.refresh()
    assert log.fault == ""
    return log.state


async def several(store: MemoryStore | None = None) -> MemoryStore:
    store = MemoryStore() if store is None else store
    for step in (1, 2, 3):
        await save_checkpoint(store, tag=f"global_step{step}", step=step)
    return store


async def views(store: Store) -> list[tuple[str, str]]:
    return [(view.prefix, view.state) for view in await catalog.look_everywhere(store)]


async def drop(store: Store) -> None:
    for entry in await store.list(CATALOG):
        await store.delete(f"{CATALOG}/{entry.name}")


async def test_a_start_adds_the_close_that_a_crash_left_out() -> None:
    store = await several()
    await leave_in_doubt(store, tag="global_step4", voting=(0,))
    await note(store, record_of("intent", "global_step4", "00000001-0"))
    state = await started(store)
    outcomes = {prefix: entry.decoded for prefix, entry in state.entries.items()}
    aborted = outcomes["global_step4/00000001-0"]
    assert aborted is not None
    assert aborted.outcome == "abort"
    assert outcomes == {view.prefix: view.outcome for view in await catalog.look_everywhere(store)}


async def test_a_start_decides_what_was_announced_and_never_written() -> None:
    """A writer that goes on after all finds the abort."""
    store = await several()
    await note(store, record_of("intent", "global_step9", "00000001-0"))
    state = await started(store)
    assert not any(entry.is_open for entry in state.entries.values())
    assert ("global_step9/00000001-0", "aborted") in await views(store)


@pytest.mark.parametrize("added_max", [0, 100])
async def test_a_start_finds_what_was_there_before_the_catalog(monkeypatch: pytest.MonkeyPatch, added_max: int) -> None:
    monkeypatch.setattr(catalog_mending, "ADDED_MAX", added_max)
    store = await several()
    before = await views(store)
    await drop(store)
    assert await catalog.scan(store) == await catalog.look_everywhere(store)
    state = await started(store)
    assert [(prefix, "committed") for prefix in state.entries] == before
    assert ("000000000001.summary" in [entry.name for entry in await store.list(CATALOG)]) == (added_max == 0)


async def test_catalog_6_a_damaged_catalog_hides_nothing_and_is_made_again() -> None:
    store = await several()
    before = await views(store)
    records = [entry.name for entry in await store.list(CATALOG)]
    await store.put(f"{CATALOG}/{records[1]}", b"{}")
    assert [(view.prefix, view.state) for view in await catalog.scan(store)] == before
    state = await started(store)
    assert [(prefix, "committed") for prefix in state.entries] == before


async def test_catalog_5_the_newest_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await several()
    mark = encode(Deleted(reason="by hand", writer=writer()))
    await store.put(f"global_step3/00000001-0/{DELETED}", mark)
    await store.put(f"global_step1/00000001-0/{DELETED}", mark)
    monkeypatch.setattr(catalog, "NEWEST_LOOKED", 1)
    found = await catalog.scan(store)
    assert {view.tag: (view.state, view.entry is None) for view in found} == {
        "global_step1": ("committed", False),
        "global_step2": ("committed", False),
        "global_step3": ("deleted", True),
    }
    monkeypatch.setattr(catalog, "NEWEST_LOOKED", 0)
    found = await catalog.with_newest_looked(store, await catalog.scan(store))
    assert [c.tag for c in catalog.checkpoints_of(found)] == ["global_step2", "global_step1"]
    rebuilt = await catalog_mending.rebuild(store)
    assert rebuilt == 3
    assert {view.tag: view.state for view in await catalog.scan(store)} == {view.tag: view.state for view in found} | {
        "global_step1": "deleted",
        "global_step3": "deleted",
    }


async def test_a_look_costs_the_same_however_many_attempts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of attempts that are decided and not among the newest, no directory is listed and no object read."""
    monkeypatch.setattr(catalog, "NEWEST_LOOKED", 2)
    store = Counting()
    for step in range(1, 4):
        await save_checkpoint(store, tag=f"global_step{step}", step=step)
    few = await store.counted()
    for step in range(4, 12):
        await save_checkpoint(store, tag=f"global_step{step}", step=step)
    assert await store.counted() == few


async def test_catalog_7_a_start_forgets_what_was_removed_by_hand() -> None:
    store = await several()
    await note(store, record_of("intent", "global_step9", "00000001-0"))
    await remove(store, "global_step1")
    assert "global_step1/00000001-0" in (await known(store)).entries
    state = await started(store)
    assert sorted(state.entries) == ["global_step2/00000001-0", "global_step3/00000001-0", "global_step9/00000001-0"]


async def test_catalog_7_a_stale_listing_of_the_root_makes_nothing_forgotten() -> None:
    store = Stale()
    await several(store)
    store.hidden = "global_step2"
    state = await started(store)
    assert "global_step2/00000001-0" in state.entries


async def test_catalog_7_what_was_forgotten_wrongly_is_read_and_added_again() -> None:
    store = await several()
    before = await views(store)
    await note(store, record_of("forgotten", "global_step2", "00000001-0"))
    assert [(view.prefix, view.state) for view in await catalog.scan(store)] == before
    assert sorted((await started(store)).entries) == [prefix for prefix, _ in before]


@pytest.mark.parametrize("kind", ["close", "removing", "removed", "verified"])
async def test_catalog_7_a_late_record_shows_no_checkpoint(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tag has another attempt, so the catalog is believed about it."""
    monkeypatch.setattr(catalog, "NEWEST_LOOKED", 0)
    store = await several()
    await save_checkpoint(store, tag="global_step1", step=5, k=1, n=5)
    old = await catalog.read_outcome(store, "global_step1", AttemptId(1, 0))
    await remove(store, "global_step1/00000001-0")
    await note(store, record_of("forgotten", "global_step1", "00000001-0"))
    late = close_of(old) if kind == "close" else record_of(kind, "global_step1", "00000001-0")
    await note(store, late)
    found = [view.prefix for view in await catalog.scan(store)]
    assert found == ["global_step1/00000001-1", "global_step2/00000001-0", "global_step3/00000001-0"]


async def test_catalog_2_what_is_forgotten_while_a_start_looks_is_not_added_again() -> None:
    """Another start, or `gc`, may go on beside it."""

    class Forgetting(MemoryStore):
        forgets = False

        async def settle(self, key: str) -> None:
            if key == "global_step4/00000001-0/outcome" and self.forgets:
                self.forgets = False
                await remove_records(self, "global_step4/00000001-0")
                await note(self, record_of("forgotten", "global_step4", "00000001-0"))
            await super().settle(key)

    store = Forgetting()
    await several(store)
    await save_checkpoint(store, tag="global_step4", step=4, world_size=1, failing={0: StagingError("torn")})
    store.forgets = True
    state = await started(store)
    assert not store.forgets
    assert "global_step4/00000001-0" not in state.entries


async def test_catalog_1_an_attempt_announced_while_the_catalog_is_made_again_stays() -> None:
    """Its intent comes between the look at the log and the record `rebuilt`, and it has no objects yet."""
    store = Between()
    await note(store, record_of("intent", "global_step1", "00000001-0"))
    store.meanwhile = record_of("intent", "global_step9", "00000001-0")
    await catalog_mending.rebuild(store)
    assert list((await known(store)).entries) == ["global_step1/00000001-0", "global_step9/00000001-0"]


async def known(store: Store) -> CatalogState:
    log = CatalogLog(store)
    await log.refresh()
    return log.state


async def remove(store: Store, prefix: str) -> None:
    for entry in await store.list(prefix):
        key = f"{prefix}/{entry.name}"
        await (remove(store, key) if entry.is_prefix else store.delete(key))


class Stale(MemoryStore):
    """A listing of the root that leaves out a tag, as on a file server that lags behind."""

    hidden = ""

    async def list(self, prefix: str) -> list[Entry]:
        return [entry for entry in await super().list(prefix) if prefix or entry.name != self.hidden]


class Between(MemoryStore):
    """Another process puts a record just before `rebuilt`."""

    meanwhile: CatalogRecord | None = None

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if self.meanwhile is not None and b'"kind": "rebuilt"' in data:
            record, self.meanwhile = self.meanwhile, None
            await note(self, record)
        return await super().put_if_absent(key, data, durable=durable)


class Counting(MemoryStore):
    """Counts the looks at attempts."""

    looks = 0

    async def counted(self) -> int:
        self.looks = 0
        await catalog.scan(self)
        return self.looks

    async def list(self, prefix: str):  # type: ignore[no-untyped-def]
        self.looks += prefix.startswith("global_step")
        return await super().list(prefix)

    async def get(self, key: str, **options: int) -> bytes:
        self.looks += key.startswith("global_step")
        return await super().get(key, **options)
