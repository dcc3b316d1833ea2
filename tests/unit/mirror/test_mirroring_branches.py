"""A mirror and the branches of its origin: what is left behind at one is left behind at the other."""

from __future__ import annotations

import pytest

from checkpointd.commit.retention import Retention
from checkpointd.mirror.branches import rollbacks
from checkpointd.pipeline.gc.collect import remove
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from tests.unit.mirror.origins import (
    TAG,
    check_whole,
    delete,
    kinds,
    mirrored,
    origin_with,
    roll_back,
    save,
    simulated,
    whole_ones,
)


async def left_behind(store: Store) -> set[str]:
    return {one.tag for one in await root_view.checkpoints(store) if one.left_behind}


def test_a_rollback_at_the_origin_is_repeated_at_the_mirror_once() -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, 3), MemoryStore("mirror")
        await mirrored(origin, mirror)
        await roll_back(origin, "global_step1")
        report = await mirrored(origin, mirror)
        assert (report.checkpoints, report.latest) == ((), "global_step1")
        assert await left_behind(mirror) == {"global_step2", "global_step3"} == await left_behind(origin)
        assert rollbacks(await root_view.state_of(origin), await root_view.state_of(mirror)) == []
        await roll_back(origin, "global_step3")  # the branch is taken up again
        assert (await mirrored(origin, mirror)).latest == "global_step3"
        assert await left_behind(mirror) == set()

    simulated(main())


@pytest.mark.parametrize("why", ["removed there", "left out"])
def test_a_rollback_to_what_the_mirror_does_not_have_waits(why: str) -> None:
    async def main() -> None:
        origin, mirror = await origin_with(1, 2, dedup=False), MemoryStore("mirror")
        await mirrored(origin, mirror, rules=Retention() if why == "removed there" else Retention(keep_last=1))
        if why == "removed there":
            await delete(mirror, "global_step1")
        await roll_back(origin, "global_step1")
        assert (await mirrored(origin, mirror)).latest == ("global_step2" if why == "removed there" else "global_step1")
        await save(origin, 3, dedup=False)
        assert (await mirrored(origin, mirror)).latest == "global_step3"
        await check_whole(mirror, origin)

    simulated(main())


def test_another_part_of_an_object_that_is_kept_for_others_may_be_needed_after_a_rollback() -> None:
    """MIRRORCOPY-3: the first attempt is none of the mirror's checkpoints, and the second keeps its objects there."""

    async def main() -> None:
        origin, mirror, rules = await origin_with(1, 2), MemoryStore("mirror"), Retention(keep_last=1)
        await mirrored(origin, mirror, rules=rules)
        await roll_back(origin, "global_step1")
        await save(origin, 3, of=1)
        assert kinds(await mirrored(origin, mirror, rules=rules))["global_step3"] == "mirrored"
        assert (await root_view.state_of(mirror)).attempts[TAG.format(3)].base == TAG.format(2)
        assert "global_step3" in await whole_ones(mirror)

    simulated(main())


def test_what_was_removed_and_is_kept_for_nobody_is_not_relied_on() -> None:
    """MIRRORCOPY-3: objects of the first attempt may be removed at any moment, until nothing is left of it."""

    async def main() -> None:
        origin, mirror = await origin_with(1), MemoryStore("mirror")
        await save(origin, 2, dedup=False)
        await mirrored(origin, mirror)
        going = {"a sweeper has just begun": [TAG.format(1)]}
        assert await remove(mirror, going) == ""
        await roll_back(origin, "global_step1")
        await save(origin, 3)
        report = await mirrored(origin, mirror)
        assert kinds(report) == {"global_step3": "blocked"}
        assert "global_step1/00000001-0/00000-0.chunks, which was removed" in report.checkpoints[0].why
        assert kinds(await mirrored(origin, mirror)) == {"global_step3": "mirrored"}  # the run before has swept it
        await check_whole(mirror, origin)

    simulated(main())
