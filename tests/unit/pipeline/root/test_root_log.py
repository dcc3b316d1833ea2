"""The log of a root as the parts of a process share it, and a command that has read one root (LOG-12 of root_id.py)."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from checkpointd.errors import RootGoneError, UnreadableError
from checkpointd.layout.keys import LOG
from checkpointd.layout.log_records import RemoveRecord
from checkpointd.pipeline import root_id
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import save_checkpoint

FIRST = "global_step1/00000001-0"


@pytest.fixture(autouse=True)
def absence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_id, "ABSENCE_S", 0.01)


def beside(store: MemoryStore) -> MemoryStore:
    """The same objects, as another process sees them."""
    other = MemoryStore()
    other.__dict__.update({name: value for name, value in store.__dict__.items() if name != "_root_log"})
    return other


async def test_the_log_of_a_store_is_one_and_goes_with_the_store() -> None:
    store = MemoryStore()
    assert RootLog.of(store) is RootLog.of(store) is RootLog.of(RootLog.of(store).store)
    assert RootLog.of(beside(store)) is not RootLog.of(store)


class Counted(MemoryStore):
    """Counts the reads of entries, each of which takes a while; they fail as long as it is `away`."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.away = 0, False

    async def get(self, key: str, *, size_max: int = 1 << 20) -> bytes:
        if key.startswith(f"{LOG}/"):
            self.reads += 1
            await asyncio.sleep(0.001)
            if self.away:
                raise UnreadableError("the storage is away")
        return await super().get(key, size_max=size_max)


@pytest.mark.parametrize("away", [False, True])
async def test_hundreds_that_wait_for_an_entry_are_served_by_one_read(away: bool) -> None:
    store = Counted()
    await save_checkpoint(store, tag="global_step1", n=0, world_size=1)
    log = RootLog(store)
    await log.look()
    reads, store.away = store.reads, away
    found = await asyncio.gather(*(log.follow(lambda _: False) for _ in range(300)), return_exceptions=True)
    assert store.reads - reads <= 2
    assert found == [False] * 300 or (away and all(isinstance(one, UnreadableError) for one in found))


@pytest.mark.parametrize("by", ["a copy", "another root"])
async def test_log_12_a_command_that_has_read_one_root_appends_nothing_to_another_one_in_its_place(
    tmp_path: Path, by: str
) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    async with PosixStore(root) as job:
        for n in range(2):
            await save_checkpoint(job, tag=f"global_step{n + 1}", n=n, world_size=1)
    async with PosixStore(root) as store:
        await root_view.state_of(store)
        root.rename(away)
        if by == "a copy":
            shutil.copytree(away, root)
        else:
            async with PosixStore(root) as made:
                for n in range(2):
                    await save_checkpoint(made, tag=f"global_step{n + 1}", n=n, world_size=1)
        removal = RemoveRecord(attempts=(FIRST,), reason="the test", writer=writer())
        with pytest.raises(RootGoneError):
            await RootLog.of(store).add(removal)
        assert (await root_view.state_of(store)).attempts[FIRST].status == "checkpoint"  # as it begins anew there
        assert await RootLog.of(store).add(removal) == ""
    async with PosixStore(away) as left:
        assert (await root_view.state_of(left)).attempts[FIRST].status == "checkpoint"
