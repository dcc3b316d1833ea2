"""The choice of a load: it decodes few of the catalog's outcomes, and takes the checkpoint that a look at all of them gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.layout.catalog_records import CATALOG, CatalogEntry, close_of
from checkpointd.layout.keys import DELETED, LATEST, AttemptId
from checkpointd.layout.manifest import Deleted, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import candidates as choices
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.candidates import candidates, listed, lost_newest
from checkpointd.pipeline.root.catalog_log import note, record_of
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import Patience
from tests.builders import save_checkpoint


def now() -> Patience:
    """A look without any patience."""
    return Patience(0.0, 0.0)


async def saves(store: Store, *save_latest: bool) -> None:
    """A save for each of `save_latest`, as one job."""
    for n, asks in enumerate(save_latest):
        await save_checkpoint(store, tag=f"tag{n}", step=n, n=n, start=1, world_size=1, save_latest=asks)


async def remove(store: Store, prefix: str) -> None:
    """Mark an attempt as removed, without a record of it."""
    await store.put(f"{prefix}/{DELETED}", encode(Deleted(reason="the test", kept=(), user="somebody", writer=writer())))


async def test_a_load_decodes_the_outcomes_of_the_newest_attempts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "RECENT", 3)
    store, decode, decoded = MemoryStore(), CatalogEntry._decode, list[str]()

    def noted(entry: CatalogEntry) -> object:
        decoded.append(entry.tag)
        return decode(entry)

    await saves(store, *[True] * 9)
    monkeypatch.setattr(CatalogEntry, "_decode", noted)
    found = await candidates(store, now())
    assert found.checkpoints[0].tag == "tag8"
    assert set(decoded) == {"tag6", "tag7", "tag8"}
    decoded.clear()
    assert [one.tag for one in await listed(store, now())] == [f"tag{n}" for n in reversed(range(9))]
    assert set(decoded) == {f"tag{n}" for n in range(9)}


@given(asks=st.lists(st.booleans(), max_size=8), tried=st.integers(0, 3), removed=st.integers(0, 3), recent=st.integers(1, 4))
async def test_it_takes_the_one_that_a_look_at_all_gives(asks: list[bool], tried: int, removed: int, recent: int) -> None:
    store = MemoryStore()
    await saves(store, *asks)
    newest_first = [f"tag{n}/00000001-0" for n, one in reversed([*enumerate(asks)]) if one]
    for prefix in newest_first[:removed]:
        await remove(store, prefix)
    passed = newest_first[removed : removed + tried]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "RECENT", recent)
        found = await candidates(store, now(), passed)
        patch.setattr(choices, "RECENT", 100)
        everything = await candidates(store, now(), passed)
    chosen, wanted = ([c.prefix for c in one.checkpoints if c.prefix not in passed][:1] for one in (found, everything))
    assert chosen == wanted
    assert [str(one.error) for one in found.passed_over] == [str(one.error) for one in everything.passed_over]


@pytest.mark.parametrize("removed", [1, 2])
async def test_candidate_1_a_removed_checkpoint_that_latest_names_is_a_loss_only_if_none_is_newer(removed: int) -> None:
    """A collector reads `latest` before a commit moves it, and the job ends before the next commit moves it on."""
    store = MemoryStore()
    await saves(store, True, True, True)
    await store.put(LATEST, f"tag{removed}".encode())
    await note(store, record_of("removing", f"tag{removed}", "00000001-0"))
    await remove(store, f"tag{removed}/00000001-0")
    found = await candidates(store, now())
    assert found.checkpoints[0].tag == ("tag2" if removed == 1 else "tag1")
    told, untold = (found.other, found.passed_over) if removed == 1 else (found.passed_over, found.other)
    assert len(told) == 1
    assert untold == ()
    assert (await lost_newest(store, now()) is None) == (removed == 1)


async def test_candidate_1_it_is_no_loss_if_the_catalog_knows_of_the_removal_and_not_of_the_outcome() -> None:
    """A collector removes a checkpoint before its coordinator puts the close (found by simulation)."""
    store = MemoryStore()
    await saves(store, True, True, True)
    closes = [close_of(await catalog.read_outcome(store, f"tag{n}", AttemptId(1, 0))) for n in (0, 2)]
    for entry in await store.list(CATALOG):
        await store.delete(f"{CATALOG}/{entry.name}")
    await note(store, *(record_of("intent", f"tag{n}", "00000001-0", n=n) for n in range(3)), *closes)
    await remove(store, "tag1/00000001-0")
    await note(store, record_of("removed", "tag1", "00000001-0", reason="the test"))
    await store.put(LATEST, b"tag1\n")
    found = await candidates(store, now())
    assert (found.checkpoints[0].tag, found.passed_over) == ("tag2", ())
    assert await lost_newest(store, now()) is None
