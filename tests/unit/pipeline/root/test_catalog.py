"""Attempts as the catalog shows them: by all their objects, and by the records of the whole attempt."""

from __future__ import annotations

import pytest

from checkpointd.errors import NotFoundError
from checkpointd.layout.keys import BALLOT, DAMAGED, DELETED, JOINT_PLAN, OUTCOME, PASSED_OVER, VERIFIED, AttemptId
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog_log import CatalogLog, record_of
from checkpointd.store.base import Entry
from checkpointd.store.memory import MemoryStore
from tests.builders import leave_in_doubt, save_checkpoint

TAG, ATTEMPT = "global_step1", AttemptId(1, 0)
PREFIX = f"{TAG}/{ATTEMPT}"


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("records", [(), (DELETED,), (VERIFIED,), (DAMAGED,), (PASSED_OVER, DAMAGED), (OUTCOME,)])
async def test_the_records_tell_the_state_as_all_objects_do(records: tuple[str, ...], damaged: bool) -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag=TAG, world_size=3)
    for name in records:
        await (store.delete(f"{PREFIX}/{name}") if name == OUTCOME else store.put(f"{PREFIX}/{name}", b""))
    if damaged and OUTCOME not in records:
        await store.put(f"{PREFIX}/{OUTCOME}", b"{")
    whole, few = await catalog.view(store, TAG, ATTEMPT), await catalog.view_of_records(store, TAG, ATTEMPT)
    assert few.state == whole.state
    assert (few.outcome, few.damage, few.read_back, few.passed_over) == (
        whole.outcome, whole.damage, whole.read_back, whole.passed_over
    )  # fmt: skip
    if whole.outcome is not None:
        assert few.sizes == {name: size for name, size in whole.sizes.items() if name in {OUTCOME, *records}}


@pytest.mark.parametrize("lost", ["00000.vote", "everything else"])
async def test_commit_5_a_commit_without_anything_else_is_not_found(lost: str) -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag=TAG, world_size=2)
    for entry in await store.list(PREFIX):
        if entry.name == lost or (lost == "everything else" and entry.name not in {OUTCOME, BALLOT, JOINT_PLAN}):
            await store.delete(f"{PREFIX}/{entry.name}")
    if lost == "00000.vote":  # the ballot has it
        assert (await catalog.find(store, TAG)).prefix == PREFIX
        return
    with pytest.raises(NotFoundError, match="is aborted"):
        await catalog.find(store, TAG)


class RemovedMeanwhile(MemoryStore):
    """Once the outcome was read, somebody removes the whole attempt, its marks last (MARK-5), before anything else is seen."""

    is_removed = True

    async def stat(self, key: str) -> int | None:
        if not self.is_removed:
            self.is_removed = True
            for entry in await self.list(PREFIX):
                await self.delete(f"{PREFIX}/{entry.name}")
        return await super().stat(key)


async def test_mark_5_what_is_removed_while_its_records_are_read_is_not_a_checkpoint() -> None:
    store = RemovedMeanwhile()
    await save_checkpoint(store, tag=TAG)
    store.is_removed = False
    assert (await catalog.view_of_records(store, TAG, ATTEMPT)).state == "in-doubt"
    with pytest.raises(NotFoundError, match="there is no tag"):
        await catalog.find(store, TAG)


async def test_a_scan_tells_only_what_is_wanted_of_decided_attempts_and_every_undecided_one() -> None:
    store = MemoryStore()
    for step in (1, 2, 3):
        await save_checkpoint(store, tag=f"global_step{step}", step=step, start=step)
    await leave_in_doubt(store, tag="global_step4", step=4, start=4)
    found = await catalog.scan(store, newest=0, wanted=lambda entry: entry.tag == "global_step2")
    assert {view.tag: (view.state, view.entry is None) for view in found} == {
        "global_step2": ("committed", False),
        "global_step4": ("in-doubt", True),
    }


async def test_a_look_goes_on_while_another_task_learns_that_an_attempt_was_forgotten() -> None:
    """They share what this process has read of the catalog."""

    class Meanwhile(MemoryStore):
        is_looked_at = False

        async def list(self, prefix: str) -> list[Entry]:
            found = await super().list(prefix)
            if prefix == "" and self.is_looked_at:
                await CatalogLog(self).append(record_of("forgotten", "t0", "00000001-0"))
                await known.refresh()
            return found

    store = Meanwhile()
    known = CatalogLog(store)
    for n in range(catalog.NEWEST_LOOKED + 2):
        await store.put(f"t{n}/00000001-0/{OUTCOME}", b"x")
        await known.append(record_of("intent", f"t{n}", "00000001-0", n=n), record_of("removed", f"t{n}", "00000001-0"))
    await known.refresh()
    store.is_looked_at = True
    assert "t1" in {view.tag for view in await catalog.scan(store, known)}
