"""The mark that counts, found by its name: MARK-5 of pipeline/root/marks.py."""

from __future__ import annotations

import pytest

from checkpointd.errors import NotFoundError
from checkpointd.layout.keys import mark_name, mark_number
from checkpointd.layout.manifest import Deleted, encode
from checkpointd.pipeline.gc import collect
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root.marks import greatest_mark
from checkpointd.store.memory import MemoryStore

PREFIX = "global_step1/00000001-0"


async def marked(store: MemoryStore, count: int) -> None:
    for number in range(count):
        await store.put(f"{PREFIX}/{mark_name(number)}", encode(Deleted(reason=str(number), writer=writer())))


@pytest.mark.parametrize("count", range(20))
async def test_mark_5_the_greatest_mark_is_found_by_its_name(count: int) -> None:
    store = MemoryStore()
    await marked(store, count)
    mark = await greatest_mark(store, PREFIX)
    assert (mark and mark.reason) == (str(count - 1) if count else None)


class Growing(MemoryStore):
    """Puts a further mark at every look."""

    count = 0

    async def stat(self, key: str) -> int | None:
        found = await super().stat(key)
        await self.put(f"{PREFIX}/{mark_name(self.count)}", encode(Deleted(reason=str(self.count), writer=writer())))
        self.count += 1
        return found


@pytest.mark.parametrize("count", range(1, 12))
async def test_mark_5_no_mark_is_missed_that_was_there_before_the_look(count: int) -> None:
    store = Growing()
    store.count = count
    await marked(store, count)
    mark = await greatest_mark(store, PREFIX)
    assert mark is not None
    assert int(mark.reason) >= count - 1


class Going(MemoryStore):
    """Notes the names that are deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []

    async def delete(self, key: str, *, durable: bool = True) -> None:
        self.deleted.append(key.rpartition("/")[2])
        await super().delete(key, durable=durable)


async def test_mark_5_the_marks_go_last_the_greatest_first() -> None:
    store = Going()
    await marked(store, 12)
    for name in ("outcome", "00000.vote"):
        await store.put(f"{PREFIX}/{name}", b"record")
    await collect.remove_records(store, PREFIX)
    assert [mark_number(name) for name in store.deleted] == [None, None, *reversed(range(12))]


async def test_mark_5_a_mark_that_goes_meanwhile_is_not_taken_for_none() -> None:
    class Forgotten(MemoryStore):
        async def get(self, key: str, *, size_max: int = 0) -> bytes:
            raise NotFoundError(f"there is no {key}")

    store = Forgotten()
    await marked(store, 1)
    with pytest.raises(NotFoundError):
        await greatest_mark(store, PREFIX)
