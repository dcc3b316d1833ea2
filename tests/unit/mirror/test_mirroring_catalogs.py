"""A mirror believes the catalogs, and still notices where the mirror is not as its catalog says."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointd.admin.gc import deletion
from checkpointd.layout.catalog_records import CATALOG
from checkpointd.layout.keys import DAMAGED, DELETED, OUTCOME
from checkpointd.layout.manifest import Damaged, encode
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring
from checkpointd.mirror.news import News
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import catalog
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.store import PosixStore
from tests.unit.mirror.origins import TAG, check_whole, contents, kinds, mirrored, origin_with, save, simulated, tags_of, told
from tests.unit.mirror.stores import Watched, flip

CHUNKS = f"{TAG.format(1)}/00000-0.chunks"


@pytest.mark.parametrize("fault", ["flip", "gone"])
def test_an_older_outcome_that_was_lost_meanwhile_is_put_again_before_a_newer_checkpoint_needs_it(fault: str) -> None:
    async def main() -> None:
        origin, mirror, news = await origin_with(1), MemoryStore("mirror"), list[News]()
        mirroring = Mirroring(origin, mirror, MirrorConfig(), tell=news.append)
        await mirroring.begin()
        await mirroring.step()
        if fault == "flip":
            flip(mirror, f"{TAG.format(1)}/{OUTCOME}")
        else:
            await mirror.delete(f"{TAG.format(1)}/{OUTCOME}")
        await save(origin, 2)
        for _ in range(2):
            await mirroring.step()
            mirroring.try_again()
        await mirroring.end()
        assert await mirror.stat(f"{TAG.format(1)}/{DELETED}") is None
        assert await tags_of(mirror) == ["global_step2", "global_step1"]
        await check_whole(mirror, origin)

    simulated(main())


def test_a_lost_outcome_is_put_again_although_a_damaged_checkpoint_needs_its_attempt() -> None:
    async def main() -> None:
        origin, mirror, news = await origin_with(1, 2), MemoryStore("mirror"), list[News]()
        mirroring = Mirroring(origin, mirror, MirrorConfig(), tell=news.append)
        await mirroring.begin()
        await mirroring.step()
        await mirror.delete(f"{TAG.format(1)}/{OUTCOME}")
        flip(mirror, f"{TAG.format(2)}/00000.index")
        assert not (await read_back(mirror, await catalog.find(mirror, "global_step2"))).whole
        for _ in range(3):
            await mirroring.step()
            mirroring.try_again()
        await mirroring.end()
        assert told(news)["global_step2"] == "healed"
        assert await tags_of(mirror) == ["global_step2", "global_step1"]
        await check_whole(mirror, origin)

    simulated(main())


def test_a_checkpoint_whose_outcome_is_gone_at_both_is_named_and_not_removed() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await deletion(origin, "global_step1", force=True, dry_run=False)
        await mirror.delete(f"{TAG.format(1)}/{OUTCOME}")
        before = contents(mirror)[CHUNKS]
        for _ in range(2):
            report = await mirrored(origin, mirror)
            assert kinds(report) == {"global_step1": "damaged-here"}
        assert await mirror.stat(f"{TAG.format(1)}/{DELETED}") is None
        assert contents(mirror)[CHUNKS] == before

    simulated(main())


@pytest.mark.parametrize("has_catalog", [True, False])
def test_a_damaged_object_that_others_need_is_not_removed_although_its_own_outcome_is_gone(has_catalog: bool) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2), MemoryStore("mirror")
        await mirrored(origin, mirror)
        index = await read_index(origin, await catalog.find(origin, "global_step1"), 0)
        flip(mirror, CHUNKS, next(one for one in index.tensors if one.fqn == "moving").chunks[0].offset)
        await mirror.delete(f"{TAG.format(1)}/{OUTCOME}")
        if not has_catalog:
            await forget_log(mirror)
        watched = Watched(mirror)
        await mirrored(origin, watched)
        assert CHUNKS not in watched.deleted
        await check_whole(mirror, origin)
        assert await tags_of(mirror) == ["global_step2", "global_step1"]

    simulated(main())


def test_a_whole_look_finds_a_record_of_damage_that_the_catalog_does_not_have() -> None:
    async def main() -> None:
        origin, mirror, news = await origin_with(1, 2), MemoryStore("mirror"), list[News]()
        mirroring = Mirroring(origin, mirror, MirrorConfig(), tell=news.append)
        await mirroring.begin()
        await mirroring.step()
        news.clear()
        await mirror.put(f"{TAG.format(1)}/{DAMAGED}", encode(Damaged(faults=("a chunk",), writer=writer())))
        await mirroring.step(whole=True)
        await mirroring.end()
        assert told(news) == {"global_step1": "healed"}

    simulated(main())


def test_a_whole_look_finds_a_checkpoint_of_which_nothing_is_left(tmp_path: Path) -> None:
    """A file system still shows the directory of the tag."""

    async def main() -> None:
        origin, mirror, news = await origin_with(1, 2, dedup=False), PosixStore(tmp_path / "mirror"), list[News]()
        mirroring = Mirroring(origin, mirror, MirrorConfig(), tell=news.append)
        await mirroring.begin()
        await mirroring.step()
        news.clear()
        shutil.rmtree(tmp_path / "mirror" / TAG.format(1))
        assert (tmp_path / "mirror" / "global_step1").is_dir()
        await mirroring.step(whole=True)
        await mirroring.end()
        assert told(news) == {"global_step1": "mirrored"}
        await check_whole(mirror, origin)

    asyncio.run(main())


def test_a_commit_during_an_attempt_to_heal_is_seen_by_the_same_step() -> None:
    """A mirror that lacks it is not in step."""

    async def save_another(store: Store) -> None:
        await save(origin, 2)

    async def main() -> None:
        await save(origin, 1)
        await mirrored(origin, mirror)
        for store in (origin, mirror):
            flip(store, CHUNKS)
        assert not (await read_back(mirror, await catalog.find(mirror, "global_step1"))).whole
        mirroring = Mirroring(SavesAtRead(origin, CHUNKS, save_another), mirror)
        await mirroring.begin()
        await mirroring.step()
        assert [one.tag for one in mirroring.seen.agenda.due] == ["global_step2"]
        assert await mirroring.has_news()
        await mirroring.end()

    origin, mirror = MemoryStore("origin"), MemoryStore("mirror")
    simulated(main())


class SavesAtRead(PassingStore):
    """Lets `work` happen when the large object `key` is read for the first time."""

    def __init__(self, store: Store, key: str, work: Callable[[Store], Awaitable[None]]) -> None:
        super().__init__(store)
        self._key, self._work = key, work

    async def get_parts(self, key: str, offset: int, parts: Any, then: Any) -> Any:
        if key == self._key:
            self._key = ""
            await self._work(self._store)
        return await super().get_parts(key, offset, parts, then)


@pytest.mark.parametrize("name", [OUTCOME, "00000-0.chunks"])
def test_a_checkpoint_that_was_damaged_at_the_origin_is_copied_once_the_origin_was_healed(name: str) -> None:
    async def main() -> None:
        origin, mirror, news = await origin_with(1), MemoryStore("mirror"), list[News]()
        checkpoint = await catalog.find(origin, "global_step1")
        await forget_log(origin)
        flip(origin, f"{TAG.format(1)}/{name}")
        if name != OUTCOME:
            assert not (await read_back(origin, checkpoint)).whole
        mirroring = Mirroring(origin, mirror, MirrorConfig(), tell=news.append)
        await mirroring.begin()
        await mirroring.step()
        assert told(news) == {"global_step1": "damaged"}
        flip(origin, f"{TAG.format(1)}/{name}")
        assert (await read_back(origin, checkpoint)).whole
        mirroring.try_again()
        await mirroring.step()
        await mirroring.end()
        assert told(news) == {"global_step1": "mirrored"}

    simulated(main())


async def forget_log(store: Store) -> None:
    """Remove the catalog's log, so that each look reads all directories."""
    for entry in await store.list(CATALOG):
        await store.delete(f"{CATALOG}/{entry.name}")
