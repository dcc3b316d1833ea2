"""A mirror believes the catalogs, and still notices where the mirror is not as its catalog says."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from checkpointd.layout.keys import DAMAGED
from checkpointd.layout.manifest import Damaged, encode
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring
from checkpointd.mirror.news import News
from checkpointd.pipeline.root.identity import writer
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.unit.mirror.origins import TAG, check_whole, origin_with, simulated, told

CHUNKS = f"{TAG.format(1)}/00000-0.chunks"


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
